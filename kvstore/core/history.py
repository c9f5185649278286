"""What appeared on a medium and what left it, for those who follow the events."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["History"]


MOST_CHANGES = 2**18
"""Changes that are kept for who does not take them."""

PORTION = 2048
"""Chunks of before the start that are told at once: some tenths of a millisecond."""


class History:
    """Keys that came and went since they were taken, in order. Nothing is kept unless wanted.

    Of changes that nobody takes the older half is dropped when there are too many. What a medium
    held at the start is told in portions, most recently used first, and leaves only after that.

    Attributes:
        lost: changes that were dropped.
    """

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self.lost = 0
        self._most = most
        self._wanted = True
        self._changes: list[tuple[bytes, bool]] = []
        self._untold: list[bytes] = []
        """What was there at the start and was not told yet, to be told from the end on."""
        self._gone: set[bytes] = set()
        """Keys that have left since the start, while some are untold."""

    def want(self, wanted: bool, here: Iterable[bytes] = ()) -> None:
        """Whether `take` will be called.

        Args:
            here: what is there already, coldest first.
        """
        self._wanted = wanted
        self._untold = list(here) if wanted else []

    def came(self, keys: Iterable[bytes]) -> None:
        """These chunks have appeared."""
        if self._wanted:
            self._changes += [(key, False) for key in keys]
            self._drop_old()

    def left(self, keys: Iterable[bytes]) -> None:
        """These chunks have left."""
        if self._wanted:
            keys = list(keys)
            if self._untold:
                # They may be among the untold: who hears that they left has to know of them.
                self._changes += [(key, False) for key in keys]
                self._gone.update(keys)
            self._changes += [(key, True) for key in keys]
            self._drop_old()

    def all_left(self, keys: Iterable[bytes]) -> None:
        """Everything there was, `keys`, has left."""
        untold, self._untold = set(self._untold), []
        self._gone.clear()
        self.left(key for key in keys if key not in untold)

    def take(self) -> list[tuple[bytes, bool]]:
        """Keys that came or (True) left since the last call, in order."""
        changes, self._changes = self._changes, []
        if self._untold:
            portion = self._untold[-PORTION:]
            del self._untold[-PORTION:]
            changes[:0] = [(key, False) for key in reversed(portion) if key not in self._gone]
            if not self._untold:
                self._gone.clear()
        return changes

    def _drop_old(self) -> None:
        excess = len(self._changes) - self._most
        if excess > 0:
            dropped = max(excess, self._most // 2)
            del self._changes[:dropped]
            self.lost += dropped
