"""S3-FIFO.

Juncheng Yang, Yazhuo Zhang, Ziyue Qiu, Yao Yue and K. V. Rashmi, "FIFO Queues are
All You Need for Cache Eviction", SOSP 2023, algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.policies.queues import Later, come_first, let_go, put_back, take
from kvstore.policies.table import OrderedTable

__all__ = ["S3FIFO"]

_Entry = tuple[bytes, int]

_MOST = 3
"""Highest count of uses."""


class S3FIFO(EvictionPolicy):
    """A small queue that filters new keys, a main queue, and ghosts of those filtered out.

    A key used at least twice in the small queue moves to the main queue, where each
    counted use gives it one more round. A new key that is a ghost enters the main
    queue directly. There are as many ghosts as places in the main queue. A key that
    was used and then removed becomes one, too.

    Args:
        small: the small queue's share of the capacity, between 0 and 1.
    """

    name = "s3-fifo"
    effort = 1.5

    def __init__(self, capacity: int, *, small: float = 0.1) -> None:
        super().__init__(capacity)
        if not 0 < small < 1:
            raise ValueError(f"small must be between 0 and 1, not {small}")
        self._small_target = max(1, int(capacity * small))
        self._main_most = capacity - self._small_target
        self._small: OrderedTable[bytes, int] = OrderedTable()
        self._main: OrderedTable[bytes, int] = OrderedTable()
        self._ghosts: OrderedTable[bytes, None] = OrderedTable()
        # Held keys of the small and the main queue.
        self._small_held: OrderedTable[bytes, int] = OrderedTable()
        self._main_held: OrderedTable[bytes, int] = OrderedTable()

    def insert(self, key: bytes) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: bytes) -> None:
        queue = self._place(key)
        if queue[key] < _MOST:
            queue[key] += 1

    def remove(self, key: bytes) -> None:
        # One that was used, as by a promotion from an exclusive tier, is not new if it comes back.
        if self._place(key).pop(key):
            self._add_ghosts((key,))

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        small, main = self._small, self._main
        if count > len(small) + len(main):
            return None
        if count == 1:
            # Fast path: stores evict one key at a time.
            sifts = len(small) + len(self._small_held) >= self._small_target or not main
            coldest = small if small and sifts else main
            if coldest and not protected(key := next(iter(coldest))):
                if coldest is small and small[key] < 2:
                    del small[key]
                    self._add_ghosts((key,))
                    return [key]
                if coldest is main and not main[key]:
                    del main[key]
                    return [key]
        sifted: list[_Entry] = []
        dropped: list[_Entry] = []
        victims: list[bytes] = []
        small_in_use: list[_Entry] = []
        main_in_use: list[_Entry] = []
        try:
            while len(victims) < count and (small or main):
                # For each victim so far, a new key will have entered the small queue.
                size = len(small) + len(self._small_held) + len(small_in_use) + len(victims)
                if small and (size >= self._small_target or not main):
                    entry = take(small, protected, small_in_use, self._small_held)
                    if entry is not None and entry[1] < 2:
                        sifted.append(entry)
                        victims.append(entry[0])
                        continue
                    if entry is not None:
                        main[entry[0]] = 0
                        in_main = len(main) + len(main_in_use) + len(self._main_held)
                        if in_main <= self._main_most:
                            continue
                entry = self._turn(protected, main_in_use)
                if entry is not None:
                    dropped.append(entry)
                    victims.append(entry[0])
        except Later:
            pass
        complete = len(victims) == count
        if complete:
            self._add_ghosts(key for key, _ in sifted)
        else:
            put_back(small, sifted)
            put_back(main, dropped)
        small.update(small_in_use)
        main.update(main_in_use)
        return victims if complete else None

    def release(self, keys: Iterable[bytes]) -> None:
        let_go(keys, ((self._small, self._small_held), (self._main, self._main_held)))

    def cool(self, keys: Iterable[bytes]) -> None:
        keys = [*keys]
        for key in keys:
            self._place(key)[key] = 0
        come_first(keys, self._small, self._main)

    def clear(self) -> None:
        self._small_held.clear()
        self._main_held.clear()
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()

    def __len__(self) -> int:
        held = len(self._small_held) + len(self._main_held)
        return len(self._small) + len(self._main) + held

    def __contains__(self, key: object) -> bool:
        return (
            key in self._small
            or key in self._main
            or key in self._small_held
            or key in self._main_held
        )

    def order(self) -> Iterable[bytes]:
        return itertools.chain(self._small, self._small_held, self._main, self._main_held)

    def _place(self, key: bytes) -> OrderedTable[bytes, int]:
        """Return the queue of a resident key."""
        if key in self._small:
            return self._small
        if key in self._main:
            return self._main
        return self._small_held if key in self._small_held else self._main_held

    def _turn(self, protected: Protected, in_use: list[_Entry]) -> _Entry | None:
        """Take the first key of the main queue that has no rounds left."""
        main = self._main
        while (entry := take(main, protected, in_use, self._main_held)) is not None:
            key, turns = entry
            if not turns:
                return entry
            main[key] = turns - 1
        return None

    def _add_ghosts(self, keys: Iterable[bytes]) -> None:
        ghosts = self._ghosts
        for key in keys:
            ghosts[key] = None
        while len(ghosts) > self._main_most:
            ghosts.popitem(last=False)
