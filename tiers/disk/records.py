"""The index of one open segment: records read and written beside the data.

Records are written through a shared mapping, so a write is a copy to memory that
outlives the process and waits for nothing. ``pwrite`` would take the file's
write lock, which on ext4 and xfs every direct transfer of the same file holds
shared until it has ended: each record would wait for the data in flight and
hold up what comes after.

Touching a mapping ends the process by SIGBUS where the file was cut short or the
medium fails. So the kernel makes the copies: ``preadv`` from a small memory file
into the mapping, and ``pwritev`` back, answer EFAULT instead.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

__all__ = ["RecordFile"]


class RecordFile:
    """Reads and writes bytes at the beginning of a file.

    Takes over `fd` and closes it.

    Args:
        fd: opened for reading, and for writing where `size` is given.
        size: length of what may be written; None for a file that is only read.
    """

    def __init__(self, fd: int, size: int | None) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        if size is not None:
            try:
                self._map = mmap.mmap(fd, size)
                self._view = memoryview(self._map)
            except (OSError, ValueError):
                return  # A file system without shared mappings: pwrite it is.
            # The mapping keeps a descriptor of its own, and one per segment is enough.
            os.close(fd)

    @property
    def mapped(self) -> bool:
        """Whether writes go through a mapping."""
        return self._view is not None

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer at the end of the file.

        Raises:
            OSError: as the system says.
        """
        if self._view is None:
            return os.pread(self._fd, size, offset)
        scratch, done = _scratch(), 0
        with self._view[offset : offset + size] as source:
            while done < len(source):
                done += os.pwritev(scratch, [source[done:] if done else source], done)
        return os.pread(scratch, done, 0)

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: as the system says; EFAULT when the file was cut short or its medium fails.
        """
        done = 0
        if self._view is None:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
            return
        scratch = _scratch()
        os.pwrite(scratch, data, 0)
        with self._view[offset : offset + len(data)] as target:
            while done < len(data):
                done += os.preadv(scratch, [target[done:] if done else target], done)

    def close(self) -> None:
        """Close the file. What was written is kept by the system."""
        if self._map is None or self._view is None:
            os.close(self._fd)
        else:
            self._view.release()
            self._map.close()


class _Scratch:
    """The memory file of one thread."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-records", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)


_local = threading.local()


def _scratch() -> int:
    scratch: _Scratch | None = getattr(_local, "scratch", None)
    if scratch is None:
        scratch = _local.scratch = _Scratch()
    return scratch.fd
