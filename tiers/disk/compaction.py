"""Compaction of a lane that nobody uses: fewer files, chains in order.

Chunks that were written or used one after the other are put into neighbouring
slots, segment by segment: a segment is emptied into free slots elsewhere and
then filled with the next chunks in order. What is empty in the end is given
back. This needs as many free slots as a segment has; with fewer there is
nothing to give back either, and the lane stays as it is.

No space beyond the files that exist is used. A chunk is moved by writing its
payload, then its new record, then erasing the old one, so a crash at any point
leaves each chunk at its old place, at its new place, or at both with the same
bytes. A chunk that is to be moved and whose payload does not match its digest
is dropped. Chunks that stay where they are are not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from kvstore.errors import ForeignFileError
from tiers.disk.fault import Fault
from tiers.disk.format import Geometry, reseal_records
from tiers.disk.index import read_index
from tiers.disk.io import choose_backend
from tiers.disk.recovery import recover
from tiers.disk.segment import Segment, read_header, segment_files
from tiers.disk.trust import STRICT, Trust

__all__ = ["Compaction", "LaneLayout", "compact_lane", "lane_layout"]

BATCH_BYTES = 16 * 1024 * 1024
NO_LIMIT = 2**63


@dataclass(slots=True)
class LaneLayout:
    """How well the chunks of a lane lie.

    Attributes:
        segments: segment files.
        file_bytes: their size together.
        slots: slots they have.
        live: slots that hold a chunk.
        extents: runs of chunks that follow each other in order and in place.
        needed: segments that would do for the live chunks.
    """

    segments: int
    file_bytes: int
    slots: int
    live: int
    extents: int
    needed: int

    @property
    def chunks_per_extent(self) -> float:
        """Mean length of a run: how many chunks one read can fetch."""
        return self.live / self.extents if self.extents else 0.0


@dataclass(slots=True)
class Compaction:
    """What compacting a lane did, or would do.

    Attributes:
        before: the layout before.
        after: the layout after.
        moved: chunks that were moved.
        dropped: chunks that were to be moved and were damaged.
        faults: all that was found to be wrong: chunks dropped, damaged records erased,
            segments that were cut short, segments that cannot be used and were left alone.
    """

    before: LaneLayout
    after: LaneLayout
    moved: int
    dropped: int
    faults: list[Fault] = field(default_factory=list)


class _Lane:
    """Segments, who is where, and moving."""

    def __init__(self, folder: Path, namespace: str, geometry: Geometry, trust: Trust) -> None:
        self.geometry = geometry
        self.backend = choose_backend(folder)
        recovered = recover(folder, namespace, geometry, NO_LIMIT, self.backend, trust)
        self.faults = recovered.faults
        self.segments = recovered.segments
        self.order = [key for key, _ in recovered.entries]
        self.slot_of = dict(recovered.entries)
        self.key_at = {slot: key for key, slot in recovered.entries}
        self._live: dict[int, set[int]] = {number: set() for number in recovered.segments}
        for slot in self.key_at:
            self._live[slot // geometry.slots].add(slot)
        self.moved = 0
        self.dropped = 0
        self.removed: set[int] = set()
        batch = max(1, BATCH_BYTES // geometry.slot_bytes)
        self._batch = batch
        self._memory = mmap.mmap(-1, batch * geometry.slot_bytes)
        self._view = memoryview(self._memory)
        self._erase_stale()

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self._view.release()
        self._memory.close()

    def count(self, number: int) -> int:
        return len(self._live[number])

    def live_in(self, number: int) -> list[int]:
        return sorted(self._live[number])

    def free_in(self, number: int) -> list[int]:
        first = number * self.geometry.slots
        live = self._live[number]
        return [slot for slot in range(first, first + self.geometry.slots) if slot not in live]

    def layout(self) -> LaneLayout:
        places = [self.slot_of[key] for key in self.order if key in self.slot_of]
        return _layout(places, len(self.segments), self.geometry)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the chunks at `sources` to the empty slots `targets`, which run in parallel."""
        for start in range(0, len(sources), self._batch):
            self._move_batch(
                sources[start : start + self._batch], targets[start : start + self._batch]
            )

    def remove(self, number: int) -> None:
        """Give an empty segment back."""
        segment = self.segments.pop(number)
        segment.close()
        segment.path.unlink()
        self.removed.add(number)

    def _move_batch(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        per_segment, size = self.geometry.slots, self.geometry.slot_bytes
        for index, source in enumerate(sources):
            target = targets[index]
            origin, home = self._at(source), self._at(target)
            from_slot, to_slot = source % per_segment, target % per_segment
            buffer = self._view[index * size : (index + 1) * size]
            live = origin.live_records(from_slot, 1)
            got = self.backend.read(origin.data, [buffer], origin.offset_of(from_slot))
            whole = (
                got == size
                and live.slots
                and xxh3_128_digest(buffer[: self.geometry.chunk_bytes]) == live.digests()[0]
            )
            key = self.key_at.pop(source)
            self._live[source // per_segment].discard(source)
            if whole:
                self.backend.write(home.data, [buffer], home.offset_of(to_slot))
                record = live.records.copy()
                record["slot"] = to_slot
                home.write_records(to_slot, reseal_records(record, home.seed))
                self.key_at[target] = key
                self._live[target // per_segment].add(target)
                self.slot_of[key] = target
                self.moved += 1
            else:
                del self.slot_of[key]
                self.dropped += 1
                told = "payload does not match its digest"
                self.faults.append(Fault(str(origin.path), from_slot, told, key.hex()))
            origin.erase_records(from_slot, 1)

    def _at(self, slot: int) -> Segment:
        return self.segments[slot // self.geometry.slots]

    def _erase_stale(self) -> None:
        """Records that are valid but superseded hold nothing."""
        for number, segment in self.segments.items():
            for slot in segment.live_records(0, self.geometry.slots).slots:
                if number * self.geometry.slots + slot not in self.key_at:
                    segment.erase_records(slot, 1)


def lane_layout(folder: Path) -> LaneLayout:
    """The layout of a lane, read without taking it: it may be in use.

    Segments that cannot be read are left out.
    """
    geometry: Geometry | None = None
    slots: list[int] = []
    sequences: list[int] = []
    segments = 0
    for number, path in segment_files(folder):
        try:
            header = read_header(path)
            found, live_slots, live_sequences = _read_places(path)
        except (ForeignFileError, OSError):
            continue
        geometry = geometry or header.geometry
        segments += 1
        slots += [number * found.slots + slot for slot in live_slots]
        sequences += live_sequences
    if geometry is None:
        return LaneLayout(0, 0, 0, 0, 0, 0)
    order = np.argsort(np.array(sequences, np.uint64), kind="stable").tolist()
    return _layout([slots[index] for index in order], segments, geometry)


def compact_lane(
    folder: Path,
    namespace: str,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda moved, live: None,
    trust: Trust = STRICT,
) -> Compaction | None:
    """Compact a lane that the caller owns. None when it holds no segment.

    Args:
        dry_run: only say what would be given back; nothing is changed.
        progress: called with the chunks moved so far and the chunks alive.
        trust: whose files are taken.
    """
    faults: list[Fault] = []
    geometry = _geometry(folder, namespace, faults)
    if geometry is None:
        layout = lane_layout(folder)
        return Compaction(layout, layout, 0, 0, faults) if faults else None
    if dry_run:
        before = lane_layout(folder)
        room = before.slots - before.live >= geometry.slots
        kept = before.needed if room else before.segments
        after = LaneLayout(
            kept,
            kept * geometry.file_bytes,
            kept * geometry.slots,
            before.live,
            kept if room else before.extents,
            before.needed,
        )
        return Compaction(before, after, 0, 0)
    lane = _Lane(folder, namespace, geometry, trust)
    try:
        before = lane.layout()
        _put_in_order(lane, progress)
        for number in [n for n in lane.segments if not lane.count(n)]:
            lane.remove(number)
        return Compaction(before, lane.layout(), lane.moved, lane.dropped, lane.faults)
    finally:
        lane.close()


def _put_in_order(lane: _Lane, progress: Callable[[int, int], None]) -> None:
    per_segment = lane.geometry.slots
    free = len(lane.segments) * per_segment - len(lane.order)
    if free < per_segment:
        return
    settled: set[int] = set()
    for start in range(0, len(lane.order), per_segment):
        group = lane.order[start : start + per_segment]
        places = [lane.slot_of[key] for key in group if key in lane.slot_of]
        if not places:
            continue
        if _is_extent(places, per_segment):
            settled.add(places[0] // per_segment)
            continue
        rest = [number for number in lane.segments if number not in settled]
        target = min(rest, key=lane.count)
        sources = lane.live_in(target)
        # Settled segments are full, so a segment's worth of slots is free in the others:
        # what is in the target always finds room there.
        room: list[int] = []
        for number in sorted(rest, key=lane.count, reverse=True):
            if number != target and len(room) < len(sources):
                room += lane.free_in(number)
        lane.move(sources, room[: len(sources)])
        sources = [lane.slot_of[key] for key in group if key in lane.slot_of]
        first = target * per_segment
        lane.move(sources, range(first, first + len(sources)))
        settled.add(target)
        progress(lane.moved, len(lane.slot_of))


def _is_extent(places: Sequence[int], per_segment: int) -> bool:
    return places[0] // per_segment == places[-1] // per_segment and all(
        after == before + 1 for before, after in pairwise(places)
    )


def _layout(slots: Sequence[int], segments: int, geometry: Geometry) -> LaneLayout:
    extents = sum(
        1
        for index, slot in enumerate(slots)
        if not index
        or abs(slot - slots[index - 1]) != 1
        or not max(slot, slots[index - 1]) % geometry.slots
    )
    return LaneLayout(
        segments,
        segments * geometry.file_bytes,
        segments * geometry.slots,
        len(slots),
        extents,
        -(-len(slots) // geometry.slots),
    )


def _geometry(folder: Path, namespace: str, faults: list[Fault]) -> Geometry | None:
    """That of the first segment that can be used; those before it are put into `faults`."""
    for _, path in segment_files(folder):
        try:
            header = read_header(path)
        except ForeignFileError as error:
            faults.append(Fault.of(path, error))
            continue
        if header.namespace == namespace:
            return header.geometry
        faults.append(Fault(str(path), None, "belongs to another namespace"))
    return None


def _read_places(path: Path) -> tuple[Geometry, list[int], list[int]]:
    header, live, _ = read_index(path)
    return header.geometry, live.slots, live.records["sequence"].tolist()
