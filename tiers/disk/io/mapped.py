"""Memory-mapped files: for file systems that are memory already (tmpfs, DAX).

On a disk this is the slow way: every page is a fault, and a medium error is a
signal that ends the process. It is therefore never chosen for a folder unless
asked for.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiers.disk.io.base import IOBackend

__all__ = ["MappedIO"]

Pages = npt.NDArray[np.uint8]


class MappedIO(IOBackend):
    """Copies between a mapping of the file and host memory.

    A mapping belongs to a descriptor and is made at its first use. The size of
    the file is looked at before every copy, so that one which was cut short is
    a short read and not a signal.
    """

    name = "mmap"

    def __init__(self) -> None:
        self._maps: dict[int, tuple[Pages, int]] = {}
        self._lock = threading.Lock()

    def open(self, path: Path, *, writable: bool = True) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        with self._lock:
            self._maps.pop(fd, None)
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        pages, size = self._pages(fd)
        done = 0
        for buffer in buffers:
            count = max(0, min(len(buffer), size - offset - done))
            into = np.frombuffer(buffer, np.uint8, count)
            np.copyto(into, pages[offset + done : offset + done + count])
            done += count
            if count < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)
        if os.fstat(fd).st_size < end:
            os.posix_fallocate(fd, 0, end)
        pages, _ = self._pages(fd)
        for buffer in buffers:
            np.copyto(pages[offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))
            offset += len(buffer)

    def _pages(self, fd: int) -> tuple[Pages, int]:
        """The mapping of the file behind `fd`, and the file's size now."""
        size = os.fstat(fd).st_size
        with self._lock:
            held = self._maps.get(fd)
            if held is None or held[1] < size:
                writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
                mapping = mmap.mmap(
                    fd,
                    size,
                    prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
                )
                held = (np.frombuffer(mapping, np.uint8), size)
                self._maps[fd] = held
        return held[0], size
