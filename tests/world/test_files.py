"""The simulated file system answers as real ones do, to any program of the calls that are made."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world.files import PAGE, ROOT, Files
from tests.world.kernel import Kernel
from tests.world.machine import FD_CALLS, PATH_CALLS

PROGRAMS = int(os.environ.get("KVSTORE_FILE_PROGRAMS", "300"))
"""Programs of each file system; many more in `make files`."""

CALLS_EACH = 60

NAMES = ("a", "b", "folder", "folder/a", "folder/b", "folder/inner", "missing/a")

FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
)

LOCKS = (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN)


class Real:
    """The system's own calls, with those of `fcntl`."""

    flock = staticmethod(fcntl.flock)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def program(rng: random.Random) -> list[tuple[str, Any]]:
    """Calls with their arguments; descriptors by the number of their opening."""
    calls: list[tuple[str, Any]] = [("mkdir", ("folder",))]
    opened = 0
    for _ in range(CALLS_EACH):
        name = rng.choice(NAMES)
        fd, offset, size = rng.randrange(opened + 1), rng.randrange(9000), rng.randrange(1, 9000)
        kind = rng.randrange(17)
        if kind < 3:
            calls.append(("open", (name, rng.choice(FLAGS))))
            opened += 1
        else:
            calls.append(
                (
                    ("close", (fd,)),
                    ("pwrite", (fd, rng.randbytes(size), offset)),
                    ("pread", (fd, size, offset)),
                    ("preadv", (fd, (size // 2, size), offset)),
                    ("pwritev", (fd, (b"x" * 512, b"y" * size), offset)),
                    ("ftruncate", (fd, size)),
                    ("posix_fallocate", (fd, offset, size + 1)),
                    ("fsync", (fd,)),
                    ("flock", (fd, rng.choice(LOCKS) | fcntl.LOCK_NB)),
                    ("unlink", (name,)),
                    ("rename", (name, rng.choice(NAMES))),
                    ("link", (name, rng.choice(NAMES))),
                    (rng.choice(("mkdir", "rmdir")), (name,)),
                    ("look", ()),
                )[kind - 3]
            )
    return calls


def outcome(system: Any, root: str, calls: list[tuple[str, Any]]) -> list[Any]:
    """What each call of a program returned, or its error."""
    fds: list[int] = []
    told: list[Any] = []

    def path(name: str) -> str:
        return f"{root}/{name}"

    def look() -> Any:
        found: dict[str, Any] = {}
        for name in NAMES:
            try:
                its = system.stat(path(name))
            except OSError as error:
                found[name] = error.errno
                continue
            is_file = stat.S_ISREG(its.st_mode)
            found[name] = (stat.S_IFMT(its.st_mode), its.st_size if is_file else 0,
                           its.st_nlink if is_file else 0)  # fmt: skip
        return found, sorted(system.listdir(path("folder"))) if "folder" in found else None

    for name, arguments in calls:
        try:
            if name == "look":
                told.append(look())
            elif name == "open":
                fds.append(-1)
                fds[-1] = system.open(path(arguments[0]), arguments[1], 0o600)
                told.append("open")
            elif name in ("unlink", "mkdir", "rmdir"):
                told.append(getattr(system, name)(path(arguments[0])))
            elif name in ("rename", "link"):
                told.append(getattr(system, name)(path(arguments[0]), path(arguments[1])))
            else:
                at = arguments[0]
                if at >= len(fds) or fds[at] < 0:
                    told.append("no file")
                    continue
                if name == "close":
                    system.close(fds[at])
                    fds[at] = -1
                    told.append(None)
                elif name == "preadv":
                    into = [bytearray(size) for size in arguments[1]]
                    count = system.preadv(fds[at], into, arguments[2])
                    told.append((count, [bytes(one) for one in into]))
                elif name == "pwritev":
                    told.append(system.pwritev(fds[at], list(arguments[1]), arguments[2]))
                else:
                    told.append(getattr(system, name)(fds[at], *arguments[1:]))
        except OSError as error:
            # POSIX allows both for a folder that is not empty.
            full = name in ("rename", "rmdir") and error.errno == errno.EEXIST
            told.append(errno.errorcode[errno.ENOTEMPTY if full else error.errno or 0])
    for fd in fds:
        if fd >= 0:
            system.close(fd)
    return told


def simulated(calls: list[tuple[str, Any]], seed: int) -> list[Any]:
    rng = random.Random(seed)
    kernel = Kernel(rng)
    files = Files(kernel, rng)
    told: list[list[Any]] = []
    kernel.spawn("program", lambda: told.append(outcome(files, ROOT, calls)))
    kernel.run(lambda: False)
    return told[0]


@pytest.fixture(params=["here", "memory", "xfs", "btrfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "here":
        yield tmp_path
        return
    if request.param in ("xfs", "btrfs"):
        with mounted(request.param, tmp_path) as there:
            yield there
        return
    memory = Path(f"/dev/shm/kvstore-test-{os.getpid()}")
    if not memory.parent.is_dir():
        pytest.skip("there is no file system in memory")
    memory.mkdir()
    yield memory
    clear(memory)
    memory.rmdir()


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A file system of this kind, on a loop device over a file."""
    image, there = folder / "image", folder / "mounted"
    with image.open("wb") as file:
        file.truncate(320 * 2**20)
    there.mkdir()
    for command in (
        [f"mkfs.{kind}", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(there)],
    ):
        if os.geteuid() != 0 or shutil.which(command[0]) is None:
            pytest.skip("needs root, and the tools of this file system")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        (there / "place").mkdir()
        yield there / "place"
    finally:
        subprocess.run(["umount", "-l", there], capture_output=True)


def clear(folder: Path) -> None:
    for one in folder.iterdir():
        if one.is_dir():
            clear(one)
            one.rmdir()
        else:
            one.unlink()


def test_programs_have_the_same_outcome_here_and_there(place: Path) -> None:
    for seed in range(PROGRAMS):
        calls = program(random.Random(seed))
        clear(place)
        real, ours = outcome(Real(), str(place), calls), simulated(calls, seed)
        for at, (call, one, other) in enumerate(zip(calls, real, ours, strict=True)):
            assert one == other, f"program {seed}, call {at}: {call[0]} {call[1]!r:.200}"


def in_one(work: Callable[[Files], None], seed: int = 0) -> Files:
    """Let a process do this; returns its file system."""
    rng = random.Random(seed)
    kernel = Kernel(rng)
    files = Files(kernel, rng)
    kernel.on_exit = files.leave_process
    kernel.spawn("one", lambda: work(files))
    kernel.run(lambda: False)
    return files


def test_what_was_synced_outlives_a_power_cut_and_the_rest_may_be_torn() -> None:
    def work(files: Files) -> None:
        fd = files.open("/sim/synced", os.O_RDWR | os.O_CREAT)
        files.pwrite(fd, b"a" * 4 * PAGE, 0)
        files.fsync(fd)
        files.pwrite(fd, b"b" * 2 * PAGE, PAGE)
        files.open("/sim/late", os.O_RDWR | os.O_CREAT)

    ends, names = set(), set()
    for seed in range(60):
        files = in_one(work, seed)
        files.cut_power()
        entries = files.top.entries["sim"].entries
        data = bytes(entries["synced"].data)
        assert data[:PAGE] == data[3 * PAGE :] == b"a" * PAGE
        assert set(data) <= {ord("a"), ord("b")}
        ends.add(data)
        names.add("late" in entries)
    assert len(ends) > 5
    assert names == {True, False}


def test_a_name_is_never_lost_between_two_of_a_rename() -> None:
    def work(files: Files) -> None:
        for text in (b"1", b"2"):
            fd = files.open("/sim/new", os.O_RDWR | os.O_CREAT)
            files.pwrite(fd, text, 0)
            files.fsync(fd)
            files.close(fd)
            files.rename("/sim/new", "/sim/epoch")
            if text == b"1":
                files.fsync(files.open("/sim", os.O_RDONLY | os.O_DIRECTORY))

    found = set()
    for seed in range(40):
        files = in_one(work, seed)
        files.cut_power()
        found.add(bytes(files.top.entries["sim"].entries["epoch"].data))
    assert found == {b"1", b"2"}


SIMULATED = {*FD_CALLS, *PATH_CALLS, "getpid", "replace", "remove"}

HARMLESS = {
    "close", "cpu_count", "fchown", "fsdecode", "fspath", "geteuid", "getegid", "getuid", "path",
    "strerror", "sysconf", "register_at_fork", "environ", "PathLike", "stat_result", "access",
    "setpriority", "PRIO_PROCESS", "open_folder", "fsencode", "getxattr", "posix_fadvise",
    "POSIX_FADV_DONTNEED",
}  # fmt: skip
"""Calls that ask nothing of a file system that could go wrong."""

SEEN = (
    "kvstore/tiers/disk", "kvstore/maintenance", "kvstore/tiers/remote/directory.py",
    "kvstore/tiers/remote/mount.py",
)  # fmt: skip


def test_the_disk_asks_nothing_else_of_the_system() -> None:
    here = Path(__file__).resolve().parents[2]
    files: list[Path] = []
    for place in (here / name for name in SEEN):
        files += [place] if place.is_file() else place.rglob("*.py")
    assert len(files) > 30
    unknown = {
        f"{file.name}: os.{node.attr}"
        for file in files
        if file.name not in ("aio.py", "mapped.py", "portable.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and not node.attr.startswith("O_")
        and node.attr not in SIMULATED | HARMLESS
    }
    assert not unknown
