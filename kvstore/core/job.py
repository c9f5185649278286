"""A job of `kvstore.core.tier_only`, from being handed over to its end, and the book of all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job", "JobBook", "JobEnd"]


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
