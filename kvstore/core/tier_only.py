"""Tiers only: copy chunks for a server that has its own host memory.

Such a server owns the rows, and decides what is in them and which requests wait. It asks whether
a chunk can be loaded, and hands over *jobs*: to store chunks from its rows, or to load chunks into
them. Only what the tiers hold and what is under way is kept here.

The caller guarantees:

* `poll` and `flush` are called in turns, and chunks that `lookup` has found are loaded before the
  next `flush`: only `flush` lets chunks leave to make room for others;
* the rows of a job are left alone until it has ended, and those of a store are not written;
* no two jobs that have not ended have the same number.

This module guarantees:

* a key is reported as loaded only when its row holds its bytes, verified by their digest;
* each job ends, even when its tier refuses or fails, but copies that have begun are
  waited for: their rows are in use as long as the tier does not answer;
* while stores hold `STORE_SHARE` of the server's rows no other store is taken, so a slow tier does
  not keep the server from its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvstore.core.cascade import CASCADE_BATCH, take_in
from kvstore.core.reports import Complaints, Spans
from kvstore.core.residency.base import TierView
from kvstore.types import NO_MOVE, Completion, LogLine, Move, Op, group_of

__all__ = ["Job", "Jobs"]

STORE_SHARE = 0.5
"""Share of the server's rows that unfinished stores may use before no other may begin."""

COPIES_PER_STEP = 256
"""Most copies to the tier that one step begins, with a policy as fast as LRU."""


@dataclass(slots=True)
class Job:
    """A job, and its result when it has ended.

    Attributes:
        number: the job's number. began: when it was handed over.
        left: chunks that are under way.
        whole: all its chunks are where they should be, or not wanted.
        loaded: keys whose rows hold their bytes; empty for a store.
        moved: chunks that were copied.
        seconds: from when the job was handed over to when its end was noticed.
    """

    number: int
    began: float
    left: int = 0
    whole: bool = True
    loaded: list[bytes] = field(default_factory=list)
    moved: int = 0
    seconds: float = 0.0


