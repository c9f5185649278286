"""A tokenizer without files: a token is a byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

__all__ = ["VOCABULARY", "Decoder", "decode", "encode"]

VOCABULARY = 256


def encode(text: str) -> list[int]:
    """The tokens of `text`.

    Raises:
        UnicodeEncodeError: for half of a surrogate pair, which has no bytes.
    """
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of `tokens`; bytes that are no UTF-8 become replacement characters."""
    return bytes(tokens).decode(errors="replace")


class Decoder:
    """Text token by token; put together it is what `decode` makes of all of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, *, last: bool) -> str:
        """The text that is certain now: empty in the middle of a character."""
        return self._decoder.decode(bytes([token]), final=last)
