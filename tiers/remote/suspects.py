"""Suspects: values of a store that are wrong, or may be ones that were removed.

They count as missing. A value that is found invalid does so for a while, unless it is replaced,
since other hosts may replace it. One that cannot be read is tried once more: if several in a row
cannot, then the store is at fault.

A server that hangs may go on later, with what it was sent before. What it stores then may be what
was removed in the meantime. So if the write of a key was given up and the key was removed since,
whatever the store has of it is a miss for a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvstore.tiers.remote.client import MOST_UNREAD, Unread

__all__ = ["LASTS", "Suspects"]

LASTS = 600.0
"""Seconds for which an invalid value counts as missing, and for which a write that was given up may
still arrive."""

MOST_KEYS = 2**14
"""Most keys that are remembered of each kind; the oldest are forgotten first."""


class Suspects:
    """What is known against the values of one epoch."""

    def __init__(self) -> None:
        # Until when a key with an invalid value counts as missing, and why.
        self._invalid: dict[bytes, tuple[float, str | None]] = {}
        # Keys, not many, whose values could not be read since one could be.
        self._unread: set[bytes] = set()
        # Until when a write that was given up may arrive, and which of these keys were removed.
        self._given_up: dict[bytes, float] = {}
        self._removed: set[bytes] = set()

    def missing(self, key: bytes) -> bool:
        """Whether the key counts as missing, whatever the store has."""
        return self._invalid.get(key, (0.0, None))[0] > time.monotonic() or self.may_return(key)

    def may_return(self, key: bytes) -> bool:
        """Whether the value may be one that was removed, and arrived since."""
        return key in self._removed and self._given_up[key] > time.monotonic()

    def invalid(self, keys: Iterable[bytes]) -> bool:
        """Whether one of these keys had an invalid value when it was read last."""
        return any(key in self._invalid for key in keys)

    def must_replace(self, keys: Iterable[bytes]) -> bool:
        """Whether a write of these keys has to replace what is there."""
        return any(key in self._invalid or self.may_return(key) for key in keys)

    def replaced(self, keys: Iterable[bytes]) -> None:
        """Note that these have new values."""
        for key in keys:
            self._invalid.pop(key, None)

    def was_read(
        self,
        keys: Sequence[bytes],
        records: Sequence[object],
        errors: Sequence[str | None],
    ) -> bool:
        """Note what reads have come to, and return whether the store is at fault.

        Args:
            records: for each key what the store returned; None if it had nothing.
            errors: for each key what is wrong, or None.
        """
        now = time.monotonic()
        unread = [key for key, record in zip(keys, records, strict=True) if type(record) is Unread]
        for key, record, error in zip(keys, records, errors, strict=True):
            known = self._invalid.pop(key, None)
            if record is not None and error is not None:
                # One that could not be read is replaced when it is written, and tried once more.
                once = type(record) is Unread and known is None
                self._invalid[key] = now if once else now + LASTS, error
        if None in errors:
            self._unread.clear()
        elif len(self._unread) < MOST_UNREAD:
            self._unread.update(unread[:MOST_UNREAD])
        for _ in range(len(self._invalid) - MOST_KEYS):
            del self._invalid[next(iter(self._invalid))]
        return bool(unread) and len(self._unread) >= MOST_UNREAD

    def trust_again(self, reason: str) -> None:
        """Forget the values that were invalid for this reason."""
        for key in [key for key, (_, why) in self._invalid.items() if why == reason]:
            del self._invalid[key]

    def gave_up(self, keys: Iterable[bytes]) -> None:
        """Note that it is not known whether the store has these, or will have them."""
        now = time.monotonic()
        for key in keys:
            if self._given_up.pop(key, now) <= now:
                self._removed.discard(key)
            self._given_up[key] = now + LASTS
        for _ in range(len(self._given_up) - MOST_KEYS):
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._removed.discard(oldest)

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that these are being removed."""
        now = time.monotonic()
        for key in keys:
            if self._given_up.get(key, now) > now:
                self._given_up[key] = now + LASTS
                self._removed.add(key)
