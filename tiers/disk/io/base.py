"""I/O backend: the interface for moving bytes between a file and memory."""

from __future__ import annotations

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.tiers.disk.digest import digests

__all__ = [
    "IOV_MAX",
    "IOBackend",
    "IORequest",
    "Later",
    "Moved",
    "UnderWay",
    "check_room",
    "file_system",
    "moved",
    "read_bytes",
    "read_whole",
    "write_whole",
]

IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Most buffers that one vectored call takes."""

XFS, XFS_EXTENT = 0x58465342, 8 * 2**30
"""Its type in ``fstatfs``, and how much it allocates in one go: either all of that or nothing. Room
that it has set aside for files that grow counts as taken, and goes to whoever needs it.
"""


class IORequest(NamedTuple):
    """Neighbouring bytes of one file, and the memory they go to or come from."""

    fd: int
    buffers: Sequence[memoryview]
    offset: int


class Moved(NamedTuple):
    """The result of a request.

    Attributes:
        length: bytes; of a read fewer than asked for at the end of the file.
        digests: of the first bytes of each buffer, where they were asked for, as far as
            these were moved.
    """

    length: int
    digests: Sequence[bytes] = ()


class UnderWay(ABC):
    """Requests that have begun."""

    @abstractmethod
    def waits(self) -> bool:
        """Whether the system still moves bytes, and the thread may do something else."""

    @abstractmethod
    def end(self) -> list[Moved | OSError]:
        """Wait for all: what each has moved, or what it raised. One fails alone."""


class IOBackend(ABC):
    """Moves extents: one call for many adjacent slots, or many such calls at once.

    All calls block, release the GIL while they do, and may run in several
    threads at once. Buffers and offsets are multiples of 4096.
    """

    name: str
    descriptors: int = 2
    """Of each segment, with that of its header."""

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

    def begin(self, requests: Sequence[IORequest], hashed: int = 0, *, load: bool) -> UnderWay:
        """Begin to move all requests, in the background where that is possible.

        Args:
            hashed: the bytes of each buffer, from its first on, whose digest is wanted.
            load: whether they are read; else they are written.

        Returns:
            What ends it, by the same thread. Until then the memory is in use.
        """
        return Later(partial(self.move_all, requests, hashed, load=load))

    def move_all(
        self, requests: Sequence[IORequest], hashed: int = 0, *, load: bool
    ) -> list[Moved | OSError]:
        """Move all requests: what each has moved, or what it raised. One fails alone."""
        return [self.move_one(request, hashed, load=load) for request in requests]

    def move_one(self, request: IORequest, hashed: int = 0, *, load: bool) -> Moved | OSError:
        """`read` or `write` for one request, in plain calls."""
        fd, buffers, offset = request
        try:
            if load:
                count = self.read(fd, buffers, offset)
            else:
                self.write(fd, buffers, offset)
                count = sum(map(len, buffers))
        except OSError as error:
            # Its frames refer to the memory, and their callers to it: a cycle.
            return error.with_traceback(None)
        return moved(request, count, hashed)


class Later(UnderWay):
    """Moves under way of backends that move bytes only while a thread waits."""

    def __init__(self, move: Callable[[], list[Moved | OSError]]) -> None:
        self._move = move

    def waits(self) -> bool:
        return False

    def end(self) -> list[Moved | OSError]:
        return self._move()


def moved(request: IORequest, count: int, hashed: int) -> Moved:
    """`count` bytes of a request were moved; their digests are made, if `hashed` bytes are."""
    return Moved(count, digests(request.buffers, hashed, count) if hashed else ())


def check_room(fd: int, size: int) -> None:
    """Refuse to let a file grow to `size` bytes where its disk has no room for that.

    An allocation that fails takes all that there is from everybody else until it does.

    Raises:
        OSError: ENOSPC if there is no room.
    """
    more = size - os.fstat(fd).st_blocks * 512
    try:
        disk = os.statvfs(fd)
    except OSError:
        return  # The allocation will tell.
    free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize
    # A file system that does not tell its size says 0.
    if disk.f_blocks and more > free and (more >= XFS_EXTENT or file_system(fd) != XFS):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def file_system(fd: int) -> int:
    """The type of a file's file system, as ``fstatfs`` has it; 0 if it does not tell."""
    # ``struct statfs`` begins with it, as a long.
    told = (ctypes.c_long * 64)()
    if ctypes.CDLL(None).fstatfs(fd, told):
        return 0
    return int(told[0]) & 0xFFFFFFFF


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


def read_bytes(fd: int, size: int, offset: int) -> bytes:
    """``pread`` until there are `size` bytes or the file ends.

    Network file systems, and calls that a signal interrupts, return less than they could.
    """
    whole = os.pread(fd, size, offset)
    while 0 < len(whole) < size:
        more = os.pread(fd, size - len(whole), offset + len(whole))
        if not more:
            break
        whole += more
    return whole


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What a full disk says, in its words."""


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
