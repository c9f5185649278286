"""Payloads: read one from a file and check it against what its record says of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh3_128

from kvstore.policies.shares import tag_of
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.sealing import SEAL_BYTES, Sealer

__all__ = ["Proof", "payload_fault", "payload_pieces", "read_payload", "sealer_of"]

READ_BYTES = 8 * 1024 * 1024
"""Most bytes of payload that one call reads."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a payload has to match.

    Attributes:
        epoch: in which the chunk was stored.
        value: the digest of the payload, or its seal.
    """

    key: bytes
    epoch: int
    value: bytes

    @property
    def sealed(self) -> bool:
        """Whether the payload is encrypted."""
        return len(self.value) == SEAL_BYTES

    @property
    def name(self) -> str:
        """What `value` is called."""
        return "seal" if self.sealed else "digest"

    def checkable(self, sealer: Sealer | None) -> bool:
        """Whether the payload can be checked: not without the key that it is encrypted with."""
        return not self.sealed or (sealer is not None and sealer.has_key(self.key, self.value))

    def check(self, payload: bytes | bytearray, sealer: Sealer | None) -> bytes | None:
        """Return the payload, decrypted; None if it does not match, or cannot be checked."""
        if not self.sealed:
            return bytes(payload) if xxh3_128(payload).digest() == self.value else None
        if sealer is None:
            return None
        opened = bytearray(payload)
        good = sealer.open(self.key, self.epoch, self.value, memoryview(opened))
        return bytes(opened) if good else None


def sealer_of(keys: str | None, namespace: str | None) -> Sealer | None:
    """Return what opens the chunks of a namespace, None without keys.

    Args:
        keys: where the keys are: see `KeyRing`.
        namespace: its digest.

    Raises:
        ConfigError: if the keys cannot be used.
    """
    if keys is None or namespace is None:
        return None
    return Sealer(KeyRing(keys, tag_of), namespace)


def payload_pieces(fd: int, offset: int, size: int) -> Iterator[bytes]:
    """Read up to `size` bytes, to the end of the file at most.

    They come in pieces: `size` may be damaged, and shall cost no memory then.

    Raises:
        OSError, OverflowError: as the system says.
    """
    end = offset + size
    while offset < end:
        piece = os.pread(fd, min(READ_BYTES, end - offset), offset)
        if not piece:
            return
        yield piece
        offset += len(piece)


def read_payload(fd: int, offset: int, size: int) -> bytes:
    """Return what of a payload can be read."""
    pieces: list[bytes] = []
    # What is missing shows when the payload is checked.
    with contextlib.suppress(OSError, OverflowError):
        pieces.extend(payload_pieces(fd, offset, size))
    return b"".join(pieces)


def payload_fault(
    fd: int, offset: int, size: int, proof: Proof, sealer: Sealer | None
) -> str | None:
    """Return what is wrong with a payload, or None. One that cannot be checked is only read."""
    hashed, done, sealed = xxh3_128(), 0, bytearray()
    opens = proof.sealed and proof.checkable(sealer)
    try:
        for piece in payload_pieces(fd, offset, size):
            done += len(piece)
            if opens:
                sealed += piece
            elif not proof.sealed:
                hashed.update(piece)
    except (OSError, OverflowError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if done < size:
        return f"truncated: only {done} of {size} bytes exist"
    if opens:
        good = proof.check(sealed, sealer) is not None
    else:
        good = proof.sealed or hashed.digest() == proof.value
    return None if good else f"payload does not match its {proof.name}"
