"""A model as a worker serves it: rows that decode, and the way from and to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fer.errors import RequestError, UsageError
from fer.standby.scheduler import Job, Rows, rows_of
from fer.standby.text import TextStream
from fer.standby.wire import Generate, Message

if TYPE_CHECKING:
    from fer.engines.transformers import TransformersEngine


class Model(Protocol):
    """What a worker needs of an engine.

    Attributes:
        context: positions of prompt and answer together.
        vocabulary: token ids are smaller than this.
        ends: tokens that end an answer.
    """

    context: int
    vocabulary: int
    ends: frozenset[int]
    rows: Rows

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Raises RequestError."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer's tokens, special ones left out."""


class TransformersModel:
    """A recovered :class:`~fer.engines.transformers.TransformersEngine`.

    Raises:
        UsageError: its folder holds no tokenizer.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        if engine.tokenizer is None:
            raise UsageError(f"{engine.folder} holds no tokenizer", fix="Add the tokenizer's files: clients send text")
        self.context = engine.max_length
        self.rows: Rows = rows_of(engine)
        self.vocabulary = int(engine.module.config.get_text_config().vocab_size)
        from fer.engines.pretrained import ends_of

        self.ends = ends_of(engine.module)
        self._tokenizer = engine.tokenizer
        # Its first call settles options inside it, which must not happen while another thread reads them.
        self.encode("a")

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestError("the model has no chat template", fix="Use /v1/completions", status=400)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError(
                "the model's chat template refuses these messages", why=str(error), status=400, param="messages"
            ) from error
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def job_of(model: Model, request: Generate) -> Job:
    """What a request asks of the model. With ``known`` tokens its text stands where they end.

    Raises:
        RequestError: it asks for what cannot be.
    """
    ids = _prompt(model, request)
    room = model.context - len(ids)
    limit = request.max_tokens if request.max_tokens is not None else room
    if not ids or limit > room or room < 1:
        raise RequestError(
            f"the prompt of {len(ids)} tokens and an answer of {max(limit, 1)} do not fit",
            why=f"the model serves {model.context} positions, and a prompt needs one token or more",
            fix="Shorten the prompt or lower max_tokens",
            status=400,
            param="prompt" if not request.messages else "messages",
            code="context_length_exceeded",
        )
    text = TextStream(model.decode, request.stop)
    for token in request.known:
        text.add(token)
    return Job(ids, limit, text, known=request.known, replay=request.replay)


def _prompt(model: Model, request: Generate) -> list[int]:
    if request.messages:
        return model.encode_chat(request.messages)
    if isinstance(request.prompt, str):
        return model.encode(request.prompt)
    ids = request.prompt or []
    # On a GPU an index past the table of embeddings would end the process, and every answer with it.
    beyond = [token for token in (*ids, *request.known) if token >= model.vocabulary]
    if beyond:
        raise RequestError(
            f"token {beyond[0]} is not in the vocabulary",
            why=f"it has {model.vocabulary} tokens",
            status=400,
            param="prompt",
        )
    return ids
