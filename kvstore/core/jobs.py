"""Jobs of a server that owns its rows, and the copies of store jobs to a tier.

`kvstore.core.tier_only` is their user. `Job` counts the chunks of one job from being handed over to
its end, `JobBook` holds all of them, `JobStores` copies the chunks of store jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvstore.core.cascade import CASCADE_BATCH, take_in
from kvstore.core.reports import Complaints
from kvstore.core.residency.base import CopyTarget, TierView
from kvstore.policies.base import EvictionPolicy
from kvstore.types import NO_MOVE, Completion, LogLine, Move, Op, group_of

__all__ = ["Job", "JobBook", "JobEnd", "JobStores"]

STORE_SHARE = 0.5
"""Part of the server's rows beyond which stores that have not ended let no other begin."""

COPIES_PER_STEP = 256
"""Most copies to the tier that one step begins, with a policy as quick as LRU."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job has ended.

    Attributes:
        number: that of the job. whole: all its chunks are where they should be, or not wanted.
        loaded: keys whose rows hold their bytes; none of a store.
        moved: chunks that were copied.
        seconds: from when the job was handed over to when its end was heard of.
    """

    number: int
    whole: bool
    loaded: list[bytes]
    moved: int
    seconds: float


class Job:
    """Counts the chunks of a job that are under way, and keeps what became of the others.

    Attributes:
        number: its own.
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
        """So many more chunks are under way."""
        self._left += chunks

    def lack(self) -> None:
        """There are chunks which the job names and nobody copies."""
        self._whole = False

    def stored(self) -> None:
        """One of the chunks under way was copied from its row."""
        self._left -= 1
        self._moved += 1

    def loaded(self, key: bytes) -> None:
        """One of the chunks under way is in its row."""
        self.stored()
        self._loaded.append(key)

    def failed(self) -> None:
        """One of the chunks under way was not copied."""
        self._left -= 1
        self._whole = False

    def end(self, now: float) -> JobEnd:
        """What became of it."""
        return JobEnd(self.number, self._whole, self._loaded, self._moved, now - self._began)


class JobBook:
    """The jobs that have not ended, and those whose end nobody has taken yet."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._ended: list[JobEnd] = []

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def begin(self, number: int, now: float) -> Job:
        """A job is handed over."""
        self._open.add(number)
        return Job(number, now)

    def settle(self, job: Job, now: float) -> None:
        """The job has ended, if nothing of it is under way."""
        if job.done:
            self._open.discard(job.number)
            self._ended.append(job.end(now))

    def take_ended(self) -> list[JobEnd]:
        """Jobs that have ended and were not taken yet."""
        ended, self._ended = self._ended, []
        return ended


class JobStores:
    """Which chunks wait to be stored, from which rows, and for which jobs.

    Args:
        target: where chunks are copied to. peers: what neighbours keep, which need not be
            written twice.
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
        self._links = type(policy).link is not EvictionPolicy.link
        self._last: dict[str, dict[bytes, bytes]] = {}
        """The last key of each request and KV cache group, where the policy wants to know."""
        self._storing: dict[bytes, tuple[int, Job]] = {}

    def __len__(self) -> int:
        """Chunks that wait to be stored, or are being stored."""
        return len(self._storing)

    def add(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], request: str, now: float
    ) -> None:
        """A job to store `rows` under `keys`: see `Jobs.store`."""
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
        """The request stores nothing more."""
        self._last.pop(request, None)

    def due(self, now: float) -> list[Move]:
        """Copies that are due, without numbers."""
        target, left = self._target, self._most_copies
        moves: list[Move] = []
        while target.queued and not target.clearing:
            limit = min(CASCADE_BATCH, left, target.max_rows_in_flight - len(target.index.writing))
            if target.health.cautious:
                # It failed a while ago. One chunk tries first: see `Cascades.due`.
                limit = 0 if target.index.writing else 1
            if limit <= 0:
                break
            keys = target.dequeue(limit)
            slots = target.take_slots(len(keys), keys[::-1])
            target.requeue(keys[len(slots) :])
            del keys[len(slots) :]
            if not keys:
                if not target.in_flight:
                    # Nothing is under way that would make room.
                    self.drop(now)
                break
            left -= len(keys)
            target.index.begin_writes(keys, slots)
            rows = [self._storing[key][0] for key in keys]
            moves.append(Move(NO_MOVE, Op.CASCADE, target.number, keys, rows, slots))
        return moves

    def ended(self, move: Move, completion: Completion, now: float) -> None:
        """A move of `due` has ended; some of its chunks may have failed."""
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
        """Whether the chunk is neither here nor on its way here, nor at a neighbour's."""
        return (
            key not in self._storing
            and self._target.index.lacks(key)
            and not any(key in peer.entries for peer in self._peers)
        )

    def _wanted(self, keys: list[bytes], job: Job, now: float) -> list[bytes]:
        """Those of `keys` that the tier takes at present, and its filter wants."""
        target = self._target
        if not keys:
            return keys
        if target.admission is not None:
            # What the server finds in its own rows is never looked up here: to offer is to ask.
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
