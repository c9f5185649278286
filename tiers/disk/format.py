"""Formats 1 and 2: the layout of a segment file, byte by byte.

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

In format 2 payloads are sealed (`kvstore.tiers.sealing`). The header and the records say version 2,
all payloads have the length that the header says, and a record has a seal in place of the digest:

    16   8 B   nonce, first part         24   16 B  tag
    120  4 B   nonce, last part

This module is long because all that is in a segment stands in one place.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvstore.errors import MALFORMED, ForeignFileError
from kvstore.tiers.keys import ID_BYTES, KeyRing
from kvstore.types import MAX_KEY_BYTES

__all__ = [
    "ALIGN",
    "DIGEST_BYTES",
    "MAX_SLOTS",
    "RECORD",
    "RECORD_BYTES",
    "Geometry",
    "Header",
    "LiveRecords",
    "Records",
    "checksummed",
    "decode_at",
    "decode_records",
    "encode_header",
    "encode_records",
    "live_chunks",
    "parse_header",
    "segment_seed",
    "set_seal",
    "used_record",
]

VERSION, SEALED = 1, 2
ALIGN = 4096
RECORD_BYTES = 128

SEGMENT_BYTES = 256 * 2**20
"""Size of a segment where nothing else is asked for."""

MAX_SLOTS = 2**20
"""Most slots of a segment: no header can make a reader take more than 128 MiB for its index."""
WORDS = RECORD_BYTES // 8
LIVE = 1

DIGEST_BYTES = 16
"""Length of a payload's digest, and of the tag at the beginning of its seal."""

