"""Machine: what Python offers of a system, replaced while a world is alive.

Everything below `files.ROOT` goes to the simulated file system, everything else to the real one.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import fcntl
import functools
import gc
import logging
import os
import random
import secrets
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import kvstore.api.portal
import kvstore.concurrency
import kvstore.tiers.disk.segment
import kvstore.tiers.pinned
from kvstore.policies import registry
from tests.world import kernel as simulated
from tests.world.files import FIRST_FD, Files
from tests.world.kernel import Kernel, Killed

__all__ = ["FD_CALLS", "PATH_CALLS", "Listener", "alive"]

FD_CALLS = (
    "close", "dup", "fstat", "fdatasync", "fsync", "ftruncate", "posix_fallocate", "pread",
    "preadv", "pwrite", "pwritev", "read", "write", "fdopen",
)  # fmt: skip
"""Calls of `os` that take a descriptor."""

PATH_CALLS = (
    "link", "listdir", "lstat", "mkdir", "open", "readlink", "rename", "rmdir", "scandir", "stat",
    "statvfs", "unlink", "utime",
)  # fmt: skip
"""Calls of `os` that take a path, perhaps below a folder's descriptor."""

PIDS = 10_000_000
"""Simulated processes have numbers above."""


class _LibC:
    """Stands for the C library, of which the disk tier uses `fallocate`."""

    def __init__(self, files: Files) -> None:
        self.fallocate = files.punch


@contextlib.contextmanager
def alive(
    kernel: Kernel,
    files: Files,
    rng: random.Random,
    skew: Callable[[], float],
    forget: Callable[[], None],
) -> Iterator[Listener]:
    """Replace the system for a block; what is logged in it goes to what is yielded.

    Args:
        forget: lets go of what was simulated, at the end.
        rng: makes what is random.
        skew: by how much the clock of the day is wrong, in seconds.
    """
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, what: object) -> None:
            stack.enter_context(patch.object(where, name, what))

        for name in FD_CALLS:
            put(os, name, _by_fd(getattr(os, name), getattr(files, name)))
        for name in PATH_CALLS:
            put(os, name, _by_path(name, getattr(os, name), getattr(files, name), files))
        put(os, "replace", os.rename)
        put(os, "remove", os.unlink)
        real_pid = os.getpid

        def pid() -> int:
            outside = kernel.current is None and not kernel.burying
            return real_pid() if outside else kernel.process.pid

        put(os, "getpid", _for_us(pid, real_pid))
        put(fcntl, "flock", _by_fd(fcntl.flock, files.flock))
        put(fcntl, "ioctl", _by_fd(fcntl.ioctl, _no_ioctl))
        put(kvstore.tiers.disk.segment, "_libc", _LibC(files))
        # It waits however often it is interrupted; to be killed is another thing.
        mortal = SimpleNamespace(suppress=lambda *kinds: contextlib.suppress(Exception))
        put(kvstore.api.portal, "contextlib", mortal)
        put(kvstore.tiers.pinned, "claimed", lambda size: contextlib.nullcontext())
        # It reads the files of all packages each time a server starts.
        put(registry, "entry_points", functools.cache(entry_points))
        for place in (kvstore.concurrency, asyncio):
            put(place, "new_event_loop", _for_us(simulated.Loop, place.new_event_loop))
        for kind in (simulated.Thread, simulated.Lock, simulated.Loop):
            stack.enter_context(patch.object(kind, "kernel", kernel, create=True))
        put(threading, "Thread", simulated.Thread)
        for name, kind in (
            ("Lock", simulated.Lock),
            ("RLock", simulated.RLock),
            ("_allocate_lock", simulated.Lock),
        ):
            put(threading, name, _for_us(kind, getattr(threading, name)))
        real = threading.current_thread
        put(threading, "current_thread", _for_us(_current(kernel, real), real))
        clocks: dict[str, Callable[..., Any]] = {
            "monotonic": lambda: kernel.now,
            "monotonic_ns": lambda: int(kernel.now * 1e9),
            "perf_counter": lambda: kernel.now,
            "time": lambda: files.now_ns() / 1e9 + skew(),
            "time_ns": lambda: files.now_ns() + int(skew() * 1e9),
            "sleep": kernel.sleep,
        }
        for name, clock in clocks.items():
            put(time, name, _for_us(clock, getattr(time, name)))
        put(threading, "_time", time.monotonic)
        put(asyncio, "set_event_loop", _for_us(lambda loop: None, asyncio.set_event_loop))
        put(secrets, "token_hex", lambda count=32: rng.randbytes(count).hex())
        put(uuid, "uuid4", lambda: uuid.UUID(bytes=rng.randbytes(16)))
        put(sys, "set_asyncgen_hooks", lambda *args, **named: None)
        before = set(weakref.finalize._registry)  # type: ignore[attr-defined]
        handler = Listener(kernel)
        logger = logging.getLogger("kvstore")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        # The coroutines of the dead are destroyed, and say so.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        put(sys, "unraisablehook", lambda told: None)
        gc.disable()
        stack.callback(gc.enable)
        # What is there already is not looked through at each burial, and not afterwards: a process
        # of tests has much of it. What is garbage by now is none for good.
        gc.collect(1)
        gc.freeze()
        try:
            yield handler
        finally:
            kernel.over = True
            for process in list(kernel.processes):
                kernel.kill(process)
            kernel.forget()
            forget()
            # What is destroyed may keep others until the next time.
            while gc.collect():
                pass
            for one in set(weakref.finalize._registry) - before:  # type: ignore[attr-defined]
                one.detach()


