"""Recovery: open a lane, reading only headers and index tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from kvstore.errors import ForeignFileError
from kvstore.tiers.disk.descriptors import NO_DESCRIPTORS
from kvstore.tiers.disk.epoch import lost_epoch
from kvstore.tiers.disk.fault import Fault
from kvstore.tiers.disk.format import ALIGN, Geometry, LiveRecords
from kvstore.tiers.disk.index import read_index
from kvstore.tiers.disk.io import IOBackend
from kvstore.tiers.disk.lane import LOCK_NAME
from kvstore.tiers.disk.segment import (
    Segment,
    is_probe,
    read_header,
    remove_leftovers,
    segment_files,
)
from kvstore.tiers.disk.trust import Trust
from kvstore.tiers.sealing import Sealer

__all__ = ["Recovered", "held_geometry", "recover"]

SEQUENCE_LIMIT = 2**62


@dataclass(slots=True)
class Recovered:
    """The segments and entries found in a lane.

    Attributes:
        segments: open segments, by number.
        entries: (key, slot) coldest first; slot = segment number x slots + slot within.
        sequences: theirs, ascending.
        sequence: higher than that of every record found, absurd ones excepted.
        foreign: files that occupy space but cannot be used.
        foreign_bytes: what they take of the disk.
        faults: segments that cannot be used or were cut short, and records that were
            neither empty nor valid.
        unreadable: chunks that are sealed with keys that are not known; their slots are free.
    """

    segments: dict[int, Segment]
    entries: list[tuple[bytes, int]]
    sequences: list[int]
    sequence: int
    foreign: list[Fault]
    foreign_bytes: int
    faults: list[Fault]
    unreadable: int

    @property
    def damaged(self) -> int:
        """Records that were neither empty nor valid."""
        return sum(fault.slot is not None for fault in self.faults)


def held_geometry(folder: Path, namespace: str, wanted: Geometry | None = None) -> Geometry | None:
    """The geometry of a lane's segments; None where there are none.

    Segments keep the number of slots they were made with, so a lane goes on
    with what it has when the configuration asks for another segment size. Where
    headers differ, the geometry counts whose segments take most of the disk: one
    strange file costs no other its chunks. `wanted` decides between equals.

    Args:
        wanted: segments with slots or chunks of another size do not count.
    """
    held: dict[Geometry, int] = {}
    for _, path in segment_files(folder):
        try:
            header = read_header(path)
        except ForeignFileError:
            continue
        alike = wanted is None or header.geometry.is_like(wanted)
        if header.namespace == namespace and alike:
            held[header.geometry] = held.get(header.geometry, 0) + _disk_bytes(path)
    return max(held, key=lambda one: (held[one], one == wanted), default=None)


def recover(
    folder: Path,
    namespace: str,
    geometry: Geometry,
    capacity_bytes: int,
    backend: IOBackend,
    trust: Trust,
    epoch: int,
    sealer: Sealer | None,
) -> Recovered:
    """Open the segments of a lane and find what they hold.

    Whatever else lies in the folder is left alone. Its size on disk leaves less
    room for growth, but never costs a whole segment. When the segments alone are more
    than the capacity allows, those whose chunks are coldest are removed. A segment that
    was cut short gets its size back where the capacity has room for it.

    Args:
        epoch: chunks of other epochs are left out.
        sealer: chunks that it has no key for are left out.
    """
    remove_leftovers(folder)
    found: dict[int, _Found] = {}
    with ExitStack() as opened:
        opened.callback(_close, found)
        foreign = [Fault(str(path), None, "no file of a lane") for path in _other_files(folder)]
        unusable: list[Fault] = []
        by_warmth: list[tuple[int, int]] = []
        files = segment_files(folder)
        if len(files) * geometry.file_bytes > capacity_bytes:
            # Before any of them is removed.
            _check_epoch(folder, files, namespace, epoch)
        for number, path in files:
            try:
                segment = Segment.open(path, namespace, geometry, backend, trust)
                found[number] = _Found.of(segment, epoch, sealer)
            except (ForeignFileError, OSError) as error:
                if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                    raise
                unusable.append(Fault.of(path, error))
                continue
            heappush(by_warmth, (found[number].warmth, number))
            # One by one, so that no more of them are ever open than may stay.
            if len(found) * geometry.file_bytes > capacity_bytes:
                segment = found.pop(heappop(by_warmth)[1]).segment
                try:
                    segment.remove()
                finally:
                    with contextlib.suppress(OSError):
                        segment.close()
        newest = max((one.newest for one in found.values()), default=0)
        if newest > epoch:
            raise _lost(folder, newest, epoch)
        faults: list[Fault] = []
        room = capacity_bytes - _bytes_of(foreign + unusable, geometry.file_bytes)
        room -= sum(one.held_bytes for one in found.values())
        for number, one in list(found.items()):
            try:
                room -= one.make_whole(room)
            except (ForeignFileError, OSError) as error:
                unusable.append(Fault.of(one.segment.path, error))
                with contextlib.suppress(OSError):
                    found.pop(number).segment.close()
            else:
                one.erase_damaged()
                faults += one.faults
        entries, sequences = _entries(found, geometry.slots)
        sequence = max((one.last for one in found.values()), default=-1) + 1
        recovered = Recovered(
            {number: one.segment for number, one in found.items()},
            entries,
            sequences,
            sequence,
            foreign + unusable,
            _bytes_of(foreign + unusable, geometry.file_bytes),
            unusable + faults,
            sum(one.unreadable for one in found.values()),
        )
        opened.pop_all()
    return recovered


@dataclass(slots=True)
class _Found:
    """An open segment, and what its index says.

    Attributes:
        missing: bytes that were cut off.
        newest: the newest epoch of its records.
        last: the last sequence of its records of the epoch, also of those without a known key:
            what is stored anew counts for more than they do, also to who knows no keys.
        unreadable: chunks without a known key.
    """

    segment: Segment
    records: LiveRecords
    missing: int
    newest: int
    last: int
    unreadable: int

    @classmethod
    def of(cls, segment: Segment, epoch: int, sealer: Sealer | None) -> _Found:
        """Reads the index; closes the segment where that fails."""
        try:
            records = segment.index.live()
            missing = segment.missing_bytes
        except BaseException:
            segment.close()
            raise
        newest = int(records.records["epoch"].max()) if len(records.slots) else 0
        if segment.geometry.sealed:
            segment.nonces = np.zeros((segment.geometry.slots, 3), np.uint32)
            segment.nonces[records.slots] = records.nonces()
        segment.epoch = epoch
        records = records.of_epoch(epoch)
        whole, sequences = len(records.slots), records.records["sequence"]
        # No lane ever comes near the limit: a sequence beyond it is not counted on from.
        last = int(sequences[sequences < SEQUENCE_LIMIT].max(initial=0)) if whole else -1
        if sealer is not None:
            records = records.readable(sealer.keys)
        return cls(segment, records, missing, newest, last, whole - len(records.slots))

    @property
    def warmth(self) -> int:
        return int(self.records.records["sequence"].max()) if len(self.records.slots) else -1

    @property
    def held_bytes(self) -> int:
        """Bytes of the capacity that it takes up as it is."""
        whole = self.segment.geometry.file_bytes
        return min(whole, _disk_bytes(self.segment.path)) if self.missing else whole

    @property
    def faults(self) -> list[Fault]:
        path = str(self.segment.path)
        cut = [self._cut] if self.missing else []
        return cut + [Fault(path, slot, "damaged record") for slot in self.records.damaged]

    @property
    def _cut(self) -> Fault:
        whole = self.segment.geometry.file_bytes
        return Fault.cut_short(self.segment.path, whole - self.missing, whole)

    def make_whole(self, room: int) -> int:
        """Give back what was cut off; returns how much of `room` that takes.

        Raises:
            ForeignFileError: if it takes more.
        """
        if not self.missing:
            return 0
        more = self.segment.geometry.file_bytes - self.held_bytes
        if more > room:
            raise ForeignFileError(f"{self._cut}, and the capacity has no room for the rest")
        self.segment.make_whole()
        return more

    def erase_damaged(self) -> None:
        """Erase damaged records, if that is possible."""
        # What stays is never served, and the rest of the segment is as good as any.
        with contextlib.suppress(OSError):
            self.segment.index.erase_slots(self.records.damaged)


def _check_epoch(
    folder: Path, files: Sequence[tuple[int, Path]], namespace: str, epoch: int
) -> None:
    """
    Raises:
        ForeignFileError: if a segment has chunks of a newer epoch.
    """
    for _, path in files:
        with contextlib.suppress(ForeignFileError, OSError):
            header, live, _ = read_index(path)
            newest = int(live.records["epoch"].max(initial=0))
            if header.namespace == namespace and newest > epoch:
                break
    else:
        return
    raise _lost(folder, newest, epoch)


def _lost(folder: Path, newest: int, epoch: int) -> ForeignFileError:
    return ForeignFileError(f"{folder}: {lost_epoch(folder.parent, newest, epoch)}")


def _close(found: Mapping[int, _Found]) -> None:
    for one in found.values():
        with contextlib.suppress(OSError):
            one.segment.close()


def _other_files(folder: Path) -> list[Path]:
    """Return the entries of a lane's folder that are not named like its own files."""
    known = {LOCK_NAME, *(path.name for _, path in segment_files(folder))}
    # Processes that look for a free lane make probes here, for an instant.
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name not in known and not is_probe(path) and os.path.lexists(path)
    ]


def _disk_bytes(path: Path, unknown: int = 0) -> int:
    """Return the bytes that a file takes up on disk, without its holes.

    Args:
        unknown: what counts for a file of which that cannot be found out.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    except OSError:
        return unknown
    # Some file systems keep small files beside the name, without a block.
    return max(found.st_blocks * 512, found.st_size if found.st_size < ALIGN else 0)


def _bytes_of(faults: list[Fault], unknown: int) -> int:
    return sum(_disk_bytes(Path(fault.path), unknown) for fault in faults)


def _entries(
    found: dict[int, _Found], slots_per_segment: int
) -> tuple[list[tuple[bytes, int]], list[int]]:
    keys: list[bytes] = []
    slots: list[int] = []
    sequences: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
    for number, one in found.items():
        records = one.records
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
