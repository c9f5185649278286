"""Record of a value in a store: identifies the payload.

128 bytes, little-endian:

    0    4 B   b"kvs1"
    4    u32   key length k, 1 to 56
    8    u64   payload length
    16   16 B  xxh3-128 of the payload
    32   56 B  key, its first k bytes
    88   36 B  zero
    124  u32   CRC32C of bytes 0 to 123, seeded with the CRC32C of the place (namespace and epoch)

The seed ties a record to its place: under another namespace it is invalid. The record of a sealed
payload (`kvstore.tiers.sealing`) begins with b"kvs2", and has a seal in place of the digest:

    16   16 B  tag
    88   12 B  nonce
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from kvstore.tiers.disk.digest import digest
from kvstore.tiers.sealing import NONCE_BYTES, SEAL_BYTES, TAG_BYTES, Sealer
from kvstore.types import MAX_KEY_BYTES

__all__ = ["NO_KEY", "RECORD_BYTES", "WRONG", "decode", "encode", "fault_of", "seed_of"]

WRONG = "a value is not what was stored under its key"
NO_KEY = "a value is encrypted with a key that is not known"

RECORD_BYTES = 128
_MAGIC, _SEALED = b"kvs1", b"kvs2"
_PACKED = struct.Struct(f"<4sIQ16s{MAX_KEY_BYTES}s{NONCE_BYTES}s24x")
_CRC = struct.Struct("<I")
assert _PACKED.size + _CRC.size == RECORD_BYTES


def seed_of(place: str) -> int:
    """Return the seed of records at this place."""
    seed: int = crc32c(place.encode())
    return seed


def encode(key: bytes, length: int, proof: bytes, seed: int) -> bytes:
    """Encode the record of a payload of `length` bytes with this digest or seal."""
    tag, nonce = proof[:TAG_BYTES], proof[TAG_BYTES:]
    packed = _PACKED.pack(_SEALED if nonce else _MAGIC, len(key), length, tag, key, nonce)
    return packed + _CRC.pack(crc32c(packed, seed))


def decode(record: bytes, key: bytes, length: int, seed: int) -> bytes | None:
    """Return the digest of the payload, or its seal; None if the record is not of this chunk."""
    if len(record) != RECORD_BYTES:
        return None
    packed = record[: _PACKED.size]
    if _CRC.unpack(record[_PACKED.size :])[0] != crc32c(packed, seed):
        return None
    magic, key_length, found, tag, padded, nonce = _PACKED.unpack(packed)
    if magic not in (_MAGIC, _SEALED) or found != length or padded[:key_length] != key:
        return None
    result: bytes = tag + nonce if magic == _SEALED else tag
    return result


def fault_of(
    record: bytes, key: bytes, payload: memoryview, seed: int, sealer: Sealer | None
) -> str | None:
    """Return what is wrong with a payload that was read, or None; opens a sealed one in place."""
    proof = decode(record, key, payload.nbytes, seed)
    if proof is None:
        return WRONG
    if sealer is None:
        return None if proof == digest(payload) else WRONG
    if not sealer.has_key(key, proof):
        return NO_KEY if len(proof) == SEAL_BYTES else WRONG
    return None if sealer.open(key, 0, proof, payload) else WRONG
