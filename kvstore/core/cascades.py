"""Copies of host chunks to slower tiers: who waits for one, and who goes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.core.budget import Budget
from kvstore.core.chunk import Chunk
from kvstore.core.complaints import Complaints
from kvstore.core.flow import Flow
from kvstore.core.pool import HostPool
from kvstore.core.tier import CopyTarget, TierView
from kvstore.types import Completion, Move, Op

__all__ = ["CASCADE_BATCH", "Cascades"]

CASCADE_BATCH = 64
"""Most chunks in one cascade move."""


class Cascades:
    """Queues of chunks that wait for their copies, and the moves that make them.

    Attributes:
        targets: tiers that are copied to. demoting: those that get what host memory gives up.

    Args:
        log: where one line per change goes.
        budget: how many copies to each tier a step begins.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        log: Callable[[str], None],
        budget: Budget,
    ) -> None:
        self._pool = pool
        self.targets = [target for tier in tiers if (target := tier.target) is not None]
        self.demoting = [t for t in self.targets if t.flow is not Flow.WRITE_THROUGH]
        self._through = [t for t in self.targets if t.flow is Flow.WRITE_THROUGH]
        self._peers = [tier for tier in tiers if tier.target is None]
        self._budget = budget
        self._complaints = Complaints(log, quiet=0.0)

    @property
    def unsaved(self) -> int:
        """Chunks that wait for a copy to a slower tier, or are being copied."""
        return sum(target.unsaved for target in self.targets)

    # -- who waits -----------------------------------------------------------------------

    def stored(self, chunks: list[Chunk], now: float) -> None:
        """The device has stored these chunks: they go to each tier that is written through."""
        # What a neighbour keeps on the same disk need not be written twice.
        chunks = self._not_shared(chunks)
        for target in self._through:
            if target.accepts(now):
                self._queue(target, target.lacking(chunks), now)
            else:
                target.count("refused", len(chunks))

    def save(self, chunks: Iterable[Chunk], now: float) -> None:
        """Copy `chunks` also where they would only go when they are given up."""
        for target in self.demoting:
            if target.accepts(now):
                waiting = 1 << target.number
                lacking = target.lacking(c for c in chunks if not c.unsaved & waiting)
                self._queue(target, self._not_shared(lacking), now)

    def demote(self, chunk: Chunk, now: float) -> bool:
        """Host memory gives the chunk up: queue it where it is wanted. False if nowhere."""
        if any(chunk.key in peer.entries for peer in self._peers):
            return False
        queued = 0
        for target in self.demoting:
            if not target.index.lacks(chunk.key):
                # To be given up once more counts as much as to be given up.
                target.index.touch((chunk.key,))
            elif target.accepts(now):
                queued += self._queue(target, [chunk], now)
            else:
                target.count("refused")
        return queued > 0

    def drop(self, target: CopyTarget) -> None:
        """Let the chunks that wait for a tier go without it."""
        refused = 0
        for key in target.dequeue(target.queued):
            chunk = self._pool.chunks.get(key)
            if chunk is not None and chunk.unsaved >> target.number & 1:
                self._pool.dequeue(chunk, target.number)
                refused += 1
        target.count("refused", refused)

    def _queue(self, target: CopyTarget, chunks: list[Chunk], now: float) -> int:
        """Put `chunks` in the queue for a tier, as far as it admits them; returns how many."""
        if target.admission is not None and chunks:
            answers = target.admission.admit([chunk.key for chunk in chunks], now)
            wanted = [chunk for chunk, answer in zip(chunks, answers, strict=True) if answer]
            target.count("declined", len(chunks) - len(wanted))
            chunks = wanted
        self._pool.queue(chunks, target.number)
        target.enqueue([chunk.key for chunk in chunks])
        return len(chunks)

    def _not_shared(self, chunks: list[Chunk]) -> list[Chunk]:
        """Those of `chunks` that no neighbour keeps on the same disk."""
        for peer in self._peers:
            if peer.entries:
                chunks = [chunk for chunk in chunks if chunk.key not in peer.entries]
        return chunks

    # -- who goes ------------------------------------------------------------------------

    def due(self, target: CopyTarget) -> list[Move]:
        """Copies to one tier that are due, without numbers."""
        moves: list[Move] = []
        number = target.number
        while target.queued and not target.clearing:
            limit = min(CASCADE_BATCH, target.max_rows_in_flight - len(target.index.writing))
            if target.health.cautious:
                # It failed a while ago. One chunk tries first: a whole batch would
                # displace chunks that can still be read, for nothing.
                limit = 0 if target.index.writing else 1
            left = self._budget.copies_to(number)
            if min(limit, left) <= 0:
                if left <= 0:
                    self._budget.copy(number, 0)
                break
            batch = self._take(target, min(limit, left))
            # Chunks are given up tail first, but stored head first.
            through = target.flow is Flow.WRITE_THROUGH
            tail_first = reversed(batch) if through else batch
            slots = target.take_slots(len(batch), [chunk.key for chunk in tail_first])
            if len(slots) < len(batch):
                target.requeue([chunk.key for chunk in batch[len(slots) :]])
                del batch[len(slots) :]
            if not batch:
                break
            self._budget.copy(number, len(batch))
            if not through:
                batch.reverse()
            self._pool.begin_copies(batch, number)
            keys = [chunk.key for chunk in batch]
            target.index.begin_writes(keys, slots)
            moves.append(Move(-1, Op.CASCADE, number, keys, [c.row for c in batch], slots))
        return moves

    def _take(self, target: CopyTarget, most: int) -> list[Chunk]:
        """The chunks that wait longest for their copies."""
        # A key may stand in the queue twice, if its chunk has left and come back meanwhile.
        found: dict[bytes, Chunk] = {}
        chunk_of, bit = self._pool.chunks.get, 1 << target.number
        while len(found) < most and (keys := target.dequeue(most - len(found))):
            for key in keys:
                chunk = chunk_of(key)
                if chunk is not None and chunk.unsaved & bit:
                    found[key] = chunk
        return list(found.values())

    def ended(self, target: CopyTarget, move: Move, completion: Completion, now: float) -> None:
        """A copy has ended, for some of its chunks well, perhaps."""
        # Tail first, as everything that reaches a policy.
        ends = list(zip(move.keys, move.slots, completion.ok, strict=True))[::-1]
        target.copied([(key, slot) for key, slot, ok in ends if ok])
        failed = [(key, slot) for key, slot, ok in ends if not ok]
        if failed:
            target.not_copied(failed, now)
        chunks = self._pool.chunks
        self._pool.unpin([chunks[key] for key, _, _ in ends])
        what = f"tier {target.name} cannot store now"
        if failed and target.health.ailing:
            self._complaints.failed(what, completion.error, now, len(failed))
            self.drop(target)
        elif failed:
            self._complaints.failed(f"a device of {what}", completion.error, now, len(failed))
        elif target.health.recovered(now):
            self._complaints.went_well(what, f"tier {target.name} stores again", now)
