"""Volume: one path of a disk tier, with its lane, files and threads.

This module is long because what opens, moves, grows and closes shares the files of one lane.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, KVStoreError, PathUnusableError
from kvstore.tiers.coding import Coder
from kvstore.tiers.disk.descriptors import (
    NO_DESCRIPTORS,
    SPARE_DESCRIPTORS,
    allow_descriptors,
    descriptors_left,
)
from kvstore.tiers.disk.epoch import raise_epoch, read_epoch
from kvstore.tiers.disk.extents import (
    Extent,
    Outcome,
    Reading,
    Writing,
    cut_batches,
    cut_extents,
    gravest,
)
from kvstore.tiers.disk.format import Geometry, Records
from kvstore.tiers.disk.io import choose_backend
from kvstore.tiers.disk.io.base import NO_ROOM
from kvstore.tiers.disk.lane import Lane, newest_told
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.disk.recovery import Recovered, held_geometry, recover
from kvstore.tiers.disk.segment import Segment, segment_files
from kvstore.tiers.disk.threads import IOThreads, Parts
from kvstore.tiers.disk.trust import Trust
from kvstore.tiers.disk.unowned import UnownedLanes
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import about

__all__ = ["Job", "Use", "Volume", "warn_of_unreadable"]

logger = logging.getLogger("kvstore.disk")

NO_LIMIT = 2**63

IN_USE_SECONDS = 1.0

UNOWNED_AT_ONCE = 4
"""Segments of unowned lanes that a store removes at most: it waits for that."""

Use = tuple[int, int, bytes, int]
"""Of a chunk that was used: its segment, its slot there, its key, and its sequence from now on."""


@dataclass(slots=True)
class Job:
    """Blocks to be moved; `slots` are those of the volume, or of its peers. Its threads fill in
    `ok`, and `unread`: the places of those that could not be read, and may be whole.

    `sequence` is that of the first record written; a job takes as many as it has keys. `coder` is
    that of chunks that are written.
    """

    keys: Sequence[bytes]
    slots: Sequence[int]
    rows: Sequence[int]
    ok: list[bool]
    load: bool
    sequence: int = 0
    coder: Coder | None = None
    unread: set[int] = field(default_factory=set)

    def batches(
        self, indices: Sequence[int], segment_slots: int, slot_bytes: int, threads: int
    ) -> list[list[list[int]]]:
        """Those blocks that `indices` name: the extents of each batch."""
        slots = [self.slots[index] for index in indices]
        extents = cut_extents(slots, segment_slots, slot_bytes, threads)
        named = [[indices[at] for at in extent] for extent in extents]
        return cut_batches(named, slot_bytes, threads)

    def extent(
        self, segment: Segment, first: int, indices: Sequence[int], region: PinnedRegion
    ) -> Extent:
        """Those blocks that `indices` name, which are neighbours from slot `first` on."""
        keys = [self.keys[index] for index in indices]
        return Extent(segment, first, keys, [region.row(self.rows[index]) for index in indices])


class Volume:
    """One volume: see the module's text. Slots are numbered within the volume.

    Opening takes the lane and recovers its entries into `recovered`.

    Args:
        path: folder of the cache; made with mode 0700 if it does not exist.
        namespace: whose bytes they are.
        wanted: geometry of segments, unless the lane has some already.
        capacity_bytes: hard limit for the files of the lane, and of unowned lanes on the path;
            None for the present size of the lane's files.
        io: name of the I/O backend, or "auto".
        io_threads: threads that do I/O.
        lane: number of the lane; by default the first that is free.
        trust: whose folders and files are taken.
        epoch: chunks of another are not found.
        coder: turns chunks into payloads, where these are sealed or encoded.
        first: number of the lane that is tried first.
        elsewhere: returns what geometry a lane without segments is to have.

    Raises:
        KVStoreError: if the path cannot be used.
    """

    def __init__(
        self,
        path: Path,
        namespace: Namespace,
        wanted: Geometry,
        capacity_bytes: int | None,
        *,
        io: str,
        io_threads: int,
        lane: int | None,
        trust: Trust,
        epoch: int = 0,
        coder: Coder | None = None,
        first: int | None = None,
        elsewhere: Callable[[int, Geometry], Geometry] = lambda lane, wanted: wanted,
    ) -> None:
        self.epoch = epoch
        self.coder = coder
        self.capacity_bytes = capacity_bytes
        self.segments: dict[int, Segment] = {}
        self.max_segments = 0
        self._namespace, self._digest = namespace, namespace.digest
        self._reads: dict[int, npt.NDArray[np.uint32]] = {}
        self._read_ms: dict[int, npt.NDArray[np.uint64]] = {}
        self._growth = threading.Lock()
        # How often each segment's files are being used; none of these is removed.
        self._used: Counter[int] = Counter()
        self._using = threading.Condition()
        self._resized = False
        self.trust = trust
        folder = namespace.establish(path, trust)
        most = math.inf if capacity_bytes is None else capacity_bytes
        self.lane = Lane.acquire(folder, lane, trust, most, first)
        self.unowned = UnownedLanes(self.lane, trust)
        try:
            held = held_geometry(self.lane.folder, self._digest, wanted)
            self._open(held or elsewhere(self.lane.number, wanted), wanted, io)
            self.threads = IOThreads(io_threads, "kvstore-disk")
        except BaseException as error:
            self.close_files()
            if isinstance(error, OSError) and not isinstance(error, KVStoreError):
                own = self.lane.folder
                where = error.filename or own
                told = f"{where}: {error.strerror or error}"
                if error.errno in NO_DESCRIPTORS:
                    # The folder may be one that cannot be listed now, either.
                    with contextlib.suppress(OSError):
                        told += f": {len(segment_files(own))} segments need two each"
                    told += "; raise the limit (ulimit -n)"
                raise PathUnusableError(told) from error
            if isinstance(error, RuntimeError):
                told = f"{self.lane.folder}: no I/O thread can be started: {error}"
                raise PathUnusableError(told) from error
            raise

    def _open(self, geometry: Geometry, wanted: Geometry, io: str) -> None:
        folder = self.lane.folder
        self.geometry = geometry
        capacity = self.capacity_bytes
        if capacity is not None and capacity < geometry.file_bytes:
            way_out = "raise it, or lower segment_bytes if you gave that"
            if geometry != wanted:
                way_out = f"those in {folder} have that size; raise it or remove them"
            raise ConfigError(
                f"capacity_bytes = {capacity}: smaller than one segment of "
                f"{geometry.file_bytes} bytes; {way_out}"
            )
        # While surplus segments are removed, one more than may stay is open.
        held, room = len(segment_files(folder)), (capacity or 0) // geometry.file_bytes
        most = held if capacity is None else max(room, min(held, room + 1))
        self.backend = choose_backend(folder, io)
        each = self.backend.descriptors
        allow_descriptors(each * most + SPARE_DESCRIPTORS, f"the lane {folder}")
        self.recovered: Recovered = recover(
            folder,
            self._digest,
            geometry,
            NO_LIMIT if capacity is None else capacity,
            self.backend,
            self.trust,
            self.epoch,
            None if self.coder is None else self.coder.sealer,
        )
        recovered = self.recovered
        self.segments = recovered.segments
        for fault in recovered.foreign:
            logger.warning(
                "disk tier: left alone and counted against its capacity: %s",
                fault,
                extra=about("disk.foreign_file", fault=fault),
            )
        for fault in recovered.faults:
            if fault.slot is None and fault not in recovered.foreign:
                logger.warning(
                    "disk tier: has its size back, not what it held there: %s",
                    fault,
                    extra=about("disk.damaged_file", fault=fault),
                )
        if recovered.damaged:
            logger.warning(
                "disk tier: %d damaged records in %s; their chunks are gone",
                recovered.damaged,
                folder,
                extra=about("disk.damaged_records", path=folder, records=recovered.damaged),
            )
        warn_of_unreadable(folder, recovered.unreadable)
        if capacity is not None:
            _warn_of_size(folder, capacity)
        if capacity is None:
            self.max_segments = len(self.segments)
        else:
            self.max_segments = max(0, capacity - recovered.foreign_bytes) // geometry.file_bytes
        self._make_room(max(1, len(self.segments)))
        if not self.segments and self.max_segments:
            try:
                self._new_segment()
            except OSError as error:
                raise PathUnusableError(
                    f"{folder}: cannot allocate a segment of {geometry.file_bytes} bytes: "
                    f"{error.strerror}"
                ) from error
        for number in self.segments:
            self._add_counters(number)

    def forget_recovered(self) -> None:
        """Forget the recovered entries, which were taken over and need not be kept twice."""
        self.recovered.entries = []
        self.recovered.sequences = []

    # -- moving ------------------------------------------------------------------------

    async def move(self, job: Job, indices: Sequence[int], region: PinnedRegion) -> str | None:
        """Move those blocks of `job` that `indices` name; returns what went wrong first."""
        cut = partial(self._cut, job, indices, region)
        errors = await self.threads.run_cut(cut, load=job.load)
        return next((error for error in errors if error is not None), None)

    def _cut(
        self, job: Job, indices: Sequence[int], region: PinnedRegion
    ) -> list[Callable[[], Parts[str | None]]]:
        slots, size = self.geometry.slots, self.geometry.slot_bytes
        operations: list[Callable[[], Parts[str | None]]] = []
        sequence = job.sequence + (indices[0] if indices else 0)
        for batch in job.batches(indices, slots, size, self.threads.count):
            operations.append(partial(self._move_batch, job, batch, region, sequence))
            sequence += sum(map(len, batch))
        return operations

    def _move_batch(
        self, job: Job, places: Sequence[Sequence[int]], region: PinnedRegion, sequence: int
    ) -> Parts[str | None]:
        with self._use([job.slots[indices[0]] // self.geometry.slots for indices in places]):
            extents = [self._extent(job, indices, region) for indices in places]
            moving = (
                Reading(self.backend, extents, self.coder)
                if job.load
                else Writing(self.backend, extents, sequence, job.coder or self.coder)
            )
            if moving.waits:
                yield
            outcomes = moving.end()
            if job.load:
                self._count_reads(extents, outcomes)
                for extent, indices, outcome in zip(extents, places, outcomes, strict=True):
                    for slot, (index, ok) in enumerate(zip(indices, outcome.ok, strict=True)):
                        if not ok and extent.first + slot not in outcome.wrong:
                            job.unread.add(index)
            else:
                self._forget_reads(extents, outcomes)
                self.lane.touch()
        if not job.load and self.unowned.due:
            self._make_room(len(self.segments), UNOWNED_AT_ONCE)
        for indices, outcome in zip(places, outcomes, strict=True):
            for index, ok in zip(indices, outcome.ok, strict=True):
                job.ok[index] = ok
        return gravest(outcomes)

    def _extent(self, job: Job, indices: Sequence[int], region: PinnedRegion) -> Extent:
        number, first = divmod(job.slots[indices[0]], self.geometry.slots)
        return job.extent(self.segments[number], first, indices, region)

    def _forget_reads(self, extents: Sequence[Extent], outcomes: Sequence[Outcome]) -> None:
        """Note that other chunks are in these slots now, which nobody has read."""
        for extent, outcome in zip(extents, outcomes, strict=True):
            slots = [extent.first + index for index, ok in enumerate(outcome.ok) if ok]
            self._reads[extent.segment.number][slots] = 0
            self._read_ms[extent.segment.number][slots] = 0

    def move_reads(self, source: Sequence[int], other: Volume, home: Sequence[int]) -> None:
        """Let a chunk that was copied have what was noted of it, and nothing of the one before it.

        The source keeps it: the chunk may be found there after all.

        Args:
            source: segment and slot in this volume.
            home: segment and slot in the other, which may be this one.
        """
        for mine, its in ((self._reads, other._reads), (self._read_ms, other._read_ms)):
            if source[0] in mine and home[0] in its:  # Else it was removed meanwhile.
                its[home[0]][home[1]] = mine[source[0]][source[1]]

    def _count_reads(self, extents: Sequence[Extent], outcomes: Sequence[Outcome]) -> None:
        """Count the reads, for the records, and erase records that are wrong."""
        now = time.time_ns() // 1_000_000
        read: dict[int, list[int]] = {}
        for extent, outcome in zip(extents, outcomes, strict=True):
            slots = read.setdefault(extent.segment.number, [])
            if outcome.error is None:
                slots += range(extent.first, extent.first + len(outcome.ok))
                continue
            slots += [extent.first + index for index, ok in enumerate(outcome.ok) if ok]
            kept: list[int] = []
            for slot in outcome.wrong:
                try:
                    extent.segment.index.erase(slot, 1)
                except OSError:
                    kept.append(slot)
            if kept:
                logger.warning(
                    "cannot erase %d records of %s, the first of slot %d",
                    len(kept),
                    extent.segment.path,
                    kept[0],
                    extra=about("disk.not_erased", path=extent.segment.path, records=len(kept)),
                )
        for number, slots in read.items():
            self._reads[number][slots] += 1
            self._read_ms[number][slots] = now

    # -- segments ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _use(self, numbers: Iterable[int]) -> Iterator[None]:
        """Keep the files of these segments, if they are still there, for a block."""
        used = Counter(numbers)
        with self._using:
            self._used.update(used)
        try:
            yield
        finally:
            with self._using:
                self._used.subtract(used)
                self._using.notify_all()

    def segments_in(self, capacity_bytes: int) -> int:
        """Return how many segments fit into this many bytes, beside files that are not ours.

        Raises:
            ConfigError: if there is no room for one.
        """
        foreign, size = self.recovered.foreign_bytes, self.geometry.file_bytes
        if capacity_bytes < foreign + size:
            raise ConfigError(
                f"capacity_bytes: the share of {self.lane.folder} would be {capacity_bytes} bytes; "
                f"it needs at least {foreign + size}, for one segment and files that are not ours"
            )
        return (capacity_bytes - foreign) // size

    def resize(self, capacity_bytes: int) -> None:
        """Set `capacity_bytes`. Surplus segments stay until they are removed."""
        self.max_segments = self.segments_in(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self._resized = True

    def grow(self) -> int | str | None:
        """Make one more segment: its number, or why that cannot be now. May block.

        None if the capacity is used up.
        """
        if len(self.segments) < self.max_segments and not self._make_room(len(self.segments) + 1):
            return "segments of unowned lanes, which cannot be removed, take the room"
        with self._growth:
            if len(self.segments) >= self.max_segments:
                return None
            try:
                if self._resized:
                    self._allow_growth()
                if descriptors_left() < SPARE_DESCRIPTORS // 4:
                    # The next process is to open all of them, and may need more for itself.
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                self.lane.check_place()
                number = self._new_segment()
            except OSError as error:
                return f"cannot allocate a segment: {error.strerror}"
            self._add_counters(number)
            return number

    def _allow_growth(self) -> None:
        """See what the size that was set last needs of the system. It may need none: an event loop
        sets it.
        """
        folder, self._resized = self.lane.folder, False
        if self.capacity_bytes is not None:
            _warn_of_size(folder, self.capacity_bytes)
        more = self.backend.descriptors * (self.max_segments - len(self.segments))
        allow_descriptors(more + SPARE_DESCRIPTORS, f"the lane {folder}")

    def _make_room(self, segments: int, at_once: int | None = None) -> bool:
        """Shrink unowned lanes to the capacity that `segments` segments of this lane leave.

        Returns:
            Whether there is room for so many, as far as that is known.
        """
        if self.capacity_bytes is None:
            return True
        own = self.recovered.foreign_bytes + segments * self.geometry.file_bytes
        try:
            return self.unowned.make_room(max(0, self.capacity_bytes - own), at_once)
        except OSError as error:
            logger.warning(
                "disk tier: unowned lanes beside %s are not looked at: %s",
                self.lane.folder,
                error.strerror,
                extra=about("disk.unowned_kept", path=self.lane.folder, error=error.strerror),
            )
            return True

    def list_segment(self, number: int) -> list[tuple[bytes, int]]:
        """(key, slot within the segment) of its valid records, in the order of storing. May block.

        Raises:
            OSError: as the system says.
        """
        return self.segments[number].list_chunks()

    def is_outdated(self, number: int, keys: KeyRing) -> bool:
        """Whether a segment has chunks that are sealed with other keys than the newest. May block.

        Raises:
            OSError: as the system says.
        """
        with self._use((number,)):
            segment = self.segments.get(number)
            if segment is None:
                return False
            if not segment.sealed_with(keys.ids(newest=True)):
                return True
            # A key that is the newest of all others is not the newest of a tenant that has its own.
            return bool(keys.own_ids) and segment.index.live().of_epoch(self.epoch).outdated(keys)

    def list_unreadable(self, number: int, keys: KeyRing) -> list[tuple[bytes, int]]:
        """(key, slot) of a segment's chunks that are sealed with keys not known. May block.

        Raises:
            OSError: as the system says.
        """
        with self._use((number,)):
            segment = self.segments.get(number)
            if segment is None or (segment.sealed_with(keys.ids()) and not keys.own_ids):
                return []
            live = segment.index.live().of_epoch(self.epoch)
        kept = set(live.readable(keys).slots)
        return [
            (key, slot)
            for key, slot in zip(live.keys(), live.slots, strict=True)
            if slot not in kept
        ]

    def remove(self, number: int) -> str | None:
        """Remove a segment's file; why that cannot be, or None. May block."""
        with self._growth:
            with self._using:
                segment = self.segments.get(number)
                if segment is None:
                    return None
                # Who reads or writes records alone has done so in a moment.
                if not self._using.wait_for(lambda: not self._used[number], IN_USE_SECONDS):
                    return f"{segment.path} is in use"
                del self.segments[number]
            try:
                segment.remove()
            except OSError as error:
                self.segments[number] = segment
                return f"{segment.path} cannot be removed: {error.strerror}"
            del self._reads[number], self._read_ms[number]
            # A file system may tell only now what went wrong with writes before.
            with contextlib.suppress(OSError):
                segment.close()
            return None

    def newest_epoch(self) -> int | str:
        """The newest epoch that somebody has been in here, or why that is not known. May block."""
        try:
            self.lane.check_place()
            told, _ = newest_told(self.lane.folder.parent, self.trust)
            return max(read_epoch(self.lane.folder.parent), told)
        except KVStoreError as error:
            return str(error)
        except OSError as error:
            return f"{self.lane.folder.parent}: cannot be read: {error.strerror}"

    def raise_epoch(
        self, epoch: int, *, giving: bool = False, seconds: float | None = None
    ) -> int | str:
        """Raise the newest epoch here to `epoch` at least; what it was, or why not. May block.

        Args:
            giving: whether a segment may be given up for it where the disk is full.
            seconds: how long to wait for another process that moves it; None: a moment.
        """
        folder = self.lane.folder.parent
        try:
            try:
                before = raise_epoch(folder, epoch, seconds)
            except FileNotFoundError:
                # The file that says whose it is was removed, as one that is damaged has to be.
                self.lane.check_place()
                self._namespace.establish(folder.parent, self.trust)
                before = raise_epoch(folder, epoch, seconds)
            self.lane.tell_epoch(epoch)
            return before
        except KVStoreError as error:
            return str(error)
        except OSError as error:
            full = giving and error.errno in NO_ROOM and len(self.segments) > 0
            if full and self.remove(max(self.segments)) is None:
                return self.raise_epoch(epoch)
            return f"{folder}: the epoch cannot be moved: {error.strerror}"

    def enter_epoch(self, epoch: int) -> None:
        """Read and write records of `epoch` from now on; no move is under way."""
        self.epoch = epoch
        for segment in self.segments.values():
            segment.epoch = epoch

    def note_uses(self, uses: Sequence[Use]) -> str | None:
        """Write into the records that these chunks were used now; why not, or None. May block.

        The reads that this process has counted go with them. Neighbours learn nothing by it.
        """
        now = time.time_ns() // 1_000_000
        try:
            for number, slot, key, sequence in uses:
                with self._use((number,)):
                    if number in self.segments:
                        reads = self._reads[number]
                        index, more = self.segments[number].index, int(reads[slot])
                        if index.note_use(slot, key, sequence, now, more):
                            # Another chunk may be in the slot by now.
                            reads[slot] -= min(more, int(reads[slot]))
        except OSError as error:
            return f"records in {self.lane.folder} cannot be written: {error.strerror}"
        return None

    def erase_keys(self, keys: Sequence[bytes]) -> str | None:
        """Take out every record of `keys`; why that could not be, or None. May block."""
        try:
            for number in list(self.segments):
                with self._use((number,)):
                    if number in self.segments:
                        self.segments[number].index.erase_keys(keys)
        except OSError as error:
            return f"records in {self.lane.folder} cannot be erased: {error.strerror}"
        finally:
            self.lane.touch()
        return None

    def save_recency(self, coldest_first: Iterable[tuple[int, int]]) -> None:
        """Write recency, as sequences, and this process's reads into the records. May block.

        Args:
            coldest_first: (slot, sequence).
        """
        slots = self.geometry.slots
        ranks: dict[int, dict[int, int]] = {number: {} for number in self.segments}
        for slot, sequence in coldest_first:
            if slot // slots in ranks:
                ranks[slot // slots][slot % slots] = sequence
        for number, segment in self.segments.items():
            if ranks[number]:
                segment.index.rewrite(partial(self._put_recency, number, ranks[number]))
        self.lane.touch()

    def _put_recency(
        self, number: int, ranks: dict[int, int], slots: list[int], records: Records
    ) -> None:
        records["sequence"] = [
            ranks.get(slot, old)
            for slot, old in zip(slots, records["sequence"].tolist(), strict=True)
        ]
        reads = records["reads"].astype(np.uint64) + self._reads[number][slots]
        records["reads"] = np.minimum(reads, 2**32 - 1)
        records["read_ms"] = np.maximum(self._read_ms[number][slots], records["read_ms"])

    def close_files(self) -> None:
        """Let go of the files and the lane; nothing runs any more."""
        for segment in self.segments.values():
            with contextlib.suppress(OSError):
                segment.close()
        self.segments = {}
        self.lane.release()

    def _new_segment(self) -> int:
        number = 0
        while number in self.segments or os.path.lexists(
            self.lane.folder / f"segment-{number}.safetensors"
        ):
            number += 1
        segment = Segment.create(
            self.lane.folder, number, self._digest, self.geometry, self.backend
        )
        segment.epoch = self.epoch
        self.segments[number] = segment
        return number

    def _add_counters(self, number: int) -> None:
        self._reads[number] = np.zeros(self.geometry.slots, np.uint32)
        self._read_ms[number] = np.zeros(self.geometry.slots, np.uint64)


def warn_of_unreadable(folder: object, chunks: int) -> None:
    """Say that chunks are encrypted with keys that are not known, if there are any."""
    if chunks:
        logger.warning(
            "disk tier: %d chunks in %s are encrypted with keys that are not known: not found",
            chunks,
            folder,
            extra=about("disk.no_key", path=folder, chunks=chunks),
        )


def _warn_of_size(folder: Path, capacity_bytes: int) -> None:
    """Say once that a capacity can never be used up, which is a mistake more often than not."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    size = found.f_blocks * found.f_frsize
    # A file system that does not tell its size says 0.
    if 0 < size < capacity_bytes:
        logger.warning(
            "disk tier: capacity_bytes = %d of %s is more than its file system has: %d bytes",
            capacity_bytes,
            folder,
            size,
            extra=about(
                "disk.capacity_beyond_file_system",
                path=folder,
                capacity_bytes=capacity_bytes,
                file_system_bytes=size,
            ),
        )
