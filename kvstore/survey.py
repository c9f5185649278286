"""What is on disk, seen from outside: for operators, and beside a running server.

Nothing here takes a lane, writes a byte or trusts a file. Records are
self-validating, so a lane may be read while a process writes to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from kvstore.errors import ForeignFileError, KVStoreError, PathUnusableError
from tiers.disk.index import read_index
from tiers.disk.lane import lane_folders, lane_owner
from tiers.disk.namespace import FILE_NAME, read_namespace
from tiers.disk.segment import read_header, segment_files

__all__ = [
    "Fault",
    "LaneSurvey",
    "NamespaceSurvey",
    "Progress",
    "SegmentSurvey",
    "survey",
    "verify",
]

READ_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
        path: the file or folder.
        slot: the slot in that segment, or None when the whole file is meant.
        what: what is wrong, in words.
        key: the key of the chunk that is lost, in hex, where it is known.
    """

    path: str
    slot: int | None
    what: str
    key: str | None = None


@dataclass(slots=True)
class SegmentSurvey:
    """One segment file; times are ms since 1970, 0 when there are no chunks."""

    path: str
    file_bytes: int
    slots: int
    slot_bytes: int
    chunk_bytes: int
    live: int
    damaged: int
    live_bytes: int
    oldest_ms: int
    newest_ms: int
    reads: int


@dataclass(slots=True)
class LaneSurvey:
    """One lane. `owner` is the process that writes to it now, or None."""

    number: int
    path: str
    owner: int | None
    segments: list[SegmentSurvey] = field(default_factory=list)


@dataclass(slots=True)
class NamespaceSurvey:
    """One namespace with its lanes, and the faults that were met on the way."""

    name: str
    path: str
    identity: dict[str, Any]
    lanes: list[LaneSurvey] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """How far `verify` has come: bytes of payload read, of those to be read."""

    done_bytes: int
    total_bytes: int
    chunks: int


def survey(path: Path) -> list[NamespaceSurvey]:
    """Namespaces at `path`: the folder given to a disk tier, or one namespace in it.

    Raises:
        PathUnusableError: if `path` is no folder, cannot be read, or holds no namespace.
    """
    if not path.is_dir():
        raise PathUnusableError(f"{path} is not a folder")
    try:
        if (path / FILE_NAME).exists():
            folders = [path]
        else:
            folders = sorted(f for f in path.iterdir() if (f / FILE_NAME).exists())
    except OSError as error:
        raise PathUnusableError(f"{path} cannot be read: {error.strerror}") from error
    if not folders:
        raise PathUnusableError(f"{path} holds no kvstore namespace")
    return [_namespace(folder) for folder in folders]


def verify(path: Path) -> Iterator[Fault | Progress]:
    """Read every payload at `path` against its digest.

    Yields faults as they are found, and progress in between. A chunk that a
    running server replaces meanwhile is no fault.

    Raises:
        PathUnusableError: as `survey` does.
    """
    found = survey(path)
    total = sum(s.live * s.chunk_bytes for n in found for lane in n.lanes for s in lane.segments)
    progress = Progress(0, total, 0)
    yield progress
    for namespace in found:
        yield from namespace.faults
        for lane in namespace.lanes:
            for segment in lane.segments:
                yield from _verify_segment(Path(segment.path), progress)
    progress.done_bytes = total
    yield progress


def _namespace(folder: Path) -> NamespaceSurvey:
    found = NamespaceSurvey(folder.name, str(folder), {})
    digest: str | None = None
    try:
        told = read_namespace(folder)
        found.identity, digest = told["identity"], told["digest"]
    except KVStoreError as error:
        found.faults.append(Fault(str(folder / FILE_NAME), None, str(error)))
    for number, lane_folder in lane_folders(folder):
        lane = LaneSurvey(number, str(lane_folder), lane_owner(lane_folder))
        found.lanes.append(lane)
        for _, path in segment_files(lane_folder):
            try:
                segment, faults = _segment(path, digest)
            except ForeignFileError as error:
                found.faults.append(Fault(str(path), None, str(error)))
                continue
            except FileNotFoundError:
                continue  # Compaction or eviction of a running server took it.
            lane.segments.append(segment)
            found.faults += faults
    return found


def _segment(path: Path, namespace: str | None) -> tuple[SegmentSurvey, list[Fault]]:
    header = read_header(path)
    geometry = header.geometry
    faults: list[Fault] = []
    if namespace is not None and header.namespace != namespace:
        faults.append(Fault(str(path), None, "belongs to another namespace"))
    _, live, size = read_index(path)
    if size < geometry.file_bytes:
        faults.append(
            Fault(str(path), None, f"cut short: {size} of {geometry.file_bytes} bytes are left")
        )
    faults += [Fault(str(path), slot, "damaged record") for slot in live.damaged]
    stored = live.records["stored_ms"]
    count = len(live.slots)
    return SegmentSurvey(
        path=str(path),
        file_bytes=size,
        slots=geometry.slots,
        slot_bytes=geometry.slot_bytes,
        chunk_bytes=geometry.chunk_bytes,
        live=count,
        damaged=len(live.damaged),
        live_bytes=count * geometry.chunk_bytes,
        oldest_ms=int(stored.min()) if count else 0,
        newest_ms=int(stored.max()) if count else 0,
        reads=int(live.records["reads"].sum()) if count else 0,
    ), faults


def _verify_segment(path: Path, progress: Progress) -> Iterator[Fault | Progress]:
    try:
        geometry = read_header(path).geometry
        _, live, _ = read_index(path)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ForeignFileError, FileNotFoundError):
        return
    suspects: list[tuple[int, bytes, str]] = []
    try:
        batch = max(1, READ_BYTES // geometry.slot_bytes)
        for slot, key, digest in zip(live.slots, live.keys(), live.digests(), strict=True):
            what = None
            try:
                payload = os.pread(
                    fd, geometry.chunk_bytes, geometry.blocks_offset + slot * geometry.slot_bytes
                )
                if len(payload) < geometry.chunk_bytes:
                    what = f"only {len(payload)} of {geometry.chunk_bytes} bytes are there"
                elif xxh3_128_digest(payload) != digest:
                    what = "payload does not match its digest"
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
            if what is not None:
                suspects.append((slot, key, what))
            progress.chunks += 1
            progress.done_bytes += geometry.chunk_bytes
            if progress.chunks % batch == 0:
                yield progress
    finally:
        os.close(fd)
    if suspects:
        # A record that has changed since belongs to a newer chunk.
        _, again, _ = read_index(path)
        before = dict(zip(live.slots, live.digests(), strict=True))
        after = dict(zip(again.slots, again.digests(), strict=True))
        for slot, key, what in suspects:
            if after.get(slot) == before[slot]:
                yield Fault(str(path), slot, what, key.hex())
