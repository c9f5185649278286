"""Retained chunks: a record beside the lane of what its owner has pinned.

What is retained is known to the owner's memory only. While anything is, the owner keeps a small
file beside its lane up to date: ``retained-<n>`` in the namespace's folder. It is replaced as a
whole, so that a reader never sees a part of it. It is no part of the cache: nobody who serves
reads it, and what is wrong with it is no fault. A reader compares `Retained.process` with the
lane's owner, because a process that was killed leaves its word behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Retained", "forget_retained", "read_retained", "write_retained"]

RENEW_SECONDS = 5.0
"""How often the owner says it again, although nothing has changed."""

STALE_SECONDS = 30.0
"""Word that is older is nobody's, whoever owns the lane."""

MOST_BYTES = 4096
"""A file that is longer is not of ours."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What a process retains.

    Attributes:
        process: who says so. written_ms: when, in ms since 1970.
        chunks: on this tier, on all its paths together.
        host_chunks: in host memory.
        keys: in all, their chunks being anywhere or nowhere.
    """

    process: int
    written_ms: int
    chunks: int
    host_chunks: int
    keys: int

    def differs(self, other: Retained) -> bool:
        """Whether it says something else, whenever it was said."""
        return dataclasses.replace(self, written_ms=other.written_ms) != other

    def is_due(self, before: Retained) -> bool:
        """Whether it is time to say it again."""
        return not 0 <= self.written_ms - before.written_ms < RENEW_SECONDS * 1000

    def is_stale(self, owner: int | None, now_ms: int) -> bool:
        """Whether nobody stands by it: its process is gone, or has not renewed it."""
        return self.process != owner or now_ms - self.written_ms > STALE_SECONDS * 1000


def write_retained(lane: Path, told: Retained) -> None:
    """Leave word beside the lane. May block.

    Raises:
        OSError: as the system says.
    """
    path = _path(lane)
    fresh = path.with_name(f".{path.name}.new")
    # Who owns the lane is alone: the name is free, or a killed process left it.
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(fresh, flags, 0o600)
    try:
        os.write(fd, json.dumps(dataclasses.asdict(told)).encode("ascii") + b"\n")
    finally:
        os.close(fd)
    os.replace(fresh, path)


def forget_retained(lane: Path) -> None:
    """Remove the word of the lane's owner, or of one before it. May block.

    Raises:
        OSError: as the system says.
    """
    _path(lane).unlink(missing_ok=True)


def read_retained(lane: Path) -> Retained | None:
    """The word that was left beside the lane; None if there is none, or nobody can read it."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(_path(lane), flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            raw = os.read(fd, MOST_BYTES + 1)
        finally:
            os.close(fd)
        told = json.loads(raw) if len(raw) <= MOST_BYTES else None
        if isinstance(told, dict):
            found = Retained(**told)
            numbers = dataclasses.astuple(found)
            if all(type(number) is int and 0 <= number < 2**63 for number in numbers):
                return found
    return None


def _path(lane: Path) -> Path:
    # Not in the lane's folder: whoever follows the lane reads that anew after each change.
    return lane.with_name(lane.name.replace("lane", "retained", 1))
