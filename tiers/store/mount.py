"""A directory that several hosts share, and whether it is still the one that was mounted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tiers.store.client import StoreError

__all__ = ["MARK", "Mount"]

MARK = "kvstore-share"
"""A file that tells the shared directory from what lies below its mount point."""

_TEXT = (
    "kvstore stores chunks here as long as it finds this file, or has not seen the mount change.\n"
)


class Mount:
    """What is mounted where a directory is, noticed when this is made.

    Where a network's file system is not mounted any more, files would go to the disk below it,
    until that is full. Mounted again it may have another device number, but it has the mark.

    Args:
        directory: is made, and marked, if need be and if it may be written.

    Raises:
        OSError: if it cannot be made or looked into.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._mark = directory / MARK
        if not self._mark.exists():
            # Who may only read cannot write to the wrong place, either.
            with contextlib.suppress(OSError):
                self._mark.write_text(_TEXT)
        self._device = directory.stat().st_dev

    def check(self) -> None:
        """Blocks as long as the file system takes to answer.

        Raises:
            StoreError: if something else is there.
        """
        # Who empties the directory may take it away as well: then it is made again, on the same
        # file system.
        there = self._directory
        while not os.path.lexists(there):
            there = there.parent
        if there.stat().st_dev == self._device:
            return
        if not self._mark.is_file():
            raise StoreError(
                f"what was mounted there is not: no file {self._mark}, another file system"
            )
        self._device = self._directory.stat().st_dev
