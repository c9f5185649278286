"""Loop thread, daemon threads, bounded waits and calls, and the loop that an object belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import threading
import weakref
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from kvstore.errors import KVStoreError

__all__ = [
    "DETACH_SECONDS",
    "Daemons",
    "Home",
    "LoopThread",
    "close_unlocked",
    "given_up_in_children",
    "in_thread",
    "new_event_loop",
    "open_at_once",
    "outlast",
    "running_loop",
    "start_thread",
    "within",
]

_T = TypeVar("_T")

DETACH_SECONDS = 0.25
"""Seconds that tasks get to end once they are cancelled."""

JOIN_SECONDS = 5.0
"""Seconds that the thread gets to end, those tasks included."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop if uvloop is installed, else one of asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def given_up_in_children(give_up: Callable[[_T], object]) -> weakref.WeakSet[_T]:
    """Return a set for what a forked child must not keep: `give_up` is called on each there."""
    kept: weakref.WeakSet[_T] = weakref.WeakSet()

    def in_child() -> None:
        for each in list(kept):
            give_up(each)

    os.register_at_fork(after_in_child=in_child)
    return kept


def close_unlocked(fd: int) -> None:
    """Close a file that may be locked by `flock`, and end the lock.

    To close it ends the lock only where no child has the file that was forked meanwhile.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def open_at_once(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    follows: bool = False,
    dir_fd: int | None = None,
) -> int:
    """Open a file as `os.open` does; a pipe in its place does not block the call.

    A file that is made may be used by its owner alone.

    Args:
        follows: whether it may be a symbolic link.

    Raises:
        OSError: as `os.open` does; also for a folder, for which `os.fdopen` would leave it open.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        KVStoreError: if the system gives no more of them.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise KVStoreError(
            f"thread {thread.name} cannot be started: {error}; the user or the container has too "
            "many (ulimit -u, pids.max)"
        ) from None


def in_thread(call: Callable[[], _T], executor: Executor) -> asyncio.Future[_T]:
    """Make `call` in a thread of `executor`, at most once.

    Raises:
        RuntimeError: if no thread can be had; then the call is not made, now or later.
    """
    future: Future[_T] = Future()
    try:
        asyncio.get_running_loop().run_in_executor(executor, _run_into, future, call)
    except RuntimeError:
        # By then an executor may have queued it, and would make it when a thread becomes free.
        if future.cancel():
            raise
    return asyncio.wrap_future(future)


class LoopThread:
    """A loop that runs in a daemon thread until `end`. A child of a fork has no such thread.

    Attributes:
        loop: calls are handed to its ``call_soon_threadsafe``.

    Args:
        keeps: an object kept alive as long as the thread, which may outlive its creator: tasks
            without a reference are destroyed, with a warning.
        at_end: called in the thread once no more calls are handed to the loop.
        grace: seconds that tasks get to end once they are cancelled.
    """

    def __init__(
        self,
        name: str,
        keeps: object,
        at_end: Callable[[], None] = lambda: None,
        grace: float = DETACH_SECONDS,
    ) -> None:
        self.loop = new_event_loop()
        self._keeps = keeps
        self._at_end = at_end
        self._grace = grace
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self.loop.close()
            raise

    @property
    def here(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread soon; may be called from any thread, and again.

        Calls handed over before have begun by then. Tasks that are left are cancelled.
        """
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def end(self) -> None:
        """Do as `stop`, and wait for the end for a limited time."""
        self.stop()
        self.join(JOIN_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=self._grace))
            self._at_end()
            # A task that waits for a call that never returns is destroyed without a warning.
            self.loop.set_exception_handler(lambda loop, context: None)
            self.loop.close()
            self._keeps = None


class Home:
    """The loop on which this object was created, with its thread and its process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether the caller runs on this loop."""
        # A loop runs in one thread, and none runs in the child of a fork.
        return running_loop() is self.loop

    def check(self) -> None:
        """Refuse a call from any other place.

        Raises:
            KVStoreError: if this loop is not the one that runs here.
        """
        if running_loop() is self.loop:
            return
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"the store belongs to process {self._pid}, this is {os.getpid()}; "
                "open one of your own after a fork"
            )
        if threading.current_thread() is not self._thread:
            raise KVStoreError(
                f"the store belongs to the loop of thread {self._thread.name!r}, this is "
                f"{threading.current_thread().name!r}; call it there by "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )
        raise KVStoreError(
            "the store belongs to the loop on which it was opened, which does not run here"
        )

    def send(self, call: Callable[[], object]) -> None:
        """Make the call on the loop soon; not if the loop has ended or in another process.

        May be called from any thread.
        """
        if os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(call)


async def outlast(
    running: asyncio.Future[_T], on_cancel: Callable[[], object] = lambda: None
) -> _T:
    """Wait for the result of `running`, however often the caller is cancelled.

    The cancellation is raised afterwards; an error of `running` is then dropped.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            # Awaiting the task itself would pass the cancellation on to it.
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        if not running.cancelled():
            running.exception()
        raise cancelled
    return running.result()


async def within(seconds: float | None, call: str, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for the result of `work`; `seconds` of None waits forever.

    Raises:
        TimeoutError: names `call` and `seconds`. `work` was cancelled and has ended.
    """
    if seconds is None:
        return await work
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"{call} took longer than {seconds:g} s") from None


class Daemons(Executor):
    """An executor that runs each call in a daemon thread, which cannot delay the process's exit.

    Args:
        name: name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        work = (future, partial(fn, *arguments, **named))
        start_thread(threading.Thread(None, _run_into, self._name, work, daemon=True))
        return future


def _run_into(future: Future[_T], call: Callable[[], _T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
