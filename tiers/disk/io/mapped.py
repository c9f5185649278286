"""Mapped I/O: for file systems that are memory already (tmpfs, ramfs).

A mapping of any other file is a trap: every page is a fault, which waits for the
medium while it holds the lock of the address space, and a medium error is a
signal that ends the process. There the bytes go through the page cache by plain
calls, which is what a mapping of DAX memory comes to as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.tiers.disk.descriptors import SPARE_DESCRIPTORS, descriptors_left
from kvstore.tiers.disk.io.base import file_system
from kvstore.tiers.disk.io.buffered import BufferedIO

__all__ = ["MappedIO"]

Pages = npt.NDArray[np.uint8]

MEMORY = {0x01021994, 0x858458F6}
"""The types of tmpfs and ramfs in ``fstatfs``: these can be neither slow nor frozen."""


class MappedIO(BufferedIO):
    """Copies from host memory to a mapping of the file, where files are memory.

    A mapping belongs to a descriptor and is made at its first use. The size of the file is looked
    at before every copy. Reads are plain calls: its owner may have removed the file, and then a
    page of the mapping is one that is allocated anew, or a signal.
    """

    name = "mmap"
    descriptors = 3

    def __init__(self) -> None:
        self._maps: dict[int, tuple[Pages, int] | None] = {}
        self._lock = threading.Lock()

    def close(self, fd: int) -> None:
        # Without the lock: the garbage collector may close a file in a thread that holds it.
        self._maps.pop(fd, None)
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)
        pages = self._pages(fd, end)
        if pages is None:
            super().write(fd, buffers, offset)
            return
        for buffer in buffers:
            np.copyto(pages[offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))
            offset += len(buffer)

    def _pages(self, fd: int, least: int) -> Pages | None:
        """The mapping of the file behind `fd`; None where it is not memory, or needs a descriptor
        too many.

        A shorter file is first extended to `least` bytes, and what it lacks is allocated.
        """
        with self._lock:
            if fd not in self._maps:
                self._maps[fd] = _NOTHING if file_system(fd) in MEMORY else None
            held = self._maps[fd]
            if held is None:
                return None
            found = os.fstat(fd)
            size = found.st_size
            if size < least:
                os.posix_fallocate(fd, 0, least)
                size = least
            # A hole for which there is no room any more would be a signal, too. Others may have
            # made one since. ramfs counts no blocks.
            if held[1] < size or 0 < 512 * found.st_blocks < size:
                os.posix_fallocate(fd, 0, size)
            if held[1] < size:
                if held[1] < 0 and not _descriptors_are_left():
                    return None
                mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                held = self._maps[fd] = (np.frombuffer(mapping, np.uint8), size)
        return held[0]


_NOTHING: tuple[Pages, int] = (np.zeros(0, np.uint8), -1)


def _descriptors_are_left() -> bool:
    with contextlib.suppress(OSError):
        return descriptors_left() >= SPARE_DESCRIPTORS // 4
    return False
