"""Codec: the numbers of a chunk in half as many bytes, on disk.

``int8``: each 64 neighbouring numbers become the largest of them by size, in their own type, and
an 8-bit integer each, 66 bytes for 128. The integers count in scales, 1/127 of the largest. A
number comes back changed by at most half a scale, and by the rounding of its own type. The largest
comes back as it was, so what was encoded once is not changed by being encoded again. Symmetric
quantization with a scale by group is as in LLM.int8 (Dettmers and others, 2022, section 2.1). Of a
group with a number that is infinite or none, all come back as none.

A chunk is only a run of numbers here: 64 neighbours are within one head and one token where heads
have a multiple of 64 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from kvstore.tiers import _codec
except ImportError:  # pragma: no cover
    _codec = None  # type: ignore[assignment]

__all__ = ["CODECS", "DTYPES", "GROUP_BYTES", "Codec"]

CODECS = ("int8",)
DTYPES = ("bfloat16", "float16")

GROUP = 64
CODED = GROUP + 2

GROUP_BYTES = 2 * GROUP
"""Bytes of a chunk for which there is one scale."""

NO_NUMBER = {"bfloat16": 0x7FC0, "float16": 0x7E00}
INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00}

LEAST = 0x0400
"""In a group whose largest bfloat16 is below, all are zero: 127 divided by it is not finite."""


class Codec:
    """Encodes and decodes chunks of one type of numbers. Safe to use from several threads.

    Attributes:
        compiled: whether the code in C is used.

    Args:
        dtype: one of `DTYPES`.
        compiled: whether the code in C is used, which gives the same bytes; by default where it is
            there.
    """

    def __init__(self, dtype: str, *, compiled: bool = True) -> None:
        self.dtype = dtype
        self._kind = DTYPES.index(dtype)
        self.compiled = compiled and _codec is not None

    @staticmethod
    def coded_bytes(chunk_bytes: int) -> int:
        """The bytes of an encoded chunk."""
        return -(-chunk_bytes // GROUP_BYTES) * CODED

    def __str__(self) -> str:
        return f"{CODECS[0]} of {self.dtype}"

    def identity(self, chunk_bytes: int) -> dict[str, Any]:
        """What the identity of a namespace says of chunks of this size that were encoded so."""
        return {"name": CODECS[0], "dtype": self.dtype, "chunk_bytes": chunk_bytes}

    def is_of(self, identity: Mapping[str, Any]) -> bool:
        """Whether the chunks of a namespace are encoded so."""
        told = identity.get("codec")
        size = told.get("chunk_bytes") if isinstance(told, dict) else None
        return (
            isinstance(size, int)
            and told == self.identity(size)
            and identity.get("chunk_bytes") == self.coded_bytes(size)
        )

    def encode(self, chunk: memoryview, out: memoryview) -> None:
        """Write the encoded chunk to the first bytes of `out`.

        Raises:
            ValueError: for an odd number of bytes, or too small an `out`.
        """
        if self.compiled:
            _codec.encode(chunk, out, self._kind)
            return
        coded = self.coded_bytes(len(chunk))
        if len(chunk) % 2 or len(out) < coded:
            raise ValueError("the target is too small, or the source no whole numbers")
        numbers = np.zeros(-(-len(chunk) // GROUP_BYTES) * GROUP, np.uint16)
        numbers[: len(chunk) // 2] = np.frombuffer(chunk, np.uint16)
        groups = numbers.reshape(-1, GROUP)
        largest = (groups & 0x7FFF).max(axis=1)
        wild = largest >= INFINITE[self.dtype]
        if self.dtype == "bfloat16":
            largest[largest < LEAST] = 0
        known = (largest > 0) & ~wild
        factors = np.zeros(len(groups), np.float32)
        factors[known] = np.float32(127) / self._widened(largest[known])
        scaled = self._widened(np.where(known[:, None], groups, 0)) * factors[:, None]
        largest[wild] = NO_NUMBER[self.dtype]
        found = np.empty((len(groups), CODED), np.uint8)
        found[:, :2] = largest.view(np.uint8).reshape(-1, 2)
        found[:, 2:] = np.rint(scaled).astype(np.int8).view(np.uint8)
        out[:coded] = found.tobytes()

    def decode(self, memory: memoryview, chunk_bytes: int) -> None:
        """Turn an encoded chunk at the beginning of `memory` into the chunk, in the same place.

        Raises:
            ValueError: for an odd number of bytes, or too small a `memory`.
        """
        if self.compiled:
            _codec.decode(memory, chunk_bytes, self._kind)
            return
        coded = self.coded_bytes(chunk_bytes)
        if chunk_bytes % 2 or len(memory) < max(coded, chunk_bytes):
            raise ValueError("the memory is too small, or holds no whole numbers")
        groups = np.frombuffer(memory, np.uint8, coded).reshape(-1, CODED).copy()
        largest = groups[:, :2].copy().view(np.uint16)[:, 0]
        wild = (largest & 0x7FFF) >= INFINITE[self.dtype]
        factors = self._widened(np.where(wild, 0, largest)) / np.float32(127)
        numbers = groups[:, 2:].view(np.int8).astype(np.float32) * factors[:, None]
        found = self._narrowed(numbers)
        found[wild] = NO_NUMBER[self.dtype]
        memory[:chunk_bytes] = found.tobytes()[:chunk_bytes]

    def _widened(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if self.dtype == "bfloat16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.uint16).view(np.float16).astype(np.float32)

    def _narrowed(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        bits = numbers.view(np.uint32)
        sign = (bits >> 16 & 0x8000).astype(np.uint16)
        if self.dtype == "bfloat16":
            size = bits & 0x7FFFFFFF
            size = (size + 0x7FFF + (size >> 16 & 1)) >> 16
            found: npt.NDArray[np.uint16] = np.minimum(size, 0x7F7F).astype(np.uint16)
        else:
            with np.errstate(over="ignore"):
                half = numbers.astype(np.float16).view(np.uint16) & 0x7FFF
            found = np.minimum(half, 0x7BFF).astype(np.uint16)
        found |= sign
        return found
