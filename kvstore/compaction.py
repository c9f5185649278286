"""Compaction of a lane that nobody uses: fewer files, chains in order.

Chunks that were written or used one after the other are put into neighbouring
slots, segment by segment: a segment is emptied into free slots elsewhere and
then filled with the next chunks in order. What is empty in the end is given
back. The core's `Compactor` plans it, as it plans compaction while serving, and
chunks are copied by the disk tier's own way.

No space beyond the files that exist is used. A chunk is moved by writing its
payload, then its new record, then erasing the old one, so a crash at any point
leaves each chunk at its old place, at its new place, or at both with the same
bytes. A chunk that is to be moved and whose payload does not match its digest
is dropped. Chunks that stay where they are are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.core.compactor import Compactor
from kvstore.core.index import Index
from kvstore.core.slots import Slots
from kvstore.errors import ForeignFileError
from kvstore.types import Completion, Move, Op
from policies import create_policy
from tiers.disk.fault import Fault
from tiers.disk.format import Geometry
from tiers.disk.io import choose_backend
from tiers.disk.layout import LaneLayout, lane_layout, layout_of
from tiers.disk.recovery import held_geometry, recover
from tiers.disk.relocation import Place, relocate
from tiers.disk.segment import Segment, read_header, segment_files
from tiers.disk.trust import STRICT, Trust

__all__ = ["Compaction", "compact_lane"]

BATCH_BYTES = 16 * 1024 * 1024
NO_LIMIT = 2**63


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
    """The files of a lane: performs what the compactor asks for, at once."""

    def __init__(self, folder: Path, namespace: str, geometry: Geometry, trust: Trust) -> None:
        self.geometry = geometry
        backend = choose_backend(folder)
        recovered = recover(folder, namespace, geometry, NO_LIMIT, backend, trust)
        self.faults = recovered.faults
        self.entries = recovered.entries
        self.segments: dict[int, Segment] = recovered.segments
        self.dropped = 0

    def perform(self, move: Move) -> Completion:
        """Do it.

        Raises:
            OSError: as the system says; what was done until then holds.
        """
        if move.op is Op.LIST:
            first = move.segment * self.geometry.slots
            listed = self.segments[move.segment].list_chunks()
            return Completion(move.id, [], found=[(key, first + slot) for key, slot in listed])
        if move.op is Op.SHRINK:
            self.remove(move.segment)
            return Completion(move.id, [])
        return self._relocate(move)

    def remove(self, number: int) -> None:
        """Remove the file of a segment that holds nothing."""
        segment = self.segments.pop(number)
        segment.close()
        segment.path.unlink()

    def _relocate(self, move: Move) -> Completion:
        sources = [self._place(slot) for slot in move.slots]
        done = relocate(move.keys, sources, [self._place(slot) for slot in move.targets])
        moved: dict[int, list[int]] = {}
        for segment, slot in itertools.compress(sources, done.ok):
            moved.setdefault(segment.number, []).append(slot)
        for number, slots in moved.items():
            self.segments[number].index.erase_slots(sorted(slots))
        for place in done.lost:
            segment, slot = sources[place]
            told = "payload does not match its digest"
            self.faults.append(Fault(str(segment.path), slot, told, move.keys[place].hex()))
        self.dropped += len(done.lost)
        if sum(done.ok) + len(done.lost) < len(sources):
            raise OSError(done.error)
        return Completion(move.id, done.ok)

    def erase_superseded(self) -> None:
        """Erase records that are valid and say nothing, because a newer one of the key counts."""
        size = self.geometry.slots
        counts = {slot for _, slot in self.entries}
        for number, segment in self.segments.items():
            live = segment.index.live().slots
            segment.index.erase_slots([slot for slot in live if number * size + slot not in counts])

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()

    def _place(self, slot: int) -> Place:
        number, within = divmod(slot, self.geometry.slots)
        return self.segments[number], within


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

    Raises:
        OSError: as the system says; what was done until then holds.
    """
    geometry = held_geometry(folder, namespace)
    if geometry is None:
        faults = _unusable(folder, namespace)
        layout = lane_layout(folder)
        return Compaction(layout, layout, 0, 0, faults) if faults else None
    if dry_run:
        before = lane_layout(folder)
        return Compaction(before, _promised(before, geometry), 0, 0)
    lane = _Lane(folder, namespace, geometry, trust)
    try:
        lane.erase_superseded()
        return _compact(lane, progress)
    finally:
        lane.close()


def _compact(lane: _Lane, progress: Callable[[int, int], None]) -> Compaction:
    order, geometry = [key for key, _ in lane.entries], lane.geometry
    index = Index(lane.entries, create_policy("fifo", max(1, len(order))))
    used = [slot for _, slot in lane.entries]
    slots = Slots(geometry.slots, list(lane.segments), len(lane.segments), 1, used)

    def layout() -> LaneLayout:
        places = [index.entries[key] for key in order if key in index.entries]
        return layout_of(places, len(lane.segments), geometry)

    before = layout()
    batch = max(1, BATCH_BYTES // geometry.slot_bytes)
    compactor = Compactor(0, index, slots, batch)
    compactor.set_rate(batch)
    compactor.lay_out(order)
    # Nobody else wants the disk: a batch each second, of a time that need not pass.
    now = 0.0
    while not compactor.laid_out:
        now += 1.0
        move = compactor.due(now, idle=True)
        if move is not None:
            compactor.ended(move, lane.perform(move), now)
            progress(compactor.relocated, len(index.entries))
    return Compaction(before, layout(), compactor.relocated, lane.dropped, lane.faults)


def _promised(before: LaneLayout, geometry: Geometry) -> LaneLayout:
    """The layout that compaction would leave."""
    room = before.slots - before.live >= geometry.slots
    kept = before.needed if room else before.segments
    return LaneLayout(
        kept,
        kept * geometry.file_bytes,
        kept * geometry.slots,
        before.live,
        kept if room else before.extents,
        before.needed,
    )


def _unusable(folder: Path, namespace: str) -> list[Fault]:
    """Why none of the segments can be used."""
    faults = []
    for _, path in segment_files(folder):
        try:
            read_header(path)
        except ForeignFileError as error:
            faults.append(Fault.of(path, error))
        else:
            faults.append(Fault(str(path), None, "belongs to another namespace"))
    return faults
