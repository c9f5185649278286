"""Opening a lane: from files to entries, reading only headers and index tensors."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import ForeignFileError
from tiers.disk.fault import Fault
from tiers.disk.format import ALIGN, Geometry, LiveRecords
from tiers.disk.io import IOBackend
from tiers.disk.lane import LOCK_NAME
from tiers.disk.segment import Segment, is_probe, read_header, remove_leftovers, segment_files
from tiers.disk.trust import STRICT, Trust

__all__ = ["Recovered", "lane_geometry", "recover"]

SEQUENCE_LIMIT = 2**62


@dataclass(slots=True)
class Recovered:
    """What a lane held.

    Attributes:
        segments: open segments, by number.
        entries: (key, slot) coldest first; slot = segment number x slots + slot within.
        sequences: theirs, ascending.
        sequence: higher than that of every record found, absurd ones excepted.
        foreign: files that occupy space but cannot be used, with the reason.
        foreign_bytes: what they take of the disk.
        faults: segments that cannot be used or were cut short, and records that were
            neither empty nor valid and have been erased.
        outdated: records of another epoch, which were erased.
        removed: names of leftovers and surplus segments that were removed.
    """

    segments: dict[int, Segment]
    entries: list[tuple[bytes, int]]
    sequences: list[int]
    sequence: int
    foreign: list[str]
    foreign_bytes: int
    faults: list[Fault]
    outdated: int
    removed: list[str]

    @property
    def damaged(self) -> int:
        """Records that were neither empty nor valid."""
        return sum(fault.slot is not None for fault in self.faults)


def lane_geometry(folder: Path, namespace: str, wanted: Geometry) -> Geometry:
    """The geometry that the lane's segments have; `wanted` where there are none.

    Segments keep the number of slots they were made with, so a lane goes on
    with what it has when the configuration asks for another segment size.
    """
    for _, path in segment_files(folder):
        try:
            header = read_header(path)
        except ForeignFileError:
            continue
        found = header.geometry
        same = (wanted.slot_bytes, wanted.chunk_bytes) == (found.slot_bytes, found.chunk_bytes)
        if header.namespace == namespace and same:
            return found
    return wanted


def recover(
    folder: Path,
    namespace: str,
    geometry: Geometry,
    capacity_bytes: int,
    backend: IOBackend,
    trust: Trust = STRICT,
    epoch: int | None = None,
) -> Recovered:
    """Open the segments of a lane and find what they hold.

    Whatever else lies in the folder is left alone. Its size on disk leaves less
    room for growth, but never costs a segment. When the segments alone are more
    than the capacity allows, those whose chunks are coldest are removed.

    Args:
        epoch: chunks of other epochs are erased; without one, all are kept.
    """
    removed = remove_leftovers(folder)
    segments: dict[int, Segment] = {}
    found: dict[int, LiveRecords] = {}
    foreign: list[str] = []
    foreign_bytes = 0
    faults: list[Fault] = []
    outdated = 0
    for path in _other_files(folder):
        foreign.append(f"{path}: no file of a lane")
        foreign_bytes += _disk_bytes(path)
    for number, path in segment_files(folder):
        try:
            size = path.lstat().st_size
            segment, records, others = _open(path, namespace, geometry, backend, trust, epoch)
        except (ForeignFileError, OSError) as error:
            faults.append(Fault.of(path, error))
            told = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            foreign.append(told)
            foreign_bytes += _disk_bytes(path)
            continue
        if size < geometry.file_bytes:
            told = f"cut short: {size} of {geometry.file_bytes} bytes are left"
            faults.append(Fault(str(path), None, told))
        faults += [Fault(str(path), slot, "damaged record") for slot in records.damaged]
        outdated += others
        segments[number] = segment
        found[number] = records
    while segments and len(segments) * geometry.file_bytes > capacity_bytes:
        coldest = min(segments, key=lambda number: _warmth(found[number]))
        segment = segments.pop(coldest)
        del found[coldest]
        segment.close()
        segment.path.unlink()
        removed.append(segment.path.name)
    entries, sequences = _entries(found, geometry.slots)
    # No lane ever comes near the limit: a sequence beyond it is not counted on from.
    sequence = max((one for one in sequences if one < SEQUENCE_LIMIT), default=-1) + 1
    return Recovered(
        segments, entries, sequences, sequence, foreign, foreign_bytes, faults, outdated, removed
    )


def _open(
    path: Path,
    namespace: str,
    geometry: Geometry,
    backend: IOBackend,
    trust: Trust,
    epoch: int | None,
) -> tuple[Segment, LiveRecords, int]:
    """Open a segment, read its index and erase what is damaged or of another epoch in it.

    Returns:
        Also how many records of other epochs it had.
    """
    segment = Segment.open(path, namespace, geometry, backend, trust)
    try:
        records = segment.index.live()
        segment.index.erase_slots(records.damaged)
        others: list[int] = []
        if epoch is not None:
            segment.epoch = epoch
            records, others = records.of_epoch(epoch)
        segment.index.erase_slots(others)
    except OSError:
        segment.close()
        raise
    return segment, records, len(others)


def _other_files(folder: Path) -> list[Path]:
    """What lies in a lane and is named like none of its files."""
    known = {LOCK_NAME, *(path.name for _, path in segment_files(folder))}
    # Processes that look for a free lane make probes here, for an instant.
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name not in known and not is_probe(path) and os.path.lexists(path)
    ]


def _disk_bytes(path: Path) -> int:
    """What a file takes of the disk: its holes cost nobody anything."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        # Some file systems keep what is small beside the name, in no block of its own.
        return max(found.st_blocks * 512, found.st_size if found.st_size < ALIGN else 0)
    return 0


def _warmth(records: LiveRecords) -> int:
    return int(records.records["sequence"].max()) if len(records.slots) else -1


def _entries(
    found: dict[int, LiveRecords], slots_per_segment: int
) -> tuple[list[tuple[bytes, int]], list[int]]:
    keys: list[bytes] = []
    slots: list[int] = []
    sequences: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
    for number, records in found.items():
        keys += records.keys()
        slots += [number * slots_per_segment + slot for slot in records.slots]
        sequences.append(records.records["sequence"])
    if not keys:
        return [], []
    sequence = np.concatenate(sequences)
    order = np.argsort(sequence, kind="stable").tolist()
    newest: dict[bytes, int] = {}
    for index in order:
        key = keys[index]
        # The last one of a key is the one that counts, also for its place in the order.
        newest.pop(key, None)
        newest[key] = index
    where = list(newest.values())
    return [(key, slots[index]) for key, index in newest.items()], sequence[where].tolist()
