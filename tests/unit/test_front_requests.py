"""Whatever a client sends becomes a request that was understood, or a refusal; never anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer.errors import ProtocolError, RequestError
from fer.standby import openai, wire

NAMES = ["model", "prompt", "messages", "max_tokens", "stop", "stream", "n", "temperature", "stream_options", "tools"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_object(body: dict[str, object]) -> None:
    for understand in (openai.completion, openai.chat):
        try:
            asked = understand(json.dumps(body).encode())
        except RequestError as error:
            assert error.fields["status"] == 400
        else:  # and what was understood can be sent on
            assert wire.request(wire.line(asked.generate)) == asked.generate


@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    with pytest.raises(RequestError):
        openai.completion(body)


def test_true_is_not_one() -> None:
    body = {"model": "m", "prompt": "p"}
    assert openai.completion(json.dumps({**body, "n": 1}).encode()).generate.prompt == "p"
    with pytest.raises(RequestError, match="n is supported as 1 only"):
        openai.completion(json.dumps({**body, "n": True}).encode())
    with pytest.raises(RequestError, match="echo is supported as False only"):
        openai.completion(json.dumps({**body, "echo": 0}).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}\n",
        b'{"type":"other"}\n',
        b'{"type":"piece","ids":[-1],"text":""}\n',
        b'{"type":"ended","reason":"x"}\n',
    ],
)
def test_events_are_decoded_strictly(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.event(line)
