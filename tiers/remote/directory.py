"""Shared directory: a store on NFS or a parallel file system.

Each value is a file in one of 256 folders, by its key, because a single folder can hold only a few
million names. It is written under a temporary name and renamed, so that no reader sees part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import secrets
import stat
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore.concurrency import open_at_once
from kvstore.errors import PathUnusableError
from kvstore.tiers.remote.client import StoreError, Unread
from kvstore.tiers.remote.loop import in_thread
from kvstore.tiers.remote.mount import Mount
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.slices import copy
from kvstore.types import about

__all__ = ["WAVE", "DirectoryClient"]

logger = logging.getLogger("kvstore")

_T = TypeVar("_T")

THREADS = 8
"""Files that one call reads or writes at once."""

MOST_LEFT = 4 * THREADS
"""Threads of calls that were given up, while so many of which are not done nothing is begun."""

OLD_SECONDS = 86400.0
"""Age from which a file with a temporary name, or an empty folder, is a leftover. Longer than the
clocks of hosts differ."""

NOT_OURS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM}
"""Errors of what is no folder of values, and is left alone."""

NO_FILE = {
    errno.ELOOP: "is a symbolic link",
    errno.EISDIR: "is a folder",
    errno.ENXIO: "is a socket or a device",
}
"""Errors of what is in the place of a value, and cannot be opened as one."""

TOLD_SECONDS = 60.0
"""Least seconds between two log lines about values that cannot be looked at."""

NO_FOLDER = "there is no folder of values"

READ_SECONDS = 600.0
"""So exactly is it known when a value was last read."""

WAVE = 32 * THREADS
"""Most values whose existence is checked at once."""


class DirectoryClient:
    """Client of a shared directory: see `StoreClient`. All names of one call have the same folder.

    If another file system is mounted than before, or a folder is not trusted, nothing is done. A
    file that is not trusted counts as an invalid value.

    Args:
        ages: whether a value that is read counts as new, for those who remove the oldest.
    """

    def __init__(self, mount: Mount, *, ages: bool = False) -> None:
        self._mount = mount
        self._ages = ages
        self._looking: asyncio.Future[None] | None = None
        # Of calls that have ended without them: a hanging file system keeps them, and their copies.
        self._left: set[asyncio.Future[Any]] = set()
        self._told = -math.inf

    async def exists(self, names: Sequence[str]) -> list[bool]:
        def one(folder: int, at: str, _: int) -> bool | OSError:
            try:
                return self._has(folder, at)
            except OSError as error:
                return error

        missing: bool | OSError = False
        found = await self._each(names, missing, one)
        faults = [each for each in found if isinstance(each, OSError)]
        if len(faults) == len(found):
            # Of the directory, which then has no answer for another name either, or of these files.
            other = secrets.token_hex(8)
            await self._each(names[:1], False, lambda folder, *_: self._has(folder, other))
        if faults and time.monotonic() - self._told >= TOLD_SECONDS:
            self._told = time.monotonic()
            logger.warning(
                "%s: there are values that cannot be looked at, and count as missing: %s",
                self._mount.directory,
                _reason(faults[0]),
                extra=about("store.damaged", path=self._mount.directory, error=faults[0]),
            )
        return [each is True for each in found]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        # Copy: the caller may be cancelled before the threads are done.
        values = [b"".join(value) for value in zip(records, payloads, strict=True)]
        given_up = threading.Event()

        def one(folder: int, at: str, place: int) -> str | None:
            there = False
            if not replace:
                # What cannot be looked at is replaced.
                with contextlib.suppress(OSError):
                    there = self._has(folder, at)
            try:
                if not there:
                    _write(folder, at, values[place], given_up)
            except OSError as error:
                return _reason(error)
            return None

        try:
            return await self._each(names, "its folder was removed meanwhile", one, make=True)
        finally:
            # What was reported as failed may not appear later, perhaps after a removal.
            given_up.set()

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        # The caller may be cancelled, and its memory reused, before the threads are done.
        using, lent = threading.Lock(), list(payloads)
        sizes = [RECORD_BYTES + len(payload) for payload in payloads]

        def one(folder: int, at: str, place: int) -> bytes | str | None:
            if not lent:
                return None
            try:
                value = self._read(folder, at, sizes[place], names[place])
            except FileNotFoundError:
                return None
            except OSError as error:
                return Unread(_reason(error))
            if isinstance(value, str) or not value:
                return value
            with using:
                if lent:
                    copy(memoryview(value)[RECORD_BYTES:], lent[place])
            return value[:RECORD_BYTES]

        try:
            return await self._each(names, None, one)
        finally:
            with using:
                lent.clear()

    async def remove(self, names: Sequence[str]) -> None:
        def one(folder: int, at: str, _: int) -> str:
            try:
                os.unlink(at, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                return f"{at}: {_reason(error)}"
            return ""

        faults = [fault for fault in await self._each(names, NO_FOLDER, one) if fault]
        if NO_FOLDER in faults:
            # A directory that was moved away may come back, with the values.
            (there,) = await self._in_threads([partial(os.path.lexists, self._mount.directory)])
            if not there:
                raise StoreError(f"{self._mount.directory} is away")
            # Nor does its mount point have them, where it was unmounted since it was looked at.
            await self._in_threads([self._mount.check])
        for fault in faults:
            if fault != NO_FOLDER:
                raise StoreError(fault)

    async def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        """Yield names and times of files, folder by folder; remove empty folders."""
        for epoch in await self._at(place, lambda folder: set(os.listdir(folder)) - set(but)):
            below = f"{place}/{epoch}"
            for within in await self._at(below, os.listdir):
                yield await self._at(below, partial(_listed, below, within))
            await self._at(place, partial(_remove_folder, epoch))

    async def close(self) -> None:
        """Do nothing: nothing is kept open."""

    # -- inside --------------------------------------------------------------------------

    async def _mounted(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = in_thread(self._mount.check)
        # Shielded, so that a hanging file system occupies one thread, not one for each call.
        await asyncio.shield(self._looking)

    async def _at(self, below: str, work: Callable[[int], Iterable[_T]]) -> list[_T]:
        """Run `work` on a folder in a thread; return [] if there is none, or it is not ours."""
        await self._mounted()

        def call() -> list[_T]:
            try:
                entered = self._mount.enter(below, make=False)
                try:
                    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=entered)
                finally:
                    os.close(entered)
            except OSError as error:
                if isinstance(error, PathUnusableError) or error.errno in NOT_OURS:
                    return []
                raise
            try:
                return list(work(folder))
            finally:
                os.close(folder)

        (found,) = await self._in_threads([call])
        return found

    async def _in_threads(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run calls in a thread each.

        Raises:
            StoreError: if one of them does, or too many of earlier ones have not ended.
        """
        if len(self._left) >= MOST_LEFT:
            raise StoreError(f"{len(self._left)} threads wait for {self._mount.directory}")
        running: list[asyncio.Future[_T]] = []
        try:
            for call in calls:
                running.append(in_thread(call))
            # Shielded, so that those that go on are known.
            return await asyncio.gather(*map(asyncio.shield, running))
        finally:
            self._left.update(each for each in running if not each.done())
            for each in running:
                each.add_done_callback(self._left.discard)

    async def _each(
        self,
        names: Sequence[str],
        missing: _T,
        work: Callable[[int, str, int], _T],
        *,
        make: bool = False,
    ) -> list[_T]:
        """Run `work` for each name in threads, with the folder, the path in it, and the index.

        Args:
            missing: the result for each name if the folder does not exist.
            make: whether to create the folder instead.

        Raises:
            StoreError: if the directory cannot be used, or `work` raises.
        """
        await self._mounted()
        below = names[0].rpartition("/")[0]
        paths = [_path(name) for name in names]
        count = min(len(names), THREADS)

        def some(first: int) -> list[_T]:
            places = range(first, len(names), count)
            try:
                folder = self._mount.enter(below, make=make)
                try:
                    return [work(folder, paths[place], place) for place in places]
                finally:
                    os.close(folder)
            except FileNotFoundError:
                return [missing for _ in places]
            except OSError as error:
                raise StoreError(_reason(error)) from error

        results = [missing for _ in names]
        parts = await self._in_threads([partial(some, first) for first in range(count)])
        for first, part in enumerate(parts):
            results[first::count] = part
        return results

    def _has(self, folder: int, at: str) -> bool:
        """Whether there is a trusted file."""
        try:
            found = os.stat(at, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and self._mount.trust.doubt(found) is None

    def _read(self, folder: int, at: str, size: int, name: str) -> bytes | str:
        """Read a value; b"" if it has another size; an error message if it is not trusted."""
        try:
            fd = open_at_once(at, dir_fd=folder)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            fault: str | None = NO_FILE[error.errno]
        else:
            with open(fd, "rb", buffering=0) as file:
                fault = self._mount.trust.file_fault(fd, written=False)
                if fault is None:
                    there = os.fstat(fd)
                    if self._ages and abs(time.time() - there.st_mtime) > READ_SECONDS:
                        with contextlib.suppress(OSError):
                            os.utime(fd)
                    value = file.read(size) if there.st_size == size else b""
                    while 0 < len(value) < size and (more := file.read(size - len(value))):
                        value += more
                    return value if len(value) == size else b""
        return f"{self._mount.directory / name.rpartition('/')[0] / at}: {fault}"


def _write(folder: int, at: str, value: bytes, given_up: threading.Event) -> None:
    _check_wanted(given_up)
    within = at.partition("/")[0]
    temporary = f"{within}/.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(within, 0o700, dir_fd=folder)
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb", buffering=0) as file:
            left = memoryview(value)
            while left:
                left = left[file.write(left) :]
        _check_wanted(given_up)
        os.rename(temporary, at, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _check_wanted(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


def _listed(below: str, within: str, folder: int) -> list[tuple[str, float]]:
    """List names and times of the files in a folder of values; remove the folder if it is empty.

    Also removes incomplete files that killed processes have left.
    """
    try:
        values = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in NOT_OURS:
            return []
        raise
    found = []
    try:
        for key in os.listdir(values):
            # It may be gone meanwhile, or cannot be used: then the others count.
            with contextlib.suppress(OSError):
                there = os.stat(key, dir_fd=values, follow_symlinks=False)
                if not stat.S_ISREG(there.st_mode):
                    continue
                name = f"{below}/{key}"
                if not key.startswith("."):
                    # A file in another folder than that of its name is not ours.
                    if _path(name) == f"{within}/{key}":
                        found.append((name, there.st_mtime))
                elif there.st_mtime < time.time() - OLD_SECONDS:
                    os.unlink(key, dir_fd=values)
    finally:
        os.close(values)
    if not found:
        _remove_folder(within, folder)
    return found


def _remove_folder(name: str, folder: int) -> list[None]:
    """Remove a folder in which nothing was written lately: others may be about to."""
    # Fails if the folder is not empty.
    with contextlib.suppress(OSError):
        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - OLD_SECONDS:
            os.rmdir(name, dir_fd=folder)
    return []


def _path(name: str) -> str:
    """Return the path of a value's file within its folder."""
    key = name.rpartition("/")[2]
    return f"{zlib.crc32(os.fsencode(key)) & 0xFF:02x}/{key}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
