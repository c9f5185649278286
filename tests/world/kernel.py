"""Kernel: simulated processes and their threads, run one at a time in an order that a seed decides.

A thread is a greenlet. It gives way at each call of the system (a file, a lock, a sleep, the wait
of an event loop), and time passes only while all threads wait. What Python's `threading`, `time`
and `asyncio` offer is replaced by what stands here while a world is alive: see `machine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import random
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

__all__ = ["DeadlockError", "Kernel", "Killed", "Lock", "Loop", "Process", "RLock", "Thread"]


DEAD = 8
"""Processes that have ended are destroyed together: the whole heap is looked through for it."""


class Killed(SystemExit):
    """Raised in every thread of a process that was killed, at whatever it does."""


class DeadlockError(AssertionError):
    """Every thread waits for another."""


class Process:
    """A process: its number and its threads.

    Attributes:
        frozen_until: before that none of its threads runs.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid, self.name = pid, name
        self.alive = True
        self.frozen_until = 0.0
        self.threads: list[Thread] = []
        self.loops: list[Loop] = []

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"


class Kernel:
    """Schedules threads.

    Attributes:
        now: seconds since the world began.
        current: the thread that runs; None while the kernel itself does.
        failed: the first exception that no thread has caught.
        burying: whether what runs is code of the dead.
        threads_fail: chance that a process gets no more threads.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1000.0
        self.current: Thread | None = None
        self.failed: BaseException | None = None
        self.over = self.burying = False
        self.threads_fail = 0.0
        self.switches = 0
        self._pids = itertools.count(10_000_001)
        self._order = itertools.count()
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Thread, int]] = []
        self.hub: greenlet.greenlet | None = None
        self.processes: list[Process] = []
        self.corpses: list[object] = []
        self.on_exit: Callable[[Process], None] = lambda process: None
        """Called when a process has ended, killed or not."""

    # -- processes -------------------------------------------------------------------------

    def spawn(self, name: str, main: Callable[[], object]) -> Process:
        """Start a process whose main thread runs `main`."""
        process = Process(next(self._pids), name)
        self.processes.append(process)

        def run() -> None:
            main()
            for one in list(process.threads):
                if not one.daemon and not one.is_main:
                    one.join()

        thread = Thread(target=run, name="main", process=process, kernel=self)
        thread.is_main = True
        thread.start()
        return process

    @property
    def process(self) -> Process:
        """The process of the thread that runs.

        Raises:
            Killed: if it is not alive, or the world has ended.
        """
        thread = self.current
        if thread is None or self.over or not thread.process.alive:
            raise Killed
        return thread.process

    def forget(self) -> None:
        """Let go of all that are dead."""
        for each in (self._ready, self._timers, self.processes, self.corpses):
            each.clear()

    def kill(self, process: Process) -> None:
        """End a process at once, as kill -9 does. Not called by one of its own threads."""
        if not process.alive:
            return
        process.alive = False
        self.processes.remove(process)
        # What its loops hold is destroyed between threads: that runs code of the dead, which must
        # not pass for the living.
        self.corpses.append([(loop, asyncio.all_tasks(loop)) for loop in process.loops])
        process.loops = []
        for thread in process.threads:
            thread.kill()
        # Who remembers the process does not keep all that it had.
        process.threads = []
        self.on_exit(process)

    # -- scheduling ------------------------------------------------------------------------

    def run(self, done: Callable[[], bool]) -> None:
        """Run threads until `done`, or until none can run.

        Raises:
            BaseException: what a thread raised.
        """
        self.hub = greenlet.getcurrent()
        while not done():
            if self.failed is not None:
                raise self.failed
            thread = self._next()
            if thread is None:
                return
            self.switches += 1
            self.current = thread
            thread.switch()
            self.current = None
            if thread.ended and thread.is_main:
                self.kill(thread.process)
            if len(self.corpses) >= DEAD:
                del thread
                self._bury()
        if self.failed is not None:
            raise self.failed

    def _bury(self) -> None:
        """Destroy what the dead have left. No thread runs: whatever they still call is refused."""
        self.burying = True
        self.corpses.clear()
        self._ready = [one for one in self._ready if one.process.alive]
        self._timers = [one for one in self._timers if one[2].process.alive]
        heapq.heapify(self._timers)
        # What is destroyed may keep others until the next time.
        while gc.collect():
            pass
        self.burying = False

    def _next(self) -> Thread | None:
        ready = self._ready
        while True:
            while self._timers and self._timers[0][0] <= self.now:
                _, _, thread, turn = heapq.heappop(self._timers)
                if thread.turn == turn and not thread.queued:
                    thread.timed_out = thread.timed_out or not thread.held_up
                    thread.held_up = False
                    self._queue(thread)
            while ready:
                at = self.rng.randrange(len(ready)) if len(ready) > 1 else 0
                ready[at], ready[-1] = ready[-1], ready[at]
                thread = ready.pop()
                thread.queued = False
                if thread.ended or not thread.process.alive:
                    continue
                if thread.process.frozen_until > self.now:
                    thread.held_up = True
                    self._at(thread.process.frozen_until, thread)
                    continue
                return thread
            if not self._timers:
                return None
            self.now = max(self.now, self._timers[0][0])

    def _queue(self, thread: Thread) -> None:
        if not thread.queued and not thread.ended:
            thread.queued = True
            thread.turn += 1
            self._ready.append(thread)

    def _at(self, when: float, thread: Thread) -> None:
        heapq.heappush(self._timers, (when, next(self._order), thread, thread.turn))

    # -- what a thread asks for ------------------------------------------------------------

    def give_way(self) -> None:
        """Let other threads run; others may go first."""
        thread = self._running()
        self._queue(thread)
        self._leave(thread)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of the world's time."""
        thread = self._running()
        end = self.now + max(0.0, seconds)
        while True:
            thread.timed_out = False
            self._at(end, thread)
            self._leave(thread)
            if self.now >= end:
                return

    def block(self, seconds: float | None = None) -> bool:
        """Wait until another thread calls `wake`; False if `seconds` have passed first."""
        thread = self._running()
        thread.timed_out = False
        if seconds is not None:
            self._at(self.now + max(0.0, seconds), thread)
        self._leave(thread)
        return not thread.timed_out

    def wake(self, thread: Thread) -> None:
        """Let a thread go on that has called `block`."""
        if not thread.queued:
            thread.timed_out = False
            self._queue(thread)

    def _running(self) -> Thread:
        thread = self.current
        if thread is None or self.over or not thread.process.alive:
            raise Killed
        return thread

    def _leave(self, thread: Thread) -> None:
        loop = events._get_running_loop()
        events._set_running_loop(None)
        assert self.hub is not None
        try:
            self.hub.switch()
        finally:
            events._set_running_loop(loop)
        if not thread.process.alive:
            raise Killed


