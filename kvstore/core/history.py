"""What appeared on a medium and what left it, for those who follow the events."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["History"]


MOST_CHANGES = 2**18
"""Changes that are kept for who does not take them."""


class History:
    """Keys that came and went since they were taken, in order. Nothing is kept unless wanted.

    Of changes that nobody takes the older half is dropped when there are too many.

    Attributes:
        lost: changes that were dropped.
    """

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self.lost = 0
        self._most = most
        self._wanted = True
        self._changes: list[tuple[bytes, bool]] = []

    def want(self, wanted: bool) -> None:
        """Whether `take` will be called."""
        self._wanted = wanted

    def came(self, keys: Iterable[bytes]) -> None:
        """These chunks have appeared."""
        if self._wanted:
            self._changes += [(key, False) for key in keys]
            self._drop_old()

    def left(self, keys: Iterable[bytes]) -> None:
        """These chunks have left."""
        if self._wanted:
            self._changes += [(key, True) for key in keys]
            self._drop_old()

    def take(self) -> list[tuple[bytes, bool]]:
        """Keys that came or (True) left since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _drop_old(self) -> None:
        excess = len(self._changes) - self._most
        if excess > 0:
            dropped = max(excess, self._most // 2)
            del self._changes[:dropped]
            self.lost += dropped
