"""Files: a file system in memory, with what real ones do at the worst moment.

The methods of `Files` have the names, arguments and errors of `os` and `fcntl`: they are all that
the disk tier asks of a system. Until it is synced, what was written may be lost at a power cut,
page by page, or sector by sector, and names in the order in which they were made.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.world.kernel import Kernel, Process

__all__ = ["Damage", "Files"]

PAGE, SECTOR = 4096, 512

ROOT = "/sim"
"""Everything below it is simulated, for every process of a world."""

FIRST_FD = 1 << 20
"""Descriptors from here on are simulated."""


class Inode:
    """A file, a folder or a symbolic link."""

    def __init__(self, number: int, mode: int, now_ns: int) -> None:
        self.number, self.mode = number, mode
        self.nlink = 1
        self.mtime_ns = self.ctime_ns = now_ns
        self.data = bytearray()
        self.allocated = 0
        self.entries: dict[str, Inode] = {}
        self.locks: dict[Open, int] = {}
        self.dirty: dict[int, bytes | None] = {}
        """By page: what a power cut may bring back; None where nothing was."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Open:
    """An open file description."""

    def __init__(self, inode: Inode, flags: int, process: Process, path: str) -> None:
        self.inode, self.flags, self.process, self.path = inode, flags, process, path
        self.offset = 0
        self.fds = 1

    @property
    def only_path(self) -> bool:
        return bool(self.flags & os.O_PATH)


class Damage:
    """What goes wrong at present.

    Attributes:
        fails: by call, the chance that it fails, and how.
        slow: by call, how many seconds it takes at most.
        short: chance that a read or write moves less than it was asked for.
        bad: places of a file that cannot be written, as first byte and end.
    """

    def __init__(self) -> None:
        self.fails: dict[str, tuple[float, int]] = {}
        self.slow: dict[str, float] = {}
        self.short = 0.0
        self.bad: list[tuple[Inode, int, int]] = []

    @property
    def present(self) -> bool:
        return bool(self.fails or self.bad)


