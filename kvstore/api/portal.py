"""Portal: hand calls from any thread to a loop in a background thread, and wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

from kvstore.concurrency import LoopThread
from kvstore.errors import KVStoreError

__all__ = ["Handover"]

T = TypeVar("T")

CLOSED = "the store is closed"


class Handover:
    """See the module's text. Starts the thread; `end` ends it.

    Nothing is handed over twice, and nobody waits for what will not come: when the
    loop ends, however it does, the calls that are left raise.

    Args:
        keeps: lives as long as the thread.
    """

    def __init__(self, name: str, keeps: object) -> None:
        self._pid = os.getpid()
        # What a collector of garbage runs while a thread holds it may make calls too.
        self._lock = threading.RLock()
        self._ended = False
        self._left: set[_Call[Any]] = set()
        """Calls that have no outcome yet."""
        self._thread = LoopThread(name, keeps, self._fail_rest)

    @property
    def foreign(self) -> bool:
        """Whether this process is the child of a fork, and has no such thread."""
        return os.getpid() != self._pid

    @property
    def ended(self) -> bool:
        """Whether nothing is taken any more."""
        return self._ended

    def check(self) -> None:
        """Refuse a call that cannot be made.

        Raises:
            KVStoreError: says why.
        """
        self.check_place()
        if self._ended:
            raise KVStoreError(CLOSED)

    def check_place(self) -> None:
        """Refuse a call from where it cannot be waited for.

        Raises:
            KVStoreError: says why.
        """
        if self.foreign:
            raise KVStoreError(
                f"the store belongs to process {self._pid}, this is {os.getpid()}; "
                "open one of your own after a fork"
            )
        if self._thread.here:
            raise KVStoreError(
                "this is the thread of the store's own loop, where a call would wait for itself; "
                "make it in another thread"
            )

    def ask(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises on the loop."""
        return self._make(_Call(function, self._left))

    def wait(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine that `begin` makes on the loop returns or raises.

        Who is interrupted while it waits (by Ctrl-C) leaves nothing running: the
        coroutine is cancelled, and has ended before the interrupt is raised.
        """
        return self._make(_Task(begin, self._left))

    def send(self, begin: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the coroutine that `begin` makes there, and wait for nothing.

        May be called on the loop's own thread too. Does nothing once the loop has ended,
        and nothing in the child of a fork.
        """
        if not self.foreign:
            task: _Task[object] = _Task(begin, self._left)
            with self._lock:
                if not self._ended:
                    self._left.add(task)
                    self._thread.loop.call_soon_threadsafe(task.run)

    def stop(self) -> None:
        """End the thread soon. Calls that are left raise, as later ones do. From any thread."""
        self._thread.stop()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def end(self) -> None:
        """`stop`, and wait for the end of the thread, but not for ever."""
        self._thread.end()

    def _make(self, call: _Call[T]) -> T:
        self.check()
        try:
            with self._lock:
                if self._ended:
                    raise KVStoreError(CLOSED)
                self._left.add(call)
                self._thread.loop.call_soon_threadsafe(call.run)
            return call.outcome()
        except BaseException:
            self._stop(call)
            raise
        finally:
            # An error that is kept must not keep what was handed over.
            del call

    def _stop(self, call: _Call[Any]) -> None:
        """If `call` has not ended, cancel it and wait for its end, however often interrupted."""
        while call in self._left:
            with contextlib.suppress(BaseException):
                with self._lock:
                    if not self._ended:
                        # If it was never handed over, this ends it.
                        self._thread.loop.call_soon_threadsafe(call.cancel)
                call.wait()

    def _fail_rest(self) -> None:
        with self._lock:
            self._ended = True
            left = list(self._left)
        for call in left:
            call.close()


class _Call(Generic[T]):
    """A function that is called on the loop.

    `wait` and `outcome` belong to the thread that calls, everything else to the loop.
    """

    def __init__(self, function: Callable[[], Any], left: set[_Call[Any]]) -> None:
        self._function: Callable[[], Any] | None = function
        self._left = left
        self._ended = False
        self._result: T | None = None
        self._error: BaseException | None = None
        # A bare lock, not an event or a future: those break when an interrupt finds them
        # between two of their own steps.
        self._bell = threading.Lock()
        self._bell.acquire()

    def wait(self) -> None:
        """Wait for the end. May be interrupted, and called again."""
        if not self._ended:
            self._bell.acquire()

    def outcome(self) -> T:
        """Wait for the end; what was returned, or raised."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                # It refers to this call already, by its traceback.
                self._error = None
        return cast(T, self._result)

    def run(self) -> None:
        try:
            result = self._taken()()
        except BaseException as error:
            self._end(error=error)
        else:
            self._end(result)

    def cancel(self) -> None:
        self.close()

    def close(self) -> None:
        """It will not end by itself any more."""
        self._end(error=KVStoreError(CLOSED))

    def _taken(self) -> Callable[[], Any]:
        """The function; what it holds on to is let go before the caller goes on."""
        function, self._function = self._function, None
        assert function is not None
        return function

    def _end(self, result: T | None = None, error: BaseException | None = None) -> None:
        if not self._ended:
            self._result, self._error = result, error
            self._ended = True
            self._left.discard(self)
            self._bell.release()


class _Task(_Call[T]):
    """A coroutine that runs as a task of the loop."""

    _task: asyncio.Task[T] | None = None

    def run(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._taken()())
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        if self._task is None:
            self.close()
        else:
            self._task.cancel()

    def _done(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            # By an interrupt, which the caller raises, or by the end of the loop.
            self.close()
        elif (error := task.exception()) is not None:
            self._end(error=error)
        else:
            self._end(task.result())
