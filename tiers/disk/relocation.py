"""Copying chunks from slot to slot, records and all."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence

from tiers.disk.extents import Extent, Outcome, gravest, read_extents
from tiers.disk.format import decode_records, reseal_records
from tiers.disk.io import IOBackend
from tiers.disk.segment import Segment

__all__ = ["Place", "relocate"]

Place = tuple[Segment, int]
"""A slot within its segment."""


def relocate(
    keys: Sequence[bytes], sources: Sequence[Place], targets: Sequence[Place]
) -> tuple[list[bool], str | None]:
    """Copy chunks to empty slots, with the sequence and the counters that they have.

    What is copied is verified first. The sources stay as they are: a crash at
    any moment leaves each chunk in one valid copy at least, or in two of which
    either may be used.
    """
    size = sources[0][0].geometry.slot_bytes
    with mmap.mmap(-1, len(keys) * size) as memory, memoryview(memory) as view:
        buffers = [view[at : at + size] for at in range(0, len(view), size)]
        try:
            return _relocate(keys, sources, targets, buffers)
        finally:
            for buffer in buffers:
                buffer.release()


def _relocate(
    keys: Sequence[bytes],
    sources: Sequence[Place],
    targets: Sequence[Place],
    buffers: Sequence[memoryview],
) -> tuple[list[bool], str | None]:
    raws: list[bytes] = []
    for segment, slot in sources:
        try:
            raws.append(segment.read_records(slot, 1))
        except OSError:
            raws.append(b"")
    extents = [
        Extent(segment, slot, [key], [buffer])
        for key, (segment, slot), buffer in zip(keys, sources, buffers, strict=True)
    ]
    outcomes = _by_backend(read_extents, extents)
    told = gravest(outcomes)
    ok = [outcome.ok[0] for outcome in outcomes]
    homes = [
        Extent(segment, slot, [key], [buffer])
        for key, (segment, slot), buffer in zip(keys, targets, buffers, strict=True)
    ]
    good = [index for index, one in enumerate(ok) if one]
    written = _by_backend(_write_payloads, [homes[index] for index in good])
    for index, outcome in zip(good, written, strict=True):
        if outcome.error is None:
            try:
                _copy_record(raws[index], sources[index], targets[index])
                continue
            except OSError as error:
                outcome.error = f"record of {targets[index][0].path}: {error.strerror or error}"
        ok[index] = False
        told = told or outcome.error
    return ok, told


def _copy_record(raw: bytes, source: Place, target: Place) -> None:
    (origin, from_slot), (home, to_slot) = source, target
    live = decode_records(raw, from_slot, origin.geometry.chunk_bytes, origin.seed)
    if not live.slots:
        raise OSError("the record has changed")
    record = live.records.copy()
    record["slot"] = to_slot
    home.write_records(to_slot, reseal_records(record, home.seed))


def _write_payloads(backend: IOBackend, extents: Sequence[Extent]) -> list[Outcome]:
    outcomes = [Outcome([True], [], None) for _ in extents]
    for outcome, extent in zip(outcomes, extents, strict=True):
        try:
            extent.segment.erase_records(extent.first, 1)
        except OSError as error:
            outcome.error = f"record of {extent.segment.path}: {error.strerror or error}"
    sound = [index for index, outcome in enumerate(outcomes) if outcome.error is None]
    moved = backend.write_all([extents[index].run for index in sound])
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
