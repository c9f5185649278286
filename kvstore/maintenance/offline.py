"""Offline maintenance: compact and purge a cache on disk that no process uses.

Each function locks the lanes that it changes, one at a time. It refuses lanes
that a living process owns, and lanes that another user could have filled. If
one lane fails, the others are still done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore.concurrency import open_at_once
from kvstore.errors import (
    ConfigError,
    ForeignFileError,
    KVStoreError,
    LaneBusyError,
    PathUnusableError,
)
from kvstore.maintenance.compaction import Compaction, compact_lane
from kvstore.maintenance.survey import (
    NOT_FOLLOWED,
    LaneSurvey,
    NamespaceSurvey,
    check_folder,
    survey,
)
from kvstore.policies.shares import tag_of
from kvstore.tiers.disk.fault import Fault
from kvstore.tiers.disk.index import IndexFile, read_index
from kvstore.tiers.disk.lane import LOCK_NAME, Lane
from kvstore.tiers.disk.namespace import read_namespace
from kvstore.tiers.disk.segment import segment_files
from kvstore.tiers.disk.trust import Trust, open_folder, sync_folder
from kvstore.types import check_key

__all__ = [
    "CompactedLane",
    "Compaction",
    "PurgedLane",
    "compact",
    "not_followed",
    "purge",
]

PathLike = str | os.PathLike[str]
_One = TypeVar("_One", bound="_Done")


@dataclass(slots=True)
class _Done:
    """What was done to a lane.

    Attributes:
        lane: folder of the lane, or of its namespace if that could not be read.
        refused: why nothing was done, or None.
        failed: what went wrong, or None; work done until then is kept.
    """

    lane: str
    refused: str | None = None
    failed: str | None = None


@dataclass(slots=True)
class CompactedLane(_Done):
    """Result of compacting a lane.

    Attributes:
        result: None if there was nothing to do or nothing could be done.
    """

    result: Compaction | None = None


@dataclass(slots=True)
class PurgedLane(_Done):
    """Result of purging a lane.

    Attributes:
        chunks: number of chunks forgotten.
        bytes: bytes of their payloads.
        outdated: number of others that were erased: nobody would have found them.
        faults: segments that could not be purged.
    """

    chunks: int = 0
    bytes: int = 0
    outdated: int = 0
    faults: list[Fault] = field(default_factory=list)


def compact(
    path: PathLike,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda moved, live: None,
    strict_modes: bool = True,
) -> list[CompactedLane]:
    """Compact every lane at `path` that no process owns.

    Args:
        dry_run: only report what would be freed.
        progress: called with the number of chunks moved so far and of live chunks in a lane.
        strict_modes: refuse lanes that other users own or may write to.

    Raises:
        PathUnusableError: if `path` is not a folder or holds no namespace.
    """
    trust = Trust(strict_modes)

    def act(its: NamespaceSurvey, lane: LaneSurvey, one: CompactedLane) -> None:
        folder = Path(lane.path)
        if not dry_run:
            one.result = compact_lane(folder, progress=progress, trust=trust)
            return
        _check_lane(folder, lane, trust)
        refused: dict[Path, Fault] = {}
        for _, path in segment_files(folder):
            try:
                os.close(_open_to_write(path, trust, dry_run=True))
            except (ForeignFileError, OSError) as error:
                refused[path] = Fault.of(path, error)
        one.result = compact_lane(folder, dry_run=True, trust=trust, without=refused.keys())
        if one.result is not None:
            places = ((each, Path(each.path)) for each in its.faults)
            known = [each for each, path in places if folder in (path, path.parent)]
            one.result.faults = known + [each for each in refused.values() if each not in known]

    return _on_each_lane(namespaces_to_change(path), CompactedLane, act)


def purge(
    path: PathLike,
    *,
    namespace: str | None = None,
    key: bytes | Collection[bytes] | None = None,
    tenant: str | Collection[str] | None = None,
    unused_since_ms: float | None = None,
    dry_run: bool = False,
    strict_modes: bool = True,
) -> list[PurgedLane]:
    """Forget the chunks that meet all given conditions, also across a power cut.

    The files keep their size; `compact` frees the space.

    Args:
        namespace: only in the namespace of that name.
        key: only the chunk of that key, or of those.
        tenant: only the chunks of the tenant of that name, or of those.
        unused_since_ms: only chunks neither stored nor read since then, in ms since 1970.
        dry_run: only count them.
        strict_modes: refuse lanes that other users own or may write to.

    Raises:
        KVStoreError: if no namespace has that name, or a condition is invalid.
    """
    wanted = None if key is None else {check_key(each) for each in _each(key)}
    tags = (b"",) if tenant is None else tuple(map(tag_of, _each(tenant)))
    since = unused_since_ms
    if since is not None and (isinstance(since, bool) or not isinstance(since, (int, float))):
        raise ConfigError(f"unused_since_ms = {since!r}: must be a number of ms since 1970")
    trust = Trust(strict_modes)

    def act(its: NamespaceSurvey, lane: LaneSurvey, one: PurgedLane) -> None:
        folder = Path(lane.path)
        owners = [other.owner for other in its.lanes if other.owner is not None]
        if since is not None and owners and lane.owner is None:
            raise LaneBusyError(
                f"lane {lane.number} of {folder.parent} may be read by process {owners[0] or '?'}, "
                "and reads of a lane that a process does not own are not noted: nobody knows what "
                "is used"
            )
        if dry_run:
            _check_lane(folder, lane, trust)
        with nullcontext() if dry_run else _owned(folder, lane.number, trust):
            for _, path in segment_files(folder):
                try:
                    _purge_segment(path, one, wanted, tags, since, trust, its, dry_run)
                except ForeignFileError as error:
                    one.faults.append(Fault.of(path, error))
            if not dry_run:
                # Files that were removed before must not come back either.
                sync_folder(folder)

    return _on_each_lane(namespaces_to_change(path, namespace), PurgedLane, act)


def _each(given: Any) -> Collection[Any]:
    """What is given, or the only one."""
    return given if isinstance(given, (list, tuple, set, frozenset)) else (given,)


def _on_each_lane(
    namespaces: Sequence[NamespaceSurvey],
    make: Callable[..., _One],
    act: Callable[[NamespaceSurvey, LaneSurvey, _One], None],
) -> list[_One]:
    """Do something to each lane; what it cannot be done to says why.

    Namespaces are left alone whose own file cannot be read: nobody knows which segments are theirs.
    """
    done: list[_One] = []
    for its in namespaces:
        if Path(its.path).is_symlink():
            done.append(make(its.path, refused=not_followed(its.path)))
            continue
        lanes = {lane.path for lane in its.lanes}
        for fault in its.unlisted:
            if fault.path not in lanes:
                done.append(make(fault.path, failed=str(fault)))
        if its.digest is None and not its.unlisted:
            try:
                read_namespace(Path(its.path))
            except KVStoreError as error:
                done.append(make(its.path, failed=str(error)))
                continue
        for each in its.links:
            done.append(make(each, refused=not_followed(each)))
        for lane in its.lanes:
            one = make(lane.path)
            done.append(one)
            if its.lost is not None:
                one.failed = str(its.lost)
                continue
            try:
                act(its, lane, one)
            except LaneBusyError as error:
                one.refused = str(error)
            except (KVStoreError, OSError) as error:
                one.failed = _reason(Path(lane.path), error)
    return done


def namespaces_to_change(path: PathLike, name: str | None = None) -> list[NamespaceSurvey]:
    """Survey a path that is to be changed, or the namespace of that name in it.

    Raises:
        KVStoreError: as `survey`; if the path is a symbolic link, or has no such namespace.
    """
    folder = check_folder(path)
    if folder.is_symlink():
        raise PathUnusableError(f"{folder} is a symbolic link; give the folder itself")
    found = survey(folder)
    if name is None:
        return found
    named = [one for one in found if one.name == name]
    if not named:
        names = [one.name for one in found]
        raise KVStoreError(f"no namespace {name!r} in {path}; there are: {names}")
    return named


def not_followed(path: str) -> str:
    """Why nothing is done to a symbolic link."""
    return f"{path} {NOT_FOLLOWED}"


def _check_lane(folder: Path, lane: LaneSurvey, trust: Trust) -> None:
    """
    Raises:
        KVStoreError: if `_owned` would refuse the lane.
        OSError: if its folder is not there, or cannot be searched.
    """
    os.close(open_folder(folder.parent, trust, own=True))
    if lane.owner is not None:
        raise LaneBusyError(
            f"lane {lane.number} of {folder.parent} is in use by process {lane.owner or '?'}"
        )
    os.close(open_folder(folder, trust, own=True))
    with suppress(FileNotFoundError):
        os.close(_open_to_write(folder / LOCK_NAME, trust, dry_run=True))


@contextmanager
def _owned(folder: Path, number: int, trust: Trust) -> Iterator[None]:
    os.close(open_folder(folder.parent, trust, own=True))
    lane = Lane.acquire(folder.parent, number, trust)
    try:
        yield
    finally:
        # Who follows the lane looks at it at once.
        lane.touch()
        lane.release()


def _reason(folder: Path, error: KVStoreError | OSError) -> str:
    if isinstance(error, KVStoreError):
        return str(error)
    return f"{error.filename or folder}: {error.strerror or error}"


def _purge_segment(
    path: Path,
    done: PurgedLane,
    keys: Collection[bytes] | None,
    tags: tuple[bytes, ...],
    unused_since_ms: float | None,
    trust: Trust,
    namespace: NamespaceSurvey,
    dry_run: bool,
) -> None:
    """Count chunks into `done`, and erase them unless it is a dry run.

    Raises:
        ForeignFileError: if the file is not one of the namespace, or must not be written to.
        OSError: if it cannot be written to.
    """
    try:
        header, live, _ = read_index(path)
    except OSError as error:
        done.faults.append(Fault.of(path, error))
        return
    if header.namespace != namespace.digest or header.geometry.sealed != namespace.sealed:
        raise ForeignFileError(f"{path}: belongs to another namespace")
    used_ms = np.maximum(live.records["stored_ms"], live.records["read_ms"]).tolist()
    slots = [
        slot
        for slot, its_key, used in zip(live.slots, live.keys(), used_ms, strict=True)
        if (keys is None or its_key in keys)
        and its_key.startswith(tags)
        and (unused_since_ms is None or used < unused_since_ms)
    ]
    fd = _open_to_write(path, trust, dry_run=dry_run) if slots else open_at_once(path)
    try:
        if not dry_run:
            IndexFile(fd, header).erase_slots(slots)
            # Also what was erased before, and is not on the medium yet.
            _sync(fd)
    finally:
        os.close(fd)
    # What is from before a reset is erased, too, but nobody would have found it.
    counted = {*live.of_epoch(*namespace.epochs).slots}
    count = sum(slot in counted for slot in slots)
    done.chunks += count
    done.outdated += len(slots) - count
    done.bytes += count * header.geometry.chunk_bytes


def _sync(fd: int) -> None:
    """Wait until what was written is on the medium.

    Raises:
        OSError: if it is not. The next reader finds what is there, not what was to be written:
            else the next purge would find nothing to erase.
    """
    try:
        os.fdatasync(fd)
    except OSError:
        # Linux takes pages for written whose write has failed.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        raise


def _open_to_write(path: Path, trust: Trust, *, dry_run: bool) -> int:
    """A descriptor of a file that is to be written to; only to be read in a dry run, which works
    in a snapshot that is mounted read-only, too.

    Raises:
        ForeignFileError: if the file must not be written to.
        OSError: from the file system.
    """
    fd = open_at_once(path, os.O_RDONLY if dry_run else os.O_RDWR)
    fault = trust.file_fault(fd, written=True)
    if fault is not None:
        os.close(fd)
        raise ForeignFileError(f"{path}: {fault}")
    return fd
