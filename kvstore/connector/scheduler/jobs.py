"""Transfers that were handed to the workers, and the blocks of the device that they use."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvstore.connector.scheduler.tracked import TrackedRequest

__all__ = ["Job", "Jobs"]


@dataclass(slots=True)
class Job:
    """A transfer under way.

    Attributes:
        block_ids: blocks of the device that it reads or writes.
        awaited: workers that have not ended it yet.
        failed: some worker could not do it.
    """

    number: int
    tracked: TrackedRequest
    keys: list[bytes]
    block_ids: list[int]
    is_store: bool
    awaited: int
    failed: bool = field(default=False)


class Jobs:
    """Numbers transfers, and knows which of them stand in the way of a new use of blocks.

    A block may be given to somebody else while a transfer uses it. That one has then to end
    before the block is written again.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._made = 0
        self._jobs: dict[int, Job] = {}
        self._users: dict[int, set[int]] = {}
        """Block -> the jobs that use it."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: int) -> bool:
        return number in self._jobs

    def begin(
        self, tracked: TrackedRequest, keys: list[bytes], block_ids: list[int], *, is_store: bool
    ) -> Job:
        """A new job."""
        job = Job(self._made, tracked, keys, block_ids, is_store, self._workers)
        self._made += 1
        self._jobs[job.number] = job
        for block in block_ids:
            self._users.setdefault(block, set()).add(job.number)
        return job

    def ended(self, number: int, workers: int, *, failed: bool) -> Job | None:
        """`workers` more have ended a job; returns it once all have, or None.

        Raises:
            KeyError: if there is no such job under way.
        """
        job = self._jobs[number]
        job.failed |= failed
        job.awaited -= workers
        if job.awaited > 0:
            return None
        del self._jobs[number]
        for block in set(job.block_ids):
            users = self._users[block]
            users.discard(number)
            if not users:
                del self._users[block]
        return job

    def using(self, blocks: Set[int]) -> set[int]:
        """The jobs that use one of `blocks` at least."""
        users = self._users
        return {number for block in users.keys() & blocks for number in users[block]}
