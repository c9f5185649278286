"""Least recently used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore.policies.base import HELD, LATER, EvictionPolicy, Protected
from kvstore.policies.queues import come_first
from kvstore.policies.table import OrderedTable

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """Evicts the least recently used key.

    The core passes keys tail first, which makes this leaf-first LRU: a chain loses
    its end before its beginning. When a request ends, its whole prompt is put in that
    order, whether its chunks were used or are new.
    """

    name = "lru"
    spares_latest = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedTable[bytes, None] = OrderedTable()
        self._held: OrderedTable[bytes, None] = OrderedTable()

    def insert(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        try:
            self._keys.move_to_end(key)
        except KeyError:
            # Held keys count as just used when they are released.
            if key not in self._held:
                raise

    def remove(self, key: bytes) -> None:
        del (self._held if key in self._held else self._keys)[key]

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        keys = self._keys
        if count > len(keys):
            return None
        victims: list[bytes] = []
        in_use: list[bytes] = []
        held: list[bytes] = []
        for key in keys:
            if len(victims) == count:
                break
            answer = protected(key)
            if not answer:
                victims.append(key)
            elif answer == HELD:
                held.append(key)
            elif answer == LATER:
                break
            else:
                in_use.append(key)
        for key in in_use:
            keys.move_to_end(key)
        for key in held:
            self._held[key] = keys.pop(key)
        if len(victims) < count:
            return None
        for key in victims:
            del keys[key]
        return victims

    def release(self, keys: Iterable[bytes]) -> None:
        held = self._held
        for key in keys:
            if key in held:
                self._keys[key] = held.pop(key)

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        resident = self._keys
        for key in reversed(keys):
            if key in resident:
                resident.move_to_end(key)

    def cool(self, keys: Iterable[bytes]) -> None:
        come_first(keys, self._keys)

    def clear(self) -> None:
        self._keys.clear()
        self._held.clear()

    def __len__(self) -> int:
        return len(self._keys) + len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._keys or key in self._held

    def order(self) -> Iterable[bytes]:
        return itertools.chain(self._keys, self._held)
