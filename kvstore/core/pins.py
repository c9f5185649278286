"""Pins: protect chunks from eviction for a given time.

A pin belongs to a key, not to a chunk. It holds the chunk wherever it is, and wherever it arrives
before the pin ends. In each place only a share of the room can be pinned: the first chunks
are held up to that share, and the rest are ordinary chunks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from kvstore.core.chunk import FILLING, Chunk
from kvstore.core.host import HostPool
from kvstore.core.residency.base import CopyTarget, TierView

__all__ = ["PINNED_SHARE", "Pins"]

PINNED_SHARE = 0.5
"""The share of host memory, and of each tier, that may be pinned."""

MOST_ENDS = 512
"""Most pins that one step ends."""

MOST_LISTED = 8
"""How often a key may be listed under its ends, on average, before the list is rebuilt."""


class Pins:
    """The pins of all keys: see the module's text.

    Args:
        share: as `PINNED_SHARE`.
        hidden: keys that are being removed: their chunks are not held.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        share: float = PINNED_SHARE,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._pool = pool
        self._hidden = hidden
        self._targets: list[CopyTarget] = [t for tier in tiers if (t := tier.target) is not None]
        self._share = share
        self._most_rows = self._most = 0
        self.resized()
        # When the pin of each key ends.
        self._until: dict[bytes, float] = {}
        # Those that are held in host memory, and those that will be once they are there.
        self._held: dict[bytes, Chunk] = {}
        self._expected: set[bytes] = set()
        # Keys by the ends of their pins, where a key may stand more than once; how many entries
        # there are; and keys whose end has come.
        self._ends: list[tuple[float, int, list[bytes]]] = []
        self._listed = 0
        # Keys that yield, the latest end first; how many; and keys that never yield.
        # By whose the keys are: nobody gives way to others.
        self._yielding: dict[int, list[tuple[float, int, list[bytes]]]] = {}
        self._may_yield = 0
        self._firm: set[bytes] = set()
        self._numbers = itertools.count()
        self._over: deque[bytes] = deque()

    def resized(self) -> None:
        """Take in that host memory, or a tier, has another size. Chunks that are held stay."""
        self._most_rows = int(self._share * self._pool.rows)
        for target in self._targets:
            target.index.limit_pins(int(self._share * target.index.policy.capacity))
        most = (target.index.most_pinned for target in self._targets)
        self._most = max((self._most_rows, *most))

    def __len__(self) -> int:
        return len(self._until)

    @property
    def rows(self) -> int:
        """Rows of host memory that are pinned."""
        return len(self._held)

    @property
    def behind(self) -> bool:
        """Whether pins are left that the last step should have ended."""
        return bool(self._over)

    def begin(
        self, keys: Sequence[bytes], until: float, *, host: bool = True, yields: bool = False
    ) -> int:
        """Pin these keys, in prefix order, until then; a later end given before still applies.

        Args:
            host: whether chunks are held in host memory too; else only on tiers.
            yields: when the limit is reached, these give way to others that yield and end
                sooner. So of many chunks to be used again, those used soonest are kept.

        Returns:
            How many leading keys are pinned; the rest are beyond the limit of every place.
        """
        if yields:
            self._give_way([key for key in keys if key not in self._until], until)
        pinned: list[bytes] = []
        for key in keys:
            before = self._until.get(key)
            if before is None and len(self._until) >= self._most:
                break
            self._until[key] = until if before is None else max(before, until)
            pinned.append(key)
        self._end_later(until, pinned)
        if yields:
            self._yield_later(until, pinned)
        else:
            self._firm.update(pinned)
        for target in self._targets:
            target.index.pin(pinned)
        if host:
            self._expected.update(key for key in pinned if key not in self._held)
            self.arrived(pinned)
        return len(pinned)

    def end(self, keys: Iterable[bytes]) -> int:
        """End the pins of these keys; returns how many were pinned."""
        ended = [key for key in dict.fromkeys(keys) if self._until.pop(key, None) is not None]
        self._expected.difference_update(ended)
        self._firm.difference_update(ended)
        for target in self._targets:
            target.index.unpin(ended)
        self._pool.unpin([self._held.pop(key) for key in ended if key in self._held])
        return len(ended)

    def expire(self, now: float) -> None:
        """End pins whose time is over, as many as a step may."""
        over, ends = self._over, self._ends
        while ends and ends[0][0] <= now:
            keys = heapq.heappop(ends)[2]
            self._listed -= len(keys)
            over += keys
        due = [over.popleft() for _ in range(min(MOST_ENDS, len(over)))]
        self.end(key for key in due if self._until.get(key, now + 1) <= now)

    def arrived(self, keys: Collection[bytes]) -> None:
        """Hold those of these keys that are expected and have reached host memory."""
        if not self._expected:
            return
        pool, held = self._pool, self._held
        for key in dict.fromkeys(key for key in keys if key in self._expected):
            if len(held) >= self._most_rows:
                return
            chunk = pool.chunks.get(key)
            if chunk is not None and chunk.state != FILLING and key not in self._hidden:
                pool.stay(chunk)
                pool.pin((chunk,))
                held[key] = chunk
                self._expected.discard(key)

    def let_go(self, rows: int) -> bool:
        """Hold no more than host memory of `rows` may; the chunks that were held last may leave.

        Their pins on tiers stay. Returns whether there were any.
        """
        excess = list(self._held)[int(self._share * rows) :]
        self._pool.unpin([self._held.pop(key) for key in excess])
        self._expected.update(excess)
        return bool(excess)

    def rows_besides(self, keys: Collection[bytes]) -> int:
        """Return how many rows are pinned, those of `keys` not counted; a key is named once."""
        return len(self._held) - sum(key in self._held for key in keys)

    def holds(self, key: bytes) -> bool:
        """Whether the chunk of the key is pinned in host memory."""
        return key in self._held

    def is_pinned(self, key: bytes) -> bool:
        """Whether the key is pinned."""
        return key in self._until

    def reset(self) -> None:
        """Forget everything."""
        for each in (self._until, self._held, self._expected, self._over, self._firm):
            each.clear()
        self._ends.clear()
        self._yielding.clear()
        self._listed = self._may_yield = 0

    def _give_way(self, keys: Sequence[bytes], until: float) -> None:
        """End pins that yield and end after `until`, tails first, so that `keys` find room."""
        short = len(keys) - (self._most - len(self._until))
        yielding = self._yielding.get(self._owner(keys), []) if keys else []
        while short > 0 and yielding and -yielding[0][0] > until:
            latest, number, its = heapq.heappop(yielding)
            self._may_yield -= len(its)
            its = self._still_yielding(-latest, its)
            kept = its[: max(0, len(its) - short)]
            short -= self.end(its[len(kept) :])
            if kept:
                heapq.heappush(yielding, (latest, number, kept))
                self._may_yield += len(kept)

    def _yield_later(self, until: float, keys: list[bytes]) -> None:
        if not keys:
            return
        mine = self._yielding.setdefault(self._owner(keys), [])
        heapq.heappush(mine, (-until, next(self._numbers), keys))
        self._may_yield += len(keys)
        if self._may_yield <= MOST_LISTED * len(self._until) + MOST_ENDS:
            return
        # Most of them have ended, or end later now.
        listed: set[bytes] = set()
        kept: dict[int, list[tuple[float, int, list[bytes]]]] = {}
        for owner, heap in self._yielding.items():
            fresh: list[tuple[float, int, list[bytes]]] = []
            for latest, number, its in heap:
                rest = [key for key in self._still_yielding(-latest, its) if key not in listed]
                listed.update(rest)
                if rest:
                    fresh.append((latest, number, rest))
            heapq.heapify(fresh)
            if fresh:
                kept[owner] = fresh
        self._yielding, self._may_yield = kept, len(listed)

    def _owner(self, keys: Sequence[bytes]) -> int:
        """Return a number for whose these keys of one request are."""
        return self._pool.policy.owner_of(keys[0])

    def _still_yielding(self, until: float, keys: list[bytes]) -> list[bytes]:
        """Return those of `keys` that still yield and whose pins end then."""
        ends, firm = self._until, self._firm
        return [key for key in keys if ends.get(key) == until and key not in firm]

    def _end_later(self, until: float, keys: list[bytes]) -> None:
        if until == math.inf or not keys:
            return
        heapq.heappush(self._ends, (until, next(self._numbers), keys))
        self._listed += len(keys)
        if self._listed <= MOST_LISTED * len(self._until) + MOST_ENDS:
            return
        # Most ends were moved to a later time: list each pin once.
        by_end: dict[float, list[bytes]] = {}
        for key, end in self._until.items():
            if end != math.inf:
                by_end.setdefault(end, []).append(key)
        self._ends = [(end, next(self._numbers), keys) for end, keys in by_end.items()]
        heapq.heapify(self._ends)
        self._listed = sum(map(len, by_end.values()))