class Jobs:
    """The jobs of a server and the moves that they need: see the module's text.

    Attributes:
        tiers: where chunks are looked for, in this order.
        target: the one of them that chunks are copied to.
        spans: the moves, if they are wanted.

    Args:
        rows: how many rows the server has.
        deadline, max_wait: limits in seconds by which a tier's health is judged: see `Health`.
        events: whether the history of `target` will be taken.
        log: where one line per change of a tier's health goes.
    """

    def __init__(
        self,
        tiers: Sequence[TierView],
        rows: int,
        *,
        deadline: float,
        max_wait: float,
        events: bool,
        log: Callable[[LogLine], None],
    ) -> None:
        self.tiers = tiers
        (self.target,) = [target for tier in tiers if (target := tier.target) is not None]
        self._deadline, self._max_wait = deadline, max_wait
        self._log = log
        self._complaints = Complaints(log, quiet=0.0)
        self.spans = Spans()
        # Others' tiers: what they hold need not be written again.
        self._peers = [tier for tier in tiers if tier.target is None]
        self._most_storing = max(1, int(rows * STORE_SHARE))
        policy = self.target.index.policy
        self._most_copies = max(1, int(COPIES_PER_STEP / policy.effort))
        self._links = policy.overrides("link")
        # The last key of each request and KV cache group, if the policy uses links.
        self._last: dict[str, dict[bytes, bytes]] = {}
        self._open = 0
        self._ended: list[Job] = []
        self._loading: dict[bytes, Job] = {}
        # Chunks that wait to be stored, or are being stored, with their rows.
        self._storing: dict[bytes, tuple[int, Job]] = {}
        self._due: list[Move] = []
        self._moves: dict[int, Move] = {}
        self._next = 0
        self._polled = 0.0
        for tier in tiers:
            tier.index.history.want(events and tier is self.target, tier.entries)

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return self._open

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self._moves)

    @property
    def unsaved(self) -> int:
        """Chunks that wait to be stored, or are being stored."""
        return len(self._storing)

    @property
    def upkeep(self) -> bool:
        """Whether uses are still to be recorded, or segments compacted, which takes steps."""
        owned = [tier.owned for tier in self.tiers if tier.owned is not None]
        return any(tier.unrecorded or not tier.compactor.idle for tier in owned)

    def lookup(self, key: bytes) -> bool:
        """Whether the chunk can be loaded."""
        return self._place_of(key) >= 0

    # -- jobs ------------------------------------------------------------------------------

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int], now: float) -> None:
        """Fill `rows` with the chunks of `keys`, given in the order of the prompt."""
        job = self._begin(number, now)
        found: list[list[tuple[bytes, int]]] = [[] for _ in self.tiers]
        for key, row in zip(keys, rows, strict=True):
            place = self._place_of(key)
            if place < 0:
                # The chunk has left since it was found, or is on its way to another row.
                job.whole = False
                continue
            self._loading[key] = job
            found[place].append((key, row))
        for tier, chunks in zip(self.tiers, found, strict=True):
            job.left += len(chunks)
            size = tier.max_rows_in_flight
            for start in range(0, len(chunks), size):
                self._promote(tier, chunks[start : start + size], now)
        self.touch(keys)
        self._settle(job, now)

    def store(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], request: str, now: float
    ) -> None:
        """Copy `rows` to the tier under `keys`, given in the order of the prompt.

        Chunks that the tier or a peer has are not copied again. Chunks that the tier does not
        take at present, or that its filter does not want, are not copied.
        """
        job = self._begin(number, now)
        self._link(request, keys)
        self.touch(keys)
        row_of = {key: row for key, row in zip(keys, rows, strict=True) if self._lacks(key)}
        wanted = self._wanted(list(row_of), job, now)
        job.left = len(wanted)
        for key in wanted:
            self._storing[key] = (row_of[key], job)
        self.target.enqueue(wanted)
        self._settle(job, now)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these chunks, given in the order of the prompt, as used."""
        self.target.index.touch(reversed(keys))

    def finished(self, request: str) -> None:
        """End a request, which asks for nothing more; its jobs go on."""
        self._last.pop(request, None)

    def take_ended(self) -> list[Job]:
        """Take the jobs that have ended."""
        ended, self._ended = self._ended, []
        return ended

    # -- steps -----------------------------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Take in completed moves, and update the health of the tiers."""
        elapsed, self._polled = now - self._polled, now
        for tier in self.tiers:
            tier.index.ages.begin_step(now)
        for completion in completions:
            self._complete(completion, now)
        for tier in self.tiers:
            # The server decides which requests wait, and whether computing is faster.
            messages, _ = tier.watch(now, elapsed, self._deadline, self._max_wait, 0.0)
            for message in messages:
                self._log(message)
        target = self.target
        if target.queued and (target.full_for_now or target.health.stalled):
            self._drop_stores(now)

    def flush(self, now: float) -> list[Move]:
        """Return the moves that are due, to be handed to the engine in this order."""
        moves, self._due = self._due, []
        for tier in self.tiers:
            compaction = None if tier.owned is None else tier.owned.compaction(now)
            due = [m for m in (tier.due(now, after_owned=False), compaction) if m is not None]
            moves += [self._hand_out(move, tier, now) for move in due]
        if self.target.queued:
            moves += [self._hand_out(move, self.target, now) for move in self._stores_due(now)]
        return moves

    # -- inside ----------------------------------------------------------------------------

    def _begin(self, number: int, now: float) -> Job:
        self._open += 1
        return Job(number, now)

    def _chunk_ended(self, job: Job, ok: bool, now: float) -> None:
        """Count one chunk under way as copied, or as failed."""
        job.left -= 1
        if ok:
            job.moved += 1
        else:
            job.whole = False
        self._settle(job, now)

    def _settle(self, job: Job, now: float) -> None:
        """End the job if none of its chunks is under way."""
        if not job.left:
            job.seconds = now - job.began
            self._open -= 1
            self._ended.append(job)

    def _place_of(self, key: bytes) -> int:
        """Return the index of the tier to read the chunk from; -1 if there is none."""
        if key not in self._loading:
            for place, tier in enumerate(self.tiers):
                if key in tier.entries and tier.health.readable:
                    return place
        return -1

    def _promote(self, tier: TierView, chunks: Sequence[tuple[bytes, int]], now: float) -> None:
        keys, rows = [key for key, _ in chunks], [row for _, row in chunks]
        slots = tier.index.begin_reads(keys)
        move = Move(NO_MOVE, Op.PROMOTE, tier.number, keys, rows, slots)
        self._due.append(self._hand_out(move, tier, now))

    def _hand_out(self, move: Move, tier: TierView, now: float) -> Move:
        move.number(self._next)
        self._next += 1
        self._moves[move.id] = move
        tier.in_flight.begin(move, now)
        self.spans.move_began(move, None, now)
        return move

    def _complete(self, completion: Completion, now: float) -> None:
        if completion.changes is not None:
            self.tiers[completion.tier].learn(completion.changes)
            completion.changes.end()
            return
        move = self._moves.pop(completion.move_id)
        tier = self.tiers[move.tier]
        started = tier.in_flight.end(move, now)
        self.spans.move_ended(move, completion, now)
        tier.health.heard()
        message = tier.health.answered()
        if message is not None:
            self._log(message)
        if completion.error is not None:
            tier.count("errors")
        if move.op is Op.PROMOTE:
            self._promoted(tier, move, completion, now)
            tier.health.arrived(completion.ok.count(True), started, completion.ended_by(now))
        elif move.op is Op.CASCADE:
            self._stored(move, completion, now)
        elif tier.owned is not None:
            tier.owned.upkeep_ended(move, completion, now, False)

    def _promoted(self, tier: TierView, move: Move, completion: Completion, now: float) -> None:
        tier.index.end_reads(move.keys)
        tier.promoted(list(compress(move.keys, completion.ok)))
        unread = set(completion.unread)
        for place, (key, ok) in enumerate(zip(move.keys, completion.ok, strict=True)):
            job = self._loading.pop(key)
            if ok:
                job.loaded.append(key)
            elif key in tier.entries:
                tier.not_promoted(key, perhaps_whole=place in unread)
            self._chunk_ended(job, ok, now)

    # -- stores ----------------------------------------------------------------------------

    def _stored(self, move: Move, completion: Completion, now: float) -> None:
        """Take in the end of a move of `_stores_due`; some of its chunks may have failed."""
        give_up = take_in(self.target, move, completion, self._complaints, now)
        for key, ok in zip(move.keys, completion.ok, strict=True):
            _, job = self._storing.pop(key)
            self._chunk_ended(job, ok, now)
        if give_up:
            self._drop_stores(now)

    def _stores_due(self, now: float) -> list[Move]:
        """Return the stores that are due, without numbers."""
        target, left = self.target, self._most_copies
        moves: list[Move] = []
        while target.queued and not target.clearing:
            limit = min(CASCADE_BATCH, left, target.max_rows_in_flight - len(target.index.writing))
            if target.health.cautious:
                # It has failed lately. One chunk is tried first: see `Cascades.due`.
                limit = 0 if target.index.writing else 1
            if limit <= 0:
                break
            keys = target.dequeue(limit)
            slots = target.take_slots(len(keys), keys[::-1])
            target.requeue(keys[len(slots) :])
            del keys[len(slots) :]
            if not keys:
                if not target.in_flight:
                    # No move is under way that could make room.
                    self._drop_stores(now)
                break
            left -= len(keys)
            target.index.begin_writes(keys, slots)
            rows = [self._storing[key][0] for key in keys]
            moves.append(Move(NO_MOVE, Op.CASCADE, target.number, keys, rows, slots))
        return moves

    def _drop_stores(self, now: float) -> None:
        """Give up the stores that have not begun."""
        keys = self.target.dequeue(self.target.queued)
        self.target.count("refused", len(keys))
        for key in keys:
            _, job = self._storing.pop(key)
            self._chunk_ended(job, False, now)

    def _lacks(self, key: bytes) -> bool:
        """Whether neither the tier nor a peer has the chunk, and it is not being stored."""
        return (
            key not in self._storing
            and self.target.index.lacks(key)
            and not any(key in peer.entries for peer in self._peers)
        )

    def _wanted(self, keys: list[bytes], job: Job, now: float) -> list[bytes]:
        """Return those of `keys` that the tier takes at present and its filter admits."""
        target = self.target
        if not keys:
            return keys
        if target.admission is not None:
            # Chunks in the server's own rows are never looked up here: an offer counts as asking.
            target.admission.asked(keys)
        if len(self._storing) >= self._most_storing or not target.accepts(now):
            job.whole = False
            target.count("refused", len(keys))
            return []
        if target.admission is None:
            return keys
        admitted = list(compress(keys, target.admission.admit(keys, now)))
        target.count("declined", len(keys) - len(admitted))
        return admitted

    def _link(self, request: str, keys: Sequence[bytes]) -> None:
        if not self._links:
            return
        last = self._last.setdefault(request, {})
        for group in dict.fromkeys(map(group_of, keys)):
            chain = [key for key in keys if group_of(key) == group]
            self.target.index.policy.link(chain, last.get(group))
            last[group] = chain[-1]
