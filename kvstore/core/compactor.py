"""Giving disk space back while serving: sparse segments are emptied and removed.

A tier whose chunks need far fewer segments than it has gives some back: the
emptiest segment takes no new chunks, its live chunks are copied to slots of
others, and when nothing refers to it any more its file is removed. Copies are
made on the tier itself, a few at a time, within a budget of chunks per second,
and only while nothing is being promoted or stored. It can be stopped at any
moment: what was copied has two valid copies, of which either serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvstore.core.directory import TierDirectory
from kvstore.types import Completion, Move, Op

__all__ = ["Compactor"]

SPARSE = 0.5
"""A segment is worth emptying when at most this part of its slots is in use."""

FAILURE_PAUSE = 60.0
"""Seconds without compaction after a copy or a removal failed."""


class Compactor:
    """Says what one tier should move next. At most one of its moves is under way.

    Args:
        tier: whose segments are given back; it says at what rate.
    """

    def __init__(self, tier: TierDirectory) -> None:
        self._tier = tier
        self.relocated = 0
        self.given_back = 0
        self._victim = -1
        self._pending: deque[tuple[bytes, int]] | None = None
        self._under_way = False
        self._allowance = 0.0
        self._counted: float | None = None
        self._not_before = 0.0

    def due(self, now: float) -> Move | None:
        """The next move, without its number, or None."""
        tier = self._tier
        elapsed = now - self._counted if self._counted is not None else 0.0
        self._counted = now
        if self._under_way:
            return None
        rate = tier.relocations_per_second if self._tier.relocation_chunks else 0.0
        if not rate or tier.clearing:
            self._stop()
            return None
        self._allowance = min(float(self._tier.relocation_chunks), self._allowance + elapsed * rate)
        if self._victim >= 0 and tier.short:
            self._stop()  # What was free is needed again.
        # A copy under way makes whoever comes meanwhile wait, so they are small and have pauses.
        idle = not (tier.in_flight or tier.queue or tier.growing)
        if not idle or not tier.readable or now < max(self._not_before, tier.store_after):
            return None
        move = self._begin() if self._victim < 0 else self._go_on(now)
        self._under_way = move is not None
        return move

    def ended(self, move: Move, completion: Completion, now: float) -> None:
        """A move of `due` has ended."""
        self._under_way = False
        tier = self._tier
        if move.op is Op.LIST:
            self._pending = deque(completion.found)
        elif move.op is Op.RELOCATE:
            copies = zip(move.keys, move.slots, move.targets, completion.ok, strict=True)
            for key, source, target, ok in copies:
                self.relocated += tier.relocated(key, source, target, ok)
        elif completion.error is None:
            tier.removed(move.segment)
            self.given_back += 1
            self._victim, self._pending = -1, None
        if completion.error is not None:
            self._give_up(now)

    def reset(self) -> None:
        """The tier has forgotten everything, and every segment is being cleared."""
        self._victim, self._pending, self._under_way = -1, None, False

    def _begin(self) -> Move | None:
        victim = self._tier.sparse_segment(SPARSE)
        if victim is None:
            return None
        self._victim = victim
        self._tier.retire(victim)
        return self._move(Op.LIST, segment=victim)

    def _go_on(self, now: float) -> Move | None:
        tier = self._tier
        assert self._pending is not None
        if not self._pending:
            if tier.retired_free == tier.segment_slots:
                return self._move(Op.SHRINK, segment=self._victim)
            # Chunks that the tier did not name, because their records are damaged.
            self._give_up(now)
            return None
        count = min(self._tier.relocation_chunks, int(self._allowance))
        keys: list[bytes] = []
        sources: list[int] = []
        while self._pending and len(keys) < count:
            key, slot = self._pending.popleft()
            if tier.entries.get(key) == slot:
                keys.append(key)
                sources.append(slot)
        targets = tier.take_free(len(keys))
        if len(targets) < len(keys):
            tier.give_slots(targets)
            self._give_up(now)
            return None
        if not keys:
            return None
        self._allowance -= len(keys)
        for key in keys:
            tier.begin_read(key)
        return self._move(Op.RELOCATE, keys, sources, targets)

    def _give_up(self, now: float) -> None:
        self._not_before = now + FAILURE_PAUSE
        self._stop()

    def _stop(self) -> None:
        if self._victim >= 0:
            self._tier.unretire(self._victim)
            self._victim, self._pending = -1, None

    def _move(
        self,
        op: Op,
        keys: Sequence[bytes] = (),
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
        segment: int = -1,
    ) -> Move:
        return Move(-1, op, self._tier.index, list(keys), [], list(sources), list(targets), segment)
