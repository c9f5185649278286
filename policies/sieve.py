"""SIEVE.

Yazhuo Zhang, Juncheng Yang, Yao Yue, Ymir Vigfusson and K. V. Rashmi, "SIEVE is
Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI
2024, algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore.policies.base import HELD, LATER, EvictionPolicy, Protected
from kvstore.policies.queues import come_first, let_go, put_back
from kvstore.policies.table import OrderedTable

__all__ = ["SIEVE"]


class SIEVE(EvictionPolicy):
    """A queue in order of arrival, and a hand that spares each used key once per pass.

    The queue is kept in two parts: keys that the hand has passed, and keys ahead of
    it. When no key is ahead, the hand starts again at the oldest.

    The chunks of long sessions that have ended stay for a whole pass, so this policy
    is not a good default for prompts: see docs/policies.md.
    """

    name = "sieve"
    effort = 1.5

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._passed: OrderedTable[bytes, bool] = OrderedTable()
        self._ahead: OrderedTable[bytes, bool] = OrderedTable()
        self._held: OrderedTable[bytes, bool] = OrderedTable()

    def insert(self, key: bytes) -> None:
        self._ahead[key] = False

    def touch(self, key: bytes) -> None:
        self._place(key)[key] = True

    def remove(self, key: bytes) -> None:
        del self._place(key)[key]
        self._wrap()

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        if count > len(self._passed) + len(self._ahead):
            return None
        if count == 1 and self._ahead:
            # Fast path: stores evict one key at a time.
            key = next(iter(self._ahead))
            if not self._ahead[key] and not protected(key):
                del self._ahead[key]
                self._wrap()
                return [key]
        victims: list[bytes] = []
        in_use: set[bytes] = set()
        while len(victims) < count and len(in_use) < len(self._passed) + len(self._ahead):
            key, used = self._ahead.popitem(last=False)
            answer = key in in_use or protected(key)
            if answer == HELD:
                self._held[key] = used
            elif answer == LATER:
                put_back(self._ahead, [(key, used)])
                break
            elif answer:
                in_use.add(key)
                self._passed[key] = used
            elif used:
                self._passed[key] = False
            else:
                victims.append(key)
            self._wrap()
        if len(victims) == count:
            return victims
        put_back(self._ahead, [(key, False) for key in victims])
        return None

    def release(self, keys: Iterable[bytes]) -> None:
        let_go(keys, ((self._passed, self._held),))
        self._wrap()

    def cool(self, keys: Iterable[bytes]) -> None:
        # Move them to where the hand comes next.
        keys = [*keys]
        for key in keys:
            self._place(key)[key] = False
            if key in self._passed:
                self._ahead[key] = self._passed.pop(key)
        come_first(keys, self._ahead)

    def clear(self) -> None:
        self._passed.clear()
        self._ahead.clear()
        self._held.clear()

    def __len__(self) -> int:
        return len(self._passed) + len(self._ahead) + len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._ahead or key in self._passed or key in self._held

    def order(self) -> Iterable[bytes]:
        return itertools.chain(self._passed, self._held, self._ahead)

    def _place(self, key: bytes) -> OrderedTable[bytes, bool]:
        """Return the part of the queue that a resident key is in."""
        if key in self._ahead:
            return self._ahead
        return self._held if key in self._held else self._passed

    def _wrap(self) -> None:
        """Move the hand from the newest key to the oldest, if it has passed all."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
