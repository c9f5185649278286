"""I/O threads: a few threads for blocking calls, loads before stores.

One of them does nothing but loads, so that a load begins at once, however long the stores are
that the others have begun.

One job is many operations, one hop to the threads and one back: a thread cuts the
job into its operations, and the last of them to end wakes the loop, once. What
the loop does for a job does not depend on its size.

Where the system moves bytes in the background, an operation has two parts: it hands
over, and it waits and verifies. While everybody is busy, a thread hands over the next
operation before it waits for the one that it has begun, so that the device has something to
do while digests are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import GeneratorType
from typing import Any, TypeVar

__all__ = ["LOADS_IN_A_ROW", "IOThreads", "Parts"]

_T = TypeVar("_T")

Parts = Generator[None, None, _T]
"""The result of an operation of two parts: it yields while the system works on its own."""

Operation = Callable[[], object]


class _Job:
    """The operations of one job and where their outcome goes.

    Attributes:
        short: whether no operation takes longer than a transfer of one batch.
    """

    __slots__ = ("ended", "error", "future", "left", "lock", "loop", "results", "short")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, short: bool = False) -> None:
        self.loop = loop
        self.short = short
        self.future: asyncio.Future[None] = loop.create_future()
        self.ended = False
        self.results: list[object] = []
        self.error: Exception | None = None
        self.left = 0
        self.lock = threading.Lock()

    def cut(self, cut: Callable[[], Sequence[Operation]]) -> Sequence[Operation]:
        """The job's operations; when there are none, it has ended."""
        try:
            operations = cut()
        except Exception as error:
            self.error = error
            operations = ()
        self.results = [None] * len(operations)
        self.left = len(operations)
        if not operations:
            self.end()
        return operations

    def begin(self, index: int, operation: Operation) -> Callable[[], None] | None:
        """Run an operation, or the first part of one that has two: then returns the second."""
        try:
            outcome = operation()
            if isinstance(outcome, GeneratorType):
                next(outcome)
                return partial(self._finish, index, outcome)
            self.results[index] = outcome
        except StopIteration as stop:
            self.results[index] = stop.value
        except Exception as error:
            self.error = error
        self._count()
        return None

    def _finish(self, index: int, parts: Parts[object]) -> None:
        try:
            next(parts)
            raise RuntimeError("an operation has two parts at most")
        except StopIteration as stop:
            self.results[index] = stop.value
        except Exception as error:
            self.error = error
        self._count()

    def _count(self) -> None:
        with self.lock:
            self.left -= 1
            last = not self.left
        if last:
            self.end()

    def detach(self) -> None:
        """Stop waiting for the operations."""
        if not self.ended:
            self.error = TimeoutError("an I/O call does not return")
            self._wake()

    def end(self) -> None:
        """Tell the loop."""
        # Once the loop is closed no task waits any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_result(None)


LOADS_IN_A_ROW = 16
"""Most loads in a row of the threads that do not only load, if something else waits."""


