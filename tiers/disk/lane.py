"""Lane: a folder with one writing process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.concurrency import close_unlocked, given_up_in_children, open_at_once
from kvstore.errors import ForeignFileError, LaneBusyError, PathUnusableError
from kvstore.tiers.disk.epoch import MAX_EPOCH
from kvstore.tiers.disk.segment import read_header, segment_files
from kvstore.tiers.disk.trust import ANYBODYS, STRICT, Trust, hand_over, make_folder
from kvstore.types import about

__all__ = [
    "LOCK_NAME",
    "MAX_LANES",
    "PID_BYTES",
    "Lane",
    "Owner",
    "lane_folders",
    "lane_owner",
    "newest_told",
    "sharing",
]

logger = logging.getLogger("kvstore.disk")

MAX_LANES = 64
LOCK_NAME = "lock"

LOOK_SECONDS = 5.0
"""For how long those who only look whose a lane is may keep it from being taken."""

PID_BYTES = 32
"""Of the lock file, for the owner's process, or since when there is none; the epoch that the owner
has told follows, and stays."""

EPOCH_BYTES = 11


class Owner(NamedTuple):
    """The process that owns a lane, 0 if not known, and its epoch, None if it has not told it."""

    pid: int
    epoch: int | None


class Lane:
    """A lane that this process owns until `release`, or its end."""

    def __init__(self, folder: Path, number: int, lock: int) -> None:
        self.folder = folder
        self.number = number
        self._lock: int | None = lock
        # Held open, so that no other folder gets the same number.
        self._folders: list[int] = []
        _owned.add(self)
        try:
            for each in (folder, folder.parent):
                self._folders.append(os.open(each, _A_FOLDER))
        except OSError as error:
            self.release()
            raise PathUnusableError(f"{each} cannot be opened: {error.strerror}") from error

    @classmethod
    def acquire(
        cls,
        namespace: Path,
        number: int | None = None,
        trust: Trust = STRICT,
        capacity_bytes: float = math.inf,
        first: int | None = None,
    ) -> Lane:
        """Own lane `number`, or one that is free: the largest of up to `capacity_bytes`.

        So of processes of different capacities that start again each finds a lane of its size. A
        larger one is taken before a new one is made, unless a single segment of it is too large.

        Args:
            first: tried before others.

        Raises:
            LaneBusyError: if the lane, or every lane, is owned by a living process.
            PathUnusableError: if the folder cannot be used, or is not to be trusted.
        """
        candidates: Iterable[int] = () if number is None else (number,)
        if number is None:
            tried = [] if first is None else [first]
            candidates = dict.fromkeys(tried + _in_order(namespace, trust, capacity_bytes))
        for candidate in candidates:
            folder = namespace / f"lane-{candidate}"
            make_folder(folder, trust, own=True)
            lock = _lock(folder, trust)
            if lock is not None:
                return cls(folder, candidate, lock)
        if number is None:
            raise LaneBusyError(f"all {MAX_LANES} lanes of {namespace} are in use")
        owner = lane_owner(folder)
        process = (owner and owner.pid) or "?"
        raise LaneBusyError(f"lane {number} of {namespace} is in use by process {process}")

    def check_place(self) -> None:
        """Check that the path still leads to the lane, and to its namespace, before it is used.

        Whoever moves a cache away may have another one made in its place, which is others'.

        Raises:
            OSError: if it does not, or cannot be looked at.
        """
        for folder, held in zip((self.folder, self.folder.parent), self._folders, strict=True):
            if not os.path.samestat(os.stat(folder), os.fstat(held)):
                raise OSError(errno.ESTALE, f"{folder} is another folder now")

    def tell_epoch(self, epoch: int) -> None:
        """Tell those who look at the lane in which epoch its owner is, and keep it for later."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, str(epoch).encode().ljust(EPOCH_BYTES), PID_BYTES)

    def touch(self) -> None:
        """Tell those who follow the lane that what it holds has changed."""
        if self._lock is not None:
            # A time of our own: two that the system gives may be the same.
            now = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(self._lock, ns=(now, now))

    def release(self) -> None:
        """Let others own the lane."""
        _owned.discard(self)
        if self._lock is not None:
            for fd in (self._lock, *self._folders):
                # Some file systems tell only now what went wrong with writes before.
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._lock = None


def _in_order(namespace: Path, trust: Trust, capacity_bytes: float) -> list[int]:
    """Return the numbers of lanes, those first that are to be taken first.

    Those that cannot be used come where they would stand if they were empty.
    """
    held: dict[int, int] = {}
    unfit: list[int] = []
    with contextlib.suppress(OSError):
        for number, folder in lane_folders(namespace, trust):
            # Of one that cannot be looked at the others are not worse.
            with contextlib.suppress(OSError):
                if number < MAX_LANES and _lock_is_trusted(folder, trust):
                    files = [path for _, path in segment_files(folder)]
                    each = _segment_bytes(files)
                    if each > capacity_bytes:
                        unfit.append(number)
                    else:
                        held[number] = each * len(files)
    fit = [number for number, size in held.items() if size <= capacity_bytes]
    fit.sort(key=lambda number: (-held[number], number))
    fresh = [number for number in range(MAX_LANES) if number not in unfit]
    return list(dict.fromkeys([*fit, *held, *fresh, *unfit]))


