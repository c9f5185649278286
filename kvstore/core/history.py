"""What appeared on a medium and what left it, for those who follow the events."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["History"]


class History:
    """Keys that came and went since they were taken, in order.

    Attributes:
        wanted: whether anything is kept.
    """

    def __init__(self) -> None:
        self.wanted = True
        self._changes: list[tuple[bytes, bool]] = []

    def want(self, wanted: bool) -> None:
        """Whether `take` will be called."""
        self.wanted = wanted

    def came(self, keys: Iterable[bytes]) -> None:
        """These chunks have appeared."""
        if self.wanted:
            self._changes += [(key, False) for key in keys]

    def left(self, keys: Iterable[bytes]) -> None:
        """These chunks have left."""
        if self.wanted:
            self._changes += [(key, True) for key in keys]

    def take(self) -> list[tuple[bytes, bool]]:
        """Keys that came or (True) left since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes
