"""Text that grows token by token: the same whatever it was cut into, and never a stop text or half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer.standby.text import TextStream


def decode(ids: Sequence[int]) -> str:
    """Bytes are tokens; 0 is a special one, which has no text."""
    return bytes(token for token in ids if token).decode("utf-8", "replace")


def shown(ids: Sequence[int], stop: Sequence[str] = (), *, cut: int = 0) -> str:
    """The text of all tokens, the first ``cut`` of them through a stream that is then replaced by another."""
    stream = TextStream(decode, stop)
    text = "".join(stream.add(token) for token in ids[:cut])
    stream = TextStream(decode, stop)
    for token in ids[:cut]:
        stream.add(token)
    return text + "".join(stream.add(token) for token in ids[cut:]) + stream.end()


TEXTS = st.text(alphabet="ab \u00e9\u4e16\U0001f600", max_size=30)


@given(TEXTS, st.data())
def test_pieces_make_the_text_also_when_another_stream_goes_on(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    assert shown(ids, cut=data.draw(st.integers(0, len(ids)))) == text


@given(TEXTS, st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=3), max_size=3), st.data())
def test_a_stop_text_ends_it_at_its_first_place(text: str, stops: list[str], data: st.DataObject) -> None:
    ids = list(text.encode())
    found = shown(ids, stops, cut=data.draw(st.integers(0, len(ids))))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert found == text
    else:  # the stop that is complete first; of those complete at once, the one that began first
        begun = [min(ends) - len(stop) for stop in stops if text[: min(ends)].endswith(stop)]
        assert found == text[: min(begun)]


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream(decode)
    assert [stream.add(token) for token in "\u4e16".encode()] == ["", "", "\u4e16"]
    assert stream.add(0xE4) == ""
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize("stop", ["ab", "abc"])
def test_the_beginning_of_a_stop_text_is_held_back(stop: str) -> None:
    stream = TextStream(decode, [stop])
    assert stream.add(ord("a")) == ""
    assert stream.add(ord("x")) == "ax"
    assert stream.add(ord("a")) == ""
    assert stream.end() == "a" and not stream.stopped


def test_tokens_without_text_change_nothing() -> None:
    assert shown([0, 104, 0, 105, 0]) == "hi"
