"""From token ids to text that may be shown, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special ones left out."""

_HALF = "\ufffd"  # what a tokenizer makes of bytes that are not a character yet


class TextStream:
    """The text of an answer that grows token by token.

    The pieces, put together, are the same whatever they were cut into: a second stream that is given the same tokens
    goes on where the first one was.

    Args:
        decode: the tokenizer's.
        stop: texts that end the answer and are no part of it.

    Attributes:
        stopped: a stop text has come; nothing follows.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        # Tokens decode in context (a leading space, a character over several tokens): new text is what a window of
        # ids has more than it had without the new ones. The window begins at a place where text was whole.
        self._begin, self._read = 0, 0
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """One more token; the text that may be shown now."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._read])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(_HALF) or len(now) <= len(before):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return self._show(now[len(before) :])

    def end(self) -> str:
        """No more tokens come: what was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._begin : self._read])
        self._read = len(self._ids)
        shown = self._show(self._decode(self._ids[self._begin :])[len(before) :])
        if not self.stopped:
            shown, self._held = shown + self._held, ""
        return shown

    def _show(self, text: str) -> str:
        """What of the held text and ``text`` cannot be part of a stop any more."""
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
