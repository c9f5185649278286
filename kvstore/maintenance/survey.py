"""Survey: read a cache on disk from outside, also beside a running server.

Nothing here locks a lane, writes a byte or trusts a file. Records are
self-validating, so a lane may be read while a process writes to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvstore.concurrency import open_at_once
from kvstore.errors import ForeignFileError, KVStoreError, PathUnusableError
from kvstore.maintenance.payloads import Proof, payload_fault, sealer_of
from kvstore.tiers.disk.epoch import EPOCH_NAME, lost_epoch, read_epoch
from kvstore.tiers.disk.fault import Fault
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.index import read_index
from kvstore.tiers.disk.lane import LOCK_NAME, lane_folders, lane_owner, newest_told
from kvstore.tiers.disk.namespace import FILE_NAME, enclosing, read_namespace
from kvstore.tiers.disk.segment import is_probe, segment_files
from kvstore.tiers.sealing import Sealer, is_sealed

__all__ = [
    "NOT_FOLLOWED",
    "EmptyPathError",
    "Fault",
    "LaneSurvey",
    "NamespaceSurvey",
    "Progress",
    "SegmentSurvey",
    "check_folder",
    "holds_chunks_of",
    "survey",
    "verify",
]

_T = TypeVar("_T")

NOT_FOLLOWED = "is a symbolic link; it is not followed"

REPORT_BYTES = 8 * 1024 * 1024
"""Bytes of payload between two reports of progress."""


class EmptyPathError(PathUnusableError):
    """There is no namespace at a path: everything in it could be looked at."""


@dataclass(slots=True)
class SegmentSurvey:
    """One segment file; times are ms since 1970, 0 when there are no chunks.

    `reads` counts reads of the live chunks, as far as their owner has noted them; `reused` is how
    many of the chunks were read at all, `used_ms` when one that counts was last stored or read.
    `outdated` of the `live` chunks are from before a reset: of none of the `epochs` of their
    namespace, so that nobody finds them. `epoch` is the newest of all, 0 when there are none.
    `key_ids` counts encrypted chunks that somebody may find by the id of the key.
    """

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
    epoch: int
    outdated: int = 0
    reused: int = 0
    used_ms: int = 0
    key_ids: dict[str, int] = field(default_factory=dict)

    @property
    def counted(self) -> int:
        """Chunks that somebody may find."""
        return self.live - self.outdated

    @property
    def whole_bytes(self) -> int:
        """The size of its file, also where that was cut short."""
        return Geometry(self.slots, self.slot_bytes, self.chunk_bytes).file_bytes


@dataclass(slots=True)
class LaneSurvey:
    """One lane.

    `epoch` is the newest of its chunks, or None when it has none. `other_bytes` are those of
    files that a server leaves alone there, and counts against its capacity.
    """

    number: int
    path: str
    owner: int | None
    epoch: int | None = None
    other_bytes: int = 0
    segments: list[SegmentSurvey] = field(default_factory=list)


@dataclass(slots=True)
class NamespaceSurvey:
    """One namespace with its newest epoch, its lanes, and the faults found in it.

    `epochs` are those in which somebody is: the newest, in which who opens it next will be, and
    older ones of processes that were not reset since. `lost` is the fault of a file `epoch` that
    is older than chunks are, or cannot be read. `sealed` says whether its chunks are encrypted.
    `links` are lanes that are symbolic links. `unlisted` are those of the faults that tell of a
    folder, of the namespace or a lane, which cannot be searched: what is in it is not known.
    """

    name: str
    path: str
    identity: dict[str, Any]
    epoch: int = 0
    epochs: list[int] = field(default_factory=list)
    digest: str | None = None
    lost: Fault | None = None
    sealed: bool = False
    links: list[str] = field(default_factory=list)
    lanes: list[LaneSurvey] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    unlisted: list[Fault] = field(default_factory=list)

    @property
    def segments(self) -> list[SegmentSurvey]:
        """Those of all lanes."""
        return [segment for lane in self.lanes for segment in lane.segments]

    @property
    def is_open(self) -> bool:
        """Whether a process has it open."""
        return any(lane.owner is not None for lane in self.lanes)

    def miss(self, folder: Path, error: OSError) -> None:
        """Note that a folder cannot be searched."""
        self.unlisted.append(Fault.of(folder, error))
        self.faults.append(self.unlisted[-1])


@dataclass(slots=True)
class Progress:
    """Progress of `verify`: bytes of payload read, and bytes to be read in total.

    `unchecked` of the `chunks` are encrypted with keys that are not known: they were only read.
    """

    done_bytes: int
    total_bytes: int
    chunks: int
    unchecked: int = 0


def survey(path: str | os.PathLike[str]) -> list[NamespaceSurvey]:
    """Survey the namespaces at `path`: the folder given to a disk tier, or one namespace in it.

    A namespace that is a symbolic link is reported as a fault and not followed, and so is a folder
    of which it cannot be said whether it is one.

    Raises:
        EmptyPathError: if `path` holds no namespace.
        PathUnusableError: if `path` is not a folder or cannot be read, or none can be found in it
            and a folder there cannot be searched.
    """
    folder = check_folder(path)
    found: list[NamespaceSurvey] = []
    unsearched: list[NamespaceSurvey] = []
    try:
        if _holds_namespace(folder):
            return [_namespace(folder)]
        for one in sorted(folder.iterdir()):
            try:
                if _holds_namespace(one):
                    found.append(_namespace(one))
            except OSError as error:
                # A file system's own folder is nobody's cache.
                if one.name != "lost+found":
                    unsearched.append(NamespaceSurvey(one.name, str(one), {}))
                    unsearched[-1].miss(one, error)
    except OSError as error:
        raise PathUnusableError(f"{path} cannot be read: {error.strerror}") from error
    if found:
        return sorted([*found, *unsearched], key=lambda each: each.path)
    if unsearched:
        raise PathUnusableError(f"{path} holds no kvstore namespace; {unsearched[0].faults[0]}")
    above = enclosing(folder)
    reason = "" if above is None else f"; it lies in the namespace {above}, give that"
    raise EmptyPathError(f"{path} holds no kvstore namespace{reason}")


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a folder; absolute where it does not tell its name.

    Raises:
        PathUnusableError: if it is not.
    """
    try:
        folder = Path(path)
        if folder.name in ("", ".."):
            # What is above a link is above where it leads to.
            folder = Path(os.path.realpath(folder))
        mode = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PathUnusableError(f"{path} is not a folder") from error
    except OSError as error:
        raise PathUnusableError(f"{path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise PathUnusableError(f"{path!r} is not the path of a folder") from error
    if not stat.S_ISDIR(mode):
        raise PathUnusableError(f"{path} is not a folder")
    return folder


def _holds_namespace(folder: Path) -> bool:
    """Whether it is a namespace, or was one before its file was lost."""
    try:
        os.lstat(folder / FILE_NAME)
    except NotADirectoryError:
        return False
    except FileNotFoundError:
        return folder.is_dir() and bool(lane_folders(folder))
    except OSError as error:
        # A link that leads to itself.
        if error.errno == errno.ELOOP:
            return False
        raise
    return True


def verify(path: str | os.PathLike[str], keys: str | None = None) -> Iterator[Fault | Progress]:
    """Check every payload at `path` that somebody may find against its digest or its seal.

    Yields faults as they are found, and progress in between. A chunk that a
    running server replaces meanwhile is not a fault.

    Args:
        keys: where the keys are that chunks are encrypted with: see `kvstore.tiers.keys.KeyRing`.

    Raises:
        PathUnusableError: as `survey` does.
        ConfigError: if the keys cannot be used.
    """
    found = survey(path)
    total = sum(s.counted * s.chunk_bytes for n in found for s in n.segments)
    progress = Progress(0, total, 0)
    yield progress
    for namespace in found:
        yield from namespace.faults
        sealer = sealer_of(keys, namespace.digest)
        for segment in namespace.segments:
            yield from _verify_segment(Path(segment.path), progress, namespace.epochs, sealer)
    progress.total_bytes = progress.done_bytes
    yield progress


def _namespace(folder: Path) -> NamespaceSurvey:
    found = NamespaceSurvey(folder.name or str(folder), str(folder), {})
    if folder.is_symlink():
        found.faults.append(Fault(str(folder), None, NOT_FOLLOWED))
        return found
    try:
        described = read_namespace(folder)
        found.identity, found.digest = described["identity"], described["digest"]
        found.sealed = is_sealed(found.identity)
    except KVStoreError as error:
        found.faults.append(Fault.of(folder / FILE_NAME, error))
    try:
        found.epoch = read_epoch(folder)
    except KVStoreError as error:
        found.lost = Fault.of(folder / EPOCH_NAME, error)
        found.faults.append(found.lost)
    unread: dict[Path, OSError] = {}
    try:
        lanes = lane_folders(folder, unread=unread)
        for lane_folder, reason in unread.items():
            found.miss(lane_folder, reason)
    except OSError as error:
        found.miss(folder, error)
        return found
    entries = sorted(set(folder.glob("lane-[0-9]*")) - unread.keys())
    found.links = [str(each) for each in entries if each.is_symlink()]
    found.faults += [Fault(each, None, NOT_FOLLOWED) for each in found.links]
    epochs = {found.epoch}
    for number, lane_folder in lanes:
        owner = lane_owner(lane_folder)
        found.lanes.append(LaneSurvey(number, str(lane_folder), owner and owner.pid))
        if owner is not None:
            # One that is opening it has not told it yet: it will be in the newest.
            epochs.add(found.epoch if owner.epoch is None else owner.epoch)
    found.epochs = sorted(epochs)
    for lane in found.lanes:
        try:
            found.faults += _lane(lane, found)
        except OSError as error:
            found.miss(Path(lane.path), error)
        lane.epoch = max((each.epoch for each in lane.segments if each.live), default=None)
    newest = max((lane.epoch for lane in found.lanes if lane.epoch is not None), default=0)
    with contextlib.suppress(KVStoreError, OSError):
        newest = max(newest, newest_told(folder)[0])
        # There may have been a reset meanwhile.
        if newest > found.epoch and newest > (epoch := read_epoch(folder)):
            found.lost = Fault(str(folder), None, lost_epoch(folder, newest, epoch))
            found.faults.append(found.lost)
    return found


def _lane(lane: LaneSurvey, namespace: NamespaceSurvey) -> list[Fault]:
    """Look at every segment of a lane; returns what is wrong with them.

    Raises:
        OSError: if the lane cannot be listed.
    """
    folder = Path(lane.path)
    try:
        paths = [path for _, path in segment_files(folder)]
    except FileNotFoundError:
        return []
    faults: list[Fault] = []
    for path in paths:
        found = _looked(path, lambda path: _segment(path, namespace), faults)
        if found is not None:
            lane.segments.append(found[0])
            faults += found[1]
    lane.other_bytes = _other_bytes(folder, {Path(each.path).name for each in lane.segments})
    return faults


def holds_chunks_of(namespace: NamespaceSurvey, geometry: Geometry) -> bool:
    """Whether a segment's chunks have the size of the namespace's. No seal would show it."""
    size: int = namespace.identity.get("chunk_bytes", geometry.chunk_bytes)
    return size == geometry.chunk_bytes


def _looked(path: Path, look: Callable[[Path], _T], faults: list[Fault]) -> _T | None:
    """Look twice at a segment with a fault: a running server may have emptied and removed it."""
    for last in (False, True):
        try:
            return look(path)
        except FileNotFoundError:
            break
        except (ForeignFileError, OSError) as error:
            if last:
                faults.append(Fault.of(path, error))
    return None


def _other_bytes(folder: Path, segments: set[str]) -> int:
    """Bytes of the files in a lane but its lock and these segments."""
    size = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not (path.name in segments or path.name == LOCK_NAME or is_probe(path)):
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    size += max(found.st_size, 512 * found.st_blocks)
    return size


def _segment(path: Path, namespace: NamespaceSurvey) -> tuple[SegmentSurvey, list[Fault]]:
    header, live, size = read_index(path)
    geometry, epochs = header.geometry, namespace.epochs
    if namespace.digest is not None and header.namespace != namespace.digest:
        raise ForeignFileError("belongs to another namespace")
    if namespace.digest is not None and geometry.sealed != namespace.sealed:
        raise ForeignFileError("is encrypted, or not, other than its namespace")
    if not holds_chunks_of(namespace, geometry):
        raise ForeignFileError(
            f"holds chunks of {geometry.chunk_bytes} bytes, its namespace others"
        )
    faults: list[Fault] = []
    if size < geometry.file_bytes:
        faults.append(Fault.cut_short(path, size, geometry.file_bytes))
    # Read again: a record that a running server was writing is complete by now.
    damaged = live.damaged and sorted({*live.damaged} & {*read_index(path)[1].damaged})
    faults += [Fault(str(path), slot, "damaged record") for slot in damaged]
    stored = live.records["stored_ms"]
    count = len(live.slots)
    found = live.of_epoch(*epochs)
    return SegmentSurvey(
        path=str(path),
        file_bytes=size,
        slots=geometry.slots,
        slot_bytes=geometry.slot_bytes,
        chunk_bytes=geometry.chunk_bytes,
        live=count,
        damaged=len(damaged),
        live_bytes=count * geometry.chunk_bytes,
        oldest_ms=int(stored.min()) if count else 0,
        newest_ms=int(stored.max()) if count else 0,
        reads=int(live.records["reads"].sum()) if count else 0,
        epoch=int(live.records["epoch"].max()) if count else 0,
        outdated=count - len(found.slots),
        reused=int((live.records["reads"] > 0).sum()),
        used_ms=int(max(found.records[name].max(initial=0) for name in ("stored_ms", "read_ms"))),
        key_ids=dict(Counter(found.key_ids())) if geometry.sealed else {},
    ), faults


def _verify_segment(
    path: Path, progress: Progress, epochs: Collection[int], sealer: Sealer | None
) -> Iterator[Fault | Progress]:
    suspects: list[tuple[int, bytes, str]] = []
    faults: list[Fault] = []
    found = _looked(path, lambda path: (*read_index(path), open_at_once(path)), faults)
    yield from faults
    if found is None:
        return
    header, live, _, fd = found
    geometry, unreported = header.geometry, 0
    try:
        live = live.of_epoch(*epochs)
        each = map(Proof, live.keys(), live.records["epoch"].tolist(), live.digests())
        for slot, proof in zip(live.slots, each, strict=True):
            offset = geometry.blocks_offset + slot * geometry.slot_bytes
            what = payload_fault(fd, offset, geometry.chunk_bytes, proof, sealer)
            if what is not None:
                suspects.append((slot, proof.key, what))
            progress.chunks += 1
            progress.unchecked += not proof.checkable(sealer)
            progress.done_bytes += geometry.chunk_bytes
            unreported += geometry.chunk_bytes
            if unreported >= REPORT_BYTES:
                unreported = 0
                yield progress
    finally:
        os.close(fd)
    if not suspects:
        return
    again = _looked(path, read_index, faults)
    yield from faults
    if again is None:
        return
    # A record that has changed meanwhile belongs to a newer chunk.
    before, after = live.by_slot(), again[1].by_slot()
    for slot, key, what in suspects:
        if after.get(slot) == before[slot]:
            yield Fault(str(path), slot, what, key.hex())
