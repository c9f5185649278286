"""Bundle: chunks of one namespace in one file, to be carried to another cache.

A bundle is a valid safetensors file. Each chunk is a tensor of bytes whose name is its key in hex,
in the order in which chunks were stored. `__metadata__` has the identity of the namespace and the
digest of each chunk, so that an import verifies what it takes. Encrypted chunks stay encrypted;
their seals are in place of digests, and an import needs the keys.

This module is long because writing and reading have one format, which stands in one place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

from kvstore.api.sync import SyncStore, open_sync
from kvstore.assembly import NAMES_ADDED
from kvstore.concurrency import open_at_once
from kvstore.config import Config, DiskConfig
from kvstore.errors import MALFORMED, ForeignFileError, KVStoreError, PathUnusableError
from kvstore.maintenance.payloads import Proof, read_payload, sealer_of
from kvstore.maintenance.survey import (
    EmptyPathError,
    Fault,
    LaneSurvey,
    NamespaceSurvey,
    holds_chunks_of,
    survey,
)
from kvstore.policies.shares import Shares
from kvstore.tiers.disk.epoch import MAX_EPOCH, read_epoch
from kvstore.tiers.disk.format import SEGMENT_BYTES, Geometry
from kvstore.tiers.disk.index import read_index
from kvstore.tiers.disk.io.base import read_bytes
from kvstore.tiers.disk.namespace import Namespace, enclosing, read_namespace
from kvstore.tiers.disk.trust import Trust, open_folder
from kvstore.tiers.pinned import round_to_page
from kvstore.tiers.sealing import Sealer, is_sealed
from kvstore.types import check_key

__all__ = [
    "Exported",
    "Imported",
    "Place",
    "export_bundle",
    "import_bundle",
    "places_of",
    "read_whole",
    "the_namespace",
    "unread",
]

FORMAT, VERSION = "kvstore bundle", 1

MAX_HEADER = 100 * 2**20
"""Most bytes of a header, as safetensors has it."""

NO_KEY = "payload is encrypted with a key that is not known"

NOT_READ = "payload cannot be read"

MOVED = "moved to another place each time when it was to be read"

MOST_LOOKS = 4
"""How often a chunk is looked for that is moved to another place meanwhile."""

LEFT_SECONDS = 3600.0
"""A temporary file that was not written to for so long is one of a process that was killed."""

WRITTEN_AT_ONCE = 64 * 2**20
"""Most payload bytes that are read before it is looked whether a server has replaced some."""

HOST_BYTES = 64 * 2**20
"""Host memory through which chunks are imported, at least two of them."""


Progress = Callable[[float, float], object]
"""Told how much is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies on disk, and what its record says of it. Times are ms since 1970.

    `older` is another copy, of another lane.
    """

    path: Path
    slot: int
    offset: int
    size: int
    proof: Proof
    sequence: int
    stored_ms: int
    read_ms: int
    reads: int
    older: Place | None = None


@dataclass
class Exported:
    """What was written.

    Attributes:
        unchecked: those of `chunks` that are encrypted with keys that are not known.
        faults: chunks that were left out.
    """

    chunks: int = 0
    bytes: int = 0
    unchecked: int = 0
    faults: list[Fault] = field(default_factory=list)


@dataclass
class Imported:
    """What became of a bundle.

    Attributes:
        namespace: the namespace that has its chunks now.
        chunks: chunks that the bundle names.
        there: those that the cache had before.
        stored: those that the cache has in the end.
        faults: what is wrong with the bundle.
    """

    namespace: str
    chunks: int = 0
    there: int = 0
    stored: int = 0
    faults: list[Fault] = field(default_factory=list)


def the_namespace(path: str | os.PathLike[str]) -> NamespaceSurvey:
    """The only namespace at `path`, and what it is of.

    Raises:
        PathUnusableError: as `survey`, and if there are several.
        KVStoreError: if what it is of cannot be read, or its epoch is lost: as no server would open
            it, nobody could tell which of its chunks are right.
    """
    found = survey(path)
    # Of a folder that cannot be searched nobody knows whether it is one.
    found = [each for each in found if each.digest or each.lanes or not each.unlisted] or found
    if len(found) > 1:
        raise PathUnusableError(
            f"{path} holds {len(found)} namespaces: name the path of one of "
            f"{', '.join(each.name for each in found)}"
        )
    (namespace,) = found
    if namespace.lost is not None:
        raise KVStoreError(str(namespace.lost))
    if namespace.digest is None:
        described = read_namespace(Path(namespace.path))
        # The survey could not read it, and it can be read by now.
        namespace.identity, namespace.digest = described["identity"], described["digest"]
        namespace.sealed = is_sealed(namespace.identity)
    return namespace


def unread(namespace: NamespaceSurvey) -> str:
    """Return what to add where a chunk is missing: what of the namespace could not be read."""
    faults = [str(fault) for fault in namespace.faults if fault.slot is None]
    return "".join(f"; {fault}" for fault in faults)


def places_of(
    namespace: NamespaceSurvey, only: Collection[bytes] | None = None
) -> dict[bytes, Place]:
    """Where each chunk of a namespace lies: the newest copy, in the order of storing.

    Those that a process finds which starts now: none from before the newest reset, which may be
    of other weights, also where a server still has them.

    Args:
        only: of these keys alone.
    """
    wanted = None if only is None else frozenset(only)
    found: dict[bytes, Place] = {}
    for lane in namespace.lanes:
        for segment in lane.segments:
            path = Path(segment.path)
            try:
                header, live, _ = read_index(path)
            except (ForeignFileError, OSError):
                continue  # A running server removed it, or the survey has told the fault.
            if header.namespace != namespace.digest:
                continue  # A stray file, perhaps of another model: no server takes it either.
            if header.geometry.sealed != namespace.sealed:
                continue  # Nor one that is not encrypted, where the namespace is.
            if not holds_chunks_of(namespace, header.geometry):
                continue  # Nor one with chunks of another size.
            live = live.of_epoch(namespace.epoch)
            geometry = header.geometry
            keys = live.keys()
            if wanted is not None and wanted.isdisjoint(keys):
                continue
            each = zip(live.slots, keys, live.digests(), live.records, strict=True)
            for slot, key, digest, record in each:
                if wanted is not None and key not in wanted:
                    continue
                place = Place(
                    path,
                    slot,
                    geometry.blocks_offset + slot * geometry.slot_bytes,
                    geometry.chunk_bytes,
                    Proof(key, int(record["epoch"]), digest),
                    int(record["sequence"]),
                    int(record["stored_ms"]),
                    int(record["read_ms"]),
                    int(record["reads"]),
                )
                if (other := found.get(key)) is not None:
                    older, newer = sorted((other, place), key=_age)
                    place = replace(newer, older=replace(older, older=other.older))
                found[key] = place
    return dict(sorted(found.items(), key=lambda each: _age(each[1])))


def _age(place: Place) -> tuple[int, int]:
    return place.stored_ms, place.sequence


def read_whole(place: Place, sealer: Sealer | None = None) -> tuple[Place, bytes | None]:
    """The newest copy of a chunk that is whole, and its payload; else the newest, and None.

    The payload is as it lies there: encrypted, if it is. A copy that cannot be checked, for want of
    its key, is returned if there is no other.
    """
    unchecked: tuple[Place, bytes] | None = None
    copy: Place | None = place
    while copy is not None:
        payload = read_chunk(copy, sealer)
        if payload is not None:
            if copy.proof.checkable(sealer):
                return copy, payload
            unchecked = unchecked or (copy, payload)
        copy = copy.older
    return unchecked or (place, None)


def read_chunk(place: Place, sealer: Sealer | None = None) -> bytes | None:
    """The payload of a chunk as it lies there, or None if it is not what its record says.

    Of one that is encrypted with a key that is not known, only the size is looked at.
    """
    try:
        fd = open_at_once(place.path)
    except OSError:
        return None
    try:
        payload = read_payload(fd, place.offset, place.size)
    finally:
        os.close(fd)
    if not place.proof.checkable(sealer):
        return payload if len(payload) == place.size else None
    return None if place.proof.check(payload, sealer) is None else payload


# -- export ----------------------------------------------------------------------------------


def export_bundle(
    path: str | os.PathLike[str],
    file: Path,
    *,
    keys: Collection[bytes] | None = None,
    used_since_ms: float = 0,
    replace: bool = False,
    encryption_keys: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the chunks of a namespace, or those of `keys`, to a bundle; also beside a server.

    Those from before the newest reset are left out: see `places_of`.

    The file appears whole or not at all. A chunk that is not what its record says is left out, and
    one that a server replaces meanwhile.

    Args:
        used_since_ms: only chunks stored or read since then, in ms since 1970.
        encryption_keys: where the keys are by which encrypted chunks are checked. They stay
            encrypted. Without its key a chunk is taken as it is.

    Raises:
        ConfigError: if the keys cannot be used.
        KVStoreError: if there is no one namespace at `path` that can be opened, if a key is not
            there, if the file exists and shall not be replaced, or is none of its own, if there are
            too many chunks for one bundle, if none is whole, or if there is a reset meanwhile.
        OSError: if the file cannot be written.
    """
    namespace = the_namespace(path)
    # Or nobody could import it.
    Namespace(namespace.name, namespace.identity).check_name()
    folder = Path(namespace.path)
    found = places_of(namespace, keys)
    missing = [key for key in keys or () if key not in found]
    if missing:
        told = f"{len(missing)} keys are not there, such as {missing[0].hex()}"
        raise KVStoreError(told + unread(namespace))
    found = {
        key: place
        for key, place in found.items()
        if max(place.stored_ms, place.read_ms) >= used_since_ms
    }
    if not found:
        raise KVStoreError(f"{path} holds no chunk to export{unread(namespace)}")
    # Behind a symbolic link, the file itself is replaced.
    file = Path(os.path.realpath(file))
    if not file.parent.is_dir():
        raise KVStoreError(f"{file}: the folder {file.parent} does not exist")
    if file.exists() and not file.is_file():
        raise KVStoreError(f"{file} is no regular file: give the name of one")
    if folder.resolve() in file.parents:
        raise KVStoreError(f"{file} is in the cache itself: give another folder")
    if file.exists() and not replace:
        raise KVStoreError(f"{file} exists: remove it, or say --force")
    room = len(_header(namespace, found))
    if room > MAX_HEADER:
        raise KVStoreError(
            f"{len(found)} chunks are too many for one bundle: choose by keys, or by when they "
            "were used"
        )
    _remove_leftovers(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            sealer = sealer_of(encryption_keys, namespace.digest)
            done = _write(out, namespace, found, room, sealer, progress)
        if read_epoch(folder) != namespace.epoch:
            raise KVStoreError(f"{path} was reset meanwhile, so these chunks may be wrong")
        os.rename(temporary, file)
    except KVStoreError:
        raise
    except OSError as error:
        # What a write raises names no file, others that beside it.
        error.filename = str(file)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return done


def _remove_leftovers(file: Path) -> None:
    """Remove what exports to this file have left that were killed: nobody writes to it any more."""
    name = re.compile(rf"\.{re.escape(file.name)}\.\d+-[0-9a-f]{{8}}")
    for path in file.parent.iterdir():
        with contextlib.suppress(OSError):
            if name.fullmatch(path.name) and time.time() - path.lstat().st_mtime > LEFT_SECONDS:
                path.unlink()


def _write(
    out: Any,
    namespace: NamespaceSurvey,
    found: dict[bytes, Place],
    room: int,
    sealer: Sealer | None,
    progress: Progress,
) -> Exported:
    done = Exported(faults=list(namespace.faults))
    total = sum(place.size for place in found.values())
    good: dict[bytes, Place] = {}
    out.seek(8 + room)
    size = max(1, WRITTEN_AT_ONCE // next(iter(found.values())).size)
    for _ in range(MOST_LOOKS):
        elsewhere: list[bytes] = []
        for keys in _batches(list(found), size):
            elsewhere += _write_some(out, keys, found, sealer, done, good)
            progress(done.bytes, total)
        # What is compacted meanwhile has another place now, and what was removed has none.
        found = places_of(the_namespace(namespace.path), elsewhere) if elsewhere else {}
        if not found:
            break
    for key, place in found.items():
        done.faults.append(Fault(str(place.path), place.slot, MOVED, key.hex()))
    if not good:
        raise KVStoreError(f"{namespace.path} holds no whole chunk to export: see kvstore verify")
    out.seek(0)
    # Chunks that were left out make it shorter: spaces fill it up.
    out.write(room.to_bytes(8, "little") + _header(namespace, good).ljust(room))
    out.flush()
    os.fsync(out.fileno())
    return done


def _write_some(
    out: Any,
    keys: Sequence[bytes],
    found: dict[bytes, Place],
    sealer: Sealer | None,
    done: Exported,
    good: dict[bytes, Place],
) -> list[bytes]:
    """Write these chunks, and add them to `good`; returns those that are not there any more."""
    payloads: dict[bytes, bytes | None] = {}
    for key in keys:
        found[key], payloads[key] = read_whole(found[key], sealer)
    kept, elsewhere = _still_there([found[key] for key in keys]), []
    for key, payload in payloads.items():
        place = found[key]
        checked = place.proof.checkable(sealer)
        # A payload that a server replaces meanwhile is no fault, and without its key nothing tells
        # whether it is the one that belongs to the record.
        if key not in kept and (payload is None or not checked):
            elsewhere.append(key)
        elif payload is None:
            what = f"payload does not match its {place.proof.name}" if checked else NOT_READ
            done.faults.append(Fault(str(place.path), place.slot, what, key.hex()))
        else:
            out.write(payload)
            good[key] = place
            done.chunks += 1
            done.unchecked += not checked
            done.bytes += len(payload)
    return elsewhere


def _still_there(places: Collection[Place]) -> set[bytes]:
    """Return the keys of those chunks whose records are what they were."""
    kept: set[bytes] = set()
    for path in dict.fromkeys(place.path for place in places):
        try:
            _, live, _ = read_index(path)
        except (ForeignFileError, OSError):
            if os.path.lexists(path):
                # What could not be read there is missed: a fault.
                kept |= {place.proof.key for place in places if place.path == path}
            continue
        now = live.by_slot()
        kept |= {
            place.proof.key
            for place in places
            if place.path == path and now.get(place.slot) == (place.proof.key, place.proof.value)
        }
    return kept


def _segment_bytes(namespace: NamespaceSurvey) -> int:
    """The size of segments where the chunks are from: a lane keeps that of its first one."""
    return min((each.whole_bytes for each in namespace.segments), default=0)


def _header(namespace: NamespaceSurvey, found: Mapping[bytes, Place]) -> bytes:
    """The header of a bundle of these chunks, padded to 8 bytes."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "namespace": namespace.name,
            "segment_bytes": str(_segment_bytes(namespace)),
            "identity": json.dumps(namespace.identity, sort_keys=True),
            "digest": Namespace(namespace.name, namespace.identity).digest,
            "epoch": str(namespace.epoch),
            "digests": json.dumps(
                {key.hex(): place.proof.value.hex() for key, place in found.items()}
            ),
        }
    }
    offset = 0
    for key, place in found.items():
        end = offset + place.size
        entries[key.hex()] = {"dtype": "U8", "shape": [place.size], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    return text.ljust(-(-len(text) // 8) * 8)


# -- import ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bundle:
    """The header of a bundle: where each chunk lies, and its digest or seal."""

    namespace: str
    identity: dict[str, Any]
    chunk_bytes: int
    segment_bytes: int
    places: Mapping[bytes, tuple[int, Proof]]


def import_bundle(
    file: Path,
    path: str | os.PathLike[str],
    *,
    capacity_bytes: int | None = None,
    keys: str | None = None,
    strict_modes: bool = True,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Store the chunks of a bundle in the cache at `path`, in the namespace that they are from.

    A store with a lane of its own takes them, as a server's would: a server that starts later goes
    on with that lane, one that runs beside it reads it. Each chunk is verified. Those that are
    there stay as they are.

    Args:
        capacity_bytes: of the lane; by default enough for the bundle beside all that is there.
        keys: where the keys are that its chunks are encrypted with, here as where they are from.
        strict_modes: refuse folders and lanes that other users own or may write to.

    Raises:
        KVStoreError: if the file is no bundle, or its chunks cannot be stored at `path`, or not in
            so many bytes without removing others that nobody uses.
        OSError: if the file cannot be read.
    """
    if (around := enclosing(Path(path))) is not None:
        what = "is" if around == Path(path).absolute() else f"is in {around},"
        raise PathUnusableError(f"{path} {what} a namespace: give the folder that it is in")
    # One that is no file shall be told, not waited for.
    fd = open_at_once(file, follows=True)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise KVStoreError(f"{file} is no regular file")
        bundle = _read_header(fd, file)
        folder = Path(path) / bundle.namespace
        done = Imported(bundle.namespace, len(bundle.places))
        size = os.fstat(fd).st_size
        whole = max((offset for offset, _ in bundle.places.values()), default=0)
        whole += bundle.chunk_bytes
        if size < whole:
            what = f"the bundle is cut short: {size} of {whole} bytes"
            if all(at + bundle.chunk_bytes > size for at, _ in bundle.places.values()):
                raise KVStoreError(f"{file}: {what}, and no chunk of it is whole")
            done.faults.append(Fault(str(file), None, what))
        config = _config(bundle, path, capacity_bytes, keys, strict_modes)
        digest = Namespace(bundle.namespace, bundle.identity).digest
        sealer = sealer_of(keys, digest)
        if not any(proof.checkable(sealer) for _, proof in bundle.places.values()):
            raise KVStoreError(f"{file}: its chunks are encrypted with keys that {keys} has not")
        if _is_there(bundle, folder, digest, sealer, Trust(strict_modes)):
            # A store would make a segment for nothing.
            done.there = done.stored = len(bundle.places)
            progress(done.there, done.there)
            return done
        batch, looked = max(1, HOST_BYTES // bundle.chunk_bytes // 2), 0
        good: set[bytes] = set()
        # Before the store is opened, which would be in the newer epoch of a reset in between.
        epoch = read_epoch(folder)
        with open_sync(config) as store:
            # Nothing may be stored in that.
            _check_epoch(folder, epoch)
            places = places_of(the_namespace(folder), bundle.places)
            for names in _batches(list(bundle.places), batch):
                looked += len(names)
                held = zip(names, store.contains(names), strict=True)
                there = [here and _is_whole(store, key, places, sealer) for key, here in held]
                done.there += sum(there)
                right: dict[bytes, bytes] = {}
                for key, whole_there in zip(names, there, strict=True):
                    offset, proof = bundle.places[key]
                    if whole_there or offset + bundle.chunk_bytes > size:
                        continue
                    payload = proof.check(read_payload(fd, offset, bundle.chunk_bytes), sealer)
                    if payload is None:
                        known = proof.checkable(sealer)
                        what = f"payload does not match its {proof.name}" if known else NO_KEY
                        done.faults.append(Fault(str(file), None, what, key.hex()))
                    else:
                        right[key] = payload
                store.put(list(right), list(right.values()), durable=True)
                good.update(compress(names, there), right)
                progress(looked, len(bundle.places))
    finally:
        os.close(fd)
    _check_epoch(folder, epoch)
    done.stored = len(places_of(the_namespace(folder), good))
    return done


def _check_epoch(folder: Path, epoch: int) -> None:
    if read_epoch(folder) != epoch:
        raise KVStoreError(f"{folder} was reset meanwhile: import the bundle again, or not at all")


def _is_whole(
    store: SyncStore, key: bytes, places: Mapping[bytes, Place], sealer: Sealer | None
) -> bool:
    """Whether a chunk can be read. To look at it is no use of it, which the store would note."""
    if key in places and _copies_are_whole(places[key], sealer):
        return True
    # The store misses what is damaged there, and stores it anew.
    with store.get([key]) as chunks:
        return len(chunks) == 1


def _copies_are_whole(place: Place, sealer: Sealer | None) -> bool:
    copy: Place | None = place
    while copy is not None:
        # Any of them may be the one that a server reads.
        if not copy.proof.checkable(sealer) or read_chunk(copy, sealer) is None:
            return False
        copy = copy.older
    return True


def _is_there(
    bundle: _Bundle, folder: Path, digest: str, sealer: Sealer | None, trust: Trust
) -> bool:
    """Whether the cache, all of which is trusted, holds every chunk of a bundle, whole."""
    try:
        namespace = the_namespace(folder)
        for each in (folder, *(Path(lane.path) for lane in namespace.lanes)):
            os.close(open_folder(each, trust, own=True))
    except (KVStoreError, OSError):
        return False
    places = places_of(namespace, bundle.places) if namespace.digest == digest else {}
    return len(places) == len(bundle.places) and all(
        _copies_are_whole(place, sealer) for place in places.values()
    )


def _batches(keys: list[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _found_at(path: str | os.PathLike[str], capacity_bytes: int | None) -> list[NamespaceSurvey]:
    """The namespaces at `path`.

    Raises:
        PathUnusableError: if not all that is there can be known, and no capacity is given.
    """
    if not os.path.lexists(path):
        return []
    try:
        found = survey(path)
    except EmptyPathError:
        return []
    except PathUnusableError as error:
        if capacity_bytes is not None:
            return []
        raise PathUnusableError(f"{error}: name a capacity with --capacity") from error
    unlisted = [str(fault) for namespace in found for fault in namespace.unlisted]
    if unlisted and capacity_bytes is None:
        raise PathUnusableError(
            f"{unlisted[0]}: how much is there cannot be known. Name a capacity with --capacity"
        )
    return found


def _held_bytes(lane: LaneSurvey) -> list[int]:
    """The sizes of all files in a lane; what was cut short has its whole size when it is used."""
    return [*(max(one.file_bytes, one.whole_bytes) for one in lane.segments), lane.other_bytes]


def _config(
    bundle: _Bundle,
    path: str | os.PathLike[str],
    capacity_bytes: int | None,
    keys: str | None,
    strict_modes: bool,
) -> Config:
    if is_sealed(bundle.identity) != (keys is not None):
        raise KVStoreError(
            "the chunks of the bundle are not encrypted: leave the keys out"
            if keys is not None
            else "the chunks of the bundle are encrypted: name the keys with --keys"
        )
    slot_bytes = round_to_page(bundle.chunk_bytes)
    smallest = Geometry(1, slot_bytes, bundle.chunk_bytes).file_bytes
    # It may claim what it likes, and a segment takes its whole size on the disk.
    whole = Geometry(len(bundle.places), slot_bytes, bundle.chunk_bytes).file_bytes
    segment_bytes = max(smallest, min(bundle.segment_bytes, max(SEGMENT_BYTES, whole)))
    found = _found_at(path, capacity_bytes)
    lanes = [lane for each in found for lane in each.lanes]
    # Beside all that is there, of which nothing shall be displaced.
    held = [size for lane in lanes for size in _held_bytes(lane)]
    free = [lane for lane in lanes if lane.owner is None and any(s.live for s in lane.segments)]
    own = [each for each in found if each.name == bundle.namespace]
    missing = set(bundle.places).difference(*(places_of(each, bundle.places) for each in own))
    # A lane keeps the size of its segments, of which each may hold fewer of the chunks.
    slots = Geometry.fitting(segment_bytes, slot_bytes, bundle.chunk_bytes).slots
    shapes = {(slots, segment_bytes)}
    shapes |= {(one.slots, one.whole_bytes) for each in own for one in each.segments}

    def room_for(chunks: int) -> int:
        return max((-(-chunks // count) + 1) * size for count, size in shapes)

    if capacity_bytes is None:
        capacity_bytes = sum(held) + max(room_for(len(missing)), *held, 0)
    elif capacity_bytes < (least := min(size for _, size in shapes)):
        raise KVStoreError(f"{path}: {capacity_bytes} bytes hold no segment: give at least {least}")
    else:
        needed = sum(size for lane in free for size in _held_bytes(lane))
        new = len(missing)
        if len(free) == 1 and any(free[0] in each.lanes for each in own):
            new -= sum(one.slots - one.live for one in free[0].segments)
        if free and new > 0:
            # What is there gives way to what comes, in this lane as in others that nobody uses.
            needed += room_for(new)
        if needed > capacity_bytes:
            raise KVStoreError(
                f"{path}: some of the chunks that are there would be removed for a capacity of "
                f"{capacity_bytes} bytes: give at least {needed}, or none"
            )
    # Caches of earlier versions may have another entry of that name.
    added = NAMES_ADDED if is_sealed(bundle.identity) else NAMES_ADDED - {"encryption"}
    return Config(
        cpu_bytes_to_use=max(HOST_BYTES, 2 * slot_bytes),
        chunk_bytes=bundle.chunk_bytes,
        identity={key: value for key, value in bundle.identity.items() if key not in added},
        namespace=bundle.namespace,
        tiers=[
            DiskConfig(path, capacity_bytes, segment_bytes=segment_bytes, strict_modes=strict_modes)
        ],
        encryption_keys=keys,
        tenants=None if keys is None else Shares(),
    )


def _read_header(fd: int, file: Path) -> _Bundle:
    """
    Raises:
        ForeignFileError: if it is not the header of a bundle.
    """

    def wrong(what: str) -> ForeignFileError:
        return ForeignFileError(f"{file} is no bundle of kvstore: {what}")

    size = os.fstat(fd).st_size
    room = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or not 0 < room <= min(MAX_HEADER, size - 8):
        raise wrong("it is not a safetensors file")
    try:
        entries = json.loads(read_bytes(fd, room, 8))
        told = entries.pop("__metadata__")
        if told["format"] != FORMAT or told["version"] != str(VERSION):
            raise wrong(f"its format is {told['format']!r}, version {told['version']!r}")
        identity, digests = json.loads(told["identity"]), json.loads(told["digests"])
        digest = Namespace(str(told["namespace"]), identity).digest
        # Bundles of earlier versions do not tell it.
        if told.get("digest", digest) != digest:
            raise wrong("its identity is damaged: it does not match its digest")
        if not entries:
            raise wrong("it holds no chunk")
        if any(int(start) < 0 for start, _ in _offsets(entries)):
            raise wrong("a chunk of it begins before its first byte")
        sizes = {int(end) - int(start) for start, end in _offsets(entries)}
        if len(sizes) != 1 or identity["chunk_bytes"] not in sizes or min(sizes) < 1:
            raise wrong("its chunks are not of one size")
        places, epoch = {}, int(told.get("epoch", 0))
        if not 0 <= epoch <= MAX_EPOCH:
            raise wrong(f"its epoch is {epoch}")
        for name, each in entries.items():
            key, offset = check_key(bytes.fromhex(name)), 8 + room + int(each["data_offsets"][0])
            places[key] = (offset, Proof(key, epoch, bytes.fromhex(digests[name])))
            if places[key][1].sealed != is_sealed(identity):
                raise wrong(f"chunk {name} is encrypted, or not, other than it says of itself")
        segment_bytes = int(told["segment_bytes"])
        # Before a path is made of it.
        Namespace(str(told["namespace"]), identity).check_name()
        return _Bundle(str(told["namespace"]), identity, sizes.pop(), segment_bytes, places)
    except KVStoreError:
        raise
    except MALFORMED as error:
        raise wrong(f"its header cannot be read ({error!r:.100})") from error


def _offsets(entries: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for each in entries.values():
        start, end = each["data_offsets"]
        yield start, end
