"""Belady's offline optimum under the rules of a prefix cache: an upper bound for every policy.

MIN (Belady 1966) evicts the chunk whose next use is furthest in the future. Here a
request's chunks are offered together, and a chunk that is not worth its place is
not stored (bypass). Of chunks with the same next use the deeper is evicted first,
so that the head of a chain stays. Hits are counted as in a replay: the longest
resident prefix of each request.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass

from kvstore.simulation.trace import Trace

__all__ = ["Optimum", "optimum"]

NEVER = 2**62


@dataclass(frozen=True, slots=True)
class Optimum:
    """Upper bound of `hits` with `capacity` chunks; `inserts` chunks are written for it."""

    capacity: int
    accesses: int
    hits: int
    inserts: int

    @property
    def hit_ratio(self) -> float:
        """Hits per access."""
        return self.hits / self.accesses if self.accesses else 0.0


def optimum(trace: Trace, capacity: int) -> Optimum:
    """Replay the trace with knowledge of the future, through one tier of `capacity` chunks.

    Raises:
        TraceError: if its ids are not hashes of prefixes: then it would be no bound.
    """
    trace.check_chained()
    following = _next_uses(trace)
    resident: dict[int, int] = {}  # chunk -> number of the request that uses it next
    # Candidates, the latest next use first and then the deepest: (-next use, -depth, chunk).
    leaving: list[tuple[int, int, int]] = []
    hits = inserts = 0
    for chunks, uses in zip(trace.requests, following, strict=True):
        whole = True
        fresh: set[int] = set()
        for depth, (chunk, use) in enumerate(zip(chunks, uses, strict=True)):
            here = resident.pop(chunk, None) is not None
            whole = whole and here
            hits += whole
            if use == NEVER:
                continue
            resident[chunk] = use
            heapq.heappush(leaving, (-use, -depth, chunk))
            if not here:
                fresh.add(chunk)
        while len(resident) > capacity:
            use, _, chunk = heapq.heappop(leaving)
            # A chunk that was used or evicted since has another entry, or none.
            if resident.get(chunk) == -use:
                del resident[chunk]
                fresh.discard(chunk)
        inserts += len(fresh)
        if len(leaving) > 4 * capacity + len(chunks):
            leaving = [entry for entry in leaving if resident.get(entry[2]) == -entry[0]]
            heapq.heapify(leaving)
    return Optimum(capacity, trace.accesses, hits, inserts)


def _next_uses(trace: Trace) -> list[array[int]]:
    """Return for each access the number of the next request with that chunk, or `NEVER`."""
    upcoming = array("q", [NEVER]) * trace.unique
    uses: list[array[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        chunks = trace.requests[number]
        uses.append(array("q", [upcoming[chunk] for chunk in chunks]))
        for chunk in chunks:
            upcoming[chunk] = number
    uses.reverse()
    return uses
