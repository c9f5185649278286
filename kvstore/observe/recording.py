"""Recordings: what requests asked for, to be replayed with other sizes and policies.

A recording holds times and 64-bit hashes of keys: no prompt can be read from
it. `kvstore.observe.recorder` writes it, in two files, ``PATH`` and ``PATH.old``.

The file: `MAGIC`; a line of JSON (``chunk_bytes``, ``created`` in seconds since
1970); then records, little-endian: u32 length of the body, u32 CRC32 of the
body, and the body: f64 seconds since 1970, u32 number of chains (one for each KV
cache group), for each chain its length as u32, then all hashes as u64. A killed
process may leave a truncated record at the end of the file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import lzma
import math
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from kvstore.errors import MALFORMED, TraceError

__all__ = [
    "MAGIC",
    "MOST_AT_ONCE",
    "Keys",
    "Progress",
    "RecordedRequest",
    "RecordingStream",
    "encode_request",
    "older_file",
    "open_compressed",
]

MAGIC = b"kvstore-trace 1\n"

MOST_AT_ONCE = 2**23
"""Most bytes that one call writes; a longer record is dropped and counted."""

MOST_HEADER = 4096
"""Longest header of a recording, in bytes."""

READ_BYTES = 2**20
"""Size of the read buffer."""

_HEAD = struct.Struct("<II")
_BODY = struct.Struct("<dI")

Keys = Sequence[Sequence[bytes]]

Progress = Callable[[int, int], None]

logger = logging.getLogger("kvstore")


@dataclass(slots=True)
class RecordedRequest:
    """A request's time, in seconds since 1970, and its keys as hashes, by group.

    The time is that of its first call if the recorder knew it, otherwise that of its end.
    """

    time: float
    chains: list[array[int]]


class RecordingStream:
    """A recording that is read as it is iterated over, its older file first if there is one.

    Attributes:
        chunk_bytes: size of a chunk.

    Args:
        path: the file.
        progress: called now and then with the bytes read so far and the size of the file.

    Raises:
        TraceError: if the file is not a recording; the message names it. Iterating raises it also
            if a file is damaged, with its position.
        OSError: if it cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._path = Path(path)
        self._progress = progress
        with open_compressed(self._path) as file:
            self.chunk_bytes, _ = _read_header(file, self._path)

    def __iter__(self) -> Iterator[RecordedRequest]:
        older = older_file(self._path)
        for path in [older, self._path] if older.exists() else [self._path]:
            with open_compressed(path, self._progress) as file:
                chunk_bytes, position = _read_header(file, path)
                # Skip a file of an earlier configuration with another chunk size.
                if chunk_bytes == self.chunk_bytes:
                    yield from self._records(file, path, position)

    def _records(self, file: IO[bytes], path: Path, position: int) -> Iterator[RecordedRequest]:
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                return  # The process was killed amid it.
            length, crc = _HEAD.unpack(head)
            # No record is longer than MOST_AT_ONCE: a greater length is damaged.
            body = file.read(length) if length <= MOST_AT_ONCE else b""
            if len(body) < length <= MOST_AT_ONCE:
                return
            request = _decode(body) if len(body) == length and zlib.crc32(body) == crc else None
            if request is None:
                raise TraceError(f"{path}: damaged at byte {position}")
            yield request
            position += _HEAD.size + length


XZ, GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"
"""How compressed files begin."""


@contextlib.contextmanager
def open_compressed(
    path: Path, progress: Progress = lambda done, total: None
) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressing xz and gzip, whatever its name.

    Args:
        progress: called now and then with the bytes read so far and the size of the file.
    """
    with io.BufferedReader(_Watched(path, progress), READ_BYTES) as raw:
        begin = raw.peek(len(XZ))
        if len(begin) < len(XZ):
            # All that a pipe has given so far.
            begin = {".xz": XZ, ".gz": GZIP}.get(path.suffix, begin)
        if begin.startswith(XZ):
            with lzma.open(raw, "rb") as plain:
                yield plain
        elif begin.startswith(GZIP):
            with gzip.open(raw, "rb") as plain:
                yield plain  # type: ignore[misc]
        else:
            yield raw


class _Watched(io.FileIO):
    """A file that reports how far it has been read."""

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
    """Return the bytes of a chunk and the length of the header."""
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceError(f"{path}: is not a recording of kvstore")
    line = file.readline(MOST_HEADER)
    try:
        if not line.endswith(b"\n"):
            raise ValueError("no end of line")
        chunk_bytes = int(json.loads(line)["chunk_bytes"])
        if chunk_bytes <= 0:
            raise ValueError("chunks of no bytes")
        return chunk_bytes, len(MAGIC) + len(line)
    except MALFORMED as error:
        raise TraceError(f"{path}: its header is damaged") from error


def encode_request(seconds: float, chains: Keys) -> bytes:
    """Encode a record: the time of a request, and its keys by group."""
    lengths = array("I", map(len, chains))
    hashes = array("Q", [xxhash.xxh3_64_intdigest(key) for chain in chains for key in chain])
    _little_endian(lengths, hashes)
    body = _BODY.pack(seconds, len(chains)) + lengths.tobytes() + hashes.tobytes()
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _decode(body: bytes) -> RecordedRequest | None:
    """Decode a record; None if its lengths do not add up, or its time is none."""
    try:
        seconds, count = _BODY.unpack_from(body)
        lengths, hashes = array("I"), array("Q")
        start = _BODY.size + 4 * count
        lengths.frombytes(body[_BODY.size : start])
        hashes.frombytes(body[start:])
    except (struct.error, ValueError):
        return None
    _little_endian(lengths, hashes)
    if len(lengths) != count or sum(lengths) != len(hashes) or not math.isfinite(seconds):
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


def older_file(path: Path) -> Path:
    """Return the path of the older part of a recording."""
    return path.with_name(f"{path.name}.old")
