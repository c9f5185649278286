"""Places: where each key lies, when several lanes may keep it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvstore.policies.table import OrderedTable
from kvstore.types import Changes

__all__ = ["Places"]


class Places:
    """The places of each key, and the changes since they were last taken.

    Most keys have one place; only those that have several cost more memory.
    May be used from several threads. Nothing here waits for I/O.
    """

    def __init__(self) -> None:
        # No call on it takes long, however many keys there are: others want the interpreter.
        self._first: OrderedTable[bytes, int] = OrderedTable()
        self._more: dict[bytes, list[int]] = {}
        self._known: dict[bytes, bool] = {}
        """Keys that have changed, and whether they were there before."""
        self._lock = threading.Lock()

    @property
    def changed(self) -> int:
        """Keys that have changed since `changes` was called."""
        return len(self._known)

    def change(
        self, gone: Iterable[tuple[bytes, int]], appeared: Iterable[tuple[bytes, int]]
    ) -> None:
        """Keys have left places, then others have come to places."""
        first, more, known = self._first, self._more, self._known
        with self._lock:
            for key, place in gone:
                known.setdefault(key, key in first)
                others = more.get(key)
                if others is None:
                    if first.get(key) == place:
                        del first[key]
                    continue
                if first[key] == place:
                    first[key] = others.pop(0)
                elif place in others:
                    others.remove(place)
                if not others:
                    del more[key]
            for key, place in appeared:
                known.setdefault(key, key in first)
                if first.setdefault(key, place) != place:
                    others = more.setdefault(key, [])
                    if place not in others:
                        others.append(place)

    def changes(self) -> Changes:
        """Take the changes since the last call, with the present place of each key."""
        with self._lock:
            known, self._known = self._known, {}
            appeared, gone = [], []
            for key, was in known.items():
                place = self._first.get(key)
                if place is not None:
                    appeared.append((key, place))
                elif was:
                    gone.append(key)
            return Changes(appeared, gone)

    def all(self) -> list[tuple[bytes, int]]:
        """Each key with the place that serves first. What has changed so far is told by that."""
        with self._lock:
            self._known = {}
            return list(self._first.items())

    def of(self, key: bytes) -> list[int]:
        """The places of the key, the one that serves first."""
        first = self._first.get(key)
        return [] if first is None else [first, *self._more.get(key, ())]
