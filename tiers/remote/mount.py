"""Mount: check that a shared directory is still mounted, and who owns it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import time
from pathlib import Path

from kvstore.concurrency import open_at_once
from kvstore.tiers.disk.trust import STRICT, Trust, open_folder
from kvstore.tiers.remote.client import StoreError
from kvstore.types import about

__all__ = ["MARK", "Mount"]

logger = logging.getLogger("kvstore.store")

MARK = "kvstore-share"
"""Name of a file that distinguishes the shared directory from the folder under its mount point."""

READ_SECONDS = 30.0
"""How often it is read again while the same file system is there."""

MOST_MARK = 4096
"""Most characters of it that are read."""

_TEXT = "kvstore stores chunks here as long as this file exists or the mount has not changed.\n"


class Mount:
    """The file system that was mounted at a directory when this object was created.

    If a network file system is no longer mounted, files would fill the disk under its mount point.
    When it is mounted again it may have another device number, but it has the same mark.

    Attributes:
        directory: the shared directory.
        trust: decides which files and folders may be used.

    Args:
        directory: created and marked if necessary, and if it is writable.

    Raises:
        OSError: if it cannot be created or read, or is not trusted.
    """

    def __init__(self, directory: Path, trust: Trust = STRICT) -> None:
        self.directory = directory
        self.trust = trust
        missing = not os.path.lexists(directory)
        folder = open_folder(directory, trust, own=False, make=True)
        if missing:
            logger.warning(
                "the shared directory %s was not there and has been made: if a file system is to "
                "be mounted there, mount it and start again",
                directory,
                extra=about("store.directory_made", path=directory),
            )
        try:
            # Without write permission no mark is needed.
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(MARK, flags, 0o600, dir_fd=folder), "w") as file:
                    file.write(f"{_TEXT}{secrets.token_hex(16)}\n")
            self._device = os.fstat(folder).st_dev
            self._mark, self._read = _text_of(directory / MARK), time.monotonic()
        finally:
            os.close(folder)

    def check(self) -> None:
        """Check that the same file system is still mounted. Blocks until it answers.

        Raises:
            StoreError: if another file system is there.
        """
        # The directory may have been removed: it is created again on the same file system.
        there = self.directory
        while not os.path.lexists(there):
            there = there.parent
        mark = self.directory / MARK
        if there.stat().st_dev == self._device:
            if time.monotonic() - self._read > READ_SECONDS:
                # Another host may have emptied the share, and marked it anew.
                self._mark, self._read = _text_of(mark) or self._mark, time.monotonic()
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = mark.lstat()
            # Under the mount point there may be another mark, of a start before it was mounted.
            same = None in (self._mark, its := _text_of(mark)) or its == self._mark
            if stat.S_ISREG(found.st_mode) and self.trust.doubt(found) is None and same:
                self._device = self.directory.stat().st_dev
                return
        raise StoreError(
            f"the shared directory is not mounted: another file system is there, without {mark} as "
            "it was at the start: if this is the share, start again"
        )

    def enter(self, below: str, *, make: bool) -> int:
        """Open a folder in the directory (O_PATH), checking every folder on the way.

        Args:
            make: whether to create missing folders, with mode 0700.

        Raises:
            FileNotFoundError: if it is missing and not created.
            StoreError: if another file system is there.
            OSError: if it cannot be opened or created, is not trusted, or is on another file
                system.
        """
        folder = self.directory / below
        try:
            found = open_folder(folder, self.trust, own=True)
        except FileNotFoundError:
            if not make:
                raise
            # Nothing is made below a mount point whose file system is gone by now.
            self.check()
            parts = folder.relative_to(self.directory).parts
            for count in range(len(parts)):
                above = self.directory.joinpath(*parts[:count])
                os.close(open_folder(above, self.trust, own=count > 0, make=True))
            found = open_folder(folder, self.trust, own=True, make=True)
        if os.fstat(found).st_dev == self._device:
            return found
        os.close(found)
        raise OSError(f"{folder} is on another file system than the one mounted before")


def _text_of(mark: Path) -> str | None:
    """What is in a mark; None if it is none, or may not be read."""
    readable = contextlib.suppress(OSError, UnicodeDecodeError)
    with readable, open(open_at_once(mark), encoding="ascii") as file:
        return file.read(MOST_MARK)
    return None
