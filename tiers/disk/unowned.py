"""Unowned lanes: lanes on the same path that no process uses, and that give way to ours.

Versions of a model come and go, and each leaves a lane that no process takes again. Together
with the lane of a running process they take no more than its capacity: as that grows, their
segments are removed. A lane counts only when it has been seen free, and has not been written to,
for `FREE_SECONDS`, so that restarting processes one after the other loses no chunks.

The time when a lane was first seen free is in its lock file until a process takes it. A process
that looks at a lane, or removes from it, shares its lock, so the lane cannot be taken meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.concurrency import open_at_once
from kvstore.errors import ForeignFileError, KVStoreError
from kvstore.tiers.disk.descriptors import NO_DESCRIPTORS
from kvstore.tiers.disk.lane import PID_BYTES, Lane, lane_folders, sharing
from kvstore.tiers.disk.namespace import read_namespace
from kvstore.tiers.disk.segment import (
    read_header,
    remove_file,
    remove_leftovers,
    segment_files,
)
from kvstore.tiers.disk.trust import Trust
from kvstore.types import about

__all__ = ["UnownedLanes"]

logger = logging.getLogger("kvstore.disk")

FREE_SECONDS = 3600.0
"""How long a lane must have been unowned and not written to before its segments are removed."""

LOOK_SECONDS = 600.0
"""How often a process that writes looks for such lanes."""

WORK_SECONDS, PAUSE_SECONDS = 0.02, 0.005
"""After so much removing there is a pause, in which a process can take the lane."""

_MARK = re.compile(rb"free (\d{1,12})")


@dataclass(slots=True)
class _Spare:
    """A segment that may be removed."""

    path: Path
    namespace: str
    disk_bytes: int


class UnownedLanes:
    """The unowned lanes of every namespace on the path of `own`.

    The oldest go first, and in each the segment that was written longest ago; those of the
    namespace of `own` go last. What fails the checks of `trust` is left alone.
    """

    def __init__(self, own: Lane, trust: Trust) -> None:
        self._own = own
        self._trust = trust
        self._spare: deque[_Spare] = deque()
        self._told: set[Path] = set()
        self._look_at = 0.0
        self._unfinished = False
        self._stuck: list[_Spare] = []
        """Those that could not be removed when it was last tried."""
        self._told_stuck: set[Path] = set()
        self._busy = threading.Lock()

    @property
    def due(self) -> bool:
        """Whether it is time to look again, or more is to be removed, and no thread is at work."""
        due = self._unfinished or time.monotonic() >= self._look_at
        return due and not self._busy.locked()

    def make_room(self, most_bytes: int, most_segments: int | None = None) -> bool:
        """Remove segments until the rest takes `most_bytes` at most. May block.

        Args:
            most_segments: how many are tried at once; by default as many as it takes.

        Returns:
            Whether the rest takes no more than that.
        """
        with self._busy:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_SECONDS
                self._stuck = []
                self._look()
            if most_segments is None:
                # Somebody may have helped.
                self._spare.extend(self._stuck)
                self._stuck = []
            held = sum(one.disk_bytes for one in (*self._spare, *self._stuck))
            tried, self._unfinished, paused = 0, False, time.monotonic()
            while self._spare and held > most_bytes:
                if tried == most_segments:
                    self._unfinished = True
                    break
                tried += 1
                if time.monotonic() - paused >= WORK_SECONDS:
                    time.sleep(PAUSE_SECONDS)
                    paused = time.monotonic()
                one = self._spare.popleft()
                try:
                    self._remove(one)
                    held -= one.disk_bytes
                except (FileNotFoundError, ForeignFileError):
                    held -= one.disk_bytes
                except OSError as error:
                    self._stuck.append(one)
                    if error.errno not in NO_DESCRIPTORS:
                        self._tell_stuck(one.path, error)
            return held <= most_bytes

    def _look(self) -> None:
        self._own.check_place()
        lanes: list[tuple[bool, int, list[_Spare]]] = []
        for folder, digest in self._lanes():
            spare = _spare_segments(folder, digest, self._trust)
            if spare is not None:
                lanes.append((folder.parent == self._own.folder.parent, *spare))
        lanes.sort(key=lambda lane: lane[:2])
        self._spare = deque(one for *_, spare in lanes for one in spare)

    def _lanes(self) -> Iterator[tuple[Path, str]]:
        """The lanes beside one's own, and the digests of their namespaces."""
        for namespace in self._own.folder.parent.parent.iterdir():
            try:
                found = namespace.lstat()
                if not stat.S_ISDIR(found.st_mode) or self._trust.doubt(found) is not None:
                    continue
                digest = read_namespace(namespace, self._trust)["digest"]
                for _, folder in lane_folders(namespace, self._trust):
                    if folder != self._own.folder:
                        yield folder, digest
            except (OSError, KVStoreError):
                continue  # No cache, or one that is not trusted.

    def _remove(self, one: _Spare) -> None:
        folder = one.path.parent
        with _free(folder, self._trust) as since:
            if since is None or time.time() - since < FREE_SECONDS:
                return
            if read_header(one.path).namespace != one.namespace:
                return
            fd = open_at_once(one.path, os.O_RDWR)
            try:
                if self._trust.file_fault(fd, written=True) is not None:
                    return
                # Else it is of another cache, which was put in the place of its own.
                self._own.check_place()
                remove_file(one.path, fd)
            finally:
                os.close(fd)
        self._told_stuck.discard(folder)
        if folder not in self._told:
            self._told.add(folder)
            logger.warning(
                "disk tier: the capacity of %s is used up: segments of %s, which nobody has used "
                "for %.1f hours, are removed as room is needed",
                self._own.folder.parent.parent,
                folder,
                (time.time() - since) / 3600,
                extra=about("disk.unowned_removed", path=folder),
            )

    def _tell_stuck(self, path: Path, error: OSError) -> None:
        if path.parent not in self._told_stuck:
            self._told_stuck.add(path.parent)
            logger.warning(
                "disk tier: %s, which nobody uses, cannot be removed and takes of the capacity: %s",
                path,
                error.strerror,
                extra=about("disk.unowned_kept", path=path, error=error.strerror),
            )


