"""Extents: runs of slots, moved by one vectored call and verified one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.tiers.coding import Coder
from kvstore.tiers.disk.format import RECORD_BYTES, encode_records
from kvstore.tiers.disk.io import IOV_MAX, IOBackend, IORequest, Moved
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.sealing import TAG_BYTES

__all__ = [
    "Extent",
    "Outcome",
    "Reading",
    "Writing",
    "cut_batches",
    "cut_extents",
    "gravest",
    "read_extents",
]

MIN_CALL_BYTES = 1024 * 1024
MAX_CALL_BYTES = 4 * 1024 * 1024
"""Longer calls only queue in the kernel, and make what is more urgent wait."""

NEAR_SLOTS = 2048
"""Records that one call reads for scattered slots, 256 KiB: copying what lies between them is
cheaper than a call for each."""


@dataclass(slots=True)
class Extent:
    """Neighbouring slots of one segment with their keys and memory.

    Attributes:
        first: the first slot, within its segment.
        buffers: a row for each key.
    """

    segment: Segment
    first: int
    keys: Sequence[bytes]
    buffers: Sequence[memoryview]

    @property
    def request(self) -> IORequest:
        """The request for the backend."""
        buffers, size = self.buffers, self.segment.geometry.slot_bytes
        if len(buffers[0]) > size:
            # An encoded chunk is smaller than a row.
            buffers = [buffer[:size] for buffer in buffers]
        return IORequest(self.segment.data, buffers, self.segment.offset_of(self.first))

    def one_by_one(self) -> list[Extent]:
        """Extents of one slot each."""
        return [
            Extent(self.segment, self.first + index, [key], [buffer])
            for index, (key, buffer) in enumerate(zip(self.keys, self.buffers, strict=True))
        ]


@dataclass(slots=True)
class Outcome:
    """The result of moving an extent.

    Attributes:
        ok: for each key, whether all its bytes are where they belong.
        wrong: slots read that do not hold what was asked for; not those that could not be read.
        error: what went wrong, in words, or None.
    """

    ok: list[bool]
    wrong: list[int]
    error: str | None


def cut_extents(
    slots: Sequence[int], segment_slots: int, slot_bytes: int, threads: int
) -> list[list[int]]:
    """Group indices into `slots` into runs of adjacent slots of one segment.

    A run is cut so that one request alone keeps every thread busy.
    """
    longest = min(IOV_MAX, max(1, _call_bytes(len(slots) * slot_bytes, threads) // slot_bytes))
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


def cut_batches(
    extents: Sequence[list[int]], slot_bytes: int, threads: int
) -> list[list[list[int]]]:
    """Extents grouped into what one thread does in one go, about as much as one long extent."""
    total = sum(len(extent) for extent in extents) * slot_bytes
    limit = _call_bytes(total, threads)
    batches: list[list[list[int]]] = []
    room = 0
    for extent in extents:
        size = len(extent) * slot_bytes
        if size > room:
            batches.append([])
            room = limit
        batches[-1].append(extent)
        room -= size
    return batches


def _call_bytes(total: int, threads: int) -> int:
    return min(MAX_CALL_BYTES, max(MIN_CALL_BYTES, total // threads))


class Reading:
    """Extents that are being read, into memory that is in use until `end`.

    Records are read before their payloads: what is written in between is a mismatch.

    Attributes:
        waits: whether the system still moves bytes, and the thread may do something else.

    Args:
        coder: turns payloads into chunks; without one they are read as they are, and what is
            sealed is not verified.
    """

    def __init__(
        self, backend: IOBackend, extents: Sequence[Extent], coder: Coder | None = None
    ) -> None:
        self._backend = backend
        self._extents = extents
        self._coder = coder
        self._records: list[bytes | OSError] = []
        while len(self._records) < len(extents):
            self._records += _read_records(_near(extents, len(self._records)))
        requests = [extent.request for extent in extents]
        self._under_way = backend.begin(requests, _hashed(extents), load=True)
        self.waits = self._under_way.waits()

    def end(self) -> list[Outcome]:
        """Verify each block against its key. A failed block fails alone."""
        moved = self._under_way.end()
        return [
            _verified(self._backend, extent, raw, done, self._coder)
            for extent, raw, done in zip(self._extents, self._records, moved, strict=True)
        ]


def read_extents(
    backend: IOBackend, extents: Sequence[Extent], coder: Coder | None = None
) -> list[Outcome]:
    """Read `extents` and verify each block against its key. A failed block fails alone."""
    return Reading(backend, extents, coder).end()


def _hashed(extents: Sequence[Extent]) -> int:
    """The bytes of a slot whose digest is wanted."""
    return (extents[0].segment.geometry.record_length or 0) if extents else 0


def _near(extents: Sequence[Extent], start: int) -> Sequence[Extent]:
    """Return the extents from `start` on whose records are worth reading in one call."""
    segment, first = extents[start].segment, extents[start].first
    end, covered = start + 1, first + len(extents[start].keys)
    for extent in extents[end:]:
        stop = extent.first + len(extent.keys)
        if extent.segment is not segment or extent.first < covered or stop - first > NEAR_SLOTS:
            break
        end, covered = end + 1, stop
    return extents[start:end]


def _read_records(extents: Sequence[Extent]) -> list[bytes | OSError]:
    """The raw records of extents of one segment, ascending, and of what lies between them."""
    first, last = extents[0], extents[-1]
    try:
        raw = first.segment.index.read(first.first, last.first + len(last.keys) - first.first)
    except OSError as error:
        if len(extents) == 1:
            return [error.with_traceback(None)]
        return [record for extent in extents for record in _read_records([extent])]
    begins = [(extent.first - first.first) * RECORD_BYTES for extent in extents]
    return [
        raw[begin : begin + len(extent.keys) * RECORD_BYTES]
        for begin, extent in zip(begins, extents, strict=True)
    ]


class Writing:
    """Extents that are being written, from memory that is in use until `end`.

    Old records out, payload in, new records in: in this order, so that a crash
    between any two of them leaves slots that hold nothing.

    Attributes:
        waits: as with `Reading`.

    Args:
        sequence: that of the first record; the others count on from it.
        coder: turns chunks into payloads; without one they are written as they are.
    """

    def __init__(
        self,
        backend: IOBackend,
        extents: Sequence[Extent],
        sequence: int,
        coder: Coder | None = None,
    ) -> None:
        self._backend = backend
        self._extents = extents
        self._sequence = sequence
        self._coder = coder
        self._coded = None if coder is None else _Coded(extents, coder)
        self._erased: list[OSError | None] = []
        for extent in extents:
            try:
                extent.segment.index.erase(extent.first, len(extent.keys))
                self._erased.append(None)
            except OSError as refused:
                self._erased.append(refused.with_traceback(None))
        wanted = (
            [extent.request for extent in extents] if self._coded is None else self._coded.requests
        )
        erased = zip(wanted, self._erased, strict=True)
        requests = [request for request, refused in erased if refused is None]
        self._under_way = backend.begin(requests, _hashed(extents), load=False)
        self.waits = self._under_way.waits()

    def end(self) -> list[Outcome]:
        """Write the records of what was written. A failed block fails alone."""
        moved = iter(self._under_way.end())
        if self._coded is not None:
            self._coded.end()
        outcomes: list[Outcome] = []
        sequence = self._sequence
        for place, (extent, failed) in enumerate(zip(self._extents, self._erased, strict=True)):
            done = failed if failed is not None else next(moved)
            if not isinstance(done, OSError):
                try:
                    seals = self._coded.seals if self._coded is not None else []
                    proofs = seals[place] if seals else done.digests
                    _write_records(extent, sequence, proofs)
                except OSError as refused:
                    done = refused.with_traceback(None)
            if isinstance(done, OSError):
                outcomes.append(_write_failed(self._backend, extent, sequence, done, self._coder))
            else:
                outcomes.append(Outcome([True] * len(extent.keys), [], None))
            sequence += len(extent.keys)
        return outcomes


class _Coded:
    """The payloads of extents, in memory that is lent until `end`.

    Attributes:
        requests: what writes them, for each extent.
        seals: theirs, likewise; nothing where they are not sealed.
    """

    def __init__(self, extents: Sequence[Extent], coder: Coder) -> None:
        self._scratch = coder.scratch
        size = extents[0].segment.geometry.slot_bytes if extents else 0
        self._memory = self._scratch.lend(size * sum(len(extent.keys) for extent in extents))
        self.requests: list[IORequest] = []
        self.seals: list[list[bytes]] = []
        view, at = memoryview(self._memory), 0
        for extent in extents:
            segment, seals, buffers = extent.segment, [], []
            for key, row in zip(extent.keys, extent.buffers, strict=True):
                buffer, at = view[at : at + size], at + size
                seals.append(coder.encode(key, segment.epoch, row, buffer))
                buffers.append(buffer)
            if segment.nonces is not None:
                # Already now: who looks for segments under older keys has to see it.
                nonces = b"".join(seal[TAG_BYTES:] for seal in seals)
                slots = slice(extent.first, extent.first + len(seals))
                segment.nonces[slots] = np.frombuffer(nonces, "<u4").reshape(-1, 3)
            offset = segment.offset_of(extent.first)
            self.requests.append(IORequest(segment.data, buffers, offset))
            if coder.sealer is not None:
                self.seals.append(seals)

    def end(self) -> None:
        """Give the memory back: nothing moves any more."""
        self._scratch.take_back(self._memory)


def _write_records(extent: Extent, sequence: int, digests: Sequence[bytes]) -> None:
    segment, size = extent.segment, extent.segment.geometry.chunk_bytes
    segment.index.write(
        extent.first,
        encode_records(
            extent.keys, extent.first, sequence, size, digests, segment.seed, segment.epoch
        ),
    )


def _write_failed(
    backend: IOBackend, extent: Extent, sequence: int, error: OSError, coder: Coder | None
) -> Outcome:
    if len(extent.keys) == 1:
        return Outcome([False], [], _told("write to", extent, error))
    return _joined(
        Writing(backend, [one], sequence + index, coder).end()[0]
        for index, one in enumerate(extent.one_by_one())
    )


def _verified(
    backend: IOBackend,
    extent: Extent,
    raw: bytes | OSError,
    done: Moved | OSError,
    coder: Coder | None,
) -> Outcome:
    """Compare what was read with the records that were there just before, and decode it."""
    error = raw if isinstance(raw, OSError) else done
    if isinstance(error, OSError):
        if len(extent.keys) == 1:
            return Outcome([False], [], _told("read of", extent, error))
        return _joined(read_extents(backend, [one], coder)[0] for one in extent.one_by_one())
    assert isinstance(raw, bytes)
    assert isinstance(done, Moved)
    segment, first = extent.segment, extent.first
    known = segment.index.chunks(first, raw, segment.epoch)
    if segment.geometry.sealed:
        return _opened(extent, known, done.length, coder)
    ok = [
        known.get(slot) == each
        for slot, each in enumerate(zip(extent.keys, done.digests, strict=False), first)
    ]
    # What was not moved whole has no digest.
    ok += [False] * (len(extent.keys) - len(ok))
    # Perhaps the record was just being written again, because its chunk was used: a chunk whose
    # digest is that of the record is the right one, whenever that was read.
    for index, digest in enumerate(done.digests):
        known_now = (extent.keys[index], digest)
        ok[index] = ok[index] or _settled(segment, first + index) == known_now
        if ok[index] and coder is not None:
            coder.decode(extent.buffers[index])
    if all(ok):
        return Outcome(ok, [], None)
    wrong = [first + index for index, one in enumerate(ok) if not one]
    return Outcome(ok, wrong, f"{segment.path}: slots {wrong} do not hold what their records say")


def _opened(
    extent: Extent,
    known: Mapping[int, tuple[bytes, bytes]],
    length: int,
    coder: Coder | None,
) -> Outcome:
    """Open what was read, the first `length` bytes of an extent; see `_verified`."""
    segment, size = extent.segment, extent.segment.geometry.chunk_bytes
    sealer = None if coder is None else coder.sealer
    ok: list[bool] = []
    wrong: list[int] = []
    unknown: list[int] = []
    each = zip(extent.keys, extent.buffers, strict=True)
    for slot, (key, buffer) in enumerate(each, extent.first):
        whole = length >= size
        length -= segment.geometry.slot_bytes
        found = known.get(slot)
        if found is None or found[0] != key:
            found = _settled(segment, slot)
        seal = found[1] if found is not None and found[0] == key else None
        good = whole and seal is not None and _is_last(segment, slot, seal)
        if good and seal is not None and sealer is not None and coder is not None:
            if not sealer.has_key(key, seal):
                unknown.append(slot)
            good = sealer.open(key, segment.epoch, seal, buffer[:size])
            if good:
                coder.decode(buffer)
        ok.append(good)
        if not good and slot not in unknown[-1:]:
            wrong.append(slot)
    told = None
    if wrong:
        told = f"{segment.path}: slots {wrong} do not hold what their records say"
    elif unknown:
        told = f"{segment.path}: slots {unknown} are encrypted with keys that are not known"
    return Outcome(ok, wrong, told)


def _is_last(segment: Segment, slot: int, seal: bytes) -> bool:
    """Whether this is the seal that this process knows of; what others write it cannot know."""
    return segment.nonces is None or segment.nonces[slot].tobytes() == seal[TAG_BYTES:]


def _settled(segment: Segment, slot: int) -> tuple[bytes, bytes] | None:
    """What the slot's record says while no thread of this process writes it."""
    try:
        raw = segment.index.read_settled(slot, 1)
    except OSError:
        return None
    return segment.index.chunks(slot, raw, segment.epoch).get(slot)


def gravest(outcomes: Iterable[Outcome]) -> str | None:
    """The error to report for several outcomes: a failed call rather than a mismatch."""
    mismatch: str | None = None
    for outcome in outcomes:
        if outcome.error is not None:
            if not outcome.wrong:
                return outcome.error
            mismatch = mismatch or outcome.error
    return mismatch


def _joined(parts: Iterable[Outcome]) -> Outcome:
    outcomes = list(parts)
    ok = [one for outcome in outcomes for one in outcome.ok]
    wrong = [slot for outcome in outcomes for slot in outcome.wrong]
    return Outcome(ok, wrong, gravest(outcomes))


def _told(what: str, extent: Extent, error: OSError) -> str:
    return f"{what} {extent.segment.path} slot {extent.first}: {error.strerror or error}"
