"""Extents: neighbouring slots, moved by one vectored call and verified one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from tiers.disk.format import live_chunks
from tiers.disk.io import IOV_MAX, IOBackend
from tiers.disk.segment import Segment

__all__ = ["ExtentRead", "cut_extents", "read_extent"]

MIN_CALL_BYTES = 1024 * 1024
MAX_CALL_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class ExtentRead:
    """The outcome of reading an extent.

    Attributes:
        ok: per key, whether its buffer holds exactly its bytes.
        wrong: slots that do not hold what was asked for; not those that could not be read.
        error: what went wrong, in words, or None.
    """

    ok: list[bool]
    wrong: list[int]
    error: str | None


def cut_extents(
    slots: Sequence[int], segment_slots: int, slot_bytes: int, threads: int
) -> list[list[int]]:
    """Indices into `slots`, grouped into runs of neighbours of one segment.

    A run is cut so that one request alone keeps every thread busy.
    """
    share = len(slots) * slot_bytes // threads
    call_bytes = min(MAX_CALL_BYTES, max(MIN_CALL_BYTES, share))
    longest = min(IOV_MAX, max(1, call_bytes // slot_bytes))
    extents: list[list[int]] = []
    previous = -2
    for index in sorted(range(len(slots)), key=slots.__getitem__):
        slot = slots[index]
        if slot == previous + 1 and slot % segment_slots and len(extents[-1]) < longest:
            extents[-1].append(index)
        else:
            extents.append([index])
        previous = slot
    return extents


def read_extent(
    backend: IOBackend,
    segment: Segment,
    first: int,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
) -> ExtentRead:
    """Read neighbouring slots from `first` on into `buffers` and verify each against its key.

    When the call fails, the blocks are read one by one: a failed block fails alone.
    """
    geometry = segment.geometry
    size = geometry.chunk_bytes
    try:
        raw = segment.read_records(first, len(keys))
        got = backend.read(segment.data, buffers, segment.offset_of(first))
    except OSError as error:
        if len(keys) == 1:
            told = f"read of {segment.path} slot {first}: {error.strerror or error}"
            return ExtentRead([False], [], told)
        return _one_by_one(backend, segment, first, keys, buffers)
    known = live_chunks(raw, first, size, segment.seed)
    ok: list[bool] = []
    for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
        whole = got >= index * geometry.slot_bytes + size
        expected = (key, xxh3_128_digest(buffer[:size])) if whole else None
        ok.append(expected is not None and known.get(first + index) == expected)
    wrong = [first + index for index, one in enumerate(ok) if not one]
    told = f"{segment.path}: slots {wrong} do not hold what their records say"
    return ExtentRead(ok, wrong, told if wrong else None)


def _one_by_one(
    backend: IOBackend,
    segment: Segment,
    first: int,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
) -> ExtentRead:
    whole = ExtentRead([], [], None)
    errors: list[str] = []
    for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
        one = read_extent(backend, segment, first + index, [key], [buffer])
        whole.ok += one.ok
        whole.wrong += one.wrong
        if one.error is not None:
            errors.append(one.error)
    whole.error = "; ".join(errors) or None
    return whole
