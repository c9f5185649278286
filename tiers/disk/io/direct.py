"""Direct I/O: O_DIRECT with vectored calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.tiers.disk.io.base import IOBackend, read_whole, write_whole

__all__ = ["DirectIO"]


class DirectIO(IOBackend):
    """Moves bytes between the device and host memory without the page cache."""

    name = "direct"

    def open(self, path: Path, *, writable: bool = True) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, mode | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read_whole(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        write_whole(fd, buffers, offset)