class Thread:
    """Stands for `threading.Thread`."""

    kernel: Kernel

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        process: Process | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self.kernel = kernel or Thread.kernel
        self.process = process or self.kernel.process
        self.name = name or "thread"
        self.daemon = daemon
        self._call = (target, args, kwargs or {})
        self.queued = self.ended = self.timed_out = self.held_up = False
        self.turn = 0
        self.is_main = False
        self._started = False
        self._joining: list[Thread] = []
        self._greenlet = greenlet.greenlet(self._run)

    def start(self) -> None:
        kernel = self.kernel
        ours = kernel.current is not None and kernel.current.process is self.process
        if ours and kernel.threads_fail and kernel.rng.random() < kernel.threads_fail:
            raise RuntimeError("can't start new thread")
        self._started = True
        self.process.threads.append(self)
        self.kernel._queue(self)

    def is_alive(self) -> bool:
        return self._started and not self.ended

    @property
    def ident(self) -> int:
        return id(self)

    def join(self, timeout: float | None = None) -> None:
        kernel = self.kernel
        end = None if timeout is None else kernel.now + timeout
        while self.is_alive():
            left = None if end is None else end - kernel.now
            if left is not None and left <= 0:
                return
            self._joining.append(kernel._running())
            kernel.block(left)

    def switch(self) -> None:
        """Go on with it. Called by the kernel."""
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def kill(self) -> None:
        """Unwind it. Called by the kernel, when its process is dead."""
        if self.ended or not self._started:
            self.ended = True
            return
        here, before = self.kernel.current, events._get_running_loop()
        hub = self.kernel.hub
        self.kernel.current = self
        self.kernel.hub = greenlet.getcurrent()
        events._set_running_loop(None)
        for _ in range(1000):
            self._greenlet.parent = greenlet.getcurrent()
            if self._greenlet.dead:
                break
            # One that has not begun passes it on.
            with contextlib.suppress(Killed):
                self._greenlet.throw(Killed)
        self.ended = True
        events._set_running_loop(before)
        self.kernel.current, self.kernel.hub = here, hub

    def _run(self) -> None:
        target, args, named = self._call
        try:
            if target is not None and self.process.alive:
                target(*args, **named)
        except Killed:
            pass
        except BaseException as error:
            if self.process.alive and self.kernel.failed is None:
                self.kernel.failed = error
        self.ended = True
        events._set_running_loop(None)
        if self.process.alive and not self.is_main:
            self.process.threads.remove(self)
        for one in self._joining:
            self.kernel.wake(one)


