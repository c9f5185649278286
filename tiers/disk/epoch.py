"""Epoch of a namespace: chunks of different epochs are not exchanged.

A reset says that chunks stored so far may be wrong from now on, because weights
have changed. It moves its process to a newer epoch, and each record carries the
epoch of the process that wrote it. The newest epoch of all stands in a small
file in the namespace's folder, in decimal; no file means 0. It only ever rises:
it is replaced as a whole and under a lock, so it survives a kill at any moment.
Where the folders of one tier disagree, the highest counts. The lock file of each lane
keeps the epoch that its owners have been in, by which it is noticed that the file is lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from kvstore.concurrency import close_unlocked
from kvstore.errors import ForeignFileError
from kvstore.tiers.disk import namespace
from kvstore.tiers.disk.io.base import write_whole
from kvstore.tiers.disk.trust import ANYBODYS, Trust, hand_over, sync_folder

__all__ = ["EPOCH_NAME", "MAX_EPOCH", "lost_epoch", "raise_epoch", "read_epoch"]

EPOCH_NAME = "epoch"
MAX_EPOCH = 2**32 - 2
"""A record has 32 bits for it."""

LOCK_SECONDS = 1.0
"""How long to wait for another process that moves the epoch."""


def read_epoch(folder: Path, trust: Trust = ANYBODYS) -> int:
    """The newest epoch of the namespace in `folder`.

    Raises:
        ForeignFileError: if the file is none of ours, or damaged.
        PathUnusableError: if it cannot be read, or is not to be trusted.
    """
    file = folder / EPOCH_NAME
    if (raw := trust.read(file, 64)) is None:
        return 0
    digits = raw.removesuffix(b"\n")
    if not digits.isdigit() or len(digits) > 10 or int(digits) > MAX_EPOCH:
        raise ForeignFileError(
            f"{file}: holds no epoch, so it is unknown which chunks are still valid; "
            f"remove the folder {folder}"
        )
    return int(digits)


def lost_epoch(folder: Path, newest: int, epoch: int) -> str:
    """What is wrong where the namespace in `folder` is of `epoch`, and a lane was in `newest`."""
    return (
        f"has been in epoch {newest}, and its namespace is of epoch {epoch}: the file "
        f"{folder / EPOCH_NAME} was lost, so nobody can tell which chunks are still right; remove "
        f"the folder {folder}"
    )


def raise_epoch(folder: Path, epoch: int, seconds: float | None = None) -> int:
    """Make sure that the namespace's newest epoch is `epoch` at least; returns what it was before.

    The epoch is durable on return. Of several processes that raise it to the same value,
    only the first is told a lower one. May block.

    Args:
        seconds: how long to wait for another process that moves it; None: `LOCK_SECONDS`.

    Raises:
        OSError: if it cannot be written, or another process holds the lock.
        KVStoreError: as `read_epoch` does.
    """
    if epoch > MAX_EPOCH:
        raise ForeignFileError(f"{folder}: no epoch is left after {MAX_EPOCH}; remove the folder")
    standing = read_epoch(folder)
    if standing >= epoch:
        # Who wrote it may have failed, or been killed, before it was durable.
        sync_folder(folder)
        return standing
    # On NFS a lock that excludes others needs a descriptor that may write.
    lock = os.open(folder / namespace.FILE_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(lock, LOCK_SECONDS if seconds is None else seconds)
        standing = read_epoch(folder)
        if standing < epoch:
            _write(folder, epoch)
        sync_folder(folder)
        return standing
    finally:
        close_unlocked(lock)


def _lock(fd: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise OSError(errno.EBUSY, "another process does not let go of it") from None
            time.sleep(0.005)


def _write(folder: Path, epoch: int) -> None:
    # Who holds the lock is alone: the name is free, or a killed process left it.
    temporary = folder / f".{EPOCH_NAME}.new"
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        hand_over(fd, folder)
        write_whole(fd, [memoryview(b"%d\n" % epoch)], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, folder / EPOCH_NAME)
