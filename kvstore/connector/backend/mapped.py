"""Blocks in a file that is mapped into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from kvstore.connector.backend.rows import RowBackend
from kvstore.errors import ConfigError, PathUnusableError
from kvstore.tiers.pinned import round_to_page

__all__ = ["MappedFileBackend"]


class MappedFileBackend(RowBackend):
    """Rows of a file, which the system writes back and reads ahead as it likes.

    For a medium that is memory (tmpfs, DAX) or larger than memory. What the file holds is worth
    nothing without the manager that knows it: it is made anew, and removed at the end.
    """

    def __init__(
        self, block_size: int, num_blocks: int, block_bytes: int, path: str | os.PathLike[str]
    ) -> None:
        """
        Args:
            block_bytes: bytes of a block; a row is as long, rounded up to a page.
            path: the file, which must not exist. All its space is allocated.

        Raises:
            ConfigError: if a number is below 1.
            PathUnusableError: if the file exists or cannot be made; then none is left.
        """
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(
                f"a file of {num_blocks} blocks of {block_bytes} bytes: both must be at least 1"
            )
        row_bytes = round_to_page(block_bytes)
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except (OSError, ValueError) as error:
            raise PathUnusableError(f"{self.path}: {_said(error)}") from error
        try:
            os.posix_fallocate(fd, 0, num_blocks * row_bytes)
            self._memory = mmap.mmap(fd, num_blocks * row_bytes)
        except (OSError, OverflowError, ValueError) as error:
            self.path.unlink()
            raise PathUnusableError(f"{self.path}: {_said(error)}") from error
        finally:
            os.close(fd)
        array = np.frombuffer(self._memory, np.uint8).reshape(num_blocks, row_bytes)
        super().__init__(block_size, "mapped file", array)

    def close(self) -> None:
        """Remove the file. Arrays made from it keep its memory until they go."""
        with contextlib.suppress(AttributeError):
            del self.array
        with contextlib.suppress(BufferError):
            self._memory.close()
        self.path.unlink(missing_ok=True)


def _said(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
