"""What appeared on a medium and what left it, for those who follow the events."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["History"]


class History:
    """Keys that came and went since they were taken, in order. Nothing is kept unless wanted."""

    def __init__(self) -> None:
        self._wanted = True
        self._changes: list[tuple[bytes, bool]] = []

    def want(self, wanted: bool) -> None:
        """Whether `take` will be called."""
        self._wanted = wanted

    def came(self, keys: Iterable[bytes]) -> None:
        """These chunks have appeared."""
        if self._wanted:
            self._changes += [(key, False) for key in keys]

    def left(self, keys: Iterable[bytes]) -> None:
        """These chunks have left."""
        if self._wanted:
            self._changes += [(key, True) for key in keys]

    def take(self) -> list[tuple[bytes, bool]]:
        """Keys that came or (True) left since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes
