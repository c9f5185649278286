"""Cascade: copies of chunks from host memory to slower tiers.

`take_in` handles the end of such a copy. It is the same for rows of the core and of a server.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, groupby

from kvstore.core.chunk import Chunk
from kvstore.core.host import HostPool
from kvstore.core.reports import Complaints
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.core.step_budget import Budget
from kvstore.policies.base import EvictionPolicy
from kvstore.types import Completion, Flow, LogLine, Move, Op

__all__ = ["CASCADE_BATCH", "Cascades", "take_in"]


def take_in(
    target: CopyTarget, move: Move, completion: Completion, complaints: Complaints, now: float
) -> bool:
    """Tell the tier which of the chunks it holds now, and log what went wrong.

    Returns:
        Whether copies that have not begun should be dropped, as the tier cannot store now.
    """
    # Tail first, as everything that reaches a policy.
    keys, slots = move.keys[::-1], move.slots[::-1]
    name, what = target.name, f"tier {target.name} cannot store now"
    if all(completion.ok):
        target.copied(keys, slots)
        if target.health.recovered(now):
            complaints.went_well(what, f"tier {name} stores again", now, tier=name)
        return False
    ok = completion.ok[::-1]
    written = list(compress(slots, ok))
    target.copied(list(compress(keys, ok)), written)
    ends = zip(keys, slots, ok, strict=True)
    failed = [(key, slot) for key, slot, whole in ends if not whole]
    at_fault = target.not_copied(failed, written, now)
    if not at_fault:
        what = f"slots of tier {name} cannot be written and are set aside"
    elif not target.health.ailing:
        what = f"a device of {what}"
    complaints.failed(what, completion.error, now, len(failed), tier=name)
    return at_fault and target.health.ailing


CASCADE_BATCH = 64
"""Most chunks in one cascade move."""


class Cascades:
    """Queues chunks for their copies to tiers, and makes the moves that copy them.

    Attributes:
        targets: tiers that are copied to. demoting: those that get chunks host memory gives up.

    Args:
        log: where one line per change goes.
        budget: bounds the copies to each tier that a step begins.
        hidden: keys that are being removed.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        log: Callable[[LogLine], object],
        budget: Budget,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._pool = pool
        self._hidden = hidden
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

    # -- queueing ------------------------------------------------------------------------

    def stored(self, chunks: list[Chunk], now: float) -> None:
        """Queue chunks that the device has stored for each tier that is written through."""
        # A chunk that a peer keeps on the same disk need not be written again.
        chunks = self._not_shared(chunks)
        for target in self._through:
            if target.accepts(now):
                self._queue(target, target.lacking(chunks), now)
            else:
                target.count("refused", len(chunks))

    def save(self, chunks: Iterable[Chunk], now: float) -> None:
        """Copy `chunks` also to tiers that get chunks only when they are given up."""
        chunks = list(chunks)
        for target in self.demoting:
            self.save_to(target, self._not_shared(chunks), now)

    def save_to(self, target: CopyTarget, chunks: Iterable[Chunk], now: float) -> None:
        """Copy `chunks` to this tier now, whatever its flow, and whatever peers keep."""
        if target.accepts(now):
            bit = 1 << target.number
            self._queue(target, target.lacking(c for c in chunks if not c.unsaved & bit), now)

    def demote(self, chunks: list[Chunk], now: float) -> set[bytes]:
        """Queue chunks that host memory gives up where they are wanted; returns those queued."""
        chunks = self._not_shared(chunks)
        queued: set[bytes] = set()
        for target in self.demoting:
            lacking = target.lacking(chunks)
            if len(lacking) < len(chunks):
                # Chunks that the tier already has count as used, as if they were copied again.
                wanted = {chunk.key for chunk in lacking}
                target.index.touch(chunk.key for chunk in chunks if chunk.key not in wanted)
            if target.accepts(now):
                queued.update(self._queue(target, lacking, now))
            else:
                target.count("refused", len(lacking))
        return queued

    def drop(self, target: CopyTarget) -> None:
        """Drop the copies that wait for a tier."""
        refused = 0
        keys = [key for owner in target.owners for key in target.dequeue(target.queued, owner)]
        for key in keys:
            chunk = self._pool.chunks.get(key)
            if chunk is not None and chunk.unsaved >> target.number & 1:
                self._pool.dequeue(chunk, target.number)
                refused += 1
        target.count("refused", refused)

    def _queue(self, target: CopyTarget, chunks: list[Chunk], now: float) -> list[bytes]:
        """Queue those of `chunks` that a tier admits; returns their keys."""
        if self._hidden:
            chunks = [chunk for chunk in chunks if chunk.key not in self._hidden]
        most = target.most
        if target.index.policy.shared and most < sys.maxsize:
            fitting = self._within_parts(target.index.policy, chunks, most)
        else:
            fitting = [chunk for chunk in chunks if chunk.depth < most]
        if len(fitting) < len(chunks):
            # The end of a prompt that is larger than the tier would take the place of its head.
            target.count("declined", len(chunks) - len(fitting))
            chunks = fitting
        if target.admission is not None and chunks:
            answers = target.admission.admit([chunk.key for chunk in chunks], now)
            wanted = [chunk for chunk, answer in zip(chunks, answers, strict=True) if answer]
            target.count("declined", len(chunks) - len(wanted))
            chunks = wanted
        self._pool.queue(chunks, target.number)
        keys = [chunk.key for chunk in chunks]
        policy = self._pool.policy
        runs = groupby(keys, policy.owner_of) if policy.shared else [(0, iter(keys))]
        for owner, run in runs:
            target.enqueue(list(run), owner)
        return keys

    @staticmethod
    def _within_parts(policy: EvictionPolicy, chunks: list[Chunk], most: int) -> list[Chunk]:
        """Return those of `chunks` that lie no deeper than their tenants may have chunks."""
        room: dict[int, int] = {}
        fitting: list[Chunk] = []
        for chunk in chunks:
            owner = policy.owner_of(chunk.key)
            if owner not in room:
                room[owner] = min(most, policy.reach([chunk.key]))
            if chunk.depth < room[owner]:
                fitting.append(chunk)
        return fitting

    def _not_shared(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return those of `chunks` that no peer keeps on the same disk."""
        for peer in self._peers:
            if peer.entries:
                chunks = [chunk for chunk in chunks if chunk.key not in peer.entries]
        return chunks

    # -- copying -------------------------------------------------------------------------

    def due(self, target: CopyTarget) -> list[Move]:
        """Return the copies to one tier that are due, without numbers."""
        moves: list[Move] = []
        number = target.number
        waiting = deque(() if target.clearing else target.owners)
        while waiting:
            owner = waiting.popleft()
            limit = min(CASCADE_BATCH, target.max_rows_in_flight - len(target.index.writing))
            if target.health.cautious:
                # It has failed lately. One chunk is tried first: a whole batch could
                # displace chunks that can still be read, for nothing.
                limit = 0 if target.index.writing else 1
            left = self._budget.copies_to(number)
            if min(limit, left) <= 0:
                if left <= 0:
                    self._budget.copy(number, 0)
                break
            found = self._take(target, min(limit, left), owner)
            keys, batch = list(found), list(found.values())
            # Chunks are given up tail first, but stored head first.
            through = target.flow is Flow.WRITE_THROUGH
            slots = target.take_slots(len(keys), keys[::-1] if through else keys)
            if len(slots) < len(keys):
                target.requeue(keys[len(slots) :], owner)
                del keys[len(slots) :], batch[len(slots) :]
            if not keys:
                # Others may still find slots.
                continue
            if owner in target.owners:
                waiting.append(owner)
            self._budget.copy(number, len(keys))
            if not through:
                keys.reverse()
                batch.reverse()
            self._pool.begin_copies(batch, number)
            target.index.begin_writes(keys, slots)
            moves.append(Move(-1, Op.CASCADE, number, keys, [c.row for c in batch], slots))
        return moves

    def _take(self, target: CopyTarget, most: int, owner: int) -> dict[bytes, Chunk]:
        """Take the chunks of one owner that have waited longest for their copies, by key."""
        # A key may be in the queue twice, if its chunk has left and come back meanwhile.
        found: dict[bytes, Chunk] = {}
        chunk_of, bit = self._pool.chunks.get, 1 << target.number
        # It may hold less than when they were queued, as it turned out that it cannot grow.
        # Pins give way to that as well, later.
        shared = target.index.policy.shared
        deepest = sys.maxsize if shared else target.most + len(target.index.pinned)
        while len(found) < most and (keys := target.dequeue(most - len(found), owner)):
            for chunk in filter(None, map(chunk_of, keys)):
                if not chunk.unsaved & bit:
                    continue
                if chunk.key in target.entries:
                    # Another host has stored it meanwhile.
                    self._pool.dequeue(chunk, target.number)
                elif chunk.depth >= deepest:
                    self._pool.dequeue(chunk, target.number)
                    target.count("declined", 1)
                else:
                    found[chunk.key] = chunk
        return found

    def ended(self, target: CopyTarget, move: Move, completion: Completion, now: float) -> None:
        """Take in the end of a move of copies; some of its chunks may have failed."""
        give_up = take_in(target, move, completion, self._complaints, now)
        self._pool.unpin(list(map(self._pool.chunks.__getitem__, move.keys[::-1])))
        if give_up:
            self.drop(target)
