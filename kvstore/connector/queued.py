"""Queued requests: the keys that a request will look up when its turn comes."""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["GroupSizes", "QueuedKeys", "tokens_that_fit", "usable_keys"]

GroupSizes = tuple[tuple[int, int | None], ...]
"""For each KV cache group the tokens of a chunk, and how many of the last chunks the next token
needs; None: all of them."""


@dataclass(frozen=True, slots=True)
class QueuedKeys:
    """The keys of a queued request in one KV cache group.

    Attributes:
        keys: keys of its whole chunks, in prompt order.
        tokens_per_chunk: tokens of a chunk.
        window_chunks: how many of the last chunks the next token needs; None: all of them.
    """

    keys: Sequence[bytes]
    tokens_per_chunk: int
    window_chunks: int | None = None


@lru_cache(maxsize=64)
def tokens_that_fit(groups: GroupSizes, rows: int) -> int:
    """Return how many tokens need at most `rows` chunks, those of all groups counted.

    They begin and end at boundaries of the largest chunk. 0: not even one chunk of each group fits.
    """
    unit = max(size for size, _ in groups)

    def needed(units: int) -> int:
        each = ((-(-units * unit // size), window) for size, window in groups)
        return sum(chunks if window is None else min(chunks, window) for chunks, window in each)

    if needed(rows + 1) <= rows:
        return sys.maxsize
    return bisect.bisect_right(range(1, rows + 1), rows, key=needed) * unit


def usable_keys(
    groups: Sequence[QueuedKeys],
    known: Callable[[Sequence[bytes]], int],
    most: int = sys.maxsize,
) -> list[bytes]:
    """Return the keys that are needed to load the longest prefix that may be known.

    Args:
        groups: the keys of a prompt, for each KV cache group.
        known: counts the leading keys that are somewhere, or may be.
        most: tokens that can be loaded at once.

    Returns:
        Of groups that need every chunk the prefix, of those with a window the last chunks of it,
        in the order of the prompt.
    """
    whole = [group for group in groups if group.window_chunks is None]
    tokens = min(
        (known(group.keys) * group.tokens_per_chunk for group in whole),
        default=max((len(group.keys) * group.tokens_per_chunk for group in groups), default=0),
    )
    tokens = min(tokens, most)
    placed: list[tuple[int, bytes]] = []
    for group in groups:
        end = tokens // group.tokens_per_chunk
        first = 0 if group.window_chunks is None else max(0, end - group.window_chunks)
        placed += [
            (place * group.tokens_per_chunk, key)
            for place, key in enumerate(group.keys[first:end], first + 1)
        ]
    if len(groups) > 1:
        placed.sort(key=operator.itemgetter(0))
    return [key for _, key in placed]
