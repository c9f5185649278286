"""A few plain threads that do blocking I/O, loads before stores.

One job is many operations and one hop back to the event loop: the last
operation to end wakes the loop, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["IOThreads"]

_T = TypeVar("_T")


class _Job:
    """The operations of one job and where their outcome goes."""

    __slots__ = ("error", "future", "left", "lock", "loop", "results")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[list[object]] = loop.create_future()
        self.results: list[object] = [None] * count
        self.error: Exception | None = None
        self.left = count
        self.lock = threading.Lock()

    def perform(self, index: int, operation: Callable[[], object]) -> None:
        try:
            self.results[index] = operation()
        except Exception as error:
            self.error = error
        with self.lock:
            self.left -= 1
            last = not self.left
        if last:
            # Once the loop is closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.results)


class IOThreads:
    """`count` threads named after `name`.

    Threads are daemons: a disk that never answers cannot keep a process from
    exiting.
    """

    def __init__(self, count: int, name: str) -> None:
        self._loads: deque[tuple[_Job, int, Callable[[], object]]] = deque()
        self._stores: deque[tuple[_Job, int, Callable[[], object]]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._running: set[asyncio.Future[list[object]]] = set()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-io-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, operations: Sequence[Callable[[], _T]], *, load: bool) -> list[_T]:
        """Run `operations` and return their results in order; waits for all, even when cancelled.

        The memory that operations use is theirs until they have ended, so a
        cancelled caller still has to wait: cancellation is delivered afterwards,
        and so is what an operation raised.
        """
        if not operations:
            return []
        job = _Job(len(operations), asyncio.get_running_loop())
        queue = self._loads if load else self._stores
        with self._wake:
            if self._closed:
                raise RuntimeError("the I/O threads have been closed")
            queue.extend((job, index, op) for index, op in enumerate(operations))
            self._wake.notify(len(operations))
        self._running.add(job.future)
        job.future.add_done_callback(self._running.discard)
        cancelled: asyncio.CancelledError | None = None
        while not job.future.done():
            try:
                await asyncio.shield(job.future)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return job.future.result()  # type: ignore[return-value]

    async def idle(self) -> None:
        """Wait until every job that was begun has ended."""
        while self._running:
            await asyncio.wait(set(self._running))

    def close(self, timeout: float = 5.0) -> bool:
        """Let the threads end once the queues are empty; False if one still runs at `timeout`."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._loads and not self._stores:
                    if self._closed:
                        return
                    self._wake.wait()
                job, index, operation = (self._loads or self._stores).popleft()
            job.perform(index, operation)
            # Nothing of the job may be kept alive while the thread waits.
            del job, operation
