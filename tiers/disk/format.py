"""Format 1: the layout of a segment file, byte by byte.

A segment is a safetensors file of fixed size:

    offset 0      8 bytes      length of the JSON header, little-endian
    offset 8      n bytes      JSON, padded with spaces so that 8 + n is 4096
    then          index        U8 [slots, 128]        one record per slot
    then          padding      U8 [p]                 only where needed to reach a 4096 boundary
    then          blocks       U8 [slots, slot_bytes]

The header never changes. A record that is not valid means that its slot holds
nothing. A record is 128 bytes, little-endian:

    0    u16   version, 1                40   u64   stored at, ms since 1970
    2    u8    state, 1 = live           48   u64   last read at, ms since 1970
    3    u8    key length k, 1 to 56     56   u32   times read
    4    u32   slot in this segment      60   u32   epoch of the writer
    8    u64   sequence                  64   56 B  key, its first k bytes
    16   u64   payload length            120  u32   0
    24   16 B  xxh3-128 of the payload   124  u32   CRC32C of bytes 0 to 123,
                                                    seeded with that of the segment id

The seed and the slot tie a record to its place: copied elsewhere it is invalid.
Of two valid records of one key, the one with the higher sequence counts.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvstore.errors import MALFORMED, ForeignFileError
from kvstore.types import MAX_KEY_BYTES

__all__ = [
    "ALIGN",
    "MAX_SLOTS",
    "RECORD",
    "RECORD_BYTES",
    "Geometry",
    "Header",
    "LiveRecords",
    "Records",
    "decode_at",
    "decode_records",
    "encode_header",
    "encode_records",
    "live_chunks",
    "parse_header",
    "reseal_records",
    "segment_seed",
    "used_record",
]

VERSION = 1
ALIGN = 4096
RECORD_BYTES = 128

SEGMENT_BYTES = 256 * 2**20
"""Size of a segment where nothing else is asked for."""

MAX_SLOTS = 2**20
"""Most slots of a segment: no header can make a reader take more than 128 MiB for its index."""
WORDS = RECORD_BYTES // 8
LIVE = 1

RECORD = np.dtype(
    [
        ("version", "<u2"),
        ("state", "u1"),
        ("key_length", "u1"),
        ("slot", "<u4"),
        ("sequence", "<u8"),
        ("length", "<u8"),
        ("digest", "u1", (16,)),
        ("stored_ms", "<u8"),
        ("read_ms", "<u8"),
        ("reads", "<u4"),
        ("epoch", "<u4"),
        ("key", "u1", (MAX_KEY_BYTES,)),
        ("zero_b", "<u4"),
        ("crc", "<u4"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

_PACKED = struct.Struct(f"<HBBIQQ16sQQII{MAX_KEY_BYTES}sI")
"""A record without its CRC."""
assert _PACKED.size == RECORD_BYTES - 4

Records = npt.NDArray[np.void]


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that all segments of a lane share.

    Attributes:
        slots: slots in a segment.
        slot_bytes: bytes of a slot, a multiple of 4096.
        chunk_bytes: bytes of a payload, at most `slot_bytes`.
    """

    slots: int
    slot_bytes: int
    chunk_bytes: int

    @property
    def index_offset(self) -> int:
        """Where the index begins. The header fits one page by construction."""
        return ALIGN

    @property
    def blocks_offset(self) -> int:
        """Where slot 0 begins."""
        return self.index_offset + _up(self.slots * RECORD_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of a segment file."""
        return self.blocks_offset + self.slots * self.slot_bytes

    @classmethod
    def wanted(
        cls, segment_bytes: int | None, capacity_bytes: int, slot_bytes: int, chunk_bytes: int
    ) -> Geometry:
        """The segments to make on a path with this capacity; maybe without a slot.

        Without a size the files have `SEGMENT_BYTES`, or an eighth of the capacity where that is
        less, but room for one slot.
        """
        if segment_bytes is None:
            segment_bytes = max(
                cls(1, slot_bytes, chunk_bytes).file_bytes, min(SEGMENT_BYTES, capacity_bytes // 8)
            )
        return cls.fitting(segment_bytes, slot_bytes, chunk_bytes)

    @classmethod
    def fitting(cls, segment_bytes: int, slot_bytes: int, chunk_bytes: int) -> Geometry:
        """The most slots of `slot_bytes` that a file of `segment_bytes` can hold; maybe none."""
        slots = max(0, (segment_bytes - ALIGN) // (slot_bytes + RECORD_BYTES))
        slots = min(slots, MAX_SLOTS)
        while slots and cls(slots, slot_bytes, chunk_bytes).file_bytes > segment_bytes:
            slots -= 1
        return cls(slots, slot_bytes, chunk_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment."""

    namespace: str
    segment_id: str
    geometry: Geometry


def segment_seed(segment_id: str) -> int:
    """The CRC that seeds the records of a segment."""
    return int(crc32c(bytes.fromhex(segment_id)))


def encode_header(header: Header) -> bytes:
    """The first page of a segment file.

    Raises:
        ValueError: if it does not fit into one page.
    """
    g = header.geometry
    index_bytes = g.slots * RECORD_BYTES
    padding = _up(index_bytes) - index_bytes
    start = index_bytes + padding
    tensors: dict[str, Any] = {
        "__metadata__": {
            "format": "kvstore segment",
            "version": str(VERSION),
            "namespace": header.namespace,
            "segment": header.segment_id,
            "slots": str(g.slots),
            "slot_bytes": str(g.slot_bytes),
            "chunk_bytes": str(g.chunk_bytes),
        },
        "index": {
            "dtype": "U8",
            "shape": [g.slots, RECORD_BYTES],
            "data_offsets": [0, index_bytes],
        },
    }
    if padding:
        tensors["padding"] = {
            "dtype": "U8",
            "shape": [padding],
            "data_offsets": [index_bytes, start],
        }
    tensors["blocks"] = {
        "dtype": "U8",
        "shape": [g.slots, g.slot_bytes],
        "data_offsets": [start, start + g.slots * g.slot_bytes],
    }
    text = json.dumps(tensors, separators=(",", ":")).encode()
    if 8 + len(text) > ALIGN:
        raise ValueError(f"a header of {len(text)} bytes does not fit into a page")
    text += b" " * (ALIGN - 8 - len(text))
    return struct.pack("<Q", len(text)) + text


def parse_header(page: bytes, name: str) -> Header:
    """Read the first page of a segment file called `name`.

    Raises:
        ForeignFileError: if it is not a segment of this format and version; the
            message says what it is instead.
    """
    if len(page) < ALIGN:
        raise ForeignFileError(f"{name}: only {len(page)} bytes, not a segment")
    (length,) = struct.unpack_from("<Q", page)
    if length != ALIGN - 8:
        raise ForeignFileError(f"{name}: header of {length} bytes, not a segment of this format")
    try:
        tensors = json.loads(page[8:ALIGN])
        told = tensors["__metadata__"]
        if told["format"] != "kvstore segment":
            raise ForeignFileError(f"{name}: format {told['format']!r} is not a kvstore segment")
        if told["version"] != str(VERSION):
            raise ForeignFileError(
                f"{name}: format version {told['version']}; this program reads version {VERSION}"
            )
        header = Header(
            str(told["namespace"]),
            str(told["segment"]),
            Geometry(int(told["slots"]), int(told["slot_bytes"]), int(told["chunk_bytes"])),
        )
        sane = (
            len(bytes.fromhex(header.segment_id)) == 16
            and 0 < header.geometry.slots <= MAX_SLOTS
            and 0 < header.geometry.chunk_bytes <= header.geometry.slot_bytes
        )
        whole = sane and encode_header(header)[:ALIGN] == page[:ALIGN]
    except ForeignFileError:
        raise
    except MALFORMED as error:
        raise ForeignFileError(f"{name}: damaged header ({error})") from error
    if not whole:
        raise ForeignFileError(f"{name}: damaged header")
    return header


def encode_records(
    keys: Sequence[bytes],
    first_slot: int,
    first_sequence: int,
    length: int,
    digests: Sequence[bytes],
    seed: int,
    epoch: int = 0,
) -> bytes:
    """Return records of `keys` in adjacent slots, ready to be written."""
    # On the path of every write, and mostly for few records: no arrays here.
    now = time.time_ns() // 1_000_000
    sealed = bytearray()
    for index, (key, digest) in enumerate(zip(keys, digests, strict=True)):
        record = _PACKED.pack(
            VERSION,
            LIVE,
            len(key),
            first_slot + index,
            first_sequence + index,
            length,
            digest,
            now,
            now,
            0,
            epoch,
            key,
            0,
        )
        sealed += record
        sealed += crc32c(record, seed).to_bytes(4, "little")
    return bytes(sealed)


def live_chunks(
    raw: bytes, first_slot: int, length: int, seed: int, epoch: int = 0
) -> dict[int, tuple[bytes, bytes]]:
    """Key and digest by slot of the valid records of `epoch` in `raw`, from `first_slot` on.

    Says the same as `decode_records`, faster for the few records of an extent.
    """
    found: dict[int, tuple[bytes, bytes]] = {}
    view = memoryview(raw)
    for index in range(len(raw) // RECORD_BYTES):
        at = index * RECORD_BYTES
        version, state, key_length, slot, _, its_length, digest, _, _, _, its_epoch, key, _ = (
            _PACKED.unpack_from(raw, at)
        )
        if (
            version == VERSION
            and state == LIVE
            and slot == first_slot + index
            and its_length == length
            and its_epoch == epoch
            and 1 <= key_length <= MAX_KEY_BYTES
            and crc32c(view[at : at + RECORD_BYTES - 4], seed)
            == int.from_bytes(view[at + RECORD_BYTES - 4 : at + RECORD_BYTES], "little")
        ):
            found[slot] = (key[:key_length], digest)
    return found


def used_record(
    raw: bytes, slot: int, key: bytes, seed: int, sequence: int, read_ms: int, reads: int
) -> bytes | None:
    """The record `raw` of `slot` with another sequence, a later use and more reads.

    None if it is not a valid record of `key`.
    """
    if len(raw) != RECORD_BYTES or crc32c(raw[:-4], seed) != int.from_bytes(raw[-4:], "little"):
        return None
    fields = list(_PACKED.unpack_from(raw))
    version, state, length, its_slot, _, _, _, _, before_ms, before, _, its_key, _ = fields
    if (version, state, its_slot, its_key[:length]) != (VERSION, LIVE, slot, key):
        return None
    fields[4] = sequence
    fields[8:10] = max(before_ms, read_ms), min(before + reads, 2**32 - 1)
    record = _PACKED.pack(*fields)
    return record + int(crc32c(record, seed)).to_bytes(4, "little")


def reseal_records(records: Records, seed: int) -> bytes:
    """Set the CRC of `records` and return their bytes."""
    raw = memoryview(records.tobytes())
    records["crc"] = [
        crc32c(raw[at : at + RECORD_BYTES - 4], seed) for at in range(0, len(raw), RECORD_BYTES)
    ]
    return records.tobytes()


@dataclass(slots=True)
class LiveRecords:
    """The valid records of an index, or a part of one.

    Attributes:
        slots: their slots within the segment, ascending.
        records: the records, in the same order.
        damaged: slots whose record is neither empty nor valid.
    """

    slots: list[int]
    records: Records
    damaged: list[int]

    def of_epoch(self, *epochs: int) -> LiveRecords:
        """Return the records of these epochs."""
        same = np.isin(self.records["epoch"], epochs)
        if same.all():
            return self
        slots = np.array(self.slots, np.int64)
        return LiveRecords(slots[same].tolist(), self.records[same], self.damaged)

    def keys(self) -> list[bytes]:
        """The keys, in the same order."""
        raw = self.records["key"].tobytes()
        lengths = self.records["key_length"].tolist()
        return [
            raw[at * MAX_KEY_BYTES : at * MAX_KEY_BYTES + length]
            for at, length in enumerate(lengths)
        ]

    def digests(self) -> list[bytes]:
        """The payload digests, in the same order."""
        raw = self.records["digest"].tobytes()
        return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def decode_records(raw: bytes, first_slot: int, length: int, seed: int) -> LiveRecords:
    """Find the valid records in `raw`, the index from slot `first_slot` on.

    A record counts only when its CRC, version, slot and payload `length` are
    right; a record of zeros is an empty slot; all else is damaged.
    """
    slots = np.arange(first_slot, first_slot + len(raw) // RECORD_BYTES)
    return decode_at(raw, slots, length, seed)


def decode_at(raw: bytes, slots: npt.NDArray[np.int64], length: int, seed: int) -> LiveRecords:
    """Decode the records of any `slots`, ascending."""
    count = len(slots)
    records = np.frombuffer(raw, RECORD, count)
    words = np.frombuffer(raw, "<u8", count * WORDS).reshape(count, WORDS)
    (used,) = np.nonzero(words.any(axis=1))
    view = memoryview(raw)
    crc = np.fromiter(
        (crc32c(view[at : at + RECORD_BYTES - 4], seed) for at in (used * RECORD_BYTES).tolist()),
        np.uint32,
        len(used),
    )
    found = records[used]
    valid = (
        (found["crc"] == crc)
        & (found["version"] == VERSION)
        & (found["state"] == LIVE)
        & (found["slot"] == slots[used])
        & (found["length"] == length)
        & (found["key_length"] >= 1)
        & (found["key_length"] <= MAX_KEY_BYTES)
    )
    return LiveRecords(
        slots[used[valid]].tolist(),
        found[valid],
        slots[used[~valid]].tolist(),
    )
