"""Sample: a part of a trace that behaves like the whole, for proportionally smaller caches.

SHARDS (Waldspurger et al., FAST'15) keeps the items that hash below a threshold. To
keep chains whole, the hash here is of a conversation instead of a chunk. A
conversation is identified by its first chunk behind what it shares with many others,
as a system prompt: see `anchors`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from kvstore.simulation.trace import Trace

__all__ = ["anchors", "sample"]

SHARED = 0.01
"""A chunk that more than this share of all requests has may belong to no single conversation."""

BRANCHES = 8
"""More different chunks than this follow the end of what conversations share. A single one, however
long, goes on in a few ways at each of its turns."""

MIX = 0xBF58476D1CE4E5B9


def sample(trace: Trace, rate: float, seed: int = 0) -> Trace:
    """Sample about `rate` of the conversations of `trace`, at least one.

    Scale cache sizes by the ratio of the two traces' `unique`, not by `rate`.
    """
    limit = int(rate * 2**32)
    kept: list[tuple[float, array[int]]] = []
    first: tuple[float, array[int]] | None = None
    requests = zip(trace.times, trace.requests, anchors(trace), strict=True)
    for seconds, chunks, anchor in requests:
        if not chunks:
            continue
        first = first or (seconds, chunks)
        if _mixed(anchor, seed) < limit:
            kept.append((seconds, chunks))
    part = Trace.of(trace.name, kept or ([first] if first else []))
    part.chunk_bytes = trace.chunk_bytes
    return part


def anchors(trace: Trace) -> list[int]:
    """Return for each request the chunk that identifies its conversation; -1 without chunks.

    That is the one behind the last chunk that many requests have, and behind which they part: it
    goes on in many ways, or in two that many requests have each.
    """
    uses = array("L", [0]) * trace.unique
    followers = array("L", [0]) * trace.unique
    before = array("q", [-1]) * trace.unique
    for chunks in trace.requests:
        last = -1
        for chunk in chunks:
            if not uses[chunk] and last >= 0:
                followers[last] += 1
                before[chunk] = last
            uses[chunk] += 1
            last = chunk
    most = max(1, int(len(trace.requests) * SHARED))
    wide = min(BRANCHES, most)
    heavy = Counter(before[chunk] for chunk in range(trace.unique) if uses[chunk] > most)

    def anchor(chunks: Sequence[int]) -> int:
        found = chunks[0]
        for chunk, after in pairwise(chunks):
            if uses[chunk] <= most:
                break
            if followers[chunk] > wide or heavy[chunk] > 1:
                found = after
        return found

    return [anchor(chunks) if chunks else -1 for chunks in trace.requests]


def _mixed(number: int, seed: int) -> int:
    value = (number + 1 + seed * 0x9E3779B97F4A7C15) * MIX % 2**64
    return ((value ^ (value >> 31)) * MIX % 2**64) >> 32
