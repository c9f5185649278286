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
from itertools import compress

from kvstore.core.jobs import Job, JobBook, JobEnd, JobStores
from kvstore.core.reports import Spans
from kvstore.core.residency.base import TierView
from kvstore.types import NO_MOVE, Completion, LogLine, Move, Op

__all__ = ["Jobs"]


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
        self.spans = Spans()
        self._book = JobBook()
        peers = [tier for tier in tiers if tier.target is None]
        self._stores = JobStores(self.target, peers, rows, self._book, log)
        self._loading: dict[bytes, Job] = {}
        self._due: list[Move] = []
        self._moves: dict[int, Move] = {}
        self._next = 0
        self._polled = 0.0
        for tier in tiers:
            tier.index.history.want(events and tier is self.target, tier.entries)

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._book)

    @property
    def in_flight(self) -> int:
        """Moves that were handed out and not completed."""
        return len(self._moves)

    @property
    def unsaved(self) -> int:
        """Chunks that wait to be stored, or are being stored."""
        return len(self._stores)

    def lookup(self, key: bytes) -> bool:
        """Whether the chunk can be loaded."""
        return self._place_of(key) >= 0

    # -- jobs ------------------------------------------------------------------------------

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int], now: float) -> None:
        """Fill `rows` with the chunks of `keys`, given in the order of the prompt."""
        job = self._book.begin(number, now)
        found: list[list[tuple[bytes, int]]] = [[] for _ in self.tiers]
        for key, row in zip(keys, rows, strict=True):
            place = self._place_of(key)
            if place < 0:
                # The chunk has left since it was found, or is on its way to another row.
                job.lack()
                continue
            self._loading[key] = job
            found[place].append((key, row))
        for tier, chunks in zip(self.tiers, found, strict=True):
            job.expect(len(chunks))
            size = tier.max_rows_in_flight
            for start in range(0, len(chunks), size):
                self._promote(tier, chunks[start : start + size], now)
        self.touch(keys)
        self._book.settle(job, now)

    def store(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], request: str, now: float
    ) -> None:
        """Copy `rows` to the tier under `keys`, given in the order of the prompt.

        Chunks that the tier or a peer has are not copied again. Chunks that the tier does not
        take at present, or that its filter does not want, are not copied.
        """
        self._stores.add(number, keys, rows, request, now)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these chunks, given in the order of the prompt, as used."""
        self.target.index.touch(reversed(keys))

    def finished(self, request: str) -> None:
        """End a request, which asks for nothing more; its jobs go on."""
        self._stores.finished(request)

    def take_ended(self) -> list[JobEnd]:
        """Take the results of jobs that have ended."""
        return self._book.take_ended()

    # -- steps -----------------------------------------------------------------------------

    def poll(self, now: float, completions: Iterable[Completion] = ()) -> None:
        """Take in completed moves, and update the health of the tiers."""
        elapsed, self._polled = now - self._polled, now
        for completion in completions:
            self._complete(completion, now)
        for tier in self.tiers:
            # The server decides which requests wait, and whether computing is faster.
            messages, _ = tier.watch(now, elapsed, self._deadline, self._max_wait, 0.0)
            for message in messages:
                self._log(message)
        target = self.target
        if target.queued and (target.full_for_now or target.health.stalled):
            self._stores.drop(now)

    def flush(self, now: float) -> list[Move]:
        """Return the moves that are due, to be handed to the engine in this order."""
        moves, self._due = self._due, []
        for tier in self.tiers:
            compaction = None if tier.owned is None else tier.owned.compaction(now)
            due = [m for m in (tier.due(now, after_owned=False), compaction) if m is not None]
            moves += [self._hand_out(move, tier, now) for move in due]
        if self.target.queued:
            moves += [self._hand_out(move, self.target, now) for move in self._stores.due(now)]
        return moves

    # -- inside ----------------------------------------------------------------------------

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
            self._stores.ended(move, completion, now)
        elif tier.owned is not None:
            tier.owned.upkeep_ended(move, completion, now, False)

    def _promoted(self, tier: TierView, move: Move, completion: Completion, now: float) -> None:
        tier.index.end_reads(move.keys)
        tier.promoted(list(compress(move.keys, completion.ok)))
        unread = set(completion.unread)
        for place, (key, ok) in enumerate(zip(move.keys, completion.ok, strict=True)):
            job = self._loading.pop(key)
            if ok:
                job.loaded(key)
            else:
                job.failed()
                if key in tier.entries:
                    tier.not_promoted(key, perhaps_whole=place in unread)
            self._book.settle(job, now)
