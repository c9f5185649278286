"""io_uring: several chunks of an extent in flight at once from one thread.

Each I/O thread has a ring of its own. Completions are waited for on an eventfd,
because waiting inside liburing would hold the GIL. Needs the package
``liburing``; where it or the kernel's permission is missing, the probe says so
and another backend is used. Some builds of it use instructions that not every processor
has, which ends the whole process: so it is tried in a child first.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiers.disk.io.base import IOBackend, read_whole, write_whole

__all__ = ["UringIO"]

DEPTH = 16

_TRIAL = "import liburing; ring = liburing.Ring(); liburing.io_uring_queue_init(2, ring, 0)"
_TRIAL_SECONDS = 30.0


class UringIO(IOBackend):
    """O_DIRECT through io_uring.

    Raises:
        OSError: at construction, ENOSYS, when liburing is not installed or cannot run here.
    """

    name = "uring"

    def __init__(self) -> None:
        try:
            import liburing
        except ImportError as error:
            raise OSError(errno.ENOSYS, "the package liburing is not installed") from error
        if not _survives():
            raise OSError(errno.ENOSYS, "the package liburing crashes on this processor")
        self._uring: Any = liburing
        self._local = threading.local()
        self._iovecs: dict[tuple[int, int], Any] = {}

    def open(self, path: Path, *, writable: bool = True) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, mode | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer, moved in zip(buffers, self._run(fd, buffers, offset, write=False), strict=True):
            if moved < len(buffer):
                # A short read: the end of the file, or the rest comes with another call.
                moved += read_whole(fd, [buffer[moved:]], offset + done + moved)
            done += moved
            if moved < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        done = 0
        for buffer, moved in zip(buffers, self._run(fd, buffers, offset, write=True), strict=True):
            if moved < len(buffer):
                write_whole(fd, [buffer[moved:]], offset + done + moved)
            done += len(buffer)

    def _run(
        self, fd: int, buffers: Sequence[memoryview], offset: int, *, write: bool
    ) -> list[int]:
        """Move all buffers; returns the bytes moved of each.

        Raises:
            OSError: of the first that failed, after all have ended: the kernel
                does not touch the buffers any more.
        """
        ring = self._ring()
        moved = [0] * len(buffers)
        prepare = self._uring.io_uring_prep_writev if write else self._uring.io_uring_prep_readv
        begun = ended = 0
        while ended < len(buffers):
            while begun < len(buffers) and begun - ended < DEPTH:
                sqe = self._uring.io_uring_get_sqe(ring.ring)
                prepare(sqe, fd, self._iovec(buffers[begun]), offset)
                sqe.user_data = begun
                offset += len(buffers[begun])
                begun += 1
            self._uring.io_uring_submit(ring.ring)
            ring.wait()
            for index, result in ring.take():
                moved[index] = result
                ended += 1
        for result in moved:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
        return moved

    def _iovec(self, buffer: memoryview) -> Any:
        # liburing never lets go of what an Iovec was made from. So it gets a view that
        # owns nothing, and one Iovec per row is kept instead of one per call made.
        place = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
        iovec = self._iovecs.get(place)
        if iovec is None:
            view = (ctypes.c_char * place[1]).from_address(place[0])
            iovec = self._iovecs[place] = self._uring.Iovec([memoryview(view).cast("B")])
        return iovec

    def _ring(self) -> _Ring:
        ring: _Ring | None = getattr(self._local, "ring", None)
        if ring is None:
            ring = self._local.ring = _Ring(self._uring)
        return ring


@functools.cache
def _survives() -> bool:
    """Whether a process that uses liburing lives on. An error that it raises is no crash."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, timeout=_TRIAL_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode >= 0


class _Ring:
    """The ring of one thread and its eventfd."""

    def __init__(self, uring: Any) -> None:
        self._uring = uring
        self.ring = uring.Ring()
        uring.io_uring_queue_init(DEPTH, self.ring, 0)
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, _close, uring, self.ring, self._event)
        uring.io_uring_register_eventfd(self.ring, self._event)
        self._cqe = uring.Cqe()

    def wait(self) -> None:
        """Until at least one completion has come since the last `wait`."""
        os.eventfd_read(self._event)

    def take(self) -> list[tuple[int, int]]:
        """(user data, result) of the completions that are there."""
        taken = []
        for _ in range(self._uring.io_uring_cq_ready(self.ring)):
            self._uring.io_uring_peek_cqe(self.ring, self._cqe)
            entry = self._cqe[0]
            try:
                result = int(entry.res)
            except OSError as error:
                # liburing raises what the kernel reports; the entry must be taken all the same,
                # or the next call of this thread would take it for its own.
                result = -(error.errno or errno.EIO)
            taken.append((int(entry.user_data), result))
            self._uring.io_uring_cqe_seen(self.ring, entry)
        return taken


def _close(uring: Any, ring: Any, event: int) -> None:
    uring.io_uring_queue_exit(ring)
    os.close(event)
