"""Adaptive replacement cache.

Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead
Replacement Cache", FAST 2003, figure 4. Names as there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore.policies.base import HELD, EvictionPolicy, Protected
from kvstore.policies.queues import Later, come_first, let_go, put_back, take
from kvstore.policies.table import OrderedTable

__all__ = ["ARC"]

_List = OrderedTable[bytes, None]


class ARC(EvictionPolicy):
    """Balances keys seen once (T1) against keys seen again (T2).

    The target size p of T1 adapts to ghosts. If a key comes back after it was
    evicted from T1, then T1 was too small; if from T2, then T2 was. The key enters
    T2 in both cases. There are at most `capacity` ghosts and `capacity` residents;
    of a tenant, which may have more of a tier than its part, twice as many ghosts.

    The paper learns from a ghost hit before it evicts. So does this policy, for the
    `incoming` keys of `evict`. If several keys are evicted, each is chosen as if the
    keys before it had already entered.
    """

    name = "arc"
    effort = 1.5

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: _List = OrderedTable()
        self._t2: _List = OrderedTable()
        # Held keys of T1 and T2.
        self._held1: OrderedTable[bytes, None] = OrderedTable()
        self._held2: OrderedTable[bytes, None] = OrderedTable()
        # True once p has adapted to this ghost, whose key was announced and may not have come.
        self._b1: OrderedTable[bytes, bool] = OrderedTable()
        self._b2: OrderedTable[bytes, bool] = OrderedTable()
        self._p = 0.0

    def insert(self, key: bytes) -> None:
        b1, b2 = self._b1, self._b2
        if key in b1 or key in b2:
            self._learn(key)
            del (b1 if key in b1 else b2)[key]
            self._t2[key] = None
            return
        if len(self._t1) + len(self._held1) + len(b1) >= self.capacity:
            if b1:
                b1.popitem(last=False)
        elif len(self) + len(b1) + len(b2) >= 2 * self.capacity and b2:
            b2.popitem(last=False)
        # Of a tenant that had more than its part of the room, which others then took.
        while len(b1) + len(b2) > 2 * self.capacity:
            (b2 or b1).popitem(last=False)
        self._t1[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._t2:
            self._t2.move_to_end(key)
        else:
            del (self._held1 if key in self._held1 else self._held2)[key]
            self._t2[key] = None

    def remove(self, key: bytes) -> None:
        for each in (self._t1, self._t2, self._held1, self._held2):
            if key in each:
                del each[key]
                return
        raise KeyError(key)

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        if count > len(self._t1) + len(self._t2):
            return None
        if count == 1 and len(incoming) == 1:
            # Fast path: stores evict one key at a time.
            self._learn(incoming[0])
            from_t1 = self._takes_t1(incoming[0], 0)
            coldest = self._t1 if from_t1 else self._t2
            if coldest:
                answer = protected(key := next(iter(coldest)))
                if not answer:
                    del coldest[key]
                    (self._b1 if from_t1 else self._b2)[key] = False
                    return [key]
                if answer == HELD:
                    # Do not ask about it again below: the number of questions may be limited.
                    del coldest[key]
                    (self._held1 if from_t1 else self._held2)[key] = None
        # If fewer leave than come, there is already room for the first that come.
        early = max(0, len(incoming) - count)
        # Keys that will have entered T1.
        entered1 = sum(not self._learn(first) for first in incoming[:early])
        t1, t2, held1, held2 = self._t1, self._t2, self._held1, self._held2
        victims: list[tuple[_List, bytes]] = []
        in_use1: list[tuple[bytes, None]] = []
        in_use2: list[tuple[bytes, None]] = []
        for index in range(early, early + count):
            arriving = incoming[index] if index < len(incoming) else None
            ghost = arriving is not None and self._learn(arriving)
            from_t1 = self._takes_t1(arriving, len(in_use1) + entered1)
            lists = ((t1, in_use1, held1), (t2, in_use2, held2))
            entry = None
            try:
                while entry is None and (t1 or t2):
                    for queue, in_use, held in lists if from_t1 else lists[::-1]:
                        entry = take(queue, protected, in_use, held)
                        if entry is not None:
                            victims.append((queue, entry[0]))
                            break
            except Later:
                break
            if entry is None:
                break
            entered1 += arriving is not None and not ghost
        complete = len(victims) == count
        if complete:
            for queue, victim in victims:
                (self._b1 if queue is t1 else self._b2)[victim] = False
        else:
            put_back(t1, [(victim, None) for queue, victim in victims if queue is t1])
            put_back(t2, [(victim, None) for queue, victim in victims if queue is t2])
        t1.update(in_use1)
        t2.update(in_use2)
        return [victim for _, victim in victims] if complete else None

    def release(self, keys: Iterable[bytes]) -> None:
        let_go(keys, ((self._t1, self._held1), (self._t2, self._held2)))

    def cool(self, keys: Iterable[bytes]) -> None:
        come_first(keys, self._t1, self._t2)

    def clear(self) -> None:
        for each in (self._t1, self._t2, self._held1, self._held2):
            each.clear()
        for ghosts in (self._b1, self._b2):
            ghosts.clear()
        self._p = 0.0

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2) + len(self._held1) + len(self._held2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2 or key in self._held1 or key in self._held2

    def order(self) -> Iterable[bytes]:
        return itertools.chain(self._t1, self._held1, self._t2, self._held2)

    def _takes_t1(self, incoming: bytes | None, further: int) -> bool:
        """Whether to evict from T1 for `incoming`, if T1 had `further` more keys."""
        size = len(self._t1) + len(self._held1) + further
        return size > self._p or (size == self._p and incoming in self._b2)

    def _learn(self, key: bytes) -> bool:
        """Adapt p if `key` is a ghost to which it has not adapted; return whether it is a ghost."""
        b1, b2 = self._b1, self._b2
        if key in b1:
            if not b1[key]:
                b1[key] = True
                self._p = min(self.capacity, self._p + max(1.0, len(b2) / len(b1)))
            return True
        if key in b2:
            if not b2[key]:
                b2[key] = True
                self._p = max(0.0, self._p - max(1.0, len(b1) / len(b2)))
            return True
        return False
