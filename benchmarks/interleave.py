"""Makes new traces out of a trace: its sessions at other times, fewer of them, or beside another's.

A session is what continues one another: a request belongs to the session that
introduced the deepest block it shares, unless that block is shared by so many
that it is a common prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.traces import Request

__all__ = ["merged", "sessions", "shuffled", "thinned"]

COMMON = 50
"""A block that this many requests have branched from is a common prompt from then on."""


def sessions(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests by session, sessions in order of their beginning."""
    followers: Counter[int] = Counter()
    owner: dict[int, int] = {}
    found: list[list[Request]] = []
    for request in requests:
        deepest = None
        for block in request.hash_ids:
            if block not in owner:
                break
            deepest = block
        session = None
        if deepest is not None:
            followers[deepest] += 1
            if followers[deepest] < COMMON:
                session = owner[deepest]
        if session is None:
            session = len(found)
            found.append([])
        found[session].append(request)
        for block in request.hash_ids:
            owner.setdefault(block, session)
    return found


def shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    """Every session with its own pauses, begun at a time drawn from all beginnings."""
    rng = random.Random(seed)
    groups = sessions(requests)
    starts = [group[0].timestamp for group in groups]
    rng.shuffle(starts)
    moved = [
        replace(request, timestamp=request.timestamp - group[0].timestamp + start)
        for group, start in zip(groups, starts, strict=True)
        for request in group
    ]
    return sorted(moved, key=lambda request: request.timestamp)


def thinned(requests: Sequence[Request], share: float, seed: int) -> list[Request]:
    """A random `share` of the sessions."""
    rng = random.Random(seed)
    kept = [request for group in sessions(requests) if rng.random() < share for request in group]
    return sorted(kept, key=lambda request: request.timestamp)


def merged(one: Sequence[Request], other: Sequence[Request]) -> list[Request]:
    """Both traces at once, the other stretched to last as long; no block is shared."""
    offset = 1 + max(max(request.hash_ids, default=0) for request in one)
    first, last = other[0].timestamp, other[-1].timestamp
    scale = (one[-1].timestamp - one[0].timestamp) / max(last - first, 1)
    moved = [
        replace(
            request,
            timestamp=one[0].timestamp + (request.timestamp - first) * scale,
            hash_ids=[block + offset for block in request.hash_ids],
        )
        for request in other
    ]
    return sorted([*one, *moved], key=lambda request: request.timestamp)
