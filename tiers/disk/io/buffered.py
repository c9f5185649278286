"""Buffered and direct I/O: vectored calls through the page cache, or past it with O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.tiers.disk.io.base import IOBackend, read_whole, write_whole

__all__ = ["BufferedIO", "DirectIO"]


class BufferedIO(IOBackend):
    """Moves bytes through the page cache; works on every file system.

    Attributes:
        flags: with which files are opened, beside those of each backend.
    """

    name = "buffered"
    flags = 0

    def open(self, path: Path, *, writable: bool = True) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, mode | self.flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read_whole(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        write_whole(fd, buffers, offset)


class DirectIO(BufferedIO):
    """Moves bytes between the device and host memory without the page cache."""

    name = "direct"
    flags = os.O_DIRECT
