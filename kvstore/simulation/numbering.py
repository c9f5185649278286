"""Numbering: map 64-bit hashes to small numbers, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Numbering", "hashes_of"]

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]


class Numbering:
    """Numbers hashes from 0 on, in order of first appearance.

    A trace has many millions of hashes. A dictionary would take over a hundred bytes
    for each; these sorted arrays take 12. Every array is at least twice as long as the
    next, so there are few arrays to search, and each hash is copied only a few times
    as arrays are merged.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sorted: list[tuple[Hashes, Numbers]] = []

    def number(self, hashes: Hashes) -> Numbers:
        """Return the numbers of `hashes`; efficient for many at once."""
        keys, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        numbers = np.zeros(len(keys), np.uint32)
        fresh = np.ones(len(keys), np.bool_)
        for known, its_numbers in self._sorted:
            places = np.searchsorted(known, keys)
            places[places == len(known)] = 0
            here = known[places] == keys
            numbers[here] = its_numbers[places[here]]
            fresh &= ~here
        (new,) = np.nonzero(fresh)
        if len(new):
            in_order = new[np.argsort(first[new])]
            numbers[in_order] = np.arange(self.count, self.count + len(new), dtype=np.uint32)
            self.count += len(new)
            self._add(keys[new], numbers[new])
        found: Numbers = numbers[inverse.reshape(-1)]
        return found

    def _add(self, keys: Hashes, numbers: Numbers) -> None:
        while self._sorted and len(self._sorted[-1][0]) < 2 * len(keys):
            more, their_numbers = self._sorted.pop()
            places = np.searchsorted(more, keys)
            keys = np.insert(more, places, keys)
            numbers = np.insert(their_numbers, places, numbers)
        self._sorted.append((keys, numbers))


def hashes_of(ids: Sequence[Any]) -> Hashes:
    """Return ids of chunks as 64-bit numbers: integers that fit unchanged, all others hashed."""
    try:
        numbers = ids if isinstance(ids, array) else array("Q", ids)
    except (TypeError, OverflowError):
        numbers = array("Q", map(_hash, ids))
    return np.array(numbers).astype(np.uint64, copy=False)


def _hash(one: object) -> int:
    if isinstance(one, int) and 0 <= one < 2**64:
        return one
    return xxhash.xxh3_64_intdigest(repr(one).encode("utf-8", "backslashreplace"))
