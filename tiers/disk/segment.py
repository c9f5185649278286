"""Segment file: created whole or not at all, opened only when it is ours."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import weakref
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.concurrency import open_at_once
from kvstore.errors import ForeignFileError
from kvstore.tiers.disk.descriptors import NO_DESCRIPTORS
from kvstore.tiers.disk.format import (
    ALIGN,
    Geometry,
    Header,
    encode_header,
    parse_header,
    segment_seed,
)
from kvstore.tiers.disk.index import IndexFile
from kvstore.tiers.disk.io import IOBackend
from kvstore.tiers.disk.io.base import check_room, read_bytes, write_whole
from kvstore.tiers.disk.trust import STRICT, Trust, hand_over, sync_folder

__all__ = ["Segment", "is_probe", "read_header", "remove_file", "segment_files"]

_NAME = re.compile(r"segment-(0|[1-9]\d{0,8})\.safetensors")
_PROBE = re.compile(r"\.probe-\d+-[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.segment-\d{1,9}\.[0-9a-f]+\.tmp|\.probe-\d+-[0-9a-f]+")

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_NO_COPY_ON_WRITE = 0x00800000
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Segment:
    """An open segment of a lane.

    Slots are moved through the descriptor `data`, by the backend's way.

    Attributes:
        number: its number within the lane, part of the file's name.
        index: its records.
        seed: seeds the CRC of its records.
        epoch: of the records that are written, and of those that are read.
        nonces: by slot that of its seal, three words, as this process knows it: an older record
            that was put back has another. None if this process does not know.
    """

    def __init__(
        self,
        number: int,
        path: Path,
        header: Header,
        backend: IOBackend,
        data: int,
        index: IndexFile,
    ) -> None:
        self.number = number
        self.path = path
        self.geometry = header.geometry
        self.seed = segment_seed(header.segment_id)
        self.epoch = 0
        self.nonces: npt.NDArray[np.uint32] | None = None
        self.backend = backend
        self.data = data
        self.index = index
        self._blocks_offset = header.geometry.blocks_offset
        self._slot_bytes = header.geometry.slot_bytes

    @classmethod
    def create(
        cls, folder: Path, number: int, namespace: str, geometry: Geometry, backend: IOBackend
    ) -> Segment:
        """Make a new, empty segment with all its space allocated.

        Raises:
            OSError: as the system says, ENOSPC above all; then nothing is left behind.
        """
        path = folder / f"segment-{number}.safetensors"
        header = Header(namespace, secrets.token_hex(16), geometry)
        temporary = folder / f".segment-{number}.{secrets.token_hex(4)}.tmp"
        fd = os.open(
            temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        name, data = temporary, -1
        try:
            hand_over(fd, folder)
            _write_in_place(fd)
            _allocate(fd, geometry.file_bytes)
            write_whole(fd, [memoryview(encode_header(header))], 0)
            os.fsync(fd)
            data = backend.open(temporary)
            os.rename(temporary, path)
            name = path
            sync_folder(folder)
        except BaseException:
            # Some file systems cannot remove what is open, or tell at its end what went wrong.
            with contextlib.suppress(OSError):
                os.close(fd)
            with contextlib.suppress(OSError):
                if data >= 0:
                    backend.close(data)
            with contextlib.suppress(OSError):
                name.unlink()
            raise
        segment = cls(number, path, header, backend, data, IndexFile(fd, header))
        if geometry.sealed:
            segment.nonces = np.zeros((geometry.slots, 3), np.uint32)
        return segment

    @classmethod
    def open(
        cls,
        path: Path,
        namespace: str,
        geometry: Geometry,
        backend: IOBackend,
        trust: Trust = STRICT,
    ) -> Segment:
        """Open an existing segment, which may have been cut short. What was added is cut off.

        Raises:
            ForeignFileError: if it is not a segment, or one of another namespace or geometry,
                or not to be trusted.
            OSError: as the system says.
        """
        header = read_header(path)
        if header.namespace != namespace:
            raise ForeignFileError(f"{path}: belongs to another namespace")
        if header.geometry != geometry:
            raise ForeignFileError(f"{path}: {header.geometry}, but the lane has {geometry}")
        match = _NAME.fullmatch(path.name)
        assert match is not None
        meta = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(path, meta, trust, written=True)
            if os.fstat(meta).st_size > geometry.file_bytes:
                os.ftruncate(meta, geometry.file_bytes)
            data = backend.open(path)
        except BaseException:
            os.close(meta)
            raise
        return cls(int(match[1]), path, header, backend, data, IndexFile(meta, header))

    @classmethod
    def follow(
        cls, path: Path, header: Header, backend: IOBackend, trust: Trust = STRICT
    ) -> Segment:
        """Open a segment of another process, for reading only.

        It closes its files when there is no reference to it any more, so that a read
        under way can finish whatever happens to the file.

        Raises:
            ForeignFileError: if it is not to be trusted.
            OSError: as the system says.
        """
        match = _NAME.fullmatch(path.name)
        assert match is not None
        meta = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(path, meta, trust, written=False)
            data = backend.open(path, writable=False)
        except BaseException:
            os.close(meta)
            raise
        index = IndexFile(meta, header)
        segment = cls(int(match[1]), path, header, backend, data, index)
        weakref.finalize(segment, _close_both, backend, data, index)
        return segment

    @property
    def missing_bytes(self) -> int:
        """Bytes that are missing at the end of the file.

        Raises:
            OSError: as the system says.
        """
        return max(0, self.geometry.file_bytes - os.fstat(self.data).st_size)

    def make_whole(self) -> None:
        """Give a file that was cut short its size back, with all its space allocated.

        Raises:
            OSError: as the system says, ENOSPC above all.
        """
        _allocate(self.data, self.geometry.file_bytes)

    def sealed_with(self, key_ids: Collection[bytes]) -> bool:
        """Whether all of its payloads that this process has known are sealed with these keys."""
        if self.nonces is None:
            return True
        used = self.nonces[self.nonces.any(axis=1), 0]
        numbers = [int.from_bytes(key_id, "little") for key_id in key_ids]
        return bool(np.isin(used, numbers).all())

    def list_chunks(self) -> list[tuple[bytes, int]]:
        """(key, slot) of the valid records of its epoch, in the order of storing. May block.

        Raises:
            OSError: as the system says.
        """
        live = self.index.live().of_epoch(self.epoch)
        found = list(zip(live.keys(), live.slots, strict=True))
        return [found[at] for at in np.argsort(live.records["sequence"], kind="stable").tolist()]

    def sync(self) -> None:
        """Wait until what was written is on the medium.

        Raises:
            OSError: as the system says.
        """
        os.fdatasync(self.data)

    def remove(self) -> None:
        """Remove the file, and give its space back; `close` is still to be called. May block.

        Raises:
            OSError: as the system says; then nothing was done.
        """
        remove_file(self.path, self.data)

    def offset_of(self, slot: int) -> int:
        """Where a slot begins in the file."""
        return self._blocks_offset + slot * self._slot_bytes

    def close(self) -> None:
        """Close the descriptors."""
        _close_both(self.backend, self.data, self.index)


def _check(path: Path, fd: int, trust: Trust, *, written: bool) -> None:
    fault = trust.file_fault(fd, written=written)
    if fault is not None:
        raise ForeignFileError(f"{path}: {fault}")


def _close_both(backend: IOBackend, data: int, index: IndexFile) -> None:
    try:
        backend.close(data)
    finally:
        index.close()


def read_header(path: Path) -> Header:
    """The header of a segment file.

    Raises:
        ForeignFileError: if it is not a segment, or cannot be read.
        OSError: if no more files may be open.
    """
    try:
        fd = open_at_once(path)
        try:
            page = read_bytes(fd, ALIGN, 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        raise ForeignFileError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_header(page, str(path))


def segment_files(folder: Path) -> list[tuple[int, Path]]:
    """Segment files of a lane by number, whether or not their content is sound."""
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def remove_file(path: Path, fd: int) -> None:
    """Remove a file that is open for writing as `fd`, and give its space back.

    Others that have it open read zeros from then on. A file with another name keeps its content.

    Raises:
        OSError: as the system says; then nothing was done.
    """
    # Another process may have removed it before.
    with contextlib.suppress(FileNotFoundError):
        if not os.path.samestat(path.lstat(), os.fstat(fd)):
            raise OSError(errno.ESTALE, "another file has its name now")
        path.unlink()
    # Only then, so that no file of zeros is left where this process is killed in between.
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        if not found.st_nlink:
            # Without support for holes, the space is freed once no process has the file open.
            _libc.fallocate(fd, _PUNCH_HOLE, 0, found.st_size)


def is_probe(path: Path) -> bool:
    """Whether this is the probe of a process that looks for a way to do I/O."""
    return bool(_PROBE.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what a process left that was killed: unfinished segments and probes."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            # Only files are leftovers of a process; one that cannot be removed counts as foreign.
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()


def _write_in_place(fd: int) -> None:
    """Have an empty file rewritten in place, where the file system would copy on write.

    It would keep an allocated extent whole until the last block of it has been rewritten.
    """
    # Most file systems have no such flag, and write in place.
    with contextlib.suppress(OSError):
        (flags,) = struct.unpack("I", fcntl.ioctl(fd, _GET_FLAGS, bytes(4)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("I", flags | _NO_COPY_ON_WRITE))


def _allocate(fd: int, size: int) -> None:
    """Give the file its size with all space allocated, so that no later write meets ENOSPC."""
    check_room(fd, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)
