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
    """Hands calls to a loop in a thread of its own, which it starts.

    No call is handed over twice, and none waits forever: when the
    loop ends, for whatever reason, the calls that are left raise.

    Attributes:
        thread: calls that are left when it ends raise, as later ones do.
        ended: whether calls are refused.

    Args:
        keeps: an object that is kept alive as long as the thread.
    """

    def __init__(self, name: str, keeps: object) -> None:
        self._pid = os.getpid()
        # Reentrant: the garbage collector may run code that makes calls while the lock is held.
        self._lock = threading.RLock()
        self.ended = False
        self._left: set[_Call[Any]] = set()
        """Calls that have no outcome yet."""
        self.thread = LoopThread(name, keeps, self._fail_rest)

    @property
    def foreign(self) -> bool:
        """Whether this process is the child of a fork, and has no such thread."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse a call that cannot be made.

        Raises:
            KVStoreError: with the reason.
        """
        self.check_place()
        if self.ended:
            raise KVStoreError(CLOSED)

    def check_place(self) -> None:
        """Refuse a call from a thread or process that cannot wait for it.

        Raises:
            KVStoreError: with the reason.
        """
        if self.foreign:
            raise KVStoreError(
                f"the store belongs to process {self._pid}, this is {os.getpid()}; "
                "open one of your own after a fork"
            )
        if self.thread.here:
            raise KVStoreError(
                "this is the thread of the store's own loop, where a call would wait for itself; "
                "make it in another thread"
            )

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop; returns or raises what it does."""
        return self._make(_Call(function, self._left))

    def wait(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `begin` makes on the loop; returns or raises what it does.

        If the wait is interrupted (by Ctrl-C) nothing is left running: the
        coroutine is cancelled, and has ended before the interrupt is raised.
        """
        return self._make(_Task(begin, self._left))

    def send(self, begin: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the coroutine that `begin` makes on the loop, without waiting for it.

        May be called on the loop's own thread too. Does nothing once the loop has ended,
        nor in the child of a fork.
        """
        if not self.foreign:
            task: _Task[object] = _Task(begin, self._left)
            with self._lock:
                if not self.ended:
                    self._left.add(task)
                    self.thread.loop.call_soon_threadsafe(task.run)

    def _make(self, call: _Call[T]) -> T:
        self.check()
        try:
            with self._lock:
                if self.ended:
                    raise KVStoreError(CLOSED)
                self._left.add(call)
                self.thread.loop.call_soon_threadsafe(call.run)
            return call.outcome()
        except BaseException:
            self._stop(call)
            raise
        finally:
            # A stored error must not keep the call's objects alive.
            del call

    def _stop(self, call: _Call[Any]) -> None:
        """If `call` has not ended, cancel it and wait for its end, however often interrupted."""
        while call in self._left:
            with contextlib.suppress(BaseException):
                with self._lock:
                    if not self.ended:
                        # If the call was never handed over, this ends it.
                        self.thread.loop.call_soon_threadsafe(call.cancel)
                call.wait()

    def _fail_rest(self) -> None:
        with self._lock:
            self.ended = True
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
        """Wait for the end; returns or raises what the function did."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                # The error already refers to this call, by its traceback.
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
        """End it with an error, as it will not end by itself any more."""
        self._end(error=KVStoreError(CLOSED))

    def _taken(self) -> Callable[[], Any]:
        """Take the function, so that its objects are freed before the caller goes on."""
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
            # Cancelled by an interrupt, which the caller raises, or by the end of the loop.
            self.close()
        elif (error := task.exception()) is not None:
            self._end(error=error)
        else:
            self._end(task.result())
