"""W-TinyLFU.

Gil Einziger, Roy Friedman and Ben Manes, "TinyLFU: A Highly Efficient Cache
Admission Policy", ACM Transactions on Storage 13 (4), 2017, section 4: an LRU window
in front of a segmented LRU, to which a frequency sketch admits keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.policies.queues import Later, come_first, let_go, put_back, take
from kvstore.policies.sketch import FrequencySketch
from kvstore.policies.table import OrderedTable

__all__ = ["WTinyLFU"]

_Queue = OrderedTable[bytes, None]
_Entry = tuple[bytes, None]


class WTinyLFU(EvictionPolicy):
    """Admits a key from a small window only if it is more frequent than the key it replaces.

    The main part is segmented: a key enters on probation, and its next use moves it
    to the protected segment. When room is needed and the window is full, the coldest
    key of the window is compared with the coldest on probation; the one with fewer
    recent uses is evicted. The paper's doorkeeper is left out: it saves memory but
    does not improve hits.

    Args:
        window: the window's share of the capacity, between 0 and 1.
        sample: number of uses counted until all counts are halved, as a multiple of
            the capacity.
    """

    name = "w-tinylfu"
    effort = 2.6

    def __init__(self, capacity: int, *, window: float = 0.01, sample: float = 10.0) -> None:
        super().__init__(capacity)
        if not 0 < window < 1:
            raise ValueError(f"window must be between 0 and 1, not {window}")
        if not 1 <= sample <= 1024:
            raise ValueError(f"sample must be from 1 to 1024, not {sample}")
        self._window_most = max(1, int(capacity * window))
        self._settled_most = int((capacity - self._window_most) * 0.8)
        self._window: _Queue = OrderedTable()
        self._probation: _Queue = OrderedTable()
        self._settled: _Queue = OrderedTable()
        # Held keys of the three queues.
        self._held: tuple[_Queue, ...] = (OrderedTable(), OrderedTable(), OrderedTable())
        # Keys on probation that any new key replaces, however often they were used.
        self._cold: set[bytes] = set()
        # Most keys of a sample occur once. With fewer than 16 counters for each place in the
        # tier, collisions would make them look frequent.
        self._sketch = FrequencySketch(4 * capacity)
        self._sample = max(1, int(capacity * sample))
        self._counted = 0

    def insert(self, key: bytes) -> None:
        self._count(key)
        self._window[key] = None
        if len(self._window) + len(self._held[0]) > self._window_most:
            # The tier has room, so no comparison is needed.
            oldest, _ = self._window.popitem(last=False)
            self._probation[oldest] = None

    def touch(self, key: bytes) -> None:
        self._count(key)
        self._cold.discard(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._settled:
            self._settled.move_to_end(key)
        elif key in self._held[0]:
            del self._held[0][key]
            self._window[key] = None
        else:
            for place in (self._probation, *self._held[1:]):
                if key in place:
                    del place[key]
                    break
            self._settled[key] = None
            if len(self._settled) + len(self._held[2]) > self._settled_most:
                oldest, _ = self._settled.popitem(last=False)
                self._probation[oldest] = None

    def remove(self, key: bytes) -> None:
        self._cold.discard(key)
        for place in (self._window, self._probation, self._settled, *self._held):
            if key in place:
                del place[key]
                return
        raise KeyError(key)

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        window, probation, settled = queues = (self._window, self._probation, self._settled)
        if count > len(window) + len(probation) + len(settled):
            return None
        held = self._held
        if count == 1 and window and probation and len(window) + len(held[0]) >= self._window_most:
            # Fast path: stores evict one key at a time.
            newer, older = next(iter(window)), next(iter(probation))
            if not protected(newer) and not protected(older):
                if not self._displaces(newer, older):
                    del window[newer]
                    return [newer]
                probation[newer] = window.pop(newer)
                del probation[older]
                self._cold.discard(older)
                return [older]
        in_use: tuple[list[_Entry], ...] = ([], [], [])
        taken: tuple[list[_Entry], ...] = ([], [], [])
        victims: list[bytes] = []
        while len(victims) < count and any(queues):
            # For each victim so far, a new key will have entered the window.
            in_window = len(window) + len(held[0]) + len(in_use[0]) + len(victims)
            candidate = victim = None
            main = 1
            try:
                if in_window >= self._window_most:
                    candidate = take(window, protected, in_use[0], held[0])
                victim = take(probation, protected, in_use[1], held[1])
                if victim is None and not (candidate or probation):
                    main = 2
                    victim = take(settled, protected, in_use[2], held[2])
                if victim is None and candidate is None and not (probation or settled):
                    candidate = take(window, protected, in_use[0], held[0])
            except Later:
                if candidate is not None:
                    put_back(window, [candidate])
                break
            if candidate is not None and victim is not None:
                if self._displaces(candidate[0], victim[0]):
                    probation[candidate[0]] = None
                    candidate = None
                else:
                    put_back(queues[main], [victim])
                    victim = None
            if candidate is not None:
                taken[0].append(candidate)
                victims.append(candidate[0])
            elif victim is not None:
                taken[main].append(victim)
                victims.append(victim[0])
        complete = len(victims) == count
        for queue, those, used in zip(queues, taken, in_use, strict=True):
            if not complete:
                put_back(queue, those)
            queue.update(used)
        if complete:
            self._cold.difference_update(victims)
        return victims if complete else None

    def release(self, keys: Iterable[bytes]) -> None:
        queues = (self._window, self._probation, self._settled)
        let_go(keys, tuple(zip(queues, self._held, strict=True)))

    def cool(self, keys: Iterable[bytes]) -> None:
        keys = [*keys]
        for queue in (self._window, self._settled):
            for key in keys:
                if key in queue:
                    self._probation[key] = queue.pop(key)
        come_first(keys, self._probation)
        self._cold.update(key for key in keys if key in self._probation)

    def clear(self) -> None:
        for place in (self._window, self._probation, self._settled, *self._held):
            place.clear()
        self._cold.clear()
        self._sketch.clear()
        self._counted = 0

    def __len__(self) -> int:
        return sum(map(len, (self._window, self._probation, self._settled, *self._held)))

    def __contains__(self, key: object) -> bool:
        places = (self._settled, self._probation, self._window, *self._held)
        return any(key in place for place in places)

    def order(self) -> Iterable[bytes]:
        places = (self._probation, self._held[1], self._settled, self._held[2])
        return itertools.chain(*places, self._window, self._held[0])

    def _displaces(self, candidate: bytes, victim: bytes) -> bool:
        """Whether `candidate`, from the window, replaces `victim`, on probation."""
        if victim in self._cold:
            return True
        return self._sketch.count(candidate) > self._sketch.count(victim)

    def _count(self, key: bytes) -> None:
        self._sketch.add(key)
        self._counted += 1
        if self._counted >= self._sample:
            self._counted //= 2
            self._sketch.halve()
