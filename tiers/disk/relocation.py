"""Relocation: copy chunks from slot to slot, with their records."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.tiers.disk.extents import Extent, Outcome, gravest, read_extents
from kvstore.tiers.disk.format import LiveRecords, set_seal
from kvstore.tiers.disk.io import IOBackend
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.sealing import Sealer

__all__ = ["Place", "Relocated", "relocate"]

Place = tuple[Segment, int]
"""A slot within its segment."""


@dataclass(slots=True)
class Relocated:
    """The result of copying chunks.

    Attributes:
        ok: for each chunk, whether its copy is complete and will be found.
        lost: places, in that list, of chunks that are not what their records said.
        error: what went wrong first, in words, or None.
    """

    ok: list[bool]
    lost: list[int] = field(default_factory=list)
    error: str | None = None


def relocate(
    keys: Sequence[bytes],
    sources: Sequence[Place],
    targets: Sequence[Place],
    sealer: Sealer | None = None,
) -> Relocated:
    """Copy chunks to empty slots, with the sequence and the counters that they have.

    What is copied is verified first; the record of a chunk that is lost is
    erased. The other sources stay as they are: a crash at any moment leaves each
    chunk in one valid copy at least, or in two of which either may be used.
    A copy that is ok is on the medium: whatever happens to its source then, a
    power cut does not take it.

    Args:
        sealer: opens sealed chunks, and seals them anew with the newest key. Without one, or
            without the key of a chunk, it is copied as it is, and not verified.
    """
    if not keys:
        return Relocated([])
    size = sources[0][0].geometry.slot_bytes
    with mmap.mmap(-1, len(keys) * size) as memory, memoryview(memory) as view:
        buffers = [view[at : at + size] for at in range(0, len(view), size)]
        try:
            return _relocate(keys, sources, targets, buffers, sealer)
        finally:
            for buffer in buffers:
                buffer.release()


def _relocate(
    keys: Sequence[bytes],
    sources: Sequence[Place],
    targets: Sequence[Place],
    buffers: Sequence[memoryview],
    sealer: Sealer | None,
) -> Relocated:
    records = [_record_of(source) for source in sources]
    origins = _extents(keys, sources, buffers)
    outcomes = _by_backend(read_extents, origins)
    if sealer is not None:
        for origin, record, outcome in zip(origins, records, outcomes, strict=True):
            if outcome.error is None and record is not None:
                _seal_anew(origin, record, outcome, sealer)
    done = Relocated([outcome.ok[0] for outcome in outcomes], error=gravest(outcomes))
    for index, outcome in enumerate(outcomes):
        if outcome.wrong:
            done.lost.append(index)
            with contextlib.suppress(OSError):
                segment, slot = sources[index]
                segment.index.erase(slot, 1)
    good = [index for index, one in enumerate(done.ok) if one]
    placed: dict[Segment, list[int]] = {}
    homes = _extents(keys, targets, buffers)
    written = _by_backend(_write_payloads, [homes[index] for index in good])
    for index, outcome in zip(good, written, strict=True):
        segment, slot = targets[index]
        record = records[index]
        if outcome.error is None and record is None:
            outcome.error = f"record of {sources[index][0].path} slot {sources[index][1]} is gone"
        if outcome.error is None and record is not None:
            try:
                if segment.nonces is not None:
                    segment.nonces[slot] = record.nonces()[0]
                segment.index.place(record.records, slot)
                placed.setdefault(segment, []).append(index)
                continue
            except OSError as error:
                outcome.error = f"record of {segment.path}: {error.strerror or error}"
        done.ok[index] = False
        done.error = done.error or outcome.error
    for segment, indices in placed.items():
        try:
            segment.sync()
        except OSError as error:
            done.error = done.error or f"sync of {segment.path}: {error.strerror or error}"
            for index in indices:
                done.ok[index] = False
    return done


def _seal_anew(origin: Extent, record: LiveRecords, outcome: Outcome, sealer: Sealer) -> None:
    """Seal a chunk that was read as it is with the newest key, and change its record to match."""
    (key,), (buffer,), (seal,) = origin.keys, origin.buffers, record.digests()
    epoch, payload = origin.segment.epoch, buffer[: origin.segment.geometry.chunk_bytes]
    if not sealer.has_key(key, seal):
        return
    if sealer.open(key, epoch, seal, payload):
        record.records = record.records.copy()
        set_seal(record.records, sealer.seal(key, epoch, payload, payload))
    else:
        what = f"{origin.segment.path}: slot {origin.first} does not hold what its record says"
        outcome.ok, outcome.wrong, outcome.error = [False], [origin.first], what


def _record_of(place: Place) -> LiveRecords | None:
    segment, slot = place
    with contextlib.suppress(OSError):
        found = segment.index.live(slot, 1)
        return found if found.slots else None
    return None


def _extents(
    keys: Sequence[bytes], places: Sequence[Place], buffers: Sequence[memoryview]
) -> list[Extent]:
    return [
        Extent(segment, slot, [key], [buffer])
        for key, (segment, slot), buffer in zip(keys, places, buffers, strict=True)
    ]


def _write_payloads(backend: IOBackend, extents: Sequence[Extent]) -> list[Outcome]:
    outcomes = [Outcome([True], [], None) for _ in extents]
    for outcome, extent in zip(outcomes, extents, strict=True):
        try:
            extent.segment.index.erase(extent.first, 1)
        except OSError as error:
            outcome.error = f"record of {extent.segment.path}: {error.strerror or error}"
    sound = [index for index, outcome in enumerate(outcomes) if outcome.error is None]
    moved = backend.move_all([extents[index].request for index in sound], load=False)
    for index, done in zip(sound, moved, strict=True):
        if isinstance(done, OSError):
            outcomes[index].error = f"write to {extents[index].segment.path}: {done.strerror}"
    return outcomes


def _by_backend(
    work: Callable[[IOBackend, Sequence[Extent]], Iterable[Outcome]], extents: Sequence[Extent]
) -> list[Outcome]:
    """`work` on all extents at once, but for those that lie on other devices."""
    groups: dict[IOBackend, list[int]] = {}
    for index, extent in enumerate(extents):
        groups.setdefault(extent.segment.backend, []).append(index)
    outcomes: list[Outcome] = [Outcome([], [], None)] * len(extents)
    for backend, indices in groups.items():
        for index, outcome in zip(
            indices, work(backend, [extents[index] for index in indices]), strict=True
        ):
            outcomes[index] = outcome
    return outcomes
