"""Jobs of a server that owns its rows, and the copies of store jobs to a tier.

`kvstore.core.tier_only` uses them. `Job` counts the chunks of one job from its start to its
end, `JobBook` holds all jobs, `JobStores` copies the chunks of store jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvstore.core.cascade import CASCADE_BATCH, take_in
from kvstore.core.reports import Complaints
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.types import NO_MOVE, Completion, LogLine, Move, Op, group_of

__all__ = ["Job", "JobBook", "JobEnd", "JobStores"]

STORE_SHARE = 0.5
"""Share of the server's rows that unfinished stores may use before no other may begin."""

COPIES_PER_STEP = 256
"""Most copies to the tier that one step begins, with a policy as fast as LRU."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The result of a job.

    Attributes:
        number: the job's number. whole: all its chunks are where they should be, or not wanted.
        loaded: keys whose rows hold their bytes; empty for a store.
        moved: chunks that were copied.
        seconds: from when the job was handed over to when its end was noticed.
    """

    number: int
    whole: bool
    loaded: list[bytes]
    moved: int
    seconds: float


class Job:
    """Counts the chunks of a job that are under way, and keeps the results of the others.

    Attributes:
        number: the job's number.
    """

    def __init__(self, number: int, began: float) -> None:
        self.number = number
        self._began = began
        self._left = self._moved = 0
        self._whole = True
        self._loaded: list[bytes] = []

    @property
    def done(self) -> bool:
        """Whether no chunk is under way."""
        return not self._left

    def expect(self, chunks: int) -> None:
        """Add to the number of chunks under way."""
        self._left += chunks

    def lack(self) -> None:
        """Note that not all chunks of the job are copied."""
        self._whole = False

    def stored(self) -> None:
        """Count one chunk under way as copied from its row."""
        self._left -= 1
        self._moved += 1

    def loaded(self, key: bytes) -> None:
        """Count one chunk under way as loaded into its row."""
        self.stored()
        self._loaded.append(key)

    def failed(self) -> None:
        """Count one chunk under way as not copied."""
        self._left -= 1
        self._whole = False

    def end(self, now: float) -> JobEnd:
        """Return the job's result."""
        return JobEnd(self.number, self._whole, self._loaded, self._moved, now - self._began)


class JobBook:
    """The jobs that have not ended, and those whose result was not taken yet."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._ended: list[JobEnd] = []

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def begin(self, number: int, now: float) -> Job:
        """Begin a job."""
        self._open.add(number)
        return Job(number, now)

    def settle(self, job: Job, now: float) -> None:
        """End the job if none of its chunks is under way."""
        if job.done:
            self._open.discard(job.number)
            self._ended.append(job.end(now))

    def take_ended(self) -> list[JobEnd]:
        """Take the results of jobs that have ended."""
        ended, self._ended = self._ended, []
        return ended


class JobStores:
    """The chunks that wait to be stored, with their rows and jobs.

    Args:
        target: where chunks are copied to. peers: tiers of peers; what they hold need not be
            written again.
        rows: how many rows the server has.
    """

    def __init__(
        self,
        target: CopyTarget,
        peers: Sequence[TierView],
        rows: int,
        book: JobBook,
        log: Callable[[LogLine], None],
    ) -> None:
        self._target, self._peers = target, peers
        self._book = book
        self._complaints = Complaints(log, quiet=0.0)
        self._most = max(1, int(rows * STORE_SHARE))
        policy = target.index.policy
        self._most_copies = max(1, int(COPIES_PER_STEP / policy.effort))
        self._links = policy.overrides("link")
        self._last: dict[str, dict[bytes, bytes]] = {}
        """The last key of each request and KV cache group, if the policy uses links."""
        self._storing: dict[bytes, tuple[int, Job]] = {}

    def __len__(self) -> int:
        """Chunks that wait to be stored, or are being stored."""
        return len(self._storing)

    def add(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], request: str, now: float
    ) -> None:
        """Add a job to store `rows` under `keys`: see `Jobs.store`."""
        job = self._book.begin(number, now)
        self._link(request, keys)
        self._target.index.touch(reversed(keys))
        row_of = {key: row for key, row in zip(keys, rows, strict=True) if self._lacks(key)}
        wanted = self._wanted(list(row_of), job, now)
        job.expect(len(wanted))
        for key in wanted:
            self._storing[key] = (row_of[key], job)
        self._target.enqueue(wanted)
        self._book.settle(job, now)

    def finished(self, request: str) -> None:
        """Forget the request, which stores nothing more."""
        self._last.pop(request, None)

    def due(self, now: float) -> list[Move]:
        """Return the copies that are due, without numbers."""
        target, left = self._target, self._most_copies
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
                    self.drop(now)
                break
            left -= len(keys)
            target.index.begin_writes(keys, slots)
            rows = [self._storing[key][0] for key in keys]
            moves.append(Move(NO_MOVE, Op.CASCADE, target.number, keys, rows, slots))
        return moves

    def ended(self, move: Move, completion: Completion, now: float) -> None:
        """Take in the end of a move of `due`; some of its chunks may have failed."""
        give_up = take_in(self._target, move, completion, self._complaints, now)
        for key, ok in zip(move.keys, completion.ok, strict=True):
            _, job = self._storing.pop(key)
            if ok:
                job.stored()
            else:
                job.failed()
            self._book.settle(job, now)
        if give_up:
            self.drop(now)

    def drop(self, now: float) -> None:
        """Give up the stores that have not begun."""
        keys = self._target.dequeue(self._target.queued)
        self._target.count("refused", len(keys))
        for key in keys:
            _, job = self._storing.pop(key)
            job.failed()
            self._book.settle(job, now)

    # -- inside ----------------------------------------------------------------------------

    def _lacks(self, key: bytes) -> bool:
        """Whether neither the tier nor a peer has the chunk, and it is not being stored."""
        return (
            key not in self._storing
            and self._target.index.lacks(key)
            and not any(key in peer.entries for peer in self._peers)
        )

    def _wanted(self, keys: list[bytes], job: Job, now: float) -> list[bytes]:
        """Return those of `keys` that the tier takes at present and its filter admits."""
        target = self._target
        if not keys:
            return keys
        if target.admission is not None:
            # Chunks in the server's own rows are never looked up here: an offer counts as asking.
            target.admission.asked(keys)
        if len(self._storing) >= self._most or not target.accepts(now):
            job.lack()
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
            self._target.index.policy.link(chain, last.get(group))
            last[group] = chain[-1]
