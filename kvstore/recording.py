"""Recording what requests asked for, so that it can be replayed against other sizes and policies.

A recording holds times and 64-bit hashes of keys: no prompt can be read from
it. `Recorder.add` only puts a reference into a queue; hashing and writing are
done by a thread. The queue and the files are bounded: what does not fit the
queue is dropped and counted, and of two files, ``PATH`` and ``PATH.old``, the
older is replaced when the newer has half of the bytes allowed.

The file: `MAGIC`; a line of JSON (``chunk_bytes``, ``created`` in seconds since
1970); then records, little-endian: u32 length of the body, u32 CRC32 of the
body, and the body: f64 seconds since 1970, u32 number of chains (one for each KV
cache group), for each chain its length as u32, then all hashes as u64. A
record that the end of the file cuts off is what a killed process leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import json
import logging
import lzma
import os
import struct
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from kvstore.errors import ConfigError, TraceError

__all__ = [
    "MAGIC",
    "Progress",
    "RecordedRequest",
    "Recorder",
    "Recording",
    "RecordingStream",
    "open_compressed",
    "read_recording",
]

MAGIC = b"kvstore-trace 1\n"

MOST_WAITING = 2**20
"""Keys that may wait to be written; requests beyond are dropped and counted."""

MOST_AT_ONCE = 2**23
"""Bytes written by one call, about; a record that is longer than this is dropped and counted."""

MOST_FILES = 64
"""Processes on one machine that may record under one name."""

WRITE_SECONDS = 0.5
"""How long a request may wait to be written."""

MOST_HEADER = 4096
"""Longest header of a recording."""

READ_BYTES = 2**20
"""Bytes that are read at once."""

_HEAD = struct.Struct("<II")
_BODY = struct.Struct("<dI")

Keys = Sequence[Sequence[bytes]]

Progress = Callable[[int, int], None]

logger = logging.getLogger("kvstore")


class Recorder:
    """Writes what requests used to a file, in a thread of its own.

    The first process writes to `path`, others on the same machine to the first
    of ``NAME-1.EXT``, ``NAME-2.EXT`` and so on that nobody writes to. A
    recording that an earlier process left becomes ``PATH.old``.

    Args:
        limit: most bytes of both files together.
        chunk_bytes: told to whoever reads the recording.

    Raises:
        ConfigError: if the file cannot be written, or is there and is no recording.
    """

    def __init__(self, path: Path, limit: int, chunk_bytes: int) -> None:
        self._limit = limit
        self._header = MAGIC + (
            json.dumps({"chunk_bytes": chunk_bytes, "created": time.time()}) + "\n"
        ).encode("ascii")
        self.dropped = 0
        """Requests that were not recorded because too much waited to be written."""
        self._queue: deque[tuple[float, Keys]] = deque()
        self._waiting = 0
        self._closing = threading.Event()
        try:
            self.path, self._fd = self._take(path)
        except OSError as error:
            raise ConfigError(f"record_trace = {str(path)!r}: {error.strerror}") from error
        self._size = 0
        self._begin()
        self._thread = threading.Thread(target=self._serve, name="kvstore-recorder", daemon=True)
        self._thread.start()

    def add(self, chains: Keys, seconds_ago: float = 0.0) -> None:
        """A request that used `chains`, one for each group, has ended. Never waits, never raises.

        The caller does not change `chains` afterwards.

        Args:
            seconds_ago: how long ago it came, where that is known.
        """
        count = sum(map(len, chains))
        if self._waiting + count > MOST_WAITING:
            self.dropped += 1
            return
        self._waiting += count
        self._queue.append((time.time() - seconds_ago, chains))

    def close(self) -> None:
        """Write what waits and end."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(5.0)
            if self.dropped:
                logger.warning("record_trace: %d requests were not recorded", self.dropped)

    def _serve(self) -> None:
        try:
            while not self._closing.wait(WRITE_SECONDS):
                self._write()
            self._write()
        except OSError as error:
            logger.warning("record_trace ends: %s: %s", self.path, error.strerror)
            self._waiting = MOST_WAITING
            self._queue.clear()
        finally:
            os.close(self._fd)

    def _write(self) -> None:
        most = min(MOST_AT_ONCE, self._limit // 2 - len(self._header))
        records = bytearray()
        while self._queue:
            seconds, chains = self._queue.popleft()
            self._waiting -= sum(map(len, chains))
            record = _encode(seconds, chains)
            if len(record) > most:
                self.dropped += 1
                continue
            if len(records) + len(record) > most:
                self._put(records)
                records = bytearray()
            records += record
        if records:
            self._put(records)

    def _put(self, data: bytes | bytearray) -> None:
        if self._size + len(data) > self._limit // 2:
            self._rotate()
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def _begin(self) -> None:
        os.ftruncate(self._fd, 0)
        self._size = 0
        view = memoryview(self._header)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size = len(self._header)

    def _rotate(self) -> None:
        fresh = self.path.with_name(f".{self.path.name}.new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(self.path, _old(self.path))
        os.replace(fresh, self.path)
        os.close(self._fd)
        self._fd = fd
        self._begin()

    @staticmethod
    def _take(path: Path) -> tuple[Path, int]:
        """The first file that nobody writes to; what was in it is kept as the old one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FILES):
            mine = path if not number else path.with_name(f"{path.stem}-{number}{path.suffix}")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(mine, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            found = os.pread(fd, len(MAGIC), 0)
            if not found:
                return mine, fd
            if found != MAGIC:
                os.close(fd)
                raise ConfigError(
                    f"record_trace = {str(mine)!r}: is there and is no recording of kvstore"
                )
            os.replace(mine, _old(mine))
            os.close(fd)
            fd = os.open(mine, flags, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return mine, fd
            os.close(fd)
        raise ConfigError(f"record_trace = {str(path)!r}: {MOST_FILES} processes write there")


@dataclass(slots=True)
class RecordedRequest:
    """A request's time, in seconds since 1970, and its keys as hashes, by group.

    The time is that of its first call where the recorder was told, else of its end.
    """

    time: float
    chains: list[array[int]]


@dataclass(slots=True)
class Recording:
    """What a recording holds, in the order in which requests ended.

    `torn` says whether the end of a file cut a record off.
    """

    chunk_bytes: int
    requests: list[RecordedRequest] = field(default_factory=list)
    torn: bool = False


class RecordingStream:
    """A recording, with the older file beside it if there is one, read as it is iterated over.

    Iterating raises as `read_recording` does.

    Attributes:
        chunk_bytes: size of a chunk.
        torn: whether the end of a file, of those read so far, cut a record off.

    Args:
        path: the file.
        progress: called now and then with the bytes of a file that were read, and all.

    Raises:
        TraceError: if the file is no recording; the message names it.
        OSError: if it cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._path = Path(path)
        self._progress = progress
        self.torn = False
        with open_compressed(self._path) as file:
            self.chunk_bytes, _ = _read_header(file, self._path)

    def __iter__(self) -> Iterator[RecordedRequest]:
        older = _old(self._path)
        for path in [older, self._path] if older.exists() else [self._path]:
            with open_compressed(path, self._progress) as file:
                chunk_bytes, position = _read_header(file, path)
                # Another model's, from before the server was configured anew, is passed over.
                if chunk_bytes == self.chunk_bytes:
                    yield from self._records(file, path, position)

    def _records(self, file: IO[bytes], path: Path, position: int) -> Iterator[RecordedRequest]:
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                self.torn = True
                return
            length, crc = _HEAD.unpack(head)
            # No record is longer than what is written at once: its length is damaged.
            body = file.read(length) if length <= MOST_AT_ONCE else b""
            if len(body) < length <= MOST_AT_ONCE:
                self.torn = True
                return
            request = _decode(body) if len(body) == length and zlib.crc32(body) == crc else None
            if request is None:
                raise TraceError(f"{path}: damaged at byte {position}")
            yield request
            position += _HEAD.size + length


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, with the older file beside it if there is one.

    Raises:
        TraceError: if a file is no recording or is damaged; the message names the
            file and where in it.
        OSError: if it cannot be read.
    """
    stream = RecordingStream(path)
    requests = list(stream)
    return Recording(stream.chunk_bytes, requests, stream.torn)


@contextlib.contextmanager
def open_compressed(
    path: Path, progress: Progress = lambda done, total: None
) -> Iterator[IO[bytes]]:
    """Open a file for reading that may end in ``.xz`` or ``.gz``.

    Args:
        progress: called now and then with the bytes of the file that were read, and all.
    """
    with io.BufferedReader(_Watched(path, progress), READ_BYTES) as raw:
        if path.suffix == ".xz":
            with lzma.open(raw, "rb") as plain:
                yield plain
        elif path.suffix == ".gz":
            with gzip.open(raw, "rb") as plain:
                yield plain  # type: ignore[misc]
        else:
            yield raw


class _Watched(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path, "rb")
        self._size = os.fstat(self.fileno()).st_size
        self._progress = progress
        self._done = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._done += count
        self._progress(self._done, self._size)
        return count


def _read_header(file: IO[bytes], path: Path) -> tuple[int, int]:
    """Bytes of a chunk, and the length of the header."""
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceError(f"{path}: is no recording of kvstore")
    line = file.readline(MOST_HEADER)
    try:
        if not line.endswith(b"\n"):
            raise ValueError("no end of line")
        return int(json.loads(line)["chunk_bytes"]), len(MAGIC) + len(line)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: its header is damaged") from error


def _encode(seconds: float, chains: Keys) -> bytes:
    lengths = array("I", map(len, chains))
    hashes = array("Q", [xxhash.xxh3_64_intdigest(key) for chain in chains for key in chain])
    _little_endian(lengths, hashes)
    body = _BODY.pack(seconds, len(chains)) + lengths.tobytes() + hashes.tobytes()
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _decode(body: bytes) -> RecordedRequest | None:
    """None if the body is not what its length says."""
    try:
        seconds, count = _BODY.unpack_from(body)
        lengths, hashes = array("I"), array("Q")
        start = _BODY.size + 4 * count
        lengths.frombytes(body[_BODY.size : start])
        hashes.frombytes(body[start:])
    except (struct.error, ValueError):
        return None
    _little_endian(lengths, hashes)
    if len(lengths) != count or sum(lengths) != len(hashes):
        return None
    chains, first = [], 0
    for length in lengths:
        chains.append(hashes[first : first + length])
        first += length
    return RecordedRequest(seconds, chains)


def _little_endian(*arrays: array[int]) -> None:
    if sys.byteorder == "big":
        for one in arrays:
            one.byteswap()


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")