REMEDY = "nothing in it can be found again, so remove it"

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
        ("last", "<u4"),
        ("crc", "<u4"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

_PACKED = struct.Struct(f"<HBBIQQ16sQQII{MAX_KEY_BYTES}sI")
"""A record without its CRC."""
assert _PACKED.size == RECORD_BYTES - 4

_NONCE = struct.Struct("<QI")
"""The nonce of a seal, as the fields `length` and `last` hold it."""

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
        sealed: whether payloads are sealed.
    """

    slots: int
    slot_bytes: int
    chunk_bytes: int
    sealed: bool = False

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

    def is_like(self, other: Geometry) -> bool:
        """Whether only the number of slots differs."""
        return replace(self, slots=other.slots) == other

    @property
    def record_length(self) -> int | None:
        """The length of payloads as records say it; None if they have a seal instead."""
        return None if self.sealed else self.chunk_bytes

    @classmethod
    def wanted(
        cls,
        segment_bytes: int | None,
        capacity_bytes: int,
        slot_bytes: int,
        chunk_bytes: int,
        sealed: bool = False,
    ) -> Geometry:
        """The segments to make on a path with this capacity; maybe without a slot.

        Without a size the files have `SEGMENT_BYTES`, or an eighth of the capacity where that is
        less, but room for one slot.
        """
        if segment_bytes is None:
            segment_bytes = max(
                cls(1, slot_bytes, chunk_bytes).file_bytes, min(SEGMENT_BYTES, capacity_bytes // 8)
            )
        return cls.fitting(segment_bytes, slot_bytes, chunk_bytes, sealed)

    @classmethod
    def fitting(
        cls, segment_bytes: int, slot_bytes: int, chunk_bytes: int, sealed: bool = False
    ) -> Geometry:
        """The most slots of `slot_bytes` that a file of `segment_bytes` can hold; maybe none."""
        slots = max(0, (segment_bytes - ALIGN) // (slot_bytes + RECORD_BYTES))
        slots = min(slots, MAX_SLOTS)
        while slots and cls(slots, slot_bytes, chunk_bytes).file_bytes > segment_bytes:
            slots -= 1
        return cls(slots, slot_bytes, chunk_bytes, sealed)


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
            "version": str(SEALED if g.sealed else VERSION),
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
            raise ForeignFileError(
                f"{name}: format {told['format']!r:.40} is not a kvstore segment"
            )
        if told["version"] not in (str(VERSION), str(SEALED)):
            raise ForeignFileError(
                f"{name}: format version {told['version']!r:.40}; this program reads versions "
                f"{VERSION} and {SEALED}"
            )
        header = Header(
            str(told["namespace"]),
            str(told["segment"]),
            Geometry(
                int(told["slots"]),
                int(told["slot_bytes"]),
                int(told["chunk_bytes"]),
                told["version"] == str(SEALED),
            ),
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
        raise ForeignFileError(f"{name}: damaged header ({error}); {REMEDY}") from error
    if not whole:
        raise ForeignFileError(f"{name}: damaged header; {REMEDY}")
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
    """Return records of `keys` in adjacent slots, ready to be written.

    Args:
        digests: of their payloads, or their seals.
    """
    # On the path of every write, and mostly for few records: no arrays here.
    now = time.time_ns() // 1_000_000
    sealed = bytearray()
    for index, (key, digest) in enumerate(zip(keys, digests, strict=True)):
        version, its_length, last = VERSION, length, 0
        if len(digest) > DIGEST_BYTES:
            version, (its_length, last) = SEALED, _NONCE.unpack(digest[DIGEST_BYTES:])
        record = _PACKED.pack(
            version,
            LIVE,
            len(key),
            first_slot + index,
            first_sequence + index,
            its_length,
            digest[:DIGEST_BYTES],
            now,
            now,
            0,
            epoch,
            key,
            last,
        )
        sealed += record
        sealed += crc32c(record, seed).to_bytes(4, "little")
    return bytes(sealed)


def live_chunks(
    raw: bytes, first_slot: int, length: int | None, seed: int, epoch: int = 0
) -> dict[int, tuple[bytes, bytes]]:
    """Key and digest, or seal, by slot of the valid records of `epoch` from `first_slot` on.

    Says the same as `decode_records`, faster for the few records of an extent.
    """
    found: dict[int, tuple[bytes, bytes]] = {}
    view = memoryview(raw)
    wanted = SEALED if length is None else VERSION
    for index in range(len(raw) // RECORD_BYTES):
        at = index * RECORD_BYTES
        version, state, key_length, slot, _, its_length, digest, _, _, _, its_epoch, key, last = (
            _PACKED.unpack_from(raw, at)
        )
        if (
            version == wanted
            and state == LIVE
            and slot == first_slot + index
            and its_length == (its_length if length is None else length)
            and its_epoch == epoch
            and 1 <= key_length <= MAX_KEY_BYTES
            and crc32c(view[at : at + RECORD_BYTES - 4], seed)
            == int.from_bytes(view[at + RECORD_BYTES - 4 : at + RECORD_BYTES], "little")
        ):
            seal = digest if length is not None else digest + _NONCE.pack(its_length, last)
            found[slot] = (key[:key_length], seal)
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
    valid = version in (VERSION, SEALED) and state == LIVE
    if not valid or (its_slot, its_key[:length]) != (slot, key):
        return None
    fields[4] = sequence
    fields[8:10] = max(before_ms, read_ms), min(before + reads, 2**32 - 1)
    record = _PACKED.pack(*fields)
    return record + int(crc32c(record, seed)).to_bytes(4, "little")


def set_seal(records: Records, seal: bytes) -> None:
    """Give records the seal of a payload that was sealed anew."""
    records["digest"] = np.frombuffer(seal, np.uint8, DIGEST_BYTES)
    records["length"], records["last"] = _NONCE.unpack(seal[DIGEST_BYTES:])


def checksummed(records: Records, seed: int) -> bytes:
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
        return self._where(np.isin(self.records["epoch"], epochs))

    def readable(self, keys: KeyRing) -> LiveRecords:
        """Return the records of payloads that are sealed with keys of those that they are of."""
        numbers = self._key_numbers
        chosen = np.isin(numbers, _numbers_of(keys.ids()))
        # A key that is a tenant's own now, and was that of all others, opens nothing of theirs.
        (own,) = np.nonzero(np.isin(numbers, _numbers_of(keys.own_ids)))
        if len(own):
            names, ids = self.keys(), self.key_ids()
            for at in own.tolist():
                chosen[at] = keys.find(names[at], bytes.fromhex(ids[at])) is not None
        return self._where(chosen)

    def _where(self, chosen: npt.NDArray[np.bool_]) -> LiveRecords:
        if chosen.all():
            return self
        slots = np.array(self.slots, np.int64)
        return LiveRecords(slots[chosen].tolist(), self.records[chosen], self.damaged)

    @property
    def _key_numbers(self) -> npt.NDArray[np.uint32]:
        return self.nonces()[:, 0]

    def keys(self) -> list[bytes]:
        """The keys, in the same order."""
        raw = self.records["key"].tobytes()
        lengths = self.records["key_length"].tolist()
        return [
            raw[at * MAX_KEY_BYTES : at * MAX_KEY_BYTES + length]
            for at, length in enumerate(lengths)
        ]

    def digests(self) -> list[bytes]:
        """The digests of payloads or their seals, in the same order."""
        raw = self.records["digest"].tobytes()
        found = [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]
        if not len(self.records) or self.records["version"][0] == VERSION:
            return found
        each = zip(self.records["length"].tolist(), self.records["last"].tolist(), strict=True)
        return [tag + _NONCE.pack(*nonce) for tag, nonce in zip(found, each, strict=True)]

    def by_slot(self) -> dict[int, tuple[bytes, bytes]]:
        """By slot, the key and the digest or seal: what tells whether a chunk is still there."""
        return dict(zip(self.slots, zip(self.keys(), self.digests(), strict=True), strict=True))

    def outdated(self, keys: KeyRing) -> bool:
        """Whether the payload of any is sealed with another key than the newest of its tenant."""
        names = np.ascontiguousarray(self.records["key"]).view(np.uint8)
        tags = names.reshape(len(self.records), MAX_KEY_BYTES)[:, : keys.tag_bytes]
        ids = self._key_numbers.astype("<u4")[:, None].view(np.uint8)
        pairs = np.unique(np.column_stack([tags, ids]), axis=0)
        return any(
            keys.newest(bytes(pair[:-ID_BYTES])).id != bytes(pair[-ID_BYTES:]) for pair in pairs
        )

    def key_ids(self) -> list[str]:
        """The ids of the keys that payloads are sealed with, in hex, in the same order."""
        return [number.to_bytes(ID_BYTES, "little").hex() for number in self._key_numbers.tolist()]

    def nonces(self) -> npt.NDArray[np.uint32]:
        """The nonces in seals, in the same order; shape (records, 3). The first is the key's id."""
        first = np.ascontiguousarray(self.records["length"]).view(np.uint32).reshape(-1, 2)
        return np.column_stack([first, self.records["last"]])


def _numbers_of(key_ids: Iterable[bytes]) -> list[int]:
    return [int.from_bytes(key_id, "little") for key_id in key_ids]


def decode_records(raw: bytes, first_slot: int, length: int | None, seed: int) -> LiveRecords:
    """Find the valid records in `raw`, the index from slot `first_slot` on.

    A record counts only when its CRC, version, slot and payload `length` are
    right; a record of zeros is an empty slot; all else is damaged.

    Args:
        length: None if payloads are sealed.
    """
    slots = np.arange(first_slot, first_slot + len(raw) // RECORD_BYTES)
    return decode_at(raw, slots, length, seed)


def decode_at(
    raw: bytes, slots: npt.NDArray[np.int64], length: int | None, seed: int
) -> LiveRecords:
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
        & (found["version"] == (SEALED if length is None else VERSION))
        & (found["state"] == LIVE)
        & (found["slot"] == slots[used])
        & ((length is None) | (found["length"] == (length or 0)))
        & (found["key_length"] >= 1)
        & (found["key_length"] <= MAX_KEY_BYTES)
    )
    return LiveRecords(
        slots[used[valid]].tolist(),
        found[valid],
        slots[used[~valid]].tolist(),
    )
