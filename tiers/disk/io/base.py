"""How bytes are moved between a file and memory: one small interface."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["IOV_MAX", "IOBackend", "IORequest", "read_whole", "write_whole"]

IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Most buffers that one vectored call takes."""


class IORequest(NamedTuple):
    """Neighbouring bytes of one file, and the memory they go to or come from."""

    fd: int
    buffers: Sequence[memoryview]
    offset: int


class IOBackend(ABC):
    """Moves extents: one call for many neighbouring slots, or many such calls at once.

    All calls block, release the GIL while they do, and may run in several
    threads at once. Buffers and offsets are multiples of 4096.
    """

    name: str

    @abstractmethod
    def open(self, path: Path, *, writable: bool = True) -> int:
        """A descriptor for `read`, and `write` where `writable`, on an existing file."""

    def close(self, fd: int) -> None:
        """Close a descriptor of `open`. Nothing uses it any more."""
        os.close(fd)

    @abstractmethod
    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on. Returns the bytes read; fewer at the end of the file.

        Raises:
            OSError: as the system says.
        """

    @abstractmethod
    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write `buffers` at `offset`, all of them.

        Raises:
            OSError: as the system says; part may have been written then.
        """

    def read_all(self, requests: Sequence[IORequest]) -> list[int | OSError]:
        """`read` for each request: the bytes read, or what was raised. One fails alone."""
        outcomes: list[int | OSError] = []
        for request in requests:
            try:
                outcomes.append(self.read(request.fd, request.buffers, request.offset))
            except OSError as error:
                outcomes.append(error)
        return outcomes

    def write_all(self, requests: Sequence[IORequest]) -> list[int | OSError]:
        """`write` for each request: the bytes written, or what was raised. One fails alone."""
        outcomes: list[int | OSError] = []
        for request in requests:
            try:
                self.write(request.fd, request.buffers, request.offset)
                outcomes.append(sum(len(buffer) for buffer in request.buffers))
            except OSError as error:
                outcomes.append(error)
        return outcomes


def read_whole(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """``preadv`` until all buffers are full or the file ends."""
    total = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < total:
        count = os.preadv(fd, _rest(buffers, done), offset + done)
        if not count:
            break
        done += count
    return done


def write_whole(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """``pwritev`` until all buffers are written."""
    total = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < total:
        count = os.pwritev(fd, _rest(buffers, done), offset + done)
        if not count:
            raise OSError(errno.EIO, "not a byte was written, and no reason given")
        done += count


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    if not done:
        return buffers
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
