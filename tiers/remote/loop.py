"""Event loop and threads of a store's client, so that nobody else waits for its copies and digests.

A call that blocks gets a thread of its own, and the end of the process does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvstore.concurrency import LoopThread, outlast
from kvstore.tiers.remote.client import StoreError

__all__ = ["ClientLoop", "in_thread"]

_T = TypeVar("_T")

JOIN_SECONDS = 60.0
"""How long what was cancelled gets to end: it may use its caller's memory until then."""

LAST_SECONDS = 5.0
"""How long `at_end` gets."""


class ClientLoop:
    """An event loop in a daemon thread. What has begun is cancelled at its end.

    Args:
        at_end: the last thing that runs there.
    """

    def __init__(self, name: str, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._ended = False
        # A loop itself does not keep its tasks.
        self._unawaited: set[asyncio.Task[None]] = set()
        self._thread = LoopThread(name, self, self._finish, JOIN_SECONDS)
        self._loop = self._thread.loop

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` there, and wait for its end, cancelled or not: it may use memory until then.

        When the waiting is cancelled, the work is.

        Raises:
            StoreError: if the work was cancelled by somebody else, or `end` was called before.
        """
        home = asyncio.get_running_loop()
        ended: asyncio.Future[_T] = home.create_future()
        tasks: list[asyncio.Task[_T]] = []

        def tell(task: asyncio.Task[_T]) -> None:
            # Once that loop is closed nobody waits any more.
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
        """Run `work` there, for whose end nobody waits."""

        def begin() -> None:
            task = self._loop.create_task(work())
            self._unawaited.add(task)
            task.add_done_callback(self._unawaited.discard)

        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(begin)

    def cancel_all(self) -> None:
        """Whoever waits for anything that runs there is told so."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def end(self) -> bool:
        """Cancel what runs and end; False if the thread has not ended within a minute."""
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
        ended.set_exception(StoreError("the call was given up"))
        return
    error = task.exception()
    if error is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


def in_thread(call: Callable[[], _T], nice: int = 0) -> asyncio.Future[_T]:
    """What a blocking call returns; what it raises is a `StoreError`.

    Nobody waits for its thread, not even the interpreter at its end.

    Args:
        nice: how much its thread gives way to others of the machine, 0 to 19.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_T] = loop.create_future()
    # Who asked may not wait any more: what it raises then nobody asks for.
    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())

    def work() -> None:
        tell: Callable[[], None]
        if nice:
            # Of Linux a thread has a priority of its own; elsewhere this may be refused.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        try:
            tell = partial(ended.set_result, call())
        except StoreError as error:
            tell = partial(ended.set_exception, error)
        except Exception as error:
            tell = partial(ended.set_exception, StoreError(repr(error)))
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if ended.done() else tell())

    threading.Thread(target=work, name="kvstore-client", daemon=True).start()
    return ended
