"""Mount: check that a shared directory is still the one that was mounted, and whose it is."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kvstore.tiers.disk.trust import STRICT, Trust, open_folder
from kvstore.tiers.remote.client import StoreError

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

    Attributes:
        directory: the shared one. trust: what is asked of it and of all that lies in it.

    Args:
        directory: is made, and marked, if need be and if it may be written.

    Raises:
        OSError: if it cannot be made or looked into, or is not to be trusted.
    """

    def __init__(self, directory: Path, trust: Trust = STRICT) -> None:
        self.directory = directory
        self.trust = trust
        folder = open_folder(directory, trust, own=False, make=True)
        try:
            # Who may only read cannot write to the wrong place, either.
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(MARK, flags, 0o600, dir_fd=folder), "w") as file:
                    file.write(_TEXT)
            self._device = os.fstat(folder).st_dev
        finally:
            os.close(folder)

    def check(self) -> None:
        """Blocks as long as the file system takes to answer.

        Raises:
            StoreError: if something else is there.
        """
        # Who empties the directory may take it away as well: then it is made again, on the same
        # file system.
        there = self.directory
        while not os.path.lexists(there):
            there = there.parent
        if there.stat().st_dev == self._device:
            return
        mark = self.directory / MARK
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = mark.lstat()
            if stat.S_ISREG(found.st_mode) and self.trust.doubt(found) is None:
                self._device = self.directory.stat().st_dev
                return
        raise StoreError(f"what was mounted there is not: no file {mark}, another file system")

    def enter(self, below: str, *, make: bool) -> int:
        """A descriptor (O_PATH) of a folder in it, every step to it looked at.

        Args:
            make: whether folders that are missing are made, with mode 0700.

        Raises:
            FileNotFoundError: if it is missing, and not made.
            OSError: if it cannot be opened or made, is not to be trusted, or lies on another file
                system.
        """
        folder = self.directory / below
        try:
            found = open_folder(folder, self.trust, own=True)
        except FileNotFoundError:
            if not make:
                raise
            parts = folder.relative_to(self.directory).parts
            for count in range(len(parts)):
                above = self.directory.joinpath(*parts[:count])
                os.close(open_folder(above, self.trust, own=count > 0, make=True))
            found = open_folder(folder, self.trust, own=True, make=True)
        if os.fstat(found).st_dev == self._device:
            return found
        os.close(found)
        raise OSError(f"{folder} is on another file system than was mounted there")
