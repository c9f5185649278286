"""Rendezvous: let the processes of one server find their shared memory.

The memory is a memfd, which has no name in any file system. Processes find each
other by a name in the system's abstract socket namespace. The process that binds
it is the host: it creates the memory, empty, and then listens. Later processes
connect, learn from the system which process listens, and open the memory through
the descriptors of that process. Nothing is ever sent.

The name, the memory and the count of processes end with the processes that hold
them. So a process that is killed at any moment leaves nothing behind and blocks no
other: the next process binds the name, and looks for memory that others still have
open before it creates any.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError, PathUnusableError

__all__ = ["OtherShapeError", "Rendezvous", "is_complete", "stem_of"]

PAUSE_SECONDS = 0.005
TAKEN_SECONDS = 3.0
"""How long another process may have the place of this one."""

GRACE_SECONDS = 1.0
"""How long a host may be without the memory, because it is about to end."""

_WAITING = 1024
"""Backlog of connections, which are never accepted; each process leaves one."""

_COMPLETE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_LOCK = "hhqqi4x"
"""The C structure ``flock`` of 64-bit Linux."""


class OtherShapeError(ConfigError):
    """The other processes use another number or size of rows."""


class _ElsewhereError(Exception):
    """No region can be joined or created under this name: try the next."""


class Rendezvous:
    """Finds or creates the memory called `name`, shared by `mappers` processes of this user.

    Keep it as long as the memory, then close it.

    Args:
        shape: rows, bytes of a row, and whatever else must be the same for all of them.
        place: number of this process among the `mappers`, from 0; by default the first free one.

    Attributes:
        place: that number, once `meet` has returned.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], mappers: int, place: int | None = None
    ) -> None:
        self._name = name
        self._stem = stem_of(name)
        self._shape = "x".join(map(str, shape))
        self._mappers = mappers
        self._assigned = place is not None
        self._places = range(mappers) if place is None else [place]
        self.place = 0
        self._host: socket.socket | None = None
        self._lacking_since: float | None = None

    def meet(self, make: Callable[[str], int], timeout: float) -> int:
        """Return a descriptor of the others' memory, or of memory that `make` creates.

        Only one process at a time calls `make`, and only if there is no memory yet.

        Raises:
            OtherShapeError: if the others use another shape.
            ConfigError: if another process keeps the place of this one.
            PathUnusableError: if the memory was not found within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        number = 0
        while True:
            try:
                fd = self._host_at(number, make)
                if fd is None:
                    fd = self._join_at(number)
                if fd is not None:
                    self._count_in(fd)
                    return fd
            except _ElsewhereError:
                number += 1
                if time.monotonic() <= deadline:
                    continue
            if time.monotonic() > deadline:
                raise PathUnusableError(
                    f"shared memory {self._name!r}: another process holds its name and has not "
                    f"created the memory within {timeout:.0f} s"
                )
            time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Stop being the host: no more processes can join through this one."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _address(self, number: int) -> str:
        return f"\0{self._stem}{os.getuid()}-{number}"

    def _host_at(self, number: int, make: Callable[[str], int]) -> int | None:
        """Become the host and return the memory; None if another process is the host."""
        host = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            host.bind(self._address(number))
        except OSError as error:
            host.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise PathUnusableError(
                f"the processes of shared memory {self._name!r} cannot find each other by an "
                f"abstract socket: {error.strerror}"
            ) from error
        try:
            fd = self._open_of_anybody()
            if fd is None:
                fd = make(self._stem + self._shape)
            host.listen(_WAITING)
        except BaseException:
            host.close()
            raise
        self._host = host
        return fd

    def _join_at(self, number: int) -> int | None:
        """Open the memory of the host; None: try again."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)
            try:
                asking.connect(self._address(number))
            except ConnectionRefusedError:
                # The host does not listen yet, or has ended.
                return None
            except BlockingIOError:
                # So many have come and gone that it has no room for one more.
                fd = self._open_of_anybody()
                if fd is None:
                    self._wait_for_lacking_host(-1)
                return fd
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                raise PathUnusableError(
                    f"the name of shared memory {self._name!r} is held by a process of another "
                    f"user ({uid})"
                )
            fd = self._open_of(pid) if pid else None
            if fd is not None and not _is_alive(asking):
                # The host has ended, and its successor may have created other memory.
                os.close(fd)
                return None
        if fd is None:
            self._wait_for_lacking_host(pid)
        return fd

    def _wait_for_lacking_host(self, pid: int) -> None:
        """Wait for a host without the memory to end; give up its name if a fork keeps it."""
        now = time.monotonic()
        if self._lacking_since is None:
            self._lacking_since = now
        if not pid or now - self._lacking_since > GRACE_SECONDS:
            raise _ElsewhereError

    def _open_of_anybody(self) -> int | None:
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(PathUnusableError, _ElsewhereError):
                    fd = self._open_of(int(process.name))
                    if fd is not None:
                        return fd
        return None

    def _open_of(self, pid: int) -> int | None:
        """Return the memory if that process has it open.

        Raises:
            _ElsewhereError: if it only has memory that all of its processes have joined.
        """
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except PermissionError as error:
            # A zombie still has a folder in /proc.
            if _is_gone(pid):
                return None
            raise PathUnusableError(
                f"the shared memory {self._name!r} of process {pid} cannot be opened: "
                f"{error.strerror}"
            ) from error
        except OSError:
            return None
        complete = False
        for name in names:
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith(f"/memfd:{self._stem}"):
                    fd = self._open(f"{folder}/{name}", target)
                    if fd is not None:
                        return fd
                    complete = True
        if complete:
            raise _ElsewhereError
        return None

    def _open(self, path: str, target: str) -> int | None:
        """Open memory; None if all its processes have joined, or it belongs to another user."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if is_complete(fd) or os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            return None
        shape = target.removeprefix(f"/memfd:{self._stem}").split(" ")[0]
        if shape != self._shape:
            os.close(fd)
            raise OtherShapeError(
                f"shared memory {self._name!r} has {shape} (rows, bytes of a row, and of it in "
                f"use), not {self._shape}: all processes of one server must use the same sizes"
            )
        return fd

    def _count_in(self, fd: int) -> None:
        """Take a place among the processes; the last one seals the memory.

        A place is a lock on one byte, which ends with the process that holds it.
        """
        # Who has an assigned place may be of an earlier start, and about to end.
        end = time.monotonic() + (TAKEN_SECONDS if self._assigned else 0.0)
        while not any(self._take(fd, place) for place in self._places):
            if time.monotonic() < end:
                time.sleep(PAUSE_SECONDS)
                continue
            self.close()
            os.close(fd)
            if not self._assigned:
                raise _ElsewhereError
            raise ConfigError(
                f"shared memory {self._name!r}: another process has the place {self._places[0]} "
                "(rank) of this one: give each worker of a server its own"
            )
        others = (place for place in range(self._mappers) if place != self.place)
        if all(_is_taken(fd, other) for other in others):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _COMPLETE)

    def _take(self, fd: int, place: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(place))
            self.place = place
            return True
        return False


def stem_of(name: str) -> str:
    """Return the prefix of the names of the socket and of the memory in ``/proc``."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=12)
    return f"kvstore-{digest.hexdigest()}-"


def is_complete(fd: int) -> bool:
    """Whether all processes have joined the memory, now or earlier."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _COMPLETE == _COMPLETE


def _lock(place: int) -> bytes:
    return struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)


def _is_taken(fd: int, place: int) -> bool:
    lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(place))
    return bool(struct.unpack(_LOCK, lock)[0] != fcntl.F_UNLCK)


def _is_alive(asking: socket.socket) -> bool:
    """Whether the host still listens: it never accepts or sends, so `recv` would block."""
    try:
        asking.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("Z", "X")
    return True