def _segment_bytes(files: Iterable[Path]) -> int:
    """Return the size of a lane's segments, by the first that says it; 0 if none does."""
    for path in files:
        with contextlib.suppress(ForeignFileError):
            return read_header(path).geometry.file_bytes
    return 0


def _lock_is_trusted(folder: Path, trust: Trust) -> bool:
    try:
        return trust.doubt((folder / LOCK_NAME).lstat()) is None
    except FileNotFoundError:
        # It was copied without, or its owner was killed before. Who takes the lane makes one.
        return True


# A forked child must not keep the lanes of its parent locked.
_owned = given_up_in_children(Lane.release)


def lane_folders(
    namespace: Path, trust: Trust = ANYBODYS, unread: dict[Path, OSError] | None = None
) -> list[tuple[int, Path]]:
    """The lanes of a namespace that exist and are to be trusted, by number.

    Args:
        unread: gets those of which the system does not say what they are.
    """
    lanes = []
    for folder in namespace.iterdir():
        match = re.fullmatch("lane-(0|[1-9][0-9]{0,3})", folder.name)
        if not match:
            continue
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            if unread is not None:
                unread[folder] = error
            continue
        doubt = trust.doubt(found)
        if doubt is not None:
            _tell(f"{folder} {doubt}; it is not read")
        elif stat.S_ISDIR(found.st_mode):
            lanes.append((int(match[1]), folder))
    return sorted(lanes)


def _tell(text: str) -> None:
    """Log a line once, however often it is said."""
    if text not in _logged:
        _logged.add(text)
        logger.warning("disk tier: %s", text, extra=about("disk.lane_not_used"))


_logged: set[str] = set()


def lane_owner(folder: Path) -> Owner | None:
    """The process that owns the lane now, or None."""
    with contextlib.suppress(OSError, ValueError):
        fd = open_at_once(folder / LOCK_NAME)
        try:
            if not _locked(fd, fcntl.LOCK_SH):
                pid, epoch = _told(fd)
                # It could not write who it is, on a full disk.
                return Owner(pid or 0, epoch)
        finally:
            close_unlocked(fd)
    return None


def newest_told(namespace: Path, trust: Trust = ANYBODYS) -> tuple[int, Path]:
    """The newest epoch that an owner of a lane has told, and whose folder that is.

    It is 0, of the namespace's folder, if none has. Nobody has been in a newer one, unless
    lanes are gone. May block.

    Raises:
        OSError: if the folder cannot be listed.
    """
    newest = 0, namespace
    for _, folder in lane_folders(namespace, trust):
        with contextlib.suppress(OSError, ValueError):
            fd = open_at_once(folder / LOCK_NAME)
            try:
                if trust.file_fault(fd, written=True) is None:
                    newest = max(newest, (_told(fd)[1] or 0, folder))
            finally:
                os.close(fd)
    return newest


_A_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _told(fd: int) -> tuple[int | None, int | None]:
    """The process that owns a lane, and the epoch that it, or the last one, has told."""
    # In one call: an owner may be about to write both.
    told = os.pread(fd, PID_BYTES + EPOCH_BYTES, 0)
    parts = told[:PID_BYTES].strip(), told[PID_BYTES:].strip()
    pid, epoch = (int(text) if text.isdigit() else None for text in parts)
    if epoch is not None and epoch > MAX_EPOCH:
        epoch = None
    return pid, epoch


@contextmanager
def sharing(folder: Path, trust: Trust) -> Iterator[int | None]:
    """Keep others from taking the lane; yields its lock file, None if it is owned or not trusted.

    Raises:
        OSError: as the system says, if there is no lock file above all.
    """
    fd = open_at_once(folder / LOCK_NAME, os.O_RDWR)
    try:
        sound = trust.file_fault(fd, written=True) is None
        yield fd if sound and _locked(fd, fcntl.LOCK_SH) else None
    finally:
        close_unlocked(fd)


def _lock(folder: Path, trust: Trust) -> int | None:
    try:
        try:
            fd = open_at_once(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            fresh = True
        except FileExistsError:
            fd = open_at_once(folder / LOCK_NAME, os.O_RDWR)
            fresh = False
    except OSError as error:
        raise PathUnusableError(
            f"{folder / LOCK_NAME} cannot be opened: {error.strerror}"
        ) from error
    try:
        if fresh:
            hand_over(fd, folder)
        fault = trust.file_fault(fd, written=True)
        if fault is not None:
            raise PathUnusableError(f"{folder / LOCK_NAME} cannot be used: {fault}")
        taken = _take(fd)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, PathUnusableError):
            # Network file systems may have no locks.
            raise PathUnusableError(
                f"{folder / LOCK_NAME} cannot be locked: {error.strerror}"
            ) from error
        raise
    if not taken:
        os.close(fd)
        return None
    with contextlib.suppress(OSError):
        os.pwrite(fd, str(os.getpid()).encode().ljust(PID_BYTES), 0)
    return fd


def _take(fd: int) -> bool:
    """Take the lock, unless another process owns the lane."""
    end = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < end:
        if _locked(fd, fcntl.LOCK_EX):
            return True
        if not _locked(fd, fcntl.LOCK_SH):
            return False
        # The lock is shared: `lane_owner` holds it so for an instant, in which a busy machine may
        # suspend it.
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(0.002)
    return False


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
