"""Trust: use only files that no other user can write, and so forge.

Digests detect damage, but not data that another user has written. So every
folder on the path of a cache, and every file in it, has to belong to the user
of this process or to root, and no other user may be able to write to it, as
sshd requires of a user's keys. A parent that everybody may write to is accepted
if it is sticky, like /tmp, because there users cannot rename or remove files of
others.

The path is walked from the root of the file system, each folder opened within
the one that was checked before it. After the walk only the
owner and root can change where the path leads, so it may be used by name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import secrets
import stat
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from kvstore.concurrency import open_at_once
from kvstore.errors import PathUnusableError
from kvstore.tiers.disk.io.base import NO_ROOM

__all__ = [
    "ANYBODYS",
    "STRICT",
    "Trust",
    "hand_over",
    "make_folder",
    "open_folder",
    "sync_folder",
]

MAX_LINKS = 40
"""Symbolic links on one way, as the kernel has it."""

WAY_OUT = (
    "run as the user whose it is, take a path of your own, or set strict_modes = false (commands: "
    "--no-strict-modes) where all who can write there are trusted"
)

_AS_IS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_ACL_USER, _ACL_GROUP = 2, 8
"""Entries of an access control list that name somebody."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The requirements for folders and files before they are used.

    Attributes:
        strict: whether owner and mode count. Kinds always do: a folder, a regular file
            with one name, no symbolic link.
    """

    strict: bool = True

    def owner_doubt(self, found: os.stat_result) -> str | None:
        """Why the owner of what `found` describes is not to be trusted, or None."""
        me = os.geteuid()
        if not self.strict or found.st_uid in (0, me):
            return None
        others = "" if not me else f" or to {_user(me)}, the user of this process"
        return f"belongs to {_user(found.st_uid)} and has to belong to root{others}: chown"

    def doubt(self, found: os.stat_result, *, sticky: bool = False) -> str | None:
        """Why what `found` describes is not to be trusted, or None.

        Args:
            sticky: whether others may write to it where it is sticky.
        """
        reason = self.owner_doubt(found)
        mode = stat.S_IMODE(found.st_mode)
        if reason or not self.strict or (sticky and mode & stat.S_ISVTX):
            return reason
        if mode & stat.S_IWOTH:
            return f"may be written by every user (mode {mode:04o}): chmod go-w"
        if mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid):
            return f"may be written by {_group(found.st_gid)} (mode {mode:04o}): chmod g-w"
        return None

    def file_fault(self, fd: int, *, written: bool) -> str | None:
        """Why an open file is not to be used as one of the cache's own, or None.

        Args:
            written: whether it is going to be written to.

        Raises:
            OSError: as the system says.
        """
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return "not a regular file"
        if written and found.st_nlink > 1:
            # Users of its other name do not expect it to be written to.
            return f"has {found.st_nlink} names (hard links): copy a cache with cp -a"
        return self.doubt(found) or (_list_doubt(fd, found) if self.strict else None)

    def read(self, file: Path, most: int) -> bytes | None:
        """Return the first `most` bytes of one of the cache's own files; None if it is not there.

        Raises:
            PathUnusableError: if it cannot be read, or is not to be trusted.
        """
        try:
            with os.fdopen(open_at_once(file), "rb") as handle:
                fault = self.file_fault(handle.fileno(), written=False)
                raw = b"" if fault is not None else handle.read(most)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PathUnusableError(f"{file}: cannot be read ({error.strerror})") from error
        if fault is not None:
            raise PathUnusableError(f"{file}: {fault}")
        return raw


STRICT = Trust()
"""The default requirements."""

ANYBODYS = Trust(strict=False)
"""The requirements of tools that only look, and trust no data that they find."""


def open_folder(path: Path, trust: Trust, *, own: bool, make: bool = False) -> int:
    """A descriptor (O_PATH) of the folder `path`, every step to it looked at.

    Args:
        own: whether only this process's user may write to it; otherwise others may,
            too, where it is sticky.
        make: whether what is missing is made: the folder with mode 0700, its parents
            with 0755 less the process's mask.

    Raises:
        PathUnusableError: if a step is not to be trusted, or `path` is a symbolic link
            or no folder.
        OSError: as the system says.
    """
    path = path.absolute()
    # Mounts what is mounted on demand, which to open it as below does not.
    with contextlib.suppress(OSError):
        os.lstat(f"{path}/.")
    with contextlib.ExitStack() as opened:

        def enter(name: str, parent: int | None = None, mode: int = 0) -> int:
            try:
                fd = _open_or_make(name, parent, mode) if make else _open(name, parent)
            except OSError as error:
                error.filename = str(shown / name)
                raise
            opened.callback(os.close, fd)
            return fd

        steps, links, shown = deque(path.parts[1:]), 0, Path("/")
        here = enter("/")
        _check(here, shown, trust, sticky=True)
        while steps:
            name = steps.popleft()
            step = enter(name, here, 0o755 if steps else 0o700)
            kind = stat.S_IFMT(os.fstat(step).st_mode)
            if kind == stat.S_IFLNK and steps:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = Path(_target(step, shown / name, trust))
                if target.is_absolute():
                    here, shown = enter("/"), Path("/")
                steps.extendleft(reversed(target.parts[target.is_absolute() :]))
                continue
            shown /= name
            if kind == stat.S_IFLNK:
                raise PathUnusableError(f"{shown} is a symbolic link; give the folder itself")
            if kind != stat.S_IFDIR:
                below = "" if shown == path else f"{path}: "
                raise PathUnusableError(f"{below}{shown} is a file, not a folder")
            here = step
            _check(here, shown, trust, sticky=bool(steps) or not own)
        return os.dup(here)


def make_folder(folder: Path, trust: Trust, *, own: bool) -> None:
    """Make `folder` (mode 0700) if it does not exist, and check that it can be used.

    Args:
        own: as in `open_folder`.

    Raises:
        PathUnusableError: if it is a file or a symbolic link, cannot be made or written,
            or could have been filled by another user.
    """
    try:
        place = open_folder(folder, trust, own=own, make=True)
        try:
            os.close(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place))
            probe = f".probe-{os.getpid()}-{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                os.close(os.open(probe, flags, 0o600, dir_fd=place))
            except OSError as error:
                # What is there can be served, and what is not is refused later.
                if error.errno not in NO_ROOM:
                    raise
            # Who owns the lane removes probes that it finds there.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe, dir_fd=place)
        finally:
            os.close(place)
    except PathUnusableError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        # The step at which the way ended may be far above.
        above = str(error.filename) if isinstance(error, OSError) else ""
        at = f"{above}: " if above in {*map(str, folder.absolute().parents)} else ""
        raise PathUnusableError(f"{str(folder)!r} cannot be used: {at}{reason}") from error


def hand_over(fd: int, folder: Path) -> None:
    """Give a file that this process has just made in `folder`, as root, to the folder's owner.

    A server that runs as that user could not open it otherwise. It does so only where root works
    on the cache of another user, which `Trust` allows where it is not strict.

    Raises:
        OSError: as the system says.
    """
    if os.geteuid() == 0:
        _give(fd, os.stat(folder))


def _hand_over_folder(name: str, parent: int | None) -> None:
    if os.geteuid() == 0 and parent is not None and os.fstat(parent).st_uid:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent)
        try:
            _give(fd, os.fstat(parent))
        finally:
            os.close(fd)


def _give(fd: int, like: os.stat_result) -> None:
    if like.st_uid:
        # In a container root may not, and is the only user that matters; some file systems cannot.
        with contextlib.suppress(OSError):
            os.fchown(fd, like.st_uid, like.st_gid)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. May block.

    Raises:
        OSError: as the system says.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(name: str, parent: int | None) -> int:
    return os.open(name, _AS_IS, dir_fd=parent)


def _open_or_make(name: str, parent: int | None, mode: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return _open(name, parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
        _hand_over_folder(name, parent)
    return _open(name, parent)


def _check(fd: int, shown: Path, trust: Trust, *, sticky: bool) -> None:
    found = os.fstat(fd)
    reason = trust.doubt(found, sticky=sticky)
    if reason is None and trust.strict and not (sticky and found.st_mode & stat.S_ISVTX):
        reason = _list_doubt(fd, found)
    if reason is not None:
        raise PathUnusableError(f"{shown} {reason}, {WAY_OUT}")


def _target(link: int, shown: Path, trust: Trust) -> str:
    reason = trust.owner_doubt(os.fstat(link))
    if reason is not None:
        raise PathUnusableError(f"{shown} is a symbolic link that {reason}; {WAY_OUT}")
    return os.readlink("", dir_fd=link)


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return f"group {grp.getgrgid(number).gr_name}"
    except KeyError:
        return f"group {number}"


def _is_private(group: int, user: int) -> bool:
    """Whether the group is that which systems make for one user alone, by the user's name."""
    try:
        found, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    if found.gr_name != owner.pw_name or owner.pw_gid != group:
        return False
    if not set(found.gr_mem) <= {owner.pw_name}:
        return False
    # Members by their primary group are in no list. Of root's own group they are its services.
    return not group or _primary_members(group, int(time.monotonic() // 60)) <= {user}


@functools.lru_cache(maxsize=16)
def _primary_members(group: int, minute: int) -> set[int]:
    """The users whose primary group it is; to ask for all users may take long."""
    return {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group}


def _list_doubt(fd: int, found: os.stat_result) -> str | None:
    """Why the access control list of what is open is not to be trusted, or None.

    The mode says of it what all whom it names may do at most, as if it were the group's.
    """
    if not found.st_mode & stat.S_IWGRP:
        return None
    try:
        # A descriptor that only names something has no attributes itself.
        packed = os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access")
    except OSError:
        return None
    for kind, may, number in struct.iter_unpack("<HHI", packed[4:]):
        user = kind == _ACL_USER and number not in (0, found.st_uid)
        if may & 2 and (user or (kind == _ACL_GROUP and not _is_private(number, found.st_uid))):
            whom = _user(number) if user else _group(number)
            return f"may be written by {whom}, by its access control list: setfacl -b"
    return None
