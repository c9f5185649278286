"""Faults found on disk, as texts for logs and reports."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from kvstore.tiers.disk.io.base import NO_ROOM

__all__ = ["Fault"]

NOT_WRITTEN = {*NO_ROOM, errno.EROFS}
"""Errors that only who writes meets."""


@dataclass(slots=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
        path: the file or folder.
        slot: the slot in that segment, or None when the whole file is meant.
        what: what is wrong, in words.
        key: the key of the chunk that is lost, in hex, where it is known.
    """

    path: str
    slot: int | None
    what: str
    key: str | None = None

    @classmethod
    def of(cls, path: Path, error: Exception) -> Fault:
        """Return the fault of a whole file; its text does not repeat the path."""
        if isinstance(error, OSError) and error.strerror:
            done = "written to" if error.errno in NOT_WRITTEN else "read"
            return cls(str(path), None, f"cannot be {done}: {error.strerror}")
        return cls(str(path), None, str(error).removeprefix(f"{path}: "))

    @classmethod
    def cut_short(cls, path: Path, left: int, whole: int) -> Fault:
        """A segment that has `left` of its `whole` bytes."""
        return cls(str(path), None, f"cut short: {left} of {whole} bytes are left")

    def __str__(self) -> str:
        where = f" slot {self.slot}" if self.slot is not None else ""
        key = f" (key {self.key})" if self.key else ""
        return f"{self.path}{where}: {self.what}{key}"
