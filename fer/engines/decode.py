"""Decoding for a list of batch sizes over one cache with a slot for each row, as CUDA graphs want it.

Every tensor a step reads or writes stays where it is, each row has a position of its own, and a batch is padded to the
smallest size that has a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from fer.engines.cache import PARKED_LENGTH
from fer.engines.graphs import DEEP, DecodeGraphs, Replayable
from fer.engines.host_cache import HostCache
from fer.errors import MappingError
from fer.memory.kept import KeptMemory

_ROUND = 2 << 20
_RESTORED_S = 2.0
"""Seconds that a step waits for its graph, once: a restore that takes longer is in trouble."""

_SWAPPED = 16 << 20
"""Bytes of a row that are exchanged at once: the cache may have all other memory of the device."""


class Slots(Cache):  # type: ignore[misc]
    """Transformers' cache over fixed tensors: prompts fill one row, steps append one token to each of the first rows.

    Args:
        memory: keys and values of each layer, ``(2, rows, heads, length, width)``: heads are those of this rank, width
            is the size of one.

    Attributes:
        token, position: what each row decodes next, and where.
    """

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        super().__init__(layers=[_Layer(self, each) for each in memory])
        self._memory = list(memory)
        _, self.rows, _, self.length, _ = memory[0].shape
        self.prompt_row: int | None = None

    def allocate(self, device: str) -> None:
        """Make the inputs of a step."""
        self.token = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.position = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.row = torch.arange(self.rows, device=device)
        self.column = torch.arange(self.length, device=device)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Keys and values of each layer, ``(2, rows, heads, length, width)``."""
        return list(self._memory)

    def forget(self) -> None:
        """Let go of the memory; layers point back here, and their garbage would wait for a collector."""
        self.layers.clear()
        self._memory.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are given with every call


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    is_compileable = False
    is_sliding = False

    def __init__(self, slots: Slots, memory: torch.Tensor) -> None:
        super().__init__()
        # Not through an attribute that Cache would walk into.
        self.slots, self.memory = slots, memory
        self.keys, self.values = self._kept = (memory[0], memory[1])
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """There is nothing left to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_states, value_states
        slots, (all_keys, all_values) = self.slots, self._kept
        if slots.prompt_row is not None:
            all_keys[slots.prompt_row, :, : keys.shape[2]] = keys[0]
            all_values[slots.prompt_row, :, : values.shape[2]] = values[0]
            return keys, values
        size = keys.shape[0]
        row, position = slots.row[:size], slots.position[:size]
        all_keys[row, :, position] = keys[:, :, 0]
        all_values[row, :, position] = values[:, :, 0]
        return all_keys[:size], all_values[:size]

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        length = query if isinstance(query, int) else int(query.shape[0])
        return (length if self.slots.prompt_row is not None else self.slots.length), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.slots.length

    def get_max_cache_shape(self) -> int:
        return self.slots.length

    def reset(self) -> None:
        """Rows are overwritten as they are used."""


class TransformersGraphs(DecodeGraphs):
    """The decode graphs of a :class:`~fer.engines.transformers.TransformersEngine`.

    Args:
        config: the model's text configuration.
        world: tensor-parallel ranks the key/value heads are spread over.
        shared: make the cache, on the host, in memory that can outlive the process.

    Attributes:
        slots: the cache, once it is allocated.
        prompted: this process has taken a prompt, for which much is loaded.
        parked: make the cache of :data:`~fer.engines.cache.PARKED_LENGTH` positions only.
    """

    parked = prompted = _late = False

    def __init__(
        self,
        config: Any,
        *,
        batch_sizes: Sequence[int],
        length: int,
        dtype: torch.dtype,
        device: str,
        world: int = 1,
        shared: bool = False,
    ) -> None:
        self.batch_sizes = tuple(batch_sizes)
        self.rows, self.length, self.dtype, self.device = max(batch_sizes), length, dtype, device
        self.world = world
        self.layers = int(config.num_hidden_layers)
        self.heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // world
        self.width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.vocabulary = int(config.vocab_size)
        self.slots: Slots | None = None
        self._shared = shared
        self._host: HostCache | None = None
        self.module: Any = None
        self.cache_name = "past_key_values"
        self._lock = threading.Lock()
        self._graphs: dict[int, tuple[Replayable, Mapping[str, torch.Tensor]]] = {}

    # -- what the stage asks

    def layout(self) -> Mapping[str, Any]:
        return {
            "shape": [self.layers, 2, self.rows, self.heads, self.length, self.width],
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def largest_kv_bytes(self) -> int:
        return 2 * self.rows * self.heads * self.length * self.width * self.dtype.itemsize

    def kv_bytes(self) -> int:
        # Tensors under 10 MiB share segments of 20 MiB in torch's pools.
        return self.layers * (-(-self.largest_kv_bytes() // _ROUND) * _ROUND + _ROUND) + (64 << 20)

    def allocate_kv(self) -> None:
        """Make the cache; forgets graphs over an earlier one."""
        self.drop()
        length = min(PARKED_LENGTH, self.length) if self.parked else self.length
        shape = (2, self.rows, self.heads, length, self.width)
        self._host = HostCache.create(self.layers, shape, self.dtype) if self._shared and not self.parked else None
        if self._host is not None:
            self.slots = Slots(self._host.tensors)
        else:
            with torch.inference_mode():
                # Deterministic algorithms fill what is allocated empty, with numbers that are none.
                empty = self.cleared and not torch.are_deterministic_algorithms_enabled()
                make = torch.empty if empty else torch.zeros
                made = [make(shape, dtype=self.dtype, device=self.device) for _ in range(self.layers)]
                self.slots = Slots(made)
        self._graphs.clear()

    def take(self, kept: KeptMemory) -> None:
        """Go on over the memory of an earlier cache, with what is in it.

        Raises:
            MappingError: it is another cache's.
        """
        if not self._shared or kept.kind != "host" or len(kept.parts) != 1:
            raise MappingError("memory for the cache does not fit", why=f"it is {len(kept.parts)} x {kept.kind}")
        shape = (2, self.rows, self.heads, self.length, self.width)
        taken = HostCache(kept.parts[0][1], self.layers, shape, self.dtype)
        self.drop()
        self._host, self.slots = taken, Slots(taken.tensors)
        self._graphs.clear()

    def drop(self) -> None:
        """Let go of the cache, if there is one."""
        if self.slots is not None:
            self.slots.forget()
        self.slots = self._host = None

    def keep(self) -> KeptMemory | None:
        """The cache's memory, if it can outlive the process."""
        return self._host.keep() if self._host is not None else None

    def allocate(self) -> None:
        if self.slots is not None:
            with torch.inference_mode():
                self.slots.allocate(self.device)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        slots = self._slots()
        found = {f"kv.{number}": memory for number, memory in enumerate(slots.memory)}
        return {**found, "token": slots.token, "position": slots.position, "row": slots.row, "column": slots.column}

    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        slots = self._slots()
        position = slots.position[:size, None]
        mask = (slots.column[None, :] <= position)[:, None, None, :]
        if getattr(self.module.config, "_attn_implementation", "") == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(self.dtype).min).to(self.dtype)
        found = self.module(
            input_ids=slots.token[:size, None],
            position_ids=position,
            attention_mask=mask,
            use_cache=True,
            **{self.cache_name: slots},
        )
        logits = found.logits[:, -1]
        return {"token": logits.argmax(-1), "logits": logits}

    deep = True

    def fill(self, size: int, number: int) -> None:
        # Made on the host: a process that serves in a moment loads no kernels for it.
        slots, row = self._slots(), torch.arange(self.rows)
        slots.token.copy_((row * 7919 + 104729 * (number + 1) + size) % self.vocabulary)
        slots.position.copy_(self.length - 1 - row % min(64, self.length) if number == DEEP else row * 0)

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        with self._lock:
            if graph is None or outputs is None:
                self._graphs.pop(size, None)
            else:
                self._graphs[size] = (graph, outputs)

    # -- what the engine does with it

    @property
    def lacking(self) -> bool:
        """Whether graphs could not be restored, or were taken back, and :meth:`settle` would capture them."""
        return self.session is not None and self.session.missing

    @property
    def restoring(self) -> bool:
        """Whether some graphs are still being restored."""
        return self.session is not None and not self.session.wait(0)

    def settle(self, most: int | None = None) -> None:
        """No row is at work: a moment to capture graphs that could not be restored, or so many of them."""
        if self.session is not None:
            self.session.capture_missing(most)

    @torch.inference_mode()
    def prompt(self, row: int, ids: Sequence[int]) -> int:
        """Fill a row with a prompt, eagerly; the token that follows it."""
        slots = self._slots()
        batch = torch.tensor([list(ids)], device=self.device)
        places = torch.arange(len(ids), device=self.device)[None]
        slots.prompt_row = row
        try:
            found = self.module(
                input_ids=batch, position_ids=places, use_cache=True, logits_to_keep=1, **{self.cache_name: slots}
            )
        finally:
            slots.prompt_row = None
        token = int(found.logits[0, -1].argmax())
        slots.token[row] = token
        slots.position[row] = len(ids)
        self.prompted = True
        return token

    def first_prompt(self, token: int) -> None:
        """A prompt of one token, whose like then finds everything loaded; the cache holds what it held."""
        with self.untouched(0, 1):
            self.prompt(0, [token])

    def first_step(self, token: int) -> int:
        """The token after this one at the beginning of a row, as a step makes it; the cache holds what it held."""
        self.resume(0, token, 0)
        with self.untouched(0, 1):
            return self.advance(1)[0]

    def resume(self, row: int, token: int, position: int) -> None:
        """Let a row whose first ``position`` positions are there decode this token next."""
        slots = self._slots()
        with torch.inference_mode():
            slots.token[row], slots.position[row] = token, position

    def move(self, source: int, target: int) -> None:
        """Let row ``target`` be what ``source`` was."""
        slots = self._slots()
        with torch.inference_mode():
            for tensor in (slots.token, slots.position):
                tensor[target].copy_(tensor[source])
            for memory in slots.memory:
                memory[:, target].copy_(memory[:, source])
        self._settled()

    def swap(self, one: int, other: int) -> None:
        """Exchange what two rows hold in the cache."""
        with torch.inference_mode():
            for memory in self._slots().memory:
                each = max(1, _SWAPPED * self.length // max(1, memory[:, one].nbytes))
                for here, there in zip(memory[:, one].split(each, 2), memory[:, other].split(each, 2), strict=True):
                    held = here.clone()
                    here.copy_(there)
                    there.copy_(held)
        self._settled()

    def _settled(self) -> None:
        """Wait for the device: what is said of the cache afterwards holds whatever becomes of this process."""
        if self.device.startswith("cuda"):
            torch.cuda.current_stream(torch.device(self.device)).synchronize()

    @contextmanager
    def untouched(self, row: int, positions: int) -> Iterator[None]:
        """Afterwards the row's first positions hold what they held."""
        with torch.inference_mode():
            memory = self._slots().memory
            held = [each[:, row, :, :positions].clone() for each in memory]
            try:
                yield
            finally:
                for each, before in zip(memory, held, strict=True):
                    each[:, row, :, :positions].copy_(before)
                self._settled()

    def _await_graph(self, active: int) -> None:
        """Where so many rows have no graph of their own yet, and are to have one.

        An eager step beside the restore takes longer than what is left of that, and one of another width rounds
        otherwise than those of the engine whose answers are gone on with.
        """
        size = min((size for size in self.batch_sizes if size >= active), default=None)
        with self._lock:
            there = size in self._graphs
        if size is not None and not there and not self._late and self.session is not None:
            self._late = not self.session.wait_for(size, _RESTORED_S)

    def step_size(self, active: int) -> int:
        """Rows that a step of the first ``active`` ones computes: those of the smallest graph that takes them.

        Several ranks compute as many, whichever graphs each has: their collectives must fit each other.
        """
        with self._lock:
            sizes = [*self._graphs]
        if self.world > 1 and self.device.startswith("cuda"):
            sizes = [*self.batch_sizes]
        return min((size for size in sizes if size >= active), default=active)

    @torch.inference_mode()
    def advance(self, active: int, width: int | None = None) -> list[int]:
        """One step of the first ``active`` rows: their next tokens, which are written as the next inputs too.

        Args:
            width: rows to compute, by a graph where there is one of exactly so many; None takes :meth:`step_size`.
                Ranks have to take the same, also where one of them lacks a graph.
        """
        slots = self._slots()
        if width is None:
            self._await_graph(active)
            width = self.step_size(active)
        with self._lock:
            chosen = self._graphs.get(width)
        # Padding rows write to the last position: what an answer left in such a row may be wanted again.
        slots.position[active:width].fill_(slots.length - 1)
        if chosen is None:
            outputs = self.step(width)
        else:
            graph, outputs = chosen
            graph.replay()
        slots.token[:active] = outputs["token"][:active]
        slots.position[:active] += 1
        return [int(token) for token in outputs["token"][:active].tolist()]

    def _slots(self) -> Slots:
        if self.slots is None:
            self.allocate_kv()
        assert self.slots is not None
        if not hasattr(self.slots, "token"):
            self.allocate()
        return self.slots
