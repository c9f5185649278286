"""A file system that passes everything on to a folder, and fails where it is told to.

    python -m tests.faults.file_system FOLDER MOUNTPOINT

Rules come as one line of JSON each on standard input and replace all earlier
ones; each line is answered by one line. A rule is a table:

    op      operation that it applies to: read, write, open, create, fsync, fallocate, ...
    path    regular expression that is searched in the path
    first   lowest offset to which it applies (read and write), 0 if not given
    end     offset from which on it does not apply, none if not given
    error   errno that is answered
    short   at most so many bytes are read or written
    delay   seconds to wait first
    hang    wait until there are other rules

The kernel keeps nothing: every read and write of a process arrives here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-untyped]

Rule = dict[str, Any]


class Rules:
    """The rules in force."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._changed = threading.Condition()
        self._generation = 0

    def replace(self, rules: list[Rule]) -> None:
        """Put `rules` in force; what hangs goes on under them."""
        with self._changed:
            self._rules = rules
            self._generation += 1
            self._changed.notify_all()

    def apply(self, op: str, path: str, offset: int = 0, size: int = 1) -> int:
        """Do what the rules say; returns how many of `size` bytes may be moved.

        Raises:
            OSError: when a rule says so.
        """
        generation = self._generation
        for rule in self._rules:
            if rule["op"] != op or not re.search(rule.get("path", ""), path):
                continue
            if offset + size <= rule.get("first", 0) or offset >= rule.get("end", offset + 1):
                continue
            time.sleep(rule.get("delay", 0))
            if rule.get("hang"):
                with self._changed:
                    self._changed.wait_for(lambda: self._generation != generation)
                return self.apply(op, path, offset, size)
            if "error" in rule:
                raise OSError(rule["error"], os.strerror(rule["error"]))
            size = min(size, rule.get("short", size))
        return size


class PassThrough(mfusepy.Operations):  # type: ignore[misc]
    """Every operation, after the rules, on the folder behind."""

    use_ns = True

    def __init__(self, folder: Path, rules: Rules) -> None:
        self._folder = folder
        self._rules = rules

    def _behind(self, op: str, path: str) -> str:
        self._rules.apply(op, path)
        return str(self._folder) + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if fh is not None:
            self._rules.apply("getattr", path)
            found = os.fstat(fh)
        else:
            found = os.lstat(self._behind("getattr", path))
        names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
        told = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
        times = {
            f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")
        }
        return told | times

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._behind("readdir", path)))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._behind("statfs", path))
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "namemax")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def open(self, path: str, flags: int) -> int:
        # The kernel has done what O_DIRECT asks; the folder behind may not have it.
        return os.open(self._behind("open", path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._behind("create", path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, self._rules.apply("read", path, offset, size), offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data[: self._rules.apply("write", path, offset, len(data))], offset)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._rules.apply("fallocate", path)
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(fh, offset, size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._rules.apply("fsync", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._behind("truncate", path), length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._behind("mkdir", path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._behind("rmdir", path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._behind("unlink", path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._behind("rename", old), str(self._folder) + new)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(str(self._folder) + source, self._behind("link", target))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._behind("chmod", path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._behind("utimens", path), ns=times)
        return 0


def obey(rules: Rules, answer: Callable[[str], None]) -> None:
    """Put the rules in force that arrive on standard input."""
    for line in sys.stdin:
        rules.replace(json.loads(line))
        answer("done")


def main() -> None:
    folder, mountpoint = sys.argv[1:]
    rules = Rules()

    def answer(word: str) -> None:
        print(word, flush=True)

    threading.Thread(target=obey, args=(rules, answer), daemon=True).start()
    mfusepy.FUSE(
        PassThrough(Path(folder), rules),
        mountpoint,
        foreground=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="kvstore-faults",
    )


if __name__ == "__main__":
    main()
