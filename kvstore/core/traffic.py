"""What moves between host memory and the tiers: handing moves out, taking their ends in.

A part of the core: it does no I/O either, and knows no time but `now`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvstore.core.chunk import Chunk
from kvstore.core.compactor import Compactor
from kvstore.core.complaints import Complaints
from kvstore.core.directory import TierDirectory
from kvstore.core.flow import Flow
from kvstore.core.followed import FollowedDirectory
from kvstore.core.line import Line
from kvstore.core.pace import UNBOUNDED
from kvstore.core.pool import HostPool
from kvstore.core.stats import TierStats
from kvstore.types import Completion, Move, Op

__all__ = ["CASCADE_BATCH", "RETRY_PAUSE", "STORE_PAUSE", "Traffic"]

CASCADE_BATCH = 64
"""Most chunks in one cascade move."""

STORE_PAUSE = 5.0
"""Seconds without new copies to a tier after a copy to it failed."""

RETRY_PAUSE = 5.0
"""Seconds before a tier that could not grow or be cleared is asked again."""


class Traffic:
    """Moves under way, and what is due next on each tier.

    Attributes:
        now: the time of the present call; the core sets it.
        moves: what was handed out and has not ended, by number.
        orphans: those of `moves` that a reset has overtaken: only their rows count.
        totals: counters, by tier.
        demoting: tiers that get what host memory gives up.
        log: where one line per change of a tier's health goes.
    """

    def __init__(self, pool: HostPool, tiers: Sequence[TierDirectory], line: Line) -> None:
        self._pool = pool
        self._tiers = tiers
        self._line = line
        self.now = 0.0
        self.moves: dict[int, Move] = {}
        self.orphans: set[int] = set()
        self._next = 0
        self.totals = [TierStats(tier.name, tier.medium) for tier in tiers]
        self._slow = [False] * len(tiers)
        self.compactors = [Compactor(tier) for tier in tiers]
        self.demoting = [
            tier
            for tier in tiers
            if tier.flow is not Flow.WRITE_THROUGH and not isinstance(tier, FollowedDirectory)
        ]
        self._followed = [tier for tier in tiers if isinstance(tier, FollowedDirectory)]
        self.pace = UNBOUNDED
        """What one step may cost; the core sets it."""
        self.behind = False
        """More copies could have been begun in this step than its pace allows."""
        self._left = [self.pace.copied] * len(tiers)
        self._owned = [tier for tier in tiers if not isinstance(tier, FollowedDirectory)]
        self.log: Callable[[str], None] = lambda message: None
        self._complaints = Complaints(lambda message: self.log(message), quiet=0.0)

    def begin_step(self) -> None:
        """What was over is begun from now on."""
        self._left = [self.pace.copied] * len(self._tiers)
        self.behind = False

    def shorten(self, share: float) -> None:
        """This step begins only a part of the copies that its pace allows."""
        for tier in self._tiers:
            left = self._left[tier.index] * share / tier.policy.effort
            self._left[tier.index] = max(1, int(left))

    def promote(
        self, tier: TierDirectory, chunks: Sequence[Chunk], slots: Sequence[int]
    ) -> list[Move]:
        """Moves that fill `chunks` from `slots`."""
        moves: list[Move] = []
        # One move, but for prefixes so long that its end would be the only sign of life.
        size = tier.max_rows_in_flight
        for start in range(0, len(chunks), size):
            part = chunks[start : start + size]
            keys = [chunk.key for chunk in part]
            rows = [chunk.row for chunk in part]
            moves.append(
                self._move(Op.PROMOTE, tier, keys, rows, list(slots[start : start + size]))
            )
        return moves

    def due(self) -> list[Move]:
        """What else is due on each tier: copies, growth, clearing, compaction."""
        moves: list[Move] = []
        for tier in self._tiers:
            spare = self.compactors[tier.index].due(self.now)
            moves += self.tend(tier)
            if spare is not None:
                moves.append(self._hand_out(spare, tier))
        return moves

    def reset(self, rows_in_transfer: Iterable[int] = ()) -> None:
        """Every tier forgets everything; what is under way counts for its rows only.

        Args:
            rows_in_transfer: rows that the device may still write or read.
        """
        # Rows of moves that an earlier reset orphaned are held already.
        moving = (
            row for id, move in self.moves.items() if id not in self.orphans for row in move.rows
        )
        self._pool.reset(itertools.chain(moving, rows_in_transfer))
        self.orphans = set(self.moves)
        for tier in self._tiers:
            tier.reset()
            self.compactors[tier.index].reset()

    @property
    def clearing(self) -> bool:
        """Whether a tier has not been cleared since a reset, nor has failed to be."""
        asked = self._owned if self._owned_clearing else self._tiers
        return any(tier.clearing and not tier.retry_after for tier in asked)

    @property
    def _owned_clearing(self) -> bool:
        return any(tier.clearing for tier in self._owned)

    def snapshot(self) -> list[TierStats]:
        """Counters and gauges, up to date."""
        for tier, totals, compactor in zip(self._tiers, self.totals, self.compactors, strict=True):
            totals.chunks, totals.free = len(tier.entries), tier.free
            totals.segments, totals.max_segments = tier.segments, tier.max_segments
            totals.queued, totals.evicted = len(tier.queue), tier.evicted
            totals.stalled, totals.congested = tier.stalled, tier.congested
            totals.slow = tier.slow
            totals.relocated, totals.given_back = compactor.relocated, compactor.given_back
        return [replace(totals) for totals in self.totals]

    def queue(self, tier: TierDirectory, chunks: list[Chunk]) -> int:
        """Put `chunks` in the queue for a tier, as far as it admits them; returns how many."""
        if tier.admission is not None and chunks:
            answers = tier.admission.admit([chunk.key for chunk in chunks], self.now)
            wanted = [chunk for chunk, answer in zip(chunks, answers, strict=True) if answer]
            self.totals[tier.index].declined += len(chunks) - len(wanted)
            chunks = wanted
        self._pool.all_queued(chunks, tier.index)
        tier.enqueue([chunk.key for chunk in chunks])
        return len(chunks)

    def shared(self, key: bytes) -> bool:
        """Whether a neighbour keeps the chunk on the same disk."""
        return any(key in tier.entries for tier in self._followed)

    def not_shared(self, chunks: list[Chunk]) -> list[Chunk]:
        """Those of `chunks` that no neighbour keeps on the same disk."""
        for tier in self._followed:
            if tier.entries:
                chunks = [chunk for chunk in chunks if chunk.key not in tier.entries]
        return chunks

    def demote(self, chunk: Chunk) -> bool:
        """Host memory gives the chunk up: queue it where it is wanted. False if nowhere."""
        if self.shared(chunk.key):
            return False
        queued = 0
        for tier in self.demoting:
            if not tier.lacks(chunk.key):
                # To be given up once more counts as much as to be given up.
                tier.touch((chunk.key,))
            elif tier.accepts(self.now):
                queued += self.queue(tier, [chunk])
            else:
                self.totals[tier.index].refused += 1
        return queued > 0

    def _move(
        self, op: Op, tier: TierDirectory, keys: list[bytes], rows: list[int], slots: list[int]
    ) -> Move:
        return self._hand_out(Move(-1, op, tier.index, keys, rows, slots), tier)

    def _hand_out(self, move: Move, tier: TierDirectory) -> Move:
        move.id = self._next
        self._next += 1
        self.moves[move.id] = move
        tier.in_flight[move.id] = (move, self.now)
        tier.rows_in_flight += len(move.rows)
        return move

    def tend(self, tier: TierDirectory) -> list[Move]:
        """Copies to, growth and clearing of one tier."""
        if tier.clearing:
            if tier.in_flight or self.now < tier.retry_after:
                return []
            if isinstance(tier, FollowedDirectory) and self._owned_clearing:
                # What others store counts from where the own lane stands then.
                return []
            return [self._move(Op.CLEAR, tier, [], [], [])]
        moves: list[Move] = []
        if tier.wants_growth and self.now >= tier.retry_after and not tier.stalled:
            tier.growing = True
            tier.growing_since = self.now
            moves.append(self._move(Op.GROW, tier, [], [], []))
        while tier.queue:
            limit = min(CASCADE_BATCH, tier.max_rows_in_flight - len(tier.writing))
            if tier.store_after:
                # It failed a while ago. One chunk tries first: a whole batch would
                # displace chunks that can still be read, for nothing.
                limit = 0 if tier.writing else 1
            limit = min(limit, self._left[tier.index])
            if limit <= 0 and self._left[tier.index] <= 0:
                self.behind = True
                break
            # A key may stand in the queue twice, if its chunk has left and come back meanwhile.
            found: dict[bytes, Chunk] = {}
            while tier.queue and len(found) < limit:
                chunk = self._pool.chunks.get(tier.queue.popleft())
                if chunk is not None and chunk.unsaved >> tier.index & 1:
                    found[chunk.key] = chunk
            if not found:
                break
            batch = list(found.values())
            # Chunks are given up tail first, but stored head first.
            through = tier.flow is Flow.WRITE_THROUGH
            tail_first = reversed(batch) if through else batch
            slots = tier.take_slots(len(batch), [chunk.key for chunk in tail_first])
            if len(slots) < len(batch):
                tier.queue.extendleft(chunk.key for chunk in reversed(batch[len(slots) :]))
                del batch[len(slots) :]
                if not batch:
                    break
            self._left[tier.index] -= len(batch)
            if not through:
                batch.reverse()
            self._pool.begin_copies(batch, tier.index)
            keys = [chunk.key for chunk in batch]
            tier.writing.update(zip(keys, slots, strict=True))
            moves.append(self._move(Op.CASCADE, tier, keys, [c.row for c in batch], slots))
        return moves

    def hear(self, completion: Completion) -> None:
        """A move has ended, whenever that is taken in."""
        move = self.moves.get(completion.move_id)
        if move is not None:
            self._tiers[move.tier].heard = True

    def complete(self, completion: Completion) -> bool:
        """A move has ended; False if nobody knows it."""
        if completion.news is not None:
            tier = self._tiers[completion.tier]
            if isinstance(tier, FollowedDirectory):
                tier.learn(completion.news)
            return True
        move = self.moves.pop(completion.move_id, None)
        if move is None:
            return False
        tier = self._tiers[move.tier]
        _, started = tier.in_flight.pop(move.id)
        tier.rows_in_flight -= len(move.rows)
        tier.heard = True
        if completion.error is not None:
            self.totals[tier.index].errors += 1
        if tier.stalled:
            tier.stalled = False
            self.log(f"tier {tier.name} answers again")
        if move.id in self.orphans:
            self.orphans.discard(move.id)
            self._pool.release_held(move.rows)
            if move.op is Op.GROW:
                tier.growing = False
                tier.noted(completion.segments)
            elif move.op is Op.SHRINK and completion.error is None:
                tier.removed(move.segment)
        elif move.op in (Op.LIST, Op.RELOCATE, Op.SHRINK):
            self.compactors[tier.index].ended(move, completion, self.now)
        elif move.op is Op.PROMOTE:
            self._promoted(tier, move, completion, started)
        elif move.op is Op.CASCADE:
            self._cascaded(tier, move, completion)
        elif move.op is Op.GROW:
            tier.growing = False
            for segment in completion.segments:
                tier.grown(segment)
            if not completion.segments:
                tier.cannot_grow = True
                tier.retry_after = self.now + RETRY_PAUSE
        elif completion.error is None:
            tier.cleared(completion.segments)
        else:
            tier.retry_after = self.now + RETRY_PAUSE
        return True

    def _promoted(
        self, tier: TierDirectory, move: Move, completion: Completion, started: float
    ) -> None:
        totals, pool, line, now = self.totals[tier.index], self._pool, self._line, self.now
        newest = -1
        tier.end_reads(move.keys)
        unread = set(completion.unread)
        ends = list(zip(move.keys, completion.ok, strict=True))
        if ends and all(completion.ok):
            chunks = [pool.chunks[key] for key in move.keys]
            newest = chunks[-1].order
            line.all_filled(chunks, now)
            totals.promoted += len(chunks)
            tier.all_read_well(move.keys)
            ends.clear()
        for place, (key, ok) in enumerate(ends):
            chunk = pool.chunks[key]
            newest = chunk.order
            if ok:
                pool.fill(chunk)
                line.filled(chunk, now)
                totals.promoted += 1
                tier.read_well(key)
                if tier.flow is Flow.EXCLUSIVE:
                    tier.forget(key)
            else:
                line.failed(chunk, now)
                pool.discard(chunk)
                if place not in unread or not tier.unread(key):
                    tier.forget(key)
                totals.failed_reads += not isinstance(tier, FollowedDirectory)
        line.passed(newest)
        tier.arrived_since = min(tier.arrived_since, started) if tier.arrived else started
        tier.arrived += len(move.keys)

    def _cascaded(self, tier: TierDirectory, move: Move, completion: Completion) -> None:
        totals = self.totals[tier.index]
        failed = completion.ok.count(False)
        # Tail first, as everything that reaches a policy.
        ends = list(zip(move.keys, move.slots, completion.ok, strict=True))[::-1]
        tier.written([(key, slot) for key, slot, ok in ends if ok])
        for key, slot, ok in ends if failed else ():
            if not ok:
                tier.not_written(key, slot)
        chunks = self._pool.chunks
        self._pool.unpin_all([chunks[key] for key, _, _ in ends])
        totals.written += len(ends) - failed
        totals.failed_writes += failed
        if failed:
            tier.refused(slot for slot, ok in zip(move.slots, completion.ok, strict=True) if not ok)
            if not tier.ailing:
                what = f"a device of tier {tier.name} cannot store now"
                self._complaints.failed(what, completion.error, self.now, failed)
                return
            what = f"tier {tier.name} cannot store now"
            self._complaints.failed(what, completion.error, self.now, failed)
            tier.store_after = self.now + STORE_PAUSE
            self._empty_queue(tier)
        elif tier.store_after and self.now >= tier.store_after:
            tier.store_after = 0.0
            what = f"tier {tier.name} cannot store now"
            self._complaints.went_well(what, f"tier {tier.name} stores again", self.now)

    def _empty_queue(self, tier: TierDirectory) -> None:
        """Let the chunks that wait for a tier go without it."""
        while tier.queue:
            chunk = self._pool.chunks.get(tier.queue.popleft())
            if chunk is not None and chunk.unsaved >> tier.index & 1:
                self._pool.dequeued(chunk, tier.index)
                self.totals[tier.index].refused += 1

    def judge(self, tier: TierDirectory) -> None:
        """Notice a tier that does not answer, is slow, or has more to do than anyone waits for."""
        if tier.silent >= 2 * self._line.deadline and not tier.stalled:
            tier.stalled = True
            self.log(
                f"tier {tier.name} has not answered for {tier.silent:.1f} s; "
                "its chunks are misses and nothing is stored there until it does"
            )
            self._empty_queue(tier)
        elif tier.full_for_now:
            self._empty_queue(tier)
        if tier.slow is not self._slow[tier.index]:
            self._slow[tier.index] = tier.slow
            if tier.slow:
                self.log(
                    f"tier {tier.name} is slow: it has been writing for "
                    f"{tier.writing_for(self.now):.1f} s; what finds no room is not stored there"
                )
            else:
                self.log(f"tier {tier.name} is not slow any more")
        backlog = len(tier.reading) * tier.seconds_per_chunk
        tier.congested = backlog > self._line.ceiling
