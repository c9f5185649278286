"""Digest of a payload: XXH3 of 128 bits, in canonical (big-endian) form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from xxhash import xxh3_128_digest

__all__ = ["address", "digest", "digests"]

_NAMES = ("XXH3_128bits_dispatch", "XXH3_128bits")
"""Names of the C function; the first uses the widest instructions of the processor."""

_SAMPLE = bytes(range(251)) * 5


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


def digest(buffer: memoryview) -> bytes:
    """The digest of `buffer`. Releases the GIL."""
    return xxh3_128_digest(buffer)


def digests(buffers: Sequence[memoryview], size: int, count: int) -> list[bytes]:
    """The digests of the first `size` bytes of each buffer, as far as `count` bytes reach.

    Args:
        count: bytes that were moved into or out of `buffers`, from the first on.
    """
    found: list[bytes] = []
    for buffer in buffers:
        if count < min(size, len(buffer)):
            break
        found.append(digest(buffer[:size]))
        count -= len(buffer)
    return found


@cache
def address() -> int | None:
    """Where a C function ``XXH128_hash_t (const void *, size_t)`` is that makes the digest.

    It is the xxhash package's own, which was tried here. None where that package does not show it.
    """
    compiled = find_spec("xxhash._xxhash")
    if compiled is None or compiled.origin is None:
        return None
    for name in _NAMES:
        try:
            function = ctypes.CDLL(compiled.origin)[name]
        except (AttributeError, OSError):
            continue
        function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        function.restype = _Hash
        found = function(_SAMPLE, len(_SAMPLE))
        if found.high.to_bytes(8) + found.low.to_bytes(8) == xxh3_128_digest(_SAMPLE):
            return ctypes.cast(function, ctypes.c_void_p).value
    return None
