"""Sealing: encrypt the payloads of chunks, and prove on the way back that nobody changed them.

AES-256 in Galois/counter mode (NIST SP 800-38D). Each chunk has a key of its own, derived from its
tenant's by HKDF-Expand with SHA-256 (RFC 5869, section 2.3) from where the chunk belongs: the
namespace, the epoch and its key. So a payload opens only as the chunk that it was sealed as, and a
nonce has to differ only from those of earlier writes of that one chunk: 64 random bits do, and need
no counter that a crash or a restored folder would set back.

A *seal* is the tag of a payload and its nonce, which begins with the id of the tenant's key. It
takes the place of the digest in a record.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from copy import copy
from hashlib import sha256
from typing import Any

from kvstore.errors import ConfigError
from kvstore.tiers.keys import ID_BYTES, KeyRing, Owned, Secret

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
except ImportError:  # pragma: no cover
    Cipher = None  # type: ignore[assignment,misc]

__all__ = ["CIPHER", "NONCE_BYTES", "SEAL_BYTES", "TAG_BYTES", "Sealer", "is_sealed"]

CIPHER = "aes-256-gcm"
"""What the identity of an encrypted namespace says."""

TAG_BYTES = 16
NONCE_BYTES = 12
SEAL_BYTES = TAG_BYTES + NONCE_BYTES

PIECE_BYTES = 2**30
"""Most bytes of one call of the cipher."""

_LABEL = b"kvstore chunk key 1"


def is_sealed(identity: Mapping[str, Any]) -> bool:
    """Return whether the chunks of a namespace of this identity are sealed."""
    return bool(identity.get("encryption") == CIPHER)


class Sealer:
    """Seals and opens the payloads of one namespace. Safe to use from several threads.

    Attributes:
        keys: of the tenants.
        before: keys that tenants had when the writing began: see `KeyRing.newest`.

    Args:
        place: what its chunks have in common: a namespace's digest, or a place in a store.

    Raises:
        ConfigError: if the package ``cryptography`` is missing.
    """

    def __init__(self, keys: KeyRing, place: str) -> None:
        if Cipher is None:
            raise ConfigError(
                "encryption_keys: needs cryptography, pip install 'kvstore-offload[encryption]'"
            )
        self.keys = keys
        self._place = _LABEL + sha256(place.encode()).digest()
        self.before: Owned = ()

    def begun(self) -> Sealer:
        """Return the sealer for what begins to be written now, with the keys that there are."""
        sealer = copy(self)
        sealer.before = self.keys.owned
        return sealer

    def seal(self, key: bytes, epoch: int, payload: memoryview, out: memoryview) -> bytes:
        """Encrypt `payload` into `out`, which may be the same memory; returns the seal."""
        secret = self.keys.newest(key, self.before)
        nonce = secret.id + os.urandom(NONCE_BYTES - ID_BYTES)
        cipher = self._cipher(secret, key, epoch, nonce, None).encryptor()
        _run(cipher, payload, out)
        cipher.finalize()
        tag: bytes = cipher.tag
        return tag + nonce

    def has_key(self, key: bytes, seal: bytes) -> bool:
        """Whether the key is known with which the chunk was sealed."""
        return self.keys.find(key, seal[TAG_BYTES : TAG_BYTES + ID_BYTES]) is not None

    def open(self, key: bytes, epoch: int, seal: bytes, payload: memoryview) -> bool:
        """Decrypt `payload` in place; returns whether it is what was sealed as this chunk.

        If not, its memory holds nothing of use.
        """
        tag, nonce = seal[:TAG_BYTES], seal[TAG_BYTES:]
        secret = self.keys.find(key, nonce[:ID_BYTES])
        if secret is None or len(nonce) != NONCE_BYTES:
            return False
        cipher = self._cipher(secret, key, epoch, nonce, tag).decryptor()
        _run(cipher, payload, payload)
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True

    def _cipher(
        self, secret: Secret, key: bytes, epoch: int, nonce: bytes, tag: bytes | None
    ) -> Cipher[modes.GCM]:
        info = self._place + epoch.to_bytes(8, "little") + key
        derived = hmac.digest(secret.material, info + b"\x01", "sha256")
        return Cipher(algorithms.AES(derived), modes.GCM(nonce, tag))


def _run(cipher: Any, source: memoryview, target: memoryview) -> None:
    for start in range(0, len(source), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        cipher.update_into(source[piece], target[piece])
