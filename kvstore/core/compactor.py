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

from kvstore.core.index import Index
from kvstore.core.slots import Slots
from kvstore.types import Completion, Move, Op

__all__ = ["Compactor"]

SPARSE = 0.5
"""A segment is worth emptying when at most this part of its slots is in use."""

FAILURE_PAUSE = 60.0
"""Seconds without compaction after a copy or a removal failed."""


class Compactor:
    """Says what one tier should move next. At most one of its moves is under way.

    Attributes:
        relocated: chunks copied within the tier. removed_segments: segments given back.

    Args:
        tier: the number of the tier.
        batch: most chunks that one move may copy; 0 where that is not offered.
    """

    def __init__(self, tier: int, index: Index, slots: Slots, batch: int) -> None:
        self._tier = tier
        self._index = index
        self._slots = slots
        self._batch = batch
        self._rate = 0.0
        self.relocated = 0
        self.removed_segments = 0
        self._victim = -1
        self._pending: deque[tuple[bytes, int]] | None = None
        self._under_way = False
        self._allowance = 0.0
        self._counted: float | None = None
        self._not_before = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and there will not be."""
        return not self._rate and self._victim < 0

    @property
    def rate(self) -> float:
        """Chunks that may be copied in a second; 0 without compaction."""
        return self._rate

    def set_rate(self, chunks_per_second: float) -> None:
        """Copy no more than so many chunks in a second from now on; 0 ends compaction."""
        self._rate = chunks_per_second

    def due(self, now: float, idle: bool) -> Move | None:
        """The next move, without its number, or None.

        Args:
            idle: whether nobody else wants anything of the tier, and it does well.
        """
        elapsed = now - self._counted if self._counted is not None else 0.0
        self._counted = now
        if self._under_way:
            return None
        rate = self._rate if self._batch else 0.0
        if not rate or self._slots.clearing:
            self._stop()
            return None
        self._allowance = min(float(self._batch), self._allowance + elapsed * rate)
        if self._victim >= 0 and self._slots.short:
            self._stop()  # What was free is needed again.
        if not idle or now < self._not_before:
            return None
        move = self._begin() if self._victim < 0 else self._go_on(now)
        self._under_way = move is not None
        return move

    def ended(self, move: Move, completion: Completion, now: float) -> None:
        """A move of `due` has ended."""
        self._under_way = False
        if move.op is Op.LIST:
            self._pending = deque(completion.found)
        elif move.op is Op.RELOCATE:
            copies = zip(move.keys, move.slots, move.targets, completion.ok, strict=True)
            for key, source, target, ok in copies:
                self.relocated += self._relocated(key, source, target, ok)
        elif completion.error is None:
            self._slots.segment_removed(move.segment)
            self.removed_segments += 1
            self._victim, self._pending = -1, None
        if completion.error is not None:
            self._give_up(now)

    def reset(self) -> None:
        """The tier has forgotten everything, and every segment is being cleared."""
        self._victim, self._pending, self._under_way = -1, None, False

    def _relocated(self, key: bytes, source: int, target: int, ok: bool) -> bool:
        """A chunk was copied within the tier; whether the copy counts."""
        self._index.end_reads((key,))
        if not ok or self._index.entries.get(key) != source:
            # It failed, or the chunk has left meanwhile, and may even be back elsewhere.
            self._slots.give((target,))
            return False
        self._index.relocate(key, target)
        self._slots.give((source,))
        return True

    def _begin(self) -> Move | None:
        victim = self._slots.sparse_segment(SPARSE)
        if victim is None:
            return None
        self._victim = victim
        self._slots.retire(victim)
        return self._move(Op.LIST, segment=victim)

    def _go_on(self, now: float) -> Move | None:
        assert self._pending is not None
        if not self._pending:
            if self._slots.retired_free == self._slots.segment_slots:
                return self._move(Op.SHRINK, segment=self._victim)
            # Chunks that the tier did not name, because their records are damaged.
            self._give_up(now)
            return None
        count = min(self._batch, int(self._allowance))
        keys: list[bytes] = []
        sources: list[int] = []
        while self._pending and len(keys) < count:
            key, slot = self._pending.popleft()
            if self._index.entries.get(key) == slot:
                keys.append(key)
                sources.append(slot)
        targets = self._slots.take(len(keys))
        if len(targets) < len(keys):
            self._slots.give(targets)
            self._give_up(now)
            return None
        if not keys:
            return None
        self._allowance -= len(keys)
        self._index.begin_reads(keys)
        return self._move(Op.RELOCATE, keys, sources, targets)

    def _give_up(self, now: float) -> None:
        self._not_before = now + FAILURE_PAUSE
        self._stop()

    def _stop(self) -> None:
        if self._victim >= 0:
            self._slots.unretire(self._victim)
            self._victim, self._pending = -1, None

    def _move(
        self,
        op: Op,
        keys: Sequence[bytes] = (),
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
        segment: int = -1,
    ) -> Move:
        return Move(-1, op, self._tier, list(keys), [], list(sources), list(targets), segment)
