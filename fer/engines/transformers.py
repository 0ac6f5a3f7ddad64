"""A Hugging Face folder as an engine: greedy generation over a static key/value cache.

::

    engine = TransformersEngine("/models/Qwen3-8B", device="cuda:0")
    report = fer.recover(engine)
    engine.ask("What is the capital of France?")
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fer.engines import cache, compiled, estimate, fp8, pretrained, process, ranks, wake
from fer.engines.base import Engine, EngineIdentity, Ranks
from fer.engines.quiet import quiet
from fer.errors import CheckpointError, FerBug, MappingError, OptionError, UsageError
from fer.weights import quantization as guard
from fer.weights.shards import resolve

if TYPE_CHECKING:
    from fer.engines.decode import TransformersGraphs
    from fer.memory.kept import KeptMemory

_PACKAGES = ("transformers", "torch", "accelerate", "tokenizers", "safetensors", "kernels")
"""Distributions that take part in loading, where installed."""


class TransformersEngine(Engine):
    """One model folder, loaded by ``AutoModelForCausalLM.from_pretrained``.

    Args:
        folder: a folder with ``config.json``, safetensors and a tokenizer. Nothing is fetched from a hub.
        device: torch's name of the device, ``"cpu"`` or ``"cuda:0"``. In a tensor-parallel launch every rank names
            its own.
        dtype: compute type such as ``"bfloat16"``, or ``"auto"`` for what the folder says.
        revision: a name for this state of the folder; part of the identity, not used to load.
        overrides: fields of the model's configuration to change, such as ``{"rope_theta": 1e6}``.
        attention: Transformers' ``attn_implementation``; ``""`` leaves the choice to it.
        tensor_parallel: shard over all ranks of the launch by the model's own plan.
        launch: the launch to join where no launcher has said so in the environment.
        max_length: positions of the key/value cache, prompt and answer together.
        matmul: how block-wise FP8 layers multiply: ``"kernels"`` (Transformers' own, where the ``kernels`` package
            holds them), ``"scaled_mm"`` (torch's block-scaled matmul, Hopper), ``"dequantize"`` (plain torch), or
            ``"auto"`` for the first of these that works here.
        trust_remote_code: let the folder's own Python files run.
        batch_sizes: decode this many rows at a time from CUDA graphs, sizes with most traffic first; empty decodes
            without graphs. Of models whose layers all attend to everything.
        compile: run the model through ``torch.compile`` with this backend, such as ``"inductor"``; empty runs it as it
            is. Not together with ``batch_sizes``.
        keep_cache: on the host, make the cache of ``batch_sizes`` in memory that can outlive the process.

    Attributes:
        folder: absolute, with links followed when the engine was made.
        module: the model in use, after :meth:`adopt`.
        tokenizer: after :meth:`load_tokenizer`; None for a folder without one.
        keep_cache: as above; may be set until the start.

    The content of ``config.json`` and ``generation_config.json`` is part of the identity, field by field.

    Raises:
        OptionError: an argument is not one of the values above.
        CheckpointError: the folder has no readable ``config.json``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        revision: str = "",
        overrides: Mapping[str, Any] | None = None,
        attention: str = "",
        tensor_parallel: bool = False,
        launch: ranks.Launch | None = None,
        max_length: int = 1024,
        matmul: str = "auto",
        trust_remote_code: bool = False,
        batch_sizes: Sequence[int] = (),
        compile: str = "",
        keep_cache: bool = False,
    ) -> None:
        if matmul not in ("auto", *fp8.MATMULS):
            raise OptionError(f"matmul={matmul!r} is not known", fix=f"Use auto, {', '.join(fp8.MATMULS)}")
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise OptionError(f"dtype={dtype!r} is not known", fix="Use auto or a torch type such as bfloat16")
        try:
            (Path(folder) / "config.json").stat()
        except OSError as error:
            raise CheckpointError(f"{folder} is no model folder", why=f"config.json: {error.strerror}") from error
        # The model carries its folder's name: every spelling of one folder must give the same module.
        self.folder = Path(folder).resolve()
        self.device = device
        self.max_length = max_length
        self.revision = revision
        self.overrides = dict(overrides or {})
        self.attention = attention
        self.tensor_parallel, self.launch = tensor_parallel, launch
        self.trust_remote_code = trust_remote_code
        self.tokenizer: Any = None
        self._dtype, self._matmul = dtype, matmul
        self._module: Any = None
        self._cache: Any = None
        self._cache_name = "past_key_values"
        self._parked = False
        self._identity: EngineIdentity | None = None
        if any(size < 1 for size in batch_sizes) or len(set(batch_sizes)) != len(batch_sizes):
            raise OptionError(f"batch_sizes={batch_sizes!r} cannot be", fix="Give different numbers from 1 on")
        self._batch_sizes, self.keep_cache = tuple(batch_sizes), keep_cache
        if compile and batch_sizes:
            raise OptionError(
                "batch_sizes and compile exclude each other",
                why="a graph holds the kernels of the steps it was captured from",
                fix="Leave one of them out",
            )
        if compile:
            compiled.check(compile)
        self.compile = compile
        self._compiled: compiled.Compiled | None = None
        self._decode: TransformersGraphs | None = None

    @property
    def module(self) -> Any:
        if self._module is None:
            raise FerBug("the engine's model was asked for before it was loaded or attached")
        return self._module

    # -- what FER asks ---------------------------------------------------------------------------------------------

    def identity(self) -> EngineIdentity:
        if self._identity is None:
            self._identity = self._describe()
        # Not the state of the first call: what counts is how things are when the weights are made.
        settings = {**self._identity.settings, "process": process.state()}
        return dataclasses.replace(self._identity, settings=settings)

    def build(self) -> nn.Module:
        with quiet():
            return self._unchanged(pretrained.build(self._recipe()))

    def load(self) -> nn.Module:
        with quiet():
            return self._unchanged(pretrained.load(self._recipe()))

    def adopt(self, module: nn.Module) -> None:
        self._module = module
        self._cache = self._compiled = None
        # Newer Transformers renamed the argument and warns about the old name.
        accepted = inspect.signature(self._module.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._join()

    def estimated_bytes(self) -> int:
        identity = self.identity()
        world = identity.ranks.tp_size
        plan: dict[str, str] = {}
        if world > 1:
            with quiet():
                plan = pretrained.plan_of(self.folder, self.overrides, trust_remote_code=self.trust_remote_code)
        itemsize = getattr(torch, identity.dtype).itemsize
        return estimate.loaded_bytes(identity.checkpoint, itemsize=itemsize, world=world, plan=plan)

    def import_code(self) -> None:
        import transformers

        # Transformers imports each class when its name is asked for; one from the folder's own code is not among them.
        # The architecture is read from the file: identity() would settle the ranks before there are process groups.
        named = pretrained.architectures(self.folder)
        for name in ("AutoTokenizer", "AutoModelForCausalLM", "StaticCache", *named):
            getattr(transformers, name, None)

    def load_tokenizer(self) -> None:
        if not any(path for pattern in ("*token*", "vocab*", "*.tiktoken") for path in self.folder.glob(pattern)):
            return  # such a model is spoken to in token ids
        with quiet():
            self.tokenizer = pretrained.tokenizer_of(self.folder, trust_remote_code=self.trust_remote_code)

    def init_distributed(self) -> None:
        if self.tensor_parallel:
            ranks.start(self.device, self.launch)

    def alone(self) -> bool:
        return not self.tensor_parallel

    def agree(self, flag: bool) -> bool:
        return ranks.agree(flag, self.device) if self.tensor_parallel else flag

    def graphs(self) -> TransformersGraphs | None:
        if self._decode is None and self._batch_sizes:
            with quiet():
                config = pretrained.config_of(self.folder, self.overrides, trust_remote_code=self.trust_remote_code)
            text = config.get_text_config(decoder=True)
            if set(getattr(text, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
                return None
            from fer.engines.decode import TransformersGraphs

            self._decode = TransformersGraphs(
                text,
                batch_sizes=self._batch_sizes,
                length=self.max_length,
                dtype=getattr(torch, self.identity().dtype),
                device=self.device,
                world=self.identity().ranks.tp_size,
                shared=self.keep_cache and self.device == "cpu",
            )
            self._join()
        return self._decode

    def allocate_kv(self) -> None:
        decode = self.graphs()
        if decode is not None:
            decode.allocate_kv()
            return
        from transformers import StaticCache

        self._cache = StaticCache(config=self.module.config, max_cache_len=self._cache_length())

    def _cache_length(self) -> int:
        return min(cache.PARKED_LENGTH, self.max_length) if self._parked else self.max_length

    def park(self) -> bool:
        self._set_parked(True)
        return True

    def unpark(self, kept: KeptMemory | None = None) -> None:
        if kept is None:
            self._set_parked(False)
            return
        decode = self.graphs()
        if decode is None:
            raise MappingError("there is no cache of rows that memory could be kept for")
        decode.take(kept)
        self._parked = decode.parked = False

    def keep(self) -> KeptMemory | None:
        decode = self.graphs()
        return decode.keep() if decode is not None else None

    def _set_parked(self, parked: bool) -> None:
        decode = self.graphs()
        if not parked and self._parked:
            cache.require_room(self._cache_bytes(), self.device)
        before = self._parked
        self._parked = parked
        if decode is not None:
            decode.parked = parked
        if self._module is None:
            return  # nothing was allocated yet
        self._cache = None
        if decode is not None:
            decode.drop()  # before the next one is made
        try:
            self.allocate_kv()
        except RuntimeError as error:  # torch's word for lack of memory
            self._set_parked(before)
            raise cache.out_of_memory(self._cache_bytes(), self.device) from error

    def _cache_bytes(self) -> int:
        """Bytes of the cache of an engine that serves."""
        config = self.module.config.get_text_config(decoder=True)
        rows = max(self._batch_sizes, default=1)
        itemsize = getattr(torch, self.identity().dtype).itemsize
        return cache.cache_bytes(config, rows, self.max_length, itemsize, self.identity().ranks.tp_size)

    def wake_libraries(self) -> None:
        wake.libraries(torch.device(self.device), getattr(torch, self.identity().dtype))

    def first_prompt(self) -> None:
        if (decode := self.graphs()) is not None:
            decode.first_prompt(self.any_token())

    def warm_up(self) -> None:
        """Run the decode path once, so that the first answer pays for no lazy initialisation or compilation."""
        list(self.stream([self.any_token()], max_new_tokens=2, stop=False))
        if self.compile:
            compiled.warm_up(self, self.compile, self._cache_length())

    def first_token(self) -> None:
        list(self.stream([self.any_token()], max_new_tokens=1, stop=False))

    def self_test(self) -> None:
        decode = self.graphs()
        if decode is None:
            made = list(self.stream([self.any_token()], max_new_tokens=1, stop=False))
        else:
            made = [decode.first_step(self.any_token())]
        vocabulary = self.module.config.get_text_config().vocab_size
        if len(made) != 1 or not 0 <= made[0] < vocabulary:
            raise FerBug("the engine's self-test made no token of its vocabulary", why=repr(made))

    # -- what users ask --------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 32) -> list[int]:
        """Greedy continuation of a prompt (text or token ids): the new token ids, without the one that ends it."""
        return list(self.stream(self._ids(prompt), max_new_tokens=max_new_tokens))

    def generate_many(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32) -> list[list[int]]:
        """Greedy continuations of several prompts at once, as :meth:`generate` gives each alone.

        Raises:
            OptionError: there are more prompts than rows, or the engine was made without ``batch_sizes``.
        """
        decode = self.graphs()
        if decode is None or len(prompts) > decode.rows:
            raise OptionError(
                f"{len(prompts)} prompts at once do not fit",
                why=f"the engine decodes {decode.rows if decode else 0} rows at a time",
                fix="Raise batch_sizes= of the engine or ask for less",
            )
        for ids in prompts:
            self._check_length(ids, max_new_tokens)
        decode.settle()
        ends = pretrained.ends_of(self.module)
        answers: list[list[int]] = [[] for _ in prompts]
        tokens = [decode.prompt(row, ids) for row, ids in enumerate(prompts)]
        done = [False] * len(prompts)
        for number in range(max_new_tokens):
            for row, token in enumerate(tokens):
                done[row] = done[row] or token in ends
                if not done[row]:
                    answers[row].append(token)
            if all(done) or number + 1 == max_new_tokens:
                break
            tokens = decode.advance(len(prompts))
        return answers

    def ask(self, question: str, max_new_tokens: int = 64) -> str:
        """Answer to one question, through the tokenizer's chat template where it has one."""
        self._need_tokenizer()
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": question}]
            question = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(question, add_special_tokens=False)["input_ids"]
        else:
            ids = self._ids(question)
        return str(self.tokenizer.decode(self.generate(ids, max_new_tokens), skip_special_tokens=True)).strip()

    def stream(self, ids: Sequence[int], *, max_new_tokens: int, stop: bool = True) -> Iterator[int]:
        """Token ids one by one as they are made; ``stop`` ends at the model's end-of-sequence token.

        Raises:
            OptionError: prompt and answer do not fit into ``max_length``.
        """
        self._check_length(ids, max_new_tokens)
        decode = self.graphs()
        if decode is not None:
            yield from self._stream_from(
                decode, ids, max_new_tokens, pretrained.ends_of(self.module) if stop else frozenset()
            )
            return
        ends = pretrained.ends_of(self.module) if stop else frozenset()
        logits = self.prefill(ids)
        for number in range(max_new_tokens):
            token = int(logits.argmax())
            if token in ends:
                return
            yield token
            if number + 1 < max_new_tokens:
                logits = self.advance(token)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Begin an answer: logits after a prompt, shape ``(vocabulary,)``. Not with ``batch_sizes``."""
        if self._cache is None:
            self.allocate_kv()
        with torch.inference_mode():  # the cache's tensors are made inside it and may be written nowhere else
            self._cache.reset()
        return self._forward(ids)

    def advance(self, token: int) -> torch.Tensor:
        """Go on with an answer that :meth:`prefill` began: logits after one more token, shape ``(vocabulary,)``."""
        return self._forward([token])

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of every position of a prompt, shape ``(len(ids), vocabulary)``, without a cache."""
        with torch.inference_mode():
            batch = torch.tensor([list(ids)], device=self.device)
            return self.module(input_ids=batch, use_cache=False).logits[0]  # type: ignore[no-any-return]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_length(self, ids: Sequence[int], max_new_tokens: int) -> None:
        if not ids or len(ids) + max_new_tokens > self.max_length:
            raise OptionError(
                f"{len(ids)} prompt tokens and {max_new_tokens} new ones do not fit",
                why=f"the key/value cache holds {self.max_length} positions and a prompt needs one token or more",
                fix="Raise max_length= of the engine or ask for less",
            )

    def _stream_from(
        self, decode: TransformersGraphs, ids: Sequence[int], max_new_tokens: int, ends: frozenset[int]
    ) -> Iterator[int]:
        decode.settle()
        for number in range(max_new_tokens):
            token = decode.prompt(0, ids) if number == 0 else decode.advance(1)[0]
            if token in ends:
                return
            yield token

    def _join(self) -> None:
        """Tell the decode graphs about the module."""
        if self._decode is not None and self._module is not None:
            self._decode.module, self._decode.cache_name = self._module, self._cache_name

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of the last of these tokens, which go into the cache; shape ``(vocabulary,)``."""
        if self.compile and self._compiled is None:
            self._compiled = compiled.Compiled(self.module, self.compile)
        # The cache makes its tensors in the first call, which belongs into no program.
        plain = self._compiled is None or not getattr(self._cache, "is_initialized", True)
        model: Any = self.module if plain else self._compiled
        batch = torch.tensor([list(ids)], device=self.device)
        output = model(input_ids=batch, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache})
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def any_token(self) -> int:
        """A token of the vocabulary, to warm up with."""
        start = self.module.config.get_text_config().bos_token_id
        return start if isinstance(start, int) else 0

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        self._need_tokenizer()
        return list(self.tokenizer(prompt)["input_ids"])

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            self.load_tokenizer()
        if self.tokenizer is None:
            raise UsageError(f"{self.folder} holds no tokenizer", fix="Give token ids, or add the tokenizer's files")

    def _recipe(self) -> pretrained.Recipe:
        identity = self.identity()
        return pretrained.Recipe(
            folder=self.folder,
            device=self.device,
            dtype=getattr(torch, identity.dtype),
            overrides=self.overrides,
            attention=self.attention,
            world=identity.ranks.tp_size,
            matmul=str(identity.settings.get("matmul", "")),
            trust_remote_code=self.trust_remote_code,
        )

    def _unchanged(self, module: nn.Module) -> nn.Module:
        """The module, made of the configuration that the identity tells; it was read from the files once more."""
        pretrained.check_unchanged(self.folder, self.identity().settings)
        return module

    def _describe(self) -> EngineIdentity:
        method, details = guard.of_config(pretrained.raw_config(self.folder))
        guard.check(method, details)
        shards = resolve(self.folder)
        with quiet():
            config = pretrained.config_of(self.folder, self.overrides, trust_remote_code=self.trust_remote_code)
        settings = {
            "attention": self.attention or "auto",
            "tensor_parallel": self.tensor_parallel,
            "trust_remote_code": self.trust_remote_code,
            **pretrained.compared_config(self.folder),
        }
        if method:
            settings["matmul"] = fp8.choose(self._matmul, self.device, details)
        place = ranks.of_launch("tp", self.device) if self.tensor_parallel else Ranks(launch=ranks.new_launch())
        pretrained.check_shared(self.folder, config, place.tp_size)
        return EngineIdentity(
            engine="transformers",
            engine_version=metadata.version("transformers"),
            model=str(self.folder),
            revision=self.revision,
            architecture=pretrained.architecture_of(config),
            quantization=method,
            quantization_config=details,
            dtype=pretrained.dtype_of(self._dtype, config, shards),
            overrides=self.overrides,
            settings=settings,
            packages=[name for name in _PACKAGES if util.find_spec(name) is not None],
            sources=tuple(sorted(self.folder.glob("**/*.py"))) if self.trust_remote_code else (),
            checkpoint=tuple(shards),
            ranks=place,
        )