class _Idle:
    """Threads of one kind that have nothing to do. The lock is held at each call.

    Attributes:
        count: those that wait, and those that were woken and have not gone on yet.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.count = 0
        self._asleep = 0
        self._woken = threading.Condition(lock)

    def wait(self) -> None:
        """Wait to be woken."""
        self.count += 1
        self._asleep += 1
        self._woken.wait()
        self.count -= 1

    def wake(self, most: int) -> int:
        """Wake up to `most` threads that are still asleep; returns how many."""
        woken = min(most, self._asleep)
        self._asleep -= woken
        self._woken.notify(woken)
        return woken


_Queue = deque[tuple[_Job, int, Any]]
"""Operations by job and number; -1 stands before what cuts the job."""


class IOThreads:
    """`count` threads named after `name`; unless there is one alone, the first only loads.

    Threads are daemons: a disk that never answers cannot keep a process from
    exiting.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._loads: _Queue = deque()
        self._stores: _Queue = deque()
        self._before_stores: _Queue = deque()
        self._in_a_row = 0
        self._lock = threading.Lock()
        self._for_loads, self._for_all = _Idle(self._lock), _Idle(self._lock)
        self._closed = False
        self._detached = False
        self._alive = count
        self._at_end: Callable[[], None] | None = None
        self._running: set[_Job] = set()
        self._idle = asyncio.Event()
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(self._for_loads if index == 0 and count > 1 else self._for_all,),
                name=f"{name}-io-{index}",
                daemon=True,
            )
            for index in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            # Those that have started end.
            self._close(None)
            raise

    async def run(self, call: Callable[[], _T], *, ahead: bool = False) -> _T:
        """Return what `call` returns, which may take long. It has its turn among stores.

        Args:
            ahead: it comes before all of them. For the rest, see `run_cut`.
        """
        queue = self._before_stores if ahead else self._stores
        job = _Job(asyncio.get_running_loop())
        done: list[_T] = await self._run(job, lambda: [call], queue)
        return done[0]

    async def run_cut(
        self, cut: Callable[[], Sequence[Callable[[], Parts[_T]]]], *, load: bool
    ) -> list[_T]:
        """Move what the operations that `cut` returns move; it is itself called by a thread.

        An operation may have two parts, and takes no longer than a transfer of one batch.
        Loads come first, then what is `ahead` of stores, then stores; but under loads without end
        the others have a turn after each `LOADS_IN_A_ROW`.

        Returns their results in order. Waits for all, even when cancelled: the
        memory that operations use is theirs until they have ended, so
        cancellation is delivered afterwards, and so is what an operation raised.

        Raises:
            TimeoutError: after `detach`; operations may still be under way.
        """
        job = _Job(asyncio.get_running_loop(), short=True)
        done: list[_T] = await self._run(job, cut, self._loads if load else self._stores)
        return done

    async def _run(self, job: _Job, cut: Callable[[], Sequence[Operation]], queue: _Queue) -> Any:
        with self._lock:
            if self._detached:
                raise TimeoutError("an earlier I/O call did not return")
            if self._closed:
                raise RuntimeError("the I/O threads have been closed")
            queue.append((job, -1, cut))
            self._notify(queue, 1)
        await self._ended(job)
        return job.results

    async def _ended(self, job: _Job) -> None:
        """Wait for the end of `job`, cancelled or not.

        Raises:
            TimeoutError: after `detach`.
        """
        self._running.add(job)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not job.ended:
                try:
                    await job.future
                except asyncio.CancelledError as error:
                    cancelled = error
                    job.future = job.loop.create_future()
        finally:
            self._running.discard(job)
            if not self._running:
                self._idle.set()
        if cancelled is not None:
            raise cancelled
        if job.error is not None:
            raise job.error

    async def idle(self) -> None:
        """Wait until every job that was begun has ended."""
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    def detach(self) -> None:
        """Give up on calls that do not return: waiting tasks get an error, no more jobs are taken.

        Called on the loop. Calls under way may still use their memory.
        """
        self._detached = True
        for job in self._running:
            job.detach()

    async def end(self, at_end: Callable[[], None]) -> None:
        """Let the threads end once the queues are empty; the last to end calls `at_end`.

        Raises:
            TimeoutError: after `detach`; `at_end` is called whenever they end.
        """
        job = _Job(asyncio.get_running_loop())

        def last() -> None:
            try:
                at_end()
            except Exception as error:
                job.error = error
            job.end()

        self._close(last)
        if self._detached:
            raise TimeoutError("an earlier I/O call did not return")
        await self._ended(job)

    def close(self, timeout: float = 5.0, at_end: Callable[[], None] | None = None) -> bool:
        """`end` without a loop; False if a thread still runs after `timeout` seconds."""
        self._close(at_end)
        end = time.monotonic() + (0.0 if self._detached else timeout)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _close(self, at_end: Callable[[], None] | None) -> None:
        with self._lock:
            self._closed = True
            alive = self._alive > 0
            if alive and self._at_end is None:
                self._at_end = at_end
            for idle in (self._for_loads, self._for_all):
                idle.wake(idle.count)
        if not alive and at_end is not None:
            at_end()

    def _serve(self, idle: _Idle) -> None:
        self._work(idle)
        with self._lock:
            self._alive -= 1
            at_end = self._at_end if not self._alive else None
        if at_end is not None:
            at_end()

    def _work(self, idle: _Idle) -> None:
        rest: Callable[[], None] | None = None
        while True:
            taken = self._take(idle, beside=rest is not None)
            if taken is None and rest is None:
                return
            following = self._begin(*taken) if taken is not None else None
            if rest is not None:
                rest()
            rest = following
            # Nothing of the job may be kept alive while the thread waits.
            del taken, following

    def _take(self, idle: _Idle, *, beside: bool) -> tuple[_Queue, _Job, int, Any] | None:
        """Return what to do next; None at the end.

        Args:
            idle: where the thread waits, which tells what it does.
            beside: an operation that has begun waits for the thread: nothing is waited
                for, and what an idle thread can do, or may take long, is not taken.
        """
        with self._lock:
            while True:
                queue = self._loads
                if idle is self._for_all:
                    others = self._before_stores or self._stores
                    if others and (not queue or self._in_a_row >= LOADS_IN_A_ROW):
                        queue = others
                if queue:
                    break
                if beside or self._closed:
                    return None
                idle.wait()
            if beside and (self._idle_for(queue) or not queue[0][0].short):
                return None
            if idle is self._for_all:
                self._in_a_row = self._in_a_row + 1 if queue is self._loads else 0
                if queue is self._loads and others:
                    # It was woken for those.
                    self._for_all.wake(1)
            return queue, *queue.popleft()

    def _idle_for(self, queue: _Queue) -> int:
        """How many threads wait that could take something from `queue`."""
        return self._for_all.count + (self._for_loads.count if queue is self._loads else 0)

    def _notify(self, queue: _Queue, count: int) -> None:
        """Wake as many threads, if there are, for what is in `queue`."""
        if queue is self._loads:
            count -= self._for_loads.wake(count)
        self._for_all.wake(count)

    def _begin(
        self, queue: _Queue, job: _Job, index: int, operation: Any
    ) -> Callable[[], None] | None:
        """Begin an operation, the first one if the job is to be cut: what is left of it to do."""
        if index < 0:
            operations = job.cut(operation)
            if not operations:
                return None
            index, operation = 0, operations[0]
            self._share(job, operations, queue)
        return job.begin(index, operation)

    def _share(
        self,
        job: _Job,
        operations: Sequence[Operation],
        queue: _Queue,
    ) -> None:
        """Offer all but the first to every thread, before the jobs that came later."""
        if len(operations) == 1:
            return
        with self._lock:
            queue.extendleft(
                (job, index, operations[index]) for index in range(len(operations) - 1, 0, -1)
            )
            self._notify(queue, len(operations) - 1)