def _for_us(ours: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` in the thread in which the world runs; those of a test's own tools keep theirs."""
    here = _thread.get_ident()

    def call(*args: Any, **named: Any) -> Any:
        return (ours if _thread.get_ident() == here else real)(*args, **named)

    return call


def _current(kernel: Kernel, real: Callable[[], object]) -> Callable[[], object]:
    return lambda: real() if kernel.current is None else kernel.current


def _by_fd(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(fd: Any, *args: Any, **named: Any) -> Any:
        if isinstance(fd, int) and fd >= FIRST_FD:
            return ours(fd, *args, **named)
        return real(fd, *args, **named)

    return call


def _by_path(
    name: str, real: Callable[..., Any], ours: Callable[..., Any], files: Files
) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **named: Any) -> Any:
        if files.is_path(path) or (named.get("dir_fd") or 0) >= FIRST_FD:
            return ours(path, *args, **named)
        text = str(path)
        if text.startswith("/proc/"):
            if name == "listdir" and text == "/proc/self/fd" and files.kernel.current is not None:
                return list(map(str, files.fds_of(files.kernel.process)))
            number = text.removeprefix("/proc/")
            if number.isdigit() and int(number) > PIDS:
                living = any(one.pid == int(number) for one in files.kernel.processes)
                return real("/proc/self" if living else "/proc/0", *args, **named)
        if name == "open" and text == "/" and files.kernel.current is not None:
            return ours(path, *args, **named)
        return real(path, *args, **named)

    return call


def _no_ioctl(fd: int, *args: object) -> None:
    raise OSError(25, "Inappropriate ioctl for device")


class Listener(logging.Handler):
    """Keeps the last lines of the log; a line with a traceback fails the world."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(logging.INFO)
        self._kernel = kernel
        self.tell: Callable[[str], None] = lambda text: None

    def createLock(self) -> None:  # noqa: N802
        # A real one: all threads of the world are one of the system, which may take it again.
        self.lock = _thread.RLock()

    def emit(self, record: logging.LogRecord) -> None:
        current = self._kernel.current
        if current is None or not current.process.alive or self._kernel.over:
            return
        self.tell(f"log: {record.levelname.lower()}: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if (
            error is not None
            and not isinstance(error, (Killed, GeneratorExit))
            and self._kernel.failed is None
        ):
            self._kernel.failed = error
