"""Choices that are read from bytes, and documents that are changed as they say."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["Choices", "damaged", "edited"]

_DEEP: list[Any] = []
for _ in range(300):
    _DEEP = [_DEEP]

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32 - 1, 2**63, 2**64 + 1, -(2**70), 10**400),
    *(0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *("", "0", "-1", "64MiB", "1e9", "nan", "\0", "../..", "/", "é\ud800", "a" * 5000, "lru"),
    *([], {}, [[]], [None], {"": None}, {"type": "disk"}, {"path": "/nowhere"}, ["a"] * 70, _DEEP),
)
"""Values in the place of others."""


class Choices:
    """Numbers from bytes; after the last of them every choice is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def next(self, below: int) -> int:
        """A number from 0 to before `below`."""
        if below <= 1:
            return 0
        size = (below - 1).bit_length() + 7 >> 3
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") % below

    def rest(self, most: int) -> bytes:
        """Up to `most` of the bytes that are left."""
        part = self._data[self._at : self._at + most]
        self._at += len(part)
        return part


def edited(value: Any, choices: Choices) -> Any:
    """A copy of a JSON document with some of its parts changed, left out, doubled or renamed."""
    # Eight of sixteen leave this part as it is, and go on within it.
    kind = choices.next(16)
    if kind == 8:
        return STRANGE[choices.next(len(STRANGE))]
    if isinstance(value, dict):
        result = {}
        for name, each in value.items():
            how = choices.next(16)
            if how == 8:
                continue
            if how == 9:
                name = name[:-1] + chr(97 + choices.next(26))
            result[name] = edited(each, choices)
        if kind == 9:
            result[["x", "", "tiers", "keys", "bytes"][choices.next(5)]] = STRANGE[
                choices.next(len(STRANGE))
            ]
        return result
    if isinstance(value, list):
        parts = [edited(each, choices) for each in value if choices.next(16) != 8]
        return parts * 2 if kind == 9 else parts[::-1] if kind == 10 else parts
    if isinstance(value, str) and kind in (9, 10, 11):
        at = choices.next(len(value) + 1)
        text = choices.rest(3).decode("latin-1")
        return value[:at] + text + value[at + (kind == 9) :]
    if isinstance(value, (int, float)) and kind in (9, 10, 11):
        return [-value, value + 1, value * 2**20][kind - 9]
    return value


def damaged(sound: bytes, choices: Choices) -> bytes:
    """A copy of a file with some bytes changed, cut off, left out, put in or doubled."""
    found = bytearray(sound)
    for _ in range(1 + choices.next(4)):
        kind = choices.next(8)
        # Most of what matters is at the beginning.
        at = choices.next(min(len(found), 256) if choices.next(2) else len(found))
        if kind == 0:
            found[at : at + 1] = choices.rest(1)
        elif kind == 1:
            found[at : at + 8] = choices.next(2**64).to_bytes(8, "little")
        elif kind == 2:
            del found[at:]
        elif kind == 3:
            del found[at : at + 1 + choices.next(200)]
        elif kind == 4:
            found[at:at] = choices.rest(1 + choices.next(32))
        elif kind == 5:
            found[at:at] = found[at : at + 1 + choices.next(200)]
        elif kind == 6:
            found[at : at + 1 + choices.next(200)] = bytes(8)
        else:
            text = json.dumps(STRANGE[choices.next(len(STRANGE))]).encode()
            found[at : at + len(text)] = text
    return bytes(found)
