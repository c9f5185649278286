"""Event loop and threads of a store's client, so that its copies and digests delay nothing else.

A blocking call gets a daemon thread of its own, for which the process does not wait at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvstore.concurrency import Daemons, LoopThread, outlast
from kvstore.errors import KVStoreError
from kvstore.tiers.remote.client import StoreError

__all__ = ["ClientLoop", "in_thread", "two_at_once"]

_T = TypeVar("_T")

JOIN_SECONDS = 60.0
"""How long to wait for cancelled work, which may use its caller's memory until it ends."""

LAST_SECONDS = 5.0
"""Time limit of `at_end`."""


class ClientLoop:
    """An event loop in a daemon thread. At its end, running work is cancelled.

    Args:
        at_end: runs last on the loop.
    """

    def __init__(self, name: str, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._ended = False
        # An event loop itself keeps only weak references to tasks.
        self._unawaited: set[asyncio.Task[None]] = set()
        self._thread = LoopThread(name, self, self._finish, JOIN_SECONDS)
        self._loop = self._thread.loop

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` on the loop, and wait for its end.

        If this call is cancelled, the work is cancelled, and this call still waits for its end,
        because the work may use memory until then.

        Raises:
            StoreError: if the work was otherwise cancelled, or `end` was called before.
        """
        home = asyncio.get_running_loop()
        ended: asyncio.Future[_T] = home.create_future()
        tasks: list[asyncio.Task[_T]] = []

        def tell(task: asyncio.Task[_T]) -> None:
            # Once the caller's loop is closed, nothing waits any more.
            with contextlib.suppress(RuntimeError):
                home.call_soon_threadsafe(_pass_on, task, ended)

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(tell)

        with self._lock:
            if self._ended:
                work.close()
                raise StoreError("the client is closed")
            self._loop.call_soon_threadsafe(begin)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        return await outlast(ended, cancel)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` on the loop without waiting for its end."""

        def begin() -> None:
            task = self._loop.create_task(work())
            self._unawaited.add(task)
            task.add_done_callback(self._unawaited.discard)

        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(begin)

    def cancel_all(self) -> None:
        """Cancel all work on the loop; callers that wait for it get a `StoreError`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def end(self) -> bool:
        """Cancel all work and end the thread; return False if it has not ended in a minute."""
        with self._lock:
            self._ended = True
        self._thread.stop()
        self._thread.join(JOIN_SECONDS)
        return not self._thread.running

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(asyncio.wait_for(self._at_end(), LAST_SECONDS))


def _pass_on(task: asyncio.Task[_T], ended: asyncio.Future[_T]) -> None:
    if task.cancelled():
        ended.set_exception(StoreError("the call was cancelled"))
        return
    error = task.exception()
    if error is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


def in_thread(call: Callable[[], _T], nice: int = 0) -> asyncio.Future[_T]:
    """Run a blocking call in a daemon thread; exceptions become a `StoreError`.

    Args:
        nice: nice level of the thread, 0 to 19.

    Raises:
        StoreError: if the system gives no more threads.
    """

    def work() -> _T:
        if nice:
            # On Linux a thread has a priority of its own; elsewhere this may be refused.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        try:
            return call()
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(repr(error)) from error

    try:
        ended = asyncio.wrap_future(Daemons("kvstore-client").submit(work))
    except KVStoreError as error:
        raise StoreError(str(error)) from None
    # Mark the exception as retrieved, as the caller may not wait any more.
    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())
    return ended


async def two_at_once(calls: Iterable[Coroutine[Any, Any, _T]], note: Callable[[_T], None]) -> None:
    """Run calls two at a time, and pass the result of each to `note`, in order.

    So the digests of one are computed while the store moves the other. If one raises, all are
    cancelled.
    """
    running: deque[asyncio.Task[_T]] = deque()
    try:
        for call in calls:
            running.append(asyncio.create_task(call))
            if len(running) == 2:
                note(await running[0])
                running.popleft()
        while running:
            note(await running[0])
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        while left := [task for task in running if not task.done()]:
            # Wait although this may be cancelled again: they use memory until they end.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(left)
        for task in running:
            # Mark their exceptions as retrieved.
            task.cancelled() or task.exception()
