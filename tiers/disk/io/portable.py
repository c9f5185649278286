"""Portable I/O: Python's own files by aiofiles, on any system.

No call of a particular system is made: a run is a seek and reads or writes
of one buffer after the other, unbuffered. Runs of one batch are under way at
once where they lie in different files. It is slower than every other backend
(docs/decisions/disk.md), and the one that is left where none of them works.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiofiles.threadpool import wrap

from kvstore.tiers.disk.io.base import IOBackend, IORequest, Moved, moved

__all__ = ["PortableIO"]

_T = TypeVar("_T")


class _File:
    """An open file, and a lock for its one position."""

    def __init__(self, fd: int, mode: str) -> None:
        # The descriptor is closed by the caller that opened it.
        self.handle: Any = wrap(io.FileIO(fd, mode, closefd=False))
        self.turn = asyncio.Lock()


class PortableIO(IOBackend):
    """Moves bytes by aiofiles, on a loop in a thread of its own."""

    name = "portable"

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def open(self, path: Path, *, writable: bool = True) -> int:
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        flags |= getattr(os, "O_BINARY", 0) | (os.O_RDWR if writable else os.O_RDONLY)
        fd = os.open(path, flags)
        try:
            self._files[fd] = _File(fd, "r+" if writable else "r")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self, fd: int) -> None:
        self._files.pop(fd, None)
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._run(self._move("readinto", fd, buffers, offset))

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._run(self._write(fd, buffers, offset))

    def move_all(
        self, requests: Sequence[IORequest], hashed: int = 0, *, load: bool
    ) -> list[Moved | OSError]:
        move = partial(self._move, "readinto") if load else self._write
        outcomes = self._run(self._all(move, requests))
        return [
            outcome if isinstance(outcome, OSError) else moved(request, outcome, hashed)
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    async def _all(
        self,
        move: Callable[[int, Sequence[memoryview], int], Awaitable[int]],
        requests: Sequence[IORequest],
    ) -> list[int | OSError]:
        outcomes = await asyncio.gather(
            *(move(request.fd, request.buffers, request.offset) for request in requests),
            return_exceptions=True,
        )
        told: list[int | OSError] = []
        for outcome in outcomes:
            if isinstance(outcome, OSError):
                # Its frames refer to the memory.
                outcome = outcome.with_traceback(None)
            elif isinstance(outcome, Exception):
                # As when the interpreter ends, and its files take no calls any more.
                outcome = OSError(errno.EIO, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            told.append(outcome)
        return told

    async def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = await self._move("write", fd, buffers, offset)
        if done < sum(map(len, buffers)):
            raise OSError(errno.EIO, "not a byte was written, and no reason given")
        return done

    async def _move(self, call: str, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Make a call of the file for all of `buffers`; the bytes moved, until none are."""
        file = self._files.get(fd)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        move, done = getattr(file.handle, call), 0
        async with file.turn:
            await file.handle.seek(offset)
            for buffer in buffers:
                while len(buffer):
                    count = await move(buffer)
                    if not count:
                        return done
                    done += count
                    buffer = buffer[count:]
        return done

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the end of `work`, which runs on the backend's loop."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_serve, args=(self._loop,), name="kvstore-portable-io", daemon=True
                ).start()
                # Not at the end of the interpreter, when a store may still have to be closed.
                weakref.finalize(self, _stop, self._loop).atexit = False
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    # At the end of the interpreter the thread may be gone already.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)