class Files:
    """The simulated file system, with one root for all processes.

    Attributes:
        size: bytes that all files may take together.
        damage: see `Damage`.
        faults: calls that have failed because of it.
    """

    def __init__(self, kernel: Kernel, rng: random.Random, size: int = 1 << 40) -> None:
        self.kernel, self.rng, self.size = kernel, rng, size
        self.damage = Damage()
        self.faults = 0
        self.used = 0
        self._number = 100
        self._fds: dict[int, Open] = {}
        self._next_fd = FIRST_FD
        self._journal: list[Callable[[], None]] = []
        self.top = self._new(stat.S_IFDIR | 0o755)
        self.top.entries["sim"] = self._new(stat.S_IFDIR | 0o755)
        self.on_rename: Callable[[str, bytes], None] = lambda target, data: None
        """Called at the moment in which a file has another name, with what it holds."""
        self.switching = 0.25
        """Chance that a call which takes no time lets others run first."""

    # -- helpers -----------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The time of the system, by which files are stamped."""
        return int((self.kernel.now + 1_700_000_000) * 1e9)

    def is_path(self, path: object) -> bool:
        """Whether a path is simulated."""
        if isinstance(path, int):
            return path >= FIRST_FD
        text = os.fsdecode(path)  # type: ignore[arg-type]
        return text == ROOT or text.startswith(ROOT + "/")

    def _new(self, mode: int) -> Inode:
        self._number += 1
        return Inode(self._number, mode, self.now_ns())

    def _call(self, name: str, path: str = "") -> Process:
        """Enter a call: others may run first, it may take time, and it may fail."""
        kernel, rng = self.kernel, self.rng
        process = kernel.process
        slow = self.damage.slow.get(name)
        if slow is not None:
            kernel.sleep(rng.random() * slow)
        elif rng.random() < self.switching:
            kernel.give_way()
        fails = self.damage.fails.get(name)
        if fails is not None and rng.random() < fails[0]:
            self.faults += 1
            raise OSError(fails[1], os.strerror(fails[1]), path or None)
        return process

    def _walk(self, path: str, start: Inode | None = None, *, follow: bool = True) -> Inode:
        here = self.top if start is None or path.startswith("/") else start
        for part in path.split("/"):
            if part in ("", "."):
                continue
            if not here.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            found = here.entries.get(part)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            here = found
        return here

    def _above(self, path: str, start: Inode | None = None) -> tuple[Inode, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        folder = self._walk(head, start) if head else (start or self.top)
        if not folder.is_dir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, name

    def _start(self, dir_fd: int | None) -> Inode | None:
        return None if dir_fd is None else self._open_file(dir_fd).inode

    def _open_file(self, fd: int) -> Open:
        found = self._fds.get(fd)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def _enter(self, folder: Inode, name: str, inode: Inode) -> None:
        folder.entries[name] = inode
        self._changed(folder)

        def undo() -> None:
            folder.entries.pop(name, None)

        self._journal.append(undo)

    def _leave(self, folder: Inode, name: str) -> Inode:
        inode = folder.entries.pop(name)
        self._changed(folder)

        def undo() -> None:
            folder.entries[name] = inode
            if not inode.is_dir:
                inode.nlink += 1

        self._journal.append(undo)
        if not inode.is_dir:
            inode.nlink -= 1
            inode.ctime_ns = self.now_ns()
            self._free(inode)
        return inode

    def _free(self, inode: Inode) -> None:
        """Give back the space of a file without a name that nobody has open."""
        if not inode.nlink and not any(one.inode is inode for one in self._fds.values()):
            self._allocate(inode, 0)

    def _changed(self, inode: Inode) -> None:
        inode.mtime_ns = inode.ctime_ns = self.now_ns()

    def _allocate(self, inode: Inode, size: int) -> None:
        more = size - inode.allocated
        if more > 0 and self.used + more > self.size:
            self.faults += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.used += more
        inode.allocated = size

    def _resize(self, inode: Inode, size: int) -> None:
        before = len(inode.data)
        if size < before:
            lost = bytes(inode.data[size:])

            def undo() -> None:
                inode.data[size:] = lost

            del inode.data[size:]
            self._allocate(inode, min(inode.allocated, size))
        else:

            def undo() -> None:
                del inode.data[before:]

            inode.data += bytes(size - before)
        self._journal.append(undo)
        self._changed(inode)

    def _keep(self, inode: Inode, start: int, end: int) -> None:
        """Remember what a power cut may bring back of these bytes."""
        for page in range(start // PAGE, -(-end // PAGE)):
            if page not in inode.dirty:
                inode.dirty[page] = bytes(inode.data[page * PAGE : (page + 1) * PAGE])

    # -- names -------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        process = self._call("open", str(path))
        text, start = os.fspath(path), self._start(dir_fd)
        try:
            inode = self._walk(text, start)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            folder, name = self._above(text, start)
            inode = self._new(stat.S_IFREG | (mode & ~0o022))
            self._enter(folder, name, inode)
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), text)
            if flags & os.O_DIRECTORY and not inode.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), text)
            if inode.is_dir and flags & os.O_ACCMODE and not flags & os.O_PATH:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), text)
            if flags & os.O_TRUNC:
                self._resize(inode, 0)
        fd = self._next_fd
        self._next_fd += 1
        self._fds[fd] = Open(inode, flags, process, text)
        return fd

    def close(self, fd: int) -> None:
        if self.kernel.over:
            return
        found = self._open_file(fd)
        del self._fds[fd]
        found.fds -= 1
        if not found.fds:
            found.inode.locks.pop(found, None)
            self._free(found.inode)

    def dup(self, fd: int) -> int:
        found = self._open_file(fd)
        found.fds += 1
        new = self._next_fd
        self._next_fd += 1
        self._fds[new] = found
        return new

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._call("mkdir", str(path))
        folder, name = self._above(os.fspath(path), self._start(dir_fd))
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._enter(folder, name, self._new(stat.S_IFDIR | (mode & ~0o022)))

    def rmdir(self, path: Any) -> None:
        self._call("unlink", str(path))
        folder, name = self._above(os.fspath(path))
        inode = self._walk(os.fspath(path))
        if not inode.is_dir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if inode.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._leave(folder, name)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._call("unlink", str(path))
        text, start = os.fspath(path), self._start(dir_fd)
        if self._walk(text, start).is_dir:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), text)
        self._leave(*self._above(text, start))

    def rename(self, source: Any, target: Any) -> None:
        self._call("rename", str(target))
        self._above(os.fspath(source))
        folder, name = self._above(os.fspath(target))
        inode = self._walk(os.fspath(source))
        if f"{target}/".startswith(f"{source}/") and str(source) != str(target):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, target)
        if f"{source}/".startswith(f"{target}/") and str(source) != str(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
        there = folder.entries.get(name)
        if there is inode:
            return
        if there is not None:
            if there.is_dir != inode.is_dir:
                kind = errno.EISDIR if there.is_dir else errno.ENOTDIR
                raise OSError(kind, os.strerror(kind), source, None, target)
            if there.entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
        # One entry of the journal: a name is never lost between the two.
        at = len(self._journal)
        if there is not None:
            self._leave(folder, name)
        self._leave(*self._above(os.fspath(source)))
        if not inode.is_dir:
            inode.nlink += 1
        self._enter(folder, name, inode)
        steps = self._journal[at:]
        del self._journal[at:]

        def undo() -> None:
            for step in reversed(steps):
                step()
            if not inode.is_dir:
                inode.nlink -= 1

        self._journal.append(undo)
        self.on_rename(os.fspath(target), bytes(inode.data))

    def link(self, source: Any, target: Any) -> None:
        self._call("rename", str(target))
        self._above(os.fspath(source))
        inode = self._walk(os.fspath(source))
        folder, name = self._above(os.fspath(target))
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
        if inode.is_dir:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)
        inode.nlink += 1
        inode.ctime_ns = self.now_ns()
        self._enter(folder, name, inode)
        enter = self._journal.pop()

        def undo() -> None:
            enter()
            inode.nlink -= 1

        self._journal.append(undo)

    def listdir(self, path: Any = ".") -> list[str]:
        self._call("list", str(path))
        inode = self._open_file(path).inode if isinstance(path, int) else self._walk(str(path))
        if not inode.is_dir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return list(inode.entries)

    def scandir(self, path: Any = ".") -> Entries:
        return Entries(self, str(path), self.listdir(path))

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> str:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    # -- what a file is ------------------------------------------------------------------------

    def stat(
        self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        if isinstance(path, int):
            return self.fstat(path)
        self._call("stat", str(path))
        return self._stat(self._walk(os.fspath(path), self._start(dir_fd)))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return self._stat(self._open_file(fd).inode)

    def _stat(self, inode: Inode) -> os.stat_result:
        nlink, size = (2, 4096) if inode.is_dir else (inode.nlink, len(inode.data))
        blocks = -(-inode.allocated // SECTOR)
        at = mtime, _, ctime = inode.mtime_ns, inode.mtime_ns, inode.ctime_ns
        # In the order of `os.stat_result`: times in seconds, with fractions, in nanoseconds.
        return os.stat_result((
            inode.mode, inode.number, 77, nlink, os.geteuid(), os.getegid(), size,
            mtime // 10**9, mtime // 10**9, ctime // 10**9, mtime / 1e9, mtime / 1e9, ctime / 1e9,
            *at, PAGE, blocks, 0,
        ))  # fmt: skip

    def utime(self, path: Any, times: Any = None, *, ns: tuple[int, int] | None = None) -> None:
        self._call("utime")
        inode = self._open_file(path).inode if isinstance(path, int) else self._walk(str(path))
        inode.mtime_ns = self.now_ns() if ns is None else ns[1]
        inode.ctime_ns = self.now_ns()

    def statvfs(self, path: Any) -> os.statvfs_result:
        blocks, free = self.size // PAGE, (self.size - self.used) // PAGE
        return os.statvfs_result(
            (PAGE, PAGE, blocks, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255)
        )

    # -- bytes ---------------------------------------------------------------------------------

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        found = self._reading(fd)
        count = self._moved(count)
        return bytes(found.inode.data[offset : offset + count])

    def read(self, fd: int, count: int) -> bytes:
        found = self._reading(fd)
        data = bytes(found.inode.data[found.offset : found.offset + count])
        found.offset += len(data)
        return data

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        found = self._reading(fd)
        self._aligned(found, buffers, offset)
        left = self._moved(sum(map(len, buffers)), found)
        done = 0
        for buffer in buffers:
            part = found.inode.data[offset + done : offset + done + min(len(buffer), left)]
            buffer[: len(part)] = part
            done += len(part)
            left -= len(part)
            if len(part) < len(buffer):
                break
        return done

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self.pwritev(fd, [memoryview(data).cast("B")], offset)

    def write(self, fd: int, data: Any) -> int:
        found = self._open_file(fd)
        done = self.pwrite(fd, data, found.offset)
        found.offset += done
        return done

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        found = self._open_file(fd)
        self._call("write", found.path)
        if not found.flags & os.O_ACCMODE or found.only_path:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._aligned(found, buffers, offset)
        inode = found.inode
        data = b"".join(bytes(buffer) for buffer in buffers)
        data = data[: self._moved(len(data), found)]
        if not data:
            return 0
        end = offset + len(data)
        if any(one is inode and offset < last and first < end
               for one, first, last in self.damage.bad):  # fmt: skip
            raise OSError(errno.EIO, os.strerror(errno.EIO), found.path)
        if end > inode.allocated:
            self._allocate(inode, end)
        if end > len(inode.data):
            self._resize(inode, end)
        self._keep(inode, offset, end)
        inode.data[offset:end] = data
        self._changed(inode)
        return len(data)

    def ftruncate(self, fd: int, size: int) -> None:
        found = self._open_file(fd)
        self._call("truncate", found.path)
        if not found.flags & os.O_ACCMODE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if size != len(found.inode.data):
            self._resize(found.inode, size)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        found = self._open_file(fd)
        self._call("allocate", found.path)
        if not found.flags & os.O_ACCMODE:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        inode, end = found.inode, offset + size
        if end > inode.allocated:
            self._allocate(inode, end)
        if end > len(inode.data):
            self._resize(inode, end)

    def punch(self, fd: int, mode: int, offset: int, size: int) -> int:
        """`fallocate` with FALLOC_FL_PUNCH_HOLE, as the C library has it."""
        inode = self._open_file(fd).inode
        self._keep(inode, offset, min(offset + size, len(inode.data)))
        inode.data[offset : offset + size] = bytes(min(size, len(inode.data) - offset))
        self._allocate(inode, 0)
        return 0

    def fsync(self, fd: int) -> None:
        found = self._open_file(fd)
        self._call("sync", found.path)
        found.inode.dirty.clear()
        self._journal.clear()

    fdatasync = fsync

    def _reading(self, fd: int) -> Open:
        found = self._open_file(fd)
        self._call("read", found.path)
        if found.only_path or found.flags & os.O_ACCMODE == os.O_WRONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if found.inode.is_dir:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return found

    def _moved(self, count: int, found: Open | None = None) -> int:
        """How much of `count` bytes a call moves."""
        if count <= SECTOR or self.rng.random() >= self.damage.short:
            return count
        some = self.rng.randrange(1, count)
        step = PAGE if found is not None and found.flags & os.O_DIRECT else 1
        return max(step, some // step * step)

    def _aligned(self, found: Open, buffers: Iterable[Any], offset: int) -> None:
        if found.flags & os.O_DIRECT and (
            offset % SECTOR or any(len(buffer) % SECTOR for buffer in buffers)
        ):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    # -- locks ---------------------------------------------------------------------------------

    def flock(self, fd: int, kind: int) -> None:
        found = self._open_file(fd)
        self._call("lock", found.path)
        locks = found.inode.locks
        if kind & fcntl.LOCK_UN:
            locks.pop(found, None)
            return
        wanted = kind & (fcntl.LOCK_SH | fcntl.LOCK_EX)
        others = [held for one, held in locks.items() if one is not found]
        if fcntl.LOCK_EX in others or (wanted == fcntl.LOCK_EX and others):
            assert kind & fcntl.LOCK_NB, "nothing waits for a lock"
            # Linux gives up the lock that is to be changed, even where it then cannot be had.
            locks.pop(found, None)
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        locks[found] = wanted

    # -- the world's part ------------------------------------------------------------------------

    def fds_of(self, process: Process) -> list[int]:
        """The descriptors of a process."""
        return [fd for fd, one in self._fds.items() if one.process is process]

    def leave_process(self, process: Process) -> None:
        """Close what a process had open that has ended."""
        for fd in self.fds_of(process):
            found = self._fds.pop(fd)
            found.inode.locks.pop(found, None)
            self._free(found.inode)

    def walk(self) -> Iterable[tuple[str, Inode]]:
        """Every file and folder, with its path."""
        stack = [(ROOT, self.top.entries["sim"])]
        while stack:
            path, inode = stack.pop()
            yield path, inode
            stack += [(f"{path}/{name}", one) for name, one in inode.entries.items()]

    def cut_power(self) -> None:
        """Lose what was not synced, as much as the seed says. No process is alive any more."""
        rng = self.rng
        everything = {id(inode): inode for _, inode in self.walk()}
        everything |= {id(one.inode): one.inode for one in self._fds.values()}
        self._fds.clear()
        kept = rng.randrange(len(self._journal) + 1)
        for undo in reversed(self._journal[kept:]):
            undo()
        self._journal.clear()
        everything |= {id(inode): inode for _, inode in self.walk()}
        for inode in everything.values():
            inode.locks.clear()
            for page, before in inode.dirty.items():
                self._lose(inode, page, before or b"", rng)
            inode.dirty.clear()
            if not inode.is_dir:
                self.used += len(inode.data) - inode.allocated if inode.nlink else -inode.allocated
                inode.allocated = len(inode.data) if inode.nlink else 0

    @staticmethod
    def _lose(inode: Inode, page: int, before: bytes, rng: random.Random) -> None:
        start = page * PAGE
        held = len(inode.data[start : start + PAGE])
        before = before.ljust(PAGE, b"\0")[:held]
        how = rng.random()
        if how < 0.4:
            return
        if how < 0.8:
            inode.data[start : start + held] = before
            return
        for sector in range(0, held, SECTOR):
            if rng.random() < 0.5:
                end = min(sector + SECTOR, held)
                inode.data[start + sector : start + end] = before[sector:end]

    def fdopen(self, fd: int, mode: str = "r", *args: Any, **named: Any) -> Any:
        raw = _Raw(self, fd)
        if "b" in mode:
            return io.BufferedWriter(raw) if "w" in mode else io.BufferedReader(raw)
        return io.TextIOWrapper(
            io.BufferedWriter(raw) if "w" in mode else io.BufferedReader(raw),
            encoding="utf-8",
        )


class _Raw(io.RawIOBase):
    """A file object over a simulated descriptor."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        found = self._files._open_file(self._fd)
        base = (0, found.offset, len(found.inode.data))[whence]
        found.offset = base + offset
        return found.offset

    def readinto(self, buffer: Any) -> int:
        data = self._files.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return self._files.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._files.close(self._fd)


class Entries:
    """The result of `scandir`."""

    def __init__(self, files: Files, path: str, names: list[str]) -> None:
        self._all = iter([Entry(files, path, name) for name in names])

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._all)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


class Entry:
    """One entry of a folder."""

    def __init__(self, files: Files, folder: str, name: str) -> None:
        self.name, self.path = name, f"{folder}/{name}"
        self._files = files

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._files._walk(self.path).is_dir

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._files.stat(self.path)
