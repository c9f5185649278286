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

import itertools
import mmap
import os
import threading

__all__ = ["RecordFile"]

PIECE_BYTES = 64 * 1024
"""Bytes that are copied at once."""


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
                self._scratch = _own_scratch()
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
        fd, place = self._scratch.fd, self._scratch.place
        whole = bytearray()
        for start in range(offset, offset + size, PIECE_BYTES):
            with self._view[start : min(start + PIECE_BYTES, offset + size)] as source:
                done = 0
                while done < len(source):
                    done += os.pwritev(fd, [source[done:] if done else source], place + done)
                whole += os.pread(fd, done, place)
        if size > PIECE_BYTES and self._map is not None:
            # A whole index was read: its pages need not count as this process's memory.
            self._map.madvise(mmap.MADV_DONTNEED)
        return bytes(whole)

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: as the system says; EFAULT when the file was cut short or its medium fails.
        """
        if self._view is None:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
            return
        fd, place = self._scratch.fd, self._scratch.place
        for start in range(0, len(data), PIECE_BYTES):
            piece, done = data[start : start + PIECE_BYTES], 0
            os.pwrite(fd, piece, place)
            with self._view[offset + start : offset + start + len(piece)] as target:
                while done < len(piece):
                    done += os.preadv(fd, [target[done:] if done else target], place + done)

    def close(self) -> None:
        """Close the file. What was written is kept by the system."""
        if self._map is None or self._view is None:
            os.close(self._fd)
        else:
            self._view.release()
            self._map.close()


class _Scratch:
    """One memory file for all threads of this process, each at a place of its own."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-records", os.MFD_CLOEXEC)
        self._local = threading.local()
        self._places = itertools.count()

    @property
    def place(self) -> int:
        """Where the part of the calling thread begins."""
        place: int | None = getattr(self._local, "place", None)
        if place is None:
            place = self._local.place = next(self._places) * PIECE_BYTES
        return place


_lock = threading.Lock()
_scratch: _Scratch | None = None


def _own_scratch() -> _Scratch:
    global _scratch
    with _lock:
        if _scratch is None:
            _scratch = _Scratch()
        return _scratch


def _forget_in_child() -> None:
    # Parent and child would write to the same places of the same memory.
    global _scratch, _lock
    _lock = threading.Lock()
    if _scratch is not None:
        os.close(_scratch.fd)
        _scratch = None


os.register_at_fork(after_in_child=_forget_in_child)