class Lock:
    """Stands for `threading.Lock`."""

    kernel: Kernel

    def __init__(self) -> None:
        self._holder: object = None
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self.kernel
        if self._holder is None:
            self._holder = kernel.current or kernel
            return True
        if not blocking:
            return False
        end = None if timeout < 0 else kernel.now + timeout
        thread = kernel._running()
        while self._holder is not None:
            left = None if end is None else end - kernel.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(thread)
            if not kernel.block(left) and thread in self._waiting:
                self._waiting.remove(thread)
        self._holder = thread
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("release unlocked lock")
        self._holder = None
        if self._waiting:
            self.kernel.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """Stands for `threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_owned():
            self._count += 1
            return True
        if super().acquire(blocking, timeout):
            self._count = 1
            return True
        return False

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            super().release()

    def _is_owned(self) -> bool:
        return self._holder is not None and self._holder is (self.kernel.current or self.kernel)

    def _release_save(self) -> int:
        count, self._count = self._count, 0
        super().release()
        return count

    def _acquire_restore(self, count: int) -> None:
        super().acquire()
        self._count = count


class _Selector:
    """The selector of a loop that waits for nothing but timers and other threads."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._waiting: Thread | None = None
        self._told = False

    def select(self, timeout: float | None) -> list[object]:
        kernel = self._kernel
        if self._told or (timeout is not None and timeout <= 0):
            self._told = False
            kernel.give_way()
            return []
        self._waiting = kernel._running()
        kernel.block(timeout)
        self._waiting, self._told = None, False
        return []

    def tell(self) -> None:
        self._told = True
        if self._waiting is not None:
            self._kernel.wake(self._waiting)


class Loop(base_events.BaseEventLoop):
    """An event loop on the kernel's clock."""

    kernel: Kernel

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector(self.kernel)
        self.process = self.kernel.process
        self.process.loops.append(self)
        self.set_exception_handler(_fail)

    def time(self) -> float:
        return self.kernel.now

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        self._selector.tell()

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def call() -> None:
            result, raised = None, None
            try:
                result = func(*args)
            except Exception as error:
                raised = error
            if not self.is_closed():
                self.call_soon_threadsafe(finish, result, raised)

        try:
            Thread(target=call, name="executor").start()
        except RuntimeError:
            # As in Python's own, another thread makes the call when it is done with its own.
            self.call_later(self.kernel.rng.random(), call)
            raise
        return future

    def close(self) -> None:
        if self in self.process.loops and not self.is_running():
            self.process.loops.remove(self)
        super().close()


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would only log fails the world."""
    error = context.get("exception") or AssertionError(
        f"{context.get('message')} {context.get('task') or context.get('future') or ''}"
    )
    assert isinstance(loop, Loop)
    if loop.process.alive and not loop.kernel.over and loop.kernel.failed is None:
        loop.kernel.failed = error
