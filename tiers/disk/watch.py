"""Watch: find changes in the lanes of other processes on one path, cheaply.

A process that writes to a lane touches its lock file afterwards. So a lane whose lock
and folder have not changed is not read, whatever its size, except for a few
segments in turn, in case its owner touches nothing. In other lanes only segments
with a new modification time are read, and only the records that differ and are of
this process's epoch are decoded.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import ForeignFileError
from kvstore.tiers.disk.descriptors import SPARE_DESCRIPTORS, allow_descriptors
from kvstore.tiers.disk.index import CHANGES_SLOTS
from kvstore.tiers.disk.lane import LOCK_NAME, lane_folders
from kvstore.tiers.disk.places import Places
from kvstore.tiers.disk.segment import Segment, read_header, segment_files
from kvstore.tiers.disk.volume import Volume
from kvstore.types import about

__all__ = ["SLOTS_PER_SEGMENT", "Watch", "Watched"]

LASTING = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""What is said of a file that nobody mends soon: not ours to read, or no file."""

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What is said of a cache that is not there any more, or is another one."""

logger = logging.getLogger("kvstore.disk")

SLOTS_PER_SEGMENT = 2**24
"""Places are numbered as if every followed segment had this many slots."""

SETTLED_NS = 2 * 10**9
"""A file that changed less than this ago may change again without a new time stamp."""

STEP_SEGMENTS = 32
"""Segments that are looked at in one step where nothing has changed."""

IN_TURN = 32
"""Segments of lanes where nothing seems to have changed that each look takes in."""


class _Stamp:
    """When a file had changed last, and when that was seen."""

    __slots__ = ("_changed_ns", "_seen_ns")

    def __init__(self) -> None:
        self._changed_ns = self._seen_ns = 0

    def holds(self, changed_ns: int) -> bool:
        """Whether all that has happened to the file was seen."""
        settled = self._seen_ns - self._changed_ns > SETTLED_NS
        return settled and changed_ns == self._changed_ns

    def seen(self, changed_ns: int, now_ns: int) -> None:
        """The file, last changed at `changed_ns`, was looked at, at `now_ns`."""
        self._changed_ns, self._seen_ns = changed_ns, now_ns


@dataclass(slots=True)
class Watched:
    """A segment of another process, and what is known of its index."""

    number: int
    segment: Segment
    inode: int
    crcs: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.object_]
    """By slot: the key of each chunk, so that its end can be told, or None. The garbage collector
    does not go through arrays."""
    stamp: _Stamp = field(default_factory=_Stamp)

    @property
    def first(self) -> int:
        """The place of its first slot."""
        return self.number * SLOTS_PER_SEGMENT


@dataclass(slots=True)
class _Lane:
    folder: _Stamp = field(default_factory=_Stamp)
    lock: _Stamp = field(default_factory=_Stamp)
    segments: dict[str, Watched] = field(default_factory=dict)


class Watch:
    """Follows the other lanes beside that of one volume.

    One thread at a time looks; others may ask `find`.

    Args:
        own: the volume; its backend is used.
        namespace: digest of what is followed.
        numbers: numbers for segments, different from those of any other watch.
        places: told where each chunk lies.
        epoch: chunks of other epochs are ignored, as are those that `own` has no key for.
    """

    def __init__(
        self,
        own: Volume,
        namespace: str,
        numbers: Iterator[int],
        places: Places,
        epoch: int,
    ) -> None:
        self._own = own
        self._namespace = namespace
        self._numbers = numbers
        self._places = places
        self._epoch = epoch
        self._lanes: dict[Path, _Lane] = {}
        self._by_number: dict[int, Watched] = {}
        sealer = None if own.coder is None else own.coder.sealer
        self._keys = None if sealer is None else sealer.keys
        self._keys_seen = 0 if self._keys is None else self._keys.changes
        self._turn: Iterator[tuple[Path, str]] = iter(())
        self._room = 0
        """Segments that may be opened, so that files are left for the process and its own lane."""
        self._short = False
        self._wrong: deque[tuple[Watched, int, bytes, int]] = deque()

    @property
    def lanes(self) -> int:
        """Lanes that hold segments."""
        return sum(1 for lane in self._lanes.values() if lane.segments)

    def find(self, number: int) -> Segment | None:
        """The segment of that number, if it is still there."""
        watched = self._by_number.get(number)
        return None if watched is None else watched.segment

    def note_wrong(self, number: int, slot: int, key: bytes) -> None:
        """Note that a slot of a segment did not hold this chunk. Never waits."""
        if (watched := self._by_number.get(number)) is not None:
            self._wrong.append((watched, slot, key, int(watched.crcs[slot])))

    def _forget_wrong(self) -> None:
        """Let the next change of these slots count, also where it brings the same chunk again."""
        while self._wrong:
            watched, slot, key, crc = self._wrong.popleft()
            # What another look has found there since counts, be it the same chunk.
            same = watched.keys[slot] == key and watched.crcs[slot] == crc
            if same and watched.number in self._by_number:
                watched.keys[slot] = None
                self._places.change([(key, watched.first + slot)], ())

    def look(self) -> Iterator[None]:
        """Bring what is known up to date, in steps of a millisecond or two: others use the
        processor and the thread in between.
        """
        own = self._own.lane.folder
        if self._keys is not None and self._keys.changes != self._keys_seen:
            self._keys_seen = self._keys.changes
            self._look_anew()
        self._forget_wrong()
        unread: dict[Path, OSError] = {}
        try:
            self._own.lane.check_place()
            found = lane_folders(own.parent, self._own.trust, unread)
        except OSError as error:
            _tell(own.parent, error)
            if error.errno not in GONE:
                # What is known may be right all the same: nothing says that it is gone.
                return
            # What is in its place is another cache, where the same epoch stands for other weights.
            found = []
        for folder, reason in unread.items():
            _tell(folder, reason)
        folders = [folder for _, folder in found if folder != own]
        for folder in self._lanes.keys() - set(folders) - unread.keys():
            lane = self._lanes.pop(folder)
            for name in list(lane.segments):
                yield from self._lose(lane, name)
        for folder in folders:
            lane = self._lanes.setdefault(folder, _Lane())
            with contextlib.suppress(OSError):
                yield from self._look_at_lane(folder, lane)
        yield from self._look_at_some()

    def _look_at_lane(self, folder: Path, lane: _Lane) -> Iterator[None]:
        # The time first, then the stamps, then what they stand for.
        now = time.time_ns()
        folder_ns, lock_ns = os.stat(folder).st_mtime_ns, _lock_ns(folder)
        listed = lane.folder.holds(folder_ns)
        if listed and lane.lock.holds(lock_ns):
            return
        names = list(lane.segments) if listed else (yield from self._list(folder, lane))
        whole = True
        for count, name in enumerate(names, 1):
            try:
                yield from self._look_at(folder, name, lane)
            except ForeignFileError as error:
                # Other errors may pass.
                cause = error.__cause__
                whole &= not isinstance(cause, OSError) or cause.errno in LASTING
            except OSError:
                whole = False
            if count % STEP_SEGMENTS == 0:
                yield
        if whole:
            lane.folder.seen(folder_ns, now)
            lane.lock.seen(lock_ns, now)

    def _list(self, folder: Path, lane: _Lane) -> Generator[None, None, list[str]]:
        """The names of the lane's segments; those that are gone are lost."""
        names = [path.name for _, path in segment_files(folder)]
        for name in lane.segments.keys() - set(names):
            yield from self._lose(lane, name)
        new = len(set(names) - lane.segments.keys())
        if new:
            own = self._own
            each = own.backend.descriptors
            # Those beyond two of a segment are opened when it is written to.
            spare = SPARE_DESCRIPTORS + each * own.max_segments - 2 * len(own.segments)
            wanted = 2 * new + spare
            room = allow_descriptors(wanted, "following other lanes", tells=not self._short)
            # Segments beyond that are left alone until their lane changes again.
            self._short = room < wanted
            self._room = max(0, room - spare) // 2
        return names

    def _look_at_some(self) -> Iterator[None]:
        """Look at a few segments, others each time, even where nothing seems to change."""
        some = list(islice(self._turn, IN_TURN))
        if not some:
            self._turn = iter(
                [(folder, name) for folder, lane in self._lanes.items() for name in lane.segments]
            )
            some = list(islice(self._turn, IN_TURN))
        for folder, name in some:
            lane = self._lanes.get(folder)
            if lane is not None and name in lane.segments:
                with contextlib.suppress(OSError, ForeignFileError):
                    yield from self._look_at(folder, name, lane)

    def _look_at(self, folder: Path, name: str, lane: _Lane) -> Iterator[None]:
        now = time.time_ns()
        stat = os.stat(f"{folder}/{name}")
        watched = lane.segments.get(name)
        if watched is not None and watched.inode != stat.st_ino:
            yield from self._lose(lane, name)
            watched = None
        if watched is None:
            watched = self._begin(folder / name, stat.st_ino)
            if watched is None:
                return
            lane.segments[name] = self._by_number[watched.number] = watched
        if watched.stamp.holds(stat.st_mtime_ns):
            return
        yield from self._read(watched)
        watched.stamp.seen(stat.st_mtime_ns, now)

    def _begin(self, path: Path, inode: int) -> Watched | None:
        if not self._room:
            return None
        header = read_header(path)
        its = header.geometry
        if header.namespace != self._namespace or not its.is_like(self._own.geometry):
            return None
        segment = Segment.follow(path, header, self._own.backend, self._own.trust)
        segment.epoch = self._epoch
        # The path led there a moment ago: now it is certain that it still leads to the same cache.
        self._own.lane.check_place()
        self._room -= 1
        crcs = np.zeros(its.slots, np.uint32)
        keys = np.full(its.slots, None, np.object_)
        return Watched(next(self._numbers), segment, inode, crcs, keys)

    def _read(self, watched: Watched) -> Iterator[None]:
        """Take in the records that have changed."""
        keys, first = watched.keys, watched.first
        for changed, live in watched.segment.index.changes(watched.crcs, self._epoch):
            if self._keys is not None:
                live = live.readable(self._keys)
            now = dict(zip(live.slots, live.keys(), strict=True))
            gone: list[tuple[bytes, int]] = []
            appeared: list[tuple[bytes, int]] = []
            for slot, before in zip(changed, keys[changed].tolist(), strict=True):
                after = now.get(slot)
                if before == after:
                    continue
                keys[slot] = after
                if before is not None:
                    gone.append((before, first + slot))
                if after is not None:
                    appeared.append((after, first + slot))
            self._places.change(gone, appeared)
            yield

    def _look_anew(self) -> None:
        """Have the next look take in every record: other keys may be known now."""
        for lane in self._lanes.values():
            lane.folder = _Stamp()
            for watched in lane.segments.values():
                watched.stamp = _Stamp()
                # Not zeros, which a record that was erased meanwhile has, too.
                np.invert(watched.crcs, out=watched.crcs)

    def _lose(self, lane: _Lane, name: str) -> Iterator[None]:
        """Forget a segment and what it holds."""
        watched = lane.segments.pop(name)
        del self._by_number[watched.number]
        self._room += 1
        for at in range(0, len(watched.keys), CHANGES_SLOTS):
            keys = watched.keys[at : at + CHANGES_SLOTS].tolist()
            some = enumerate(keys, watched.first + at)
            self._places.change([(key, place) for place, key in some if key is not None], ())
            yield


def _tell(folder: Path, error: OSError) -> None:
    logger.debug(
        "cannot follow %s: %s",
        folder,
        error,
        extra=about("disk.not_followed", path=folder, error=error),
    )


def _lock_ns(folder: Path) -> int:
    try:
        return os.stat(f"{folder}/{LOCK_NAME}").st_mtime_ns
    except FileNotFoundError:
        return 0  # No process has ever owned the lane.
