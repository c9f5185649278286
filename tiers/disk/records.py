"""The index of one open segment: records read and written beside the data.

Records go through the page cache by plain calls, never through a mapping. A
thread that touches a mapping waits in a page fault while the file system is
frozen or its medium is slow, and a fault holds the lock of the whole address
space: every allocation of the process would wait behind it.

A write takes the file's write lock, which direct transfers of the same file
hold shared. With native AIO and io_uring they hold it only until they are handed
over, so a record waits a few microseconds; with blocking calls (``direct``)
it waits for the transfers that run.
"""

from __future__ import annotations

import errno
import os

__all__ = ["RecordFile"]


class RecordFile:
    """Reads and writes bytes at the beginning of a file. Takes over `fd` and closes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer at the end of the file.

        Raises:
            OSError: as the system says.
        """
        whole = os.pread(self._fd, size, offset)
        while 0 < len(whole) < size:
            more = os.pread(self._fd, size - len(whole), offset + len(whole))
            if not more:
                break
            whole += more
        return whole

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`; when this returns it outlives the process.

        Raises:
            OSError: as the system says.
        """
        done = os.pwrite(self._fd, data, offset)
        while done < len(data):
            count = os.pwrite(self._fd, data[done:], offset + done)
            if not count:
                raise OSError(errno.EIO, "not a byte was written, and no reason given")
            done += count

    def close(self) -> None:
        """Close the file. What was written is kept by the system."""
        os.close(self._fd)
