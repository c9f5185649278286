"""Changing a cache on disk that nobody uses: compaction and purging.

Each function takes the lanes that it changes, one at a time, and refuses those
that a living process owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import KVStoreError, LaneBusyError, PathUnusableError
from kvstore.survey import survey
from tiers.disk.compaction import Compaction, LaneLayout, compact_lane, lane_layout
from tiers.disk.format import RECORD_BYTES
from tiers.disk.index import read_index
from tiers.disk.lane import Lane
from tiers.disk.namespace import read_namespace
from tiers.disk.segment import segment_files

__all__ = [
    "CompactedLane",
    "Layout",
    "PurgedLane",
    "compact",
    "layouts",
    "purge",
]


@dataclass(slots=True)
class Layout:
    """Layout of one lane, and how full its segments are.

    `occupancy` counts segments by tenths of their slots in use: ten numbers.
    """

    lane: str
    layout: LaneLayout
    occupancy: list[int]


@dataclass(slots=True)
class CompactedLane:
    """What was done to a lane. `refused` says why nothing was, or is None."""

    lane: str
    result: Compaction | None
    refused: str | None = None


@dataclass(slots=True)
class PurgedLane:
    """What was purged from a lane. `refused` says why nothing was, or is None."""

    lane: str
    chunks: int
    bytes: int
    refused: str | None = None


def layouts(path: Path) -> list[Layout]:
    """Layout of every lane at `path`; may be called beside a running server."""
    found = []
    for namespace in survey(path):
        for lane in namespace.lanes:
            occupancy = [0] * 10
            for segment in lane.segments:
                occupancy[min(9, 10 * segment.live // segment.slots)] += 1
            found.append(Layout(lane.path, lane_layout(Path(lane.path)), occupancy))
    return found


def compact(
    path: Path,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda moved, live: None,
) -> list[CompactedLane]:
    """Compact every lane at `path` that no process owns.

    Args:
        dry_run: only say what would be gained.
        progress: called with the chunks moved so far and the chunks alive in a lane.
    """
    done = []
    for namespace in survey(path):
        digest = read_namespace(Path(namespace.path))["digest"]
        for lane in namespace.lanes:
            folder = Path(lane.path)
            try:
                if dry_run:
                    result = compact_lane(folder, digest, dry_run=True)
                else:
                    with _owned(folder, lane.number):
                        result = compact_lane(folder, digest, progress=progress)
                done.append(CompactedLane(lane.path, result))
            except LaneBusyError as error:
                done.append(CompactedLane(lane.path, None, str(error)))
            except OSError as error:
                raise PathUnusableError(f"{folder}: {error.strerror}") from error
    return done


def purge(
    path: Path,
    *,
    namespace: str | None = None,
    key: bytes | None = None,
    unused_since_ms: int | None = None,
    dry_run: bool = False,
) -> list[PurgedLane]:
    """Forget chunks: those to which all the given conditions apply.

    Args:
        namespace: only in the namespace of that name.
        key: only the chunk of that key.
        unused_since_ms: only chunks neither stored nor read since, ms since 1970.
        dry_run: only count them.

    Raises:
        KVStoreError: if no namespace has that name.
    """
    found = survey(path)
    if namespace is not None:
        names = [one.name for one in found]
        found = [one for one in found if one.name == namespace]
        if not found:
            raise KVStoreError(f"no namespace {namespace!r} in {path}; there are: {names}")
    done = []
    for one in found:
        for lane in one.lanes:
            folder = Path(lane.path)
            try:
                if dry_run:
                    chunks, size = _purge_lane(folder, key, unused_since_ms, erase=False)
                else:
                    with _owned(folder, lane.number):
                        chunks, size = _purge_lane(folder, key, unused_since_ms, erase=True)
                done.append(PurgedLane(lane.path, chunks, size))
            except LaneBusyError as error:
                done.append(PurgedLane(lane.path, 0, 0, str(error)))
    return done


@contextmanager
def _owned(folder: Path, number: int) -> Iterator[None]:
    lane = Lane.acquire(folder.parent, number)
    try:
        yield
    finally:
        lane.release()


def _purge_lane(
    folder: Path, key: bytes | None, unused_since_ms: int | None, *, erase: bool
) -> tuple[int, int]:
    chunks = size = 0
    for _, path in segment_files(folder):
        try:
            header, live, _ = read_index(path)
        except (KVStoreError, OSError):
            continue
        used_ms = [
            max(stored, read)
            for stored, read in zip(
                live.records["stored_ms"].tolist(), live.records["read_ms"].tolist(), strict=True
            )
        ]
        slots = [
            slot
            for slot, its_key, used in zip(live.slots, live.keys(), used_ms, strict=True)
            if (key is None or its_key == key)
            and (unused_since_ms is None or used < unused_since_ms)
        ]
        chunks += len(slots)
        size += len(slots) * header.geometry.chunk_bytes
        if erase and slots:
            with path.open("r+b", buffering=0) as file:
                for slot in slots:
                    file.seek(header.geometry.index_offset + slot * RECORD_BYTES)
                    file.write(bytes(RECORD_BYTES))
    return chunks, size
