"""Recorder: record what requests look up, beside a running engine.

`Recorder.add` only puts a reference into a queue. A thread hashes and aiofiles writes, so
that neither holds up the loop. The queue and the files are bounded: requests that do not fit the
queue are dropped and counted. When ``PATH`` has half of the bytes allowed, it replaces
``PATH.old``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from aiofiles.threadpool import wrap

from kvstore.concurrency import Daemons, given_up_in_children
from kvstore.errors import ConfigError, KVStoreError
from kvstore.observe.recording import MAGIC, MOST_AT_ONCE, Keys, encode_request, older_file
from kvstore.tiers.disk.trust import STRICT
from kvstore.types import about

__all__ = ["MOST_QUEUED", "Recorder", "fault_of"]

MOST_QUEUED = 2**20
"""Most keys in the queue; further requests are dropped and counted."""

MOST_FILES = 64
"""Most processes on one machine that may record under one name."""

WRITE_SECONDS = 0.5
"""Seconds between two writes."""

HEADER_BYTES = 4096
"""More than a header takes."""

logger = logging.getLogger("kvstore")


class Recorder:
    """Writes the keys that requests used to a file, while `run` runs.

    The first process writes to `path`, others on the same machine to the first
    of ``NAME-1.EXT``, ``NAME-2.EXT`` and so on that no process writes to. A
    recording that an earlier process left becomes ``PATH.old``.

    Args:
        limit: most bytes of both files together.
        chunk_bytes: size of a chunk, for the header of the recording.

    Raises:
        ConfigError: if the file cannot be written, or exists and is not a recording.
    """

    def __init__(self, path: Path, limit: int, chunk_bytes: int) -> None:
        self._limit = limit
        self._header = MAGIC + (
            json.dumps({"chunk_bytes": chunk_bytes, "created": time.time()}) + "\n"
        ).encode("ascii")
        self.dropped = 0
        """Requests that were not recorded because the queue was full or they were too long."""
        self._behind = False
        self._queue: deque[tuple[float, Keys]] = deque()
        self._writing = 0
        """Requests whose records are being written."""
        # Keys that were queued, and keys that were written or dropped; one thread counts each.
        self._came = self._went = 0
        self._ended = False
        self._stopped = asyncio.Event()
        # Daemon threads: a file system that hangs holds up only the recording.
        self._threads = Daemons("kvstore-recorder")
        try:
            self.path, fd = self._take(path)
            self._file = io.FileIO(fd, "r+")
            self._begin()
        except OSError as error:
            raise ConfigError(f"record_trace = {str(path)!r}: {error.strerror}") from error
        _open.add(self)

    def add(self, chains: Keys, seconds_ago: float = 0.0) -> None:
        """Record that a request ended which used `chains`, one for each group.

        Never waits and never raises. The caller must not change `chains` afterwards.

        Args:
            seconds_ago: how long ago the request arrived, if known.
        """
        count = sum(map(len, chains))
        if self._ended or self._came - self._went + count > MOST_QUEUED:
            if not self._behind and not self._ended and self._came > self._went:
                self._behind = True
                logger.warning(
                    "record_trace: %s does not take requests as fast as they come",
                    self.path,
                    extra=about("recorder.behind", path=self.path),
                )
            self.dropped += 1
            return
        self._came += count
        self._queue.append((time.time() - seconds_ago, chains))

    async def run(self) -> None:
        """Write the queue every `WRITE_SECONDS` until `stop`; then write the rest and close."""
        try:
            stopped = False
            while not stopped:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WRITE_SECONDS):
                        stopped = await self._stopped.wait()
                await self._write()
        except (OSError, KVStoreError) as error:
            # The disk is full, or there are no more threads.
            why = error.strerror if isinstance(error, OSError) else str(error)
            logger.warning(
                "record_trace stopped: %s: %s",
                self.path,
                why,
                extra=about("recorder.ended", path=self.path, error=why),
            )
            self.dropped += self._writing + len(self._queue)
        finally:
            self._ended = True
            self._queue.clear()
            self.abandon()
            if self.dropped:
                logger.warning(
                    "record_trace: %d requests were not recorded",
                    self.dropped,
                    extra=about("recorder.dropped", requests=self.dropped),
                )

    def stop(self) -> None:
        """Let `run` end. Called on its loop."""
        self._stopped.set()

    def abandon(self) -> None:
        """Close the file without writing the queue."""
        self._file.close()

    async def _write(self) -> None:
        while self._queue:
            loop = asyncio.get_running_loop()
            records = await loop.run_in_executor(self._threads, self._encode)
            if not records:
                continue
            if self._size + len(records) > self._limit // 2:
                await loop.run_in_executor(self._threads, self._rotate)
            handle: Any = wrap(self._file, executor=self._threads)
            view = memoryview(records)
            while view:
                written = await handle.write(view)
                self._size += written
                view = view[written:]
            self._writing = 0

    def _encode(self) -> bytearray:
        """Encode the oldest requests of the queue, as many as one call writes."""
        most = min(MOST_AT_ONCE, self._limit // 2 - len(self._header))
        records = bytearray()
        while self._queue:
            seconds, chains = self._queue[0]
            record = encode_request(seconds, chains)
            fits = len(record) <= most
            if fits and len(records) + len(record) > most:
                break
            self._queue.popleft()
            self._went += sum(map(len, chains))
            if fits:
                records += record
                self._writing += 1
            else:
                self.dropped += 1
        return records

    def _begin(self) -> None:
        self._file.truncate(0)
        view = memoryview(self._header)
        while view:
            view = view[self._file.write(view) :]
        self._size = len(self._header)

    def _rotate(self) -> None:
        fresh = self.path.with_name(f".{self.path.name}.new")
        # What lies there is of a process that was killed, or somebody else's.
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        before, self._file = self._file, io.FileIO(fd, "r+")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin()
            # Somebody may have taken it away.
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path, older_file(self.path))
            os.replace(fresh, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        finally:
            # Last: with it goes the lock of what had the name.
            before.close()

    @staticmethod
    def _take(path: Path) -> tuple[Path, int]:
        """Open and lock the first file that no process writes to; keep its contents as the old."""
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
            if not _is_at(fd, mine):
                # Another process has begun meanwhile, and kept this as the older one.
                os.close(fd)
                continue
            if (fault := fault_of(fd)) is not None:
                os.close(fd)
                raise ConfigError(f"record_trace = {str(mine)!r}: {fault}")
            if _has_no_record(fd):
                # New, or of a start that failed, or that served nobody: the older one stays.
                return mine, fd
            os.replace(mine, older_file(mine))
            os.close(fd)
            fd = os.open(mine, flags, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return mine, fd
            os.close(fd)
        raise ConfigError(
            f"record_trace = {str(path)!r}: {MOST_FILES} processes already record there"
        )


# A forked child must not keep the recordings of its parent locked.
_open = given_up_in_children(Recorder.abandon)


def fault_of(fd: int) -> str | None:
    """Why an open file is not to be recorded to, or None."""
    fault = STRICT.file_fault(fd, written=True)
    # A disk that was full may have taken a part.
    if fault is None and not MAGIC.startswith(os.pread(fd, len(MAGIC), 0)):
        fault = "exists and is not a recording of kvstore"
    return fault


def _has_no_record(fd: int) -> bool:
    """Whether nothing follows the header of a recording, if it has one."""
    head = os.pread(fd, HEADER_BYTES, 0)
    return head.find(b"\n", len(MAGIC)) in (-1, os.fstat(fd).st_size - 1)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False
