"""Host memory: one region of rows, allocated once.

A private region is anonymous memory. A shared region is a memfd that other
processes of the same user open through ``/proc``: it has no name in any file
system, so a killed process leaves nothing behind. Processes find each other by
a small rendezvous file that names the creator and is removed as soon as the
expected number of processes has mapped the region.

Memory of 4 KiB pages costs direct I/O 40 to 60 % of its speed against huge
pages, so both kinds ask for huge pages and report what they were given.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, PathUnusableError

__all__ = ["PAGE", "PinnedRegion", "round_to_page"]

PAGE = 4096
HUGE_PAGE = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
_MFD_HUGETLB = 0x0004


def round_to_page(size: int) -> int:
    """The next multiple of the page size, in bytes."""
    return -(-size // PAGE) * PAGE


class PinnedRegion:
    """`rows` rows of `row_bytes` bytes each, page-aligned, contiguous.

    Build one with `private` or `shared`. The memory is touched at creation, so
    that no page fault is left for the hot path.

    Attributes:
        rows: number of rows.
        row_bytes: bytes in a row, a multiple of 4096.
        address: address of row 0.
        huge_bytes: how much of the region is backed by huge pages.
        registered: whether CUDA knows the memory as pinned.
        complete: whether, with this process, all expected ones have mapped it.
    """

    def __init__(self, memory: mmap.mmap, rows: int, row_bytes: int) -> None:
        self.rows = rows
        self.row_bytes = row_bytes
        self.size = rows * row_bytes
        self.registered = False
        self.complete = True
        self._memory: mmap.mmap | None = memory
        self._fd: int | None = None
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)[: self.size]
        self._view: memoryview | None = memoryview(memory)[: self.size]
        self.address = int(self._bytes.ctypes.data)
        self.huge_bytes = _huge_bytes(self.address)

    @classmethod
    def private(cls, rows: int, row_bytes: int) -> PinnedRegion:
        """Memory for this process alone.

        Raises:
            ConfigError: if the machine has not that much memory.
        """
        size = _checked_size(rows, row_bytes)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(f"host memory of {size} bytes: {error.strerror}") from error
        _populate(memory, new=True)
        return cls(memory, rows, row_bytes)

    @classmethod
    def shared(
        cls, name: str, rows: int, row_bytes: int, mappers: int, timeout: float = 60.0
    ) -> PinnedRegion:
        """Memory that `mappers` processes of this user map under `name`.

        The first to come creates it. A rendezvous left by a process that no
        longer lives is ignored and replaced.

        Raises:
            ConfigError: if the machine has not that much memory, or the region
                exists with another size.
            PathUnusableError: if no other process could be met within `timeout` seconds.
        """
        size = _checked_size(rows, row_bytes)
        rendezvous = _Rendezvous(name, rows, row_bytes, mappers)
        deadline = time.monotonic() + timeout
        while True:
            fd = rendezvous.join()
            if fd is not None:
                memory = _map(fd, name, size)
                _populate(memory, new=False)
                break
            fd, memory = _new_memfd(name, size)
            if rendezvous.publish(fd):
                break
            memory.close()
            os.close(fd)
            if time.monotonic() > deadline:
                raise PathUnusableError(f"no rendezvous for shared memory {name!r}")
        region = cls(memory, rows, row_bytes)
        region._fd = fd
        rendezvous.mapped()
        return region

    @property
    def view(self) -> memoryview:
        """The whole region as writable bytes."""
        assert self._view is not None, "the region is closed"
        return self._view

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The region as an array of shape (rows, row_bytes)."""
        assert self._bytes is not None, "the region is closed"
        return self._bytes.reshape(self.rows, self.row_bytes)

    def row(self, row: int) -> memoryview:
        """One row as writable bytes."""
        start = row * self.row_bytes
        return self.view[start : start + self.row_bytes]

    @property
    def description(self) -> str:
        """Size, pages and registration in a few words."""
        huge = round(100 * min(self.huge_bytes, self.size) / self.size)
        pinned = ", registered with CUDA" if self.registered else ""
        return f"{self.rows} rows of {self.row_bytes} B, {huge} % huge pages{pinned}"

    def register_with_cuda(self) -> bool:
        """Make the memory known to CUDA as pinned. False, and no harm, where that cannot be."""
        if self.registered:
            return True
        import torch

        if not torch.cuda.is_available():
            return False
        result = torch.cuda.cudart().cudaHostRegister(self.address, self.size, 0)
        self.registered = int(result) == 0
        return self.registered

    def close(self) -> None:
        """Give the memory back. Views that are still held keep it alive until they go."""
        if self._memory is None:
            return
        if self.registered:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.registered = False
        if self._view is not None:
            with contextlib.suppress(BufferError):
                self._view.release()
        self._bytes = self._view = None
        with contextlib.suppress(BufferError):
            self._memory.close()
        self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Rendezvous:
    """A file that names the process and descriptor of a shared region.

    Who removes it holds a lock on the very file that was looked at, so nobody
    removes what has taken its place meanwhile.
    """

    def __init__(self, name: str, rows: int, row_bytes: int, mappers: int) -> None:
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:100]
        shm = Path("/dev/shm")
        folder = shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
        self._path = folder / f"kvstore-{os.getuid()}-{safe}.json"
        self._shape = [rows, row_bytes]
        self._mappers = mappers
        self._fd = -1
        """The file that was joined or published."""

    def join(self) -> int | None:
        """Open the published region; None when there is none, or its creator is gone."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PathUnusableError(f"{self._path} cannot be opened: {error.strerror}") from error
        region = None
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise PathUnusableError(f"{self._path} belongs to another user")
            region = self._open_region(os.pread(fd, PAGE, 0))
            if region is None:
                self._remove(fd)
        finally:
            if region is None:
                os.close(fd)
        self._fd = fd
        return region

    def publish(self, region: int) -> bool:
        """Name the region; False when another process was faster."""
        token = os.readlink(f"/proc/self/fd/{region}").removeprefix("/memfd:").split(" ")[0]
        told = {"pid": os.getpid(), "fd": region, "token": token, "shape": self._shape}
        temporary = self._path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise PathUnusableError(f"{temporary} cannot be made: {error.strerror}") from error
        try:
            os.write(fd, json.dumps(told).encode())
            os.link(temporary, self._path)
        except FileExistsError:
            os.close(fd)
            return False
        finally:
            temporary.unlink()
        self._fd = fd
        return True

    def mapped(self) -> None:
        """Count this process; the last one removes the rendezvous.

        The count is the number of lines: appending one byte is atomic, whoever does it.
        """
        os.write(self._fd, b"\n")
        if os.pread(self._fd, PAGE, 0).count(b"\n") >= self._mappers:
            self._remove(self._fd)
        os.close(self._fd)

    def _open_region(self, text: bytes) -> int | None:
        try:
            told = json.loads(text)
            pid, fd, token, shape = int(told["pid"]), told["fd"], told["token"], told["shape"]
        except (ValueError, KeyError, TypeError):
            return None
        target = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(target).startswith(f"/memfd:{token}"):
                return None
            region = os.open(target, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            # So says the system of a process that is dead but not buried, too.
            if _is_alive(pid):
                raise PathUnusableError(
                    f"{self._path}: the memory of process {pid} cannot be opened: {error.strerror}"
                ) from error
            return None
        except OSError:
            return None
        if shape != self._shape:
            os.close(region)
            raise ConfigError(
                f"shared memory {self._path.name} has rows x bytes {shape}, not {self._shape}: "
                "all processes of one server must use the same sizes"
            )
        return region

    def _remove(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), self._path.lstat()):
                self._path.unlink()


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def _checked_size(rows: int, row_bytes: int) -> int:
    if rows < 1 or row_bytes < 1 or row_bytes % PAGE:
        raise ConfigError(
            f"host memory needs at least one row and rows that are multiples of {PAGE} bytes; "
            f"got {rows} rows of {row_bytes} bytes"
        )
    size = -(-rows * row_bytes // HUGE_PAGE) * HUGE_PAGE
    available = _available_bytes()
    if available is not None and size > available:
        raise ConfigError(
            f"host memory of {rows * row_bytes} bytes does not fit: {available} bytes are available"
        )
    return size


def _available_bytes() -> int | None:
    available: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            left = max(0, int(limit) - used)
            available = left if available is None else min(available, left)
    return available


def _new_memfd(name: str, size: int) -> tuple[int, mmap.mmap]:
    token = f"kvstore-{secrets.token_hex(8)}"
    free_huge = 0
    with contextlib.suppress(OSError, ValueError):
        free_huge = int(
            Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()
        )
    for flags in (_MFD_HUGETLB, 0) if free_huge * HUGE_PAGE >= size else (0,):
        fd = os.memfd_create(token, os.MFD_CLOEXEC | flags)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
            _populate(memory, new=True)
            return fd, memory
        except OSError as error:
            os.close(fd)
            if not flags:
                raise ConfigError(f"shared memory {name!r} of {size} bytes: {error}") from error
    raise AssertionError("unreachable")


def _map(fd: int, name: str, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"shared memory {name!r} of {size} bytes: {error}") from error


def _populate(memory: mmap.mmap, *, new: bool) -> None:
    size = len(memory)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, size, 256 * HUGE_PAGE):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(256 * HUGE_PAGE, size - start))
    except OSError:
        # Linux before 5.14 does not know the advice.
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        if new:
            pages[:] = 0
        else:
            pages.max()


def _huge_bytes(address: int) -> int:
    """What the kernel says of the mapping at `address` in smaps."""
    huge = 0
    inside = False
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split(None, 1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low <= address < high
            elif inside and first in (
                "AnonHugePages:",
                "ShmemPmdMapped:",
                "Shared_Hugetlb:",
                "Private_Hugetlb:",
            ):
                huge += int(line.split()[1]) * 1024
    return huge
