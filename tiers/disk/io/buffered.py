"""Through the page cache: where O_DIRECT is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiers.disk.io.base import IOBackend, read_whole, write_whole

__all__ = ["BufferedIO"]


class BufferedIO(IOBackend):
    """Moves bytes through the page cache; works on every file system."""

    name = "buffered"

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read_whole(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        write_whole(fd, buffers, offset)