def _spare_segments(folder: Path, namespace: str, trust: Trust) -> tuple[int, list[_Spare]] | None:
    """When a lane was written to last, in ns, and its segments; None if none may be removed."""
    with contextlib.suppress(OSError), _free(folder, trust) as since:
        found = [(path.lstat(), path) for _, path in segment_files(folder)]
        if since is None or not found:
            return None
        newest_ns, now = max(one.st_mtime_ns for one, _ in found), time.time()
        written = newest_ns / 1e9
        if now - (since if written > now else max(since, written)) >= FREE_SECONDS:
            remove_leftovers(folder)
            found.sort(key=lambda each: each[0].st_mtime_ns)
            return newest_ns, [_Spare(path, namespace, one.st_blocks * 512) for one, path in found]
    return None


@contextmanager
def _free(folder: Path, trust: Trust) -> Iterator[float | None]:
    """Share the lock of a lane: since when it has been free, or None where it is not.

    A lane that was not marked as free is from now on.
    """
    with sharing(folder, trust) as fd:
        if fd is None:
            yield None
            return
        now, match = time.time(), _MARK.fullmatch(os.pread(fd, PID_BYTES, 0).rstrip())
        # A clock that was wrong must not keep the lane forever.
        if match is None or int(match[1]) > now:
            # The epoch that stands behind it stays.
            os.pwrite(fd, (b"free %d" % now).ljust(PID_BYTES), 0)
            yield now
        else:
            since, changed = int(match[1]), os.fstat(fd).st_ctime
            # A copy of a cache brings its mark along.
            yield max(since, changed) if changed <= now else since
