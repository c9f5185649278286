"""Headroom: how much memory this process may still allocate.

This is bounded by the machine's free memory, and by the limit of every enclosing
control group, version 1 and 2. Clean page cache counts as free, because the kernel
frees it on demand.

Allocated memory that was not touched yet still looks free. So a process claims memory before it
allocates it, with a name in the system's abstract socket namespace, which ends with the process.
The name tells the limits that the process is under: what others claim below limits of their own, as
in other containers, counts against the machine's memory alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.concurrency import given_up_in_children
from kvstore.errors import ConfigError

__all__ = ["available_bytes", "claimed", "most_bytes"]

WAIT_S = 45.0
"""How long a claim waits for others, which may already have allocated part of their memory."""

PAUSE_S = 0.02
ROOT = Path("/")

MACHINE = ""
"""In place of a limit's name."""

NO_LIMIT = 2**62
"""From here on a limit of version 1 is none."""

MOST_TOLD = 6
"""Limits that a claim tells, the innermost first: a name has room for so many."""

ASKING, CLAIM = "kvstore-room", "kvstore-room-of-"


@contextlib.contextmanager
def claimed(size: int) -> Iterator[None]:
    """Claim `size` bytes for a block in which they are allocated; processes claim in turn.

    Raises:
        ConfigError: if there is not enough memory besides what others have claimed.
    """
    until = time.monotonic() + WAIT_S
    while (claim := _claim(size, last=time.monotonic() > until)) is None:
        time.sleep(PAUSE_S)
    with claim:
        yield


def _claim(size: int, *, last: bool) -> contextlib.AbstractContextManager[object] | None:
    """Make a claim; return None if it must wait for the claims of others."""
    with _alone():
        # Claims first: whose claim ends meanwhile has taken its memory, and is counted twice. The
        # other way round it would not be counted at all.
        claims, rooms = list(_claims()), list(_rooms(ROOT))
        own = [limit for limit, _ in rooms if limit != MACHINE][:MOST_TOLD]
        beside = [
            sum(its for its, under in claims if limit == MACHINE or under is None or limit in under)
            for limit, _ in rooms
        ]
        each = zip(rooms, beside, strict=True)
        short = [(room, its) for (_, room), its in each if size + its > room]
        if not short:
            name = f"{CLAIM}{size}-{secrets.token_hex(6)}-{'.'.join(own)}"
            return _named(name) or contextlib.nullcontext()
    if not last and all(size <= room for room, _ in short):
        return None
    available, others = short[0]
    taken = f", and other processes are taking {others}" if others else ""
    raise ConfigError(
        f"host memory of {size} bytes does not fit: {available} bytes are available{taken} "
        f"({size / 2**30:.1f} GiB of {available / 2**30:.1f}): lower cpu_bytes_to_use (host)"
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Exclude other processes that claim memory, but do not wait forever for one that hangs."""
    until = time.monotonic() + WAIT_S
    while (held := _named(ASKING)) is None and time.monotonic() < until:
        time.sleep(PAUSE_S)
    with held or contextlib.nullcontext():
        yield


def _named(name: str) -> socket.socket | None:
    """Return a socket with this name; None if it is taken. Unnamed if names are not supported."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _names.add(holder)
    try:
        holder.bind(f"\0{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder.close()
            return None
    return holder


# A forked child must not keep the claims of its parent.
_names = given_up_in_children(socket.socket.close)


def _claims() -> Iterator[tuple[int, list[str] | None]]:
    """Yield what others claim, and the limits that they are under; None if they do not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text().splitlines():
            _, found, rest = line.partition(f"@{CLAIM}")
            size, *more = rest.split("-")
            if found and size.isdigit():
                yield int(size), more[1].split(".") if more[1:] else None


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes are available, or None if the system does not say.

    Args:
        root: root of the file system with ``proc`` and the mounts that it names.
    """
    rooms = [room for _, room in _rooms(root)]
    return max(0, min(rooms)) if rooms else None


def most_bytes(root: Path = Path("/")) -> int:
    """Return the most that this process may ever use: the machine's memory, or a smaller limit."""
    known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for _, at in _groups(root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            if (limit := _number(at / name)) is not None:
                known.append(limit)
    return min(known)


def _rooms(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the room of the machine, and that below each limit, with its name."""
    yield from ((MACHINE, room) for room in _machine(root))
    yield from _limits(root)


def _machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _limits(root: Path) -> Iterator[tuple[str, int]]:
    """Yield each limit of this process's control groups and their parents, and the room below it.

    A limit is named by the inode of its folder, which is the same in all containers.
    """
    for kind, at in _groups(root):
        for room in _room_v1(at) if kind == "cgroup" else _room_v2(at):
            with contextlib.suppress(OSError):
                yield f"{at.stat().st_ino:x}", room


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield kind and folder of each of this process's control groups, and of their parents."""
    for kind, mount, top, group in _hierarchies(root):
        folder = root / mount.lstrip("/")
        inside = group.removeprefix(top.rstrip("/")).strip("/")
        if group != top and not group.startswith(top.rstrip("/") + "/"):
            # The group is not below the mounted folder: only the top can be read.
            inside = ""
        parts = [part for part in inside.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield kind, folder.joinpath(*parts[:depth])


def _hierarchies(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, mount point, top and our group of each hierarchy that may limit memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        groups: dict[str, str] = {}
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                groups["cgroup2"] = group
            elif "memory" in controllers.split(","):
                groups["cgroup"] = group
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup" and "memory" not in options.split(","):
                continue
            if kind in groups:
                top, mount = before.split(" ")[3:5]
                yield kind, mount, top, groups[kind]


def _room_v2(group: Path) -> Iterator[int]:
    used = _number(group / "memory.current")
    limits = [_number(group / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    if used is None or not known:
        return
    stat = _table(group / "memory.stat")
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    busy = stat.get("file_dirty", 0) + stat.get("file_writeback", 0)
    yield min(known) - used + max(0, cache - busy) + stat.get("slab_reclaimable", 0)


def _room_v1(group: Path) -> Iterator[int]:
    used = _number(group / "memory.usage_in_bytes")
    limit = _number(group / "memory.limit_in_bytes")
    if used is None or limit is None:
        return
    stat = _table(group / "memory.stat")
    # A limit further up may be outside the mounted hierarchy.
    limit = min(limit, stat.get("hierarchical_memory_limit", limit))
    if limit >= NO_LIMIT:
        return
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    busy = stat.get("total_dirty", 0) + stat.get("total_writeback", 0)
    yield limit - used + max(0, cache - busy)


def _number(path: Path) -> int | None:
    """Read a number; None for "max" and for a missing file."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    table = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, value = line.split()
            table[name] = int(value)
    return table
