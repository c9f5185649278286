"""Makes new traces out of a trace: its sessions at other times, fewer of them, or beside another's.

A session is what continues one another: a request belongs to the session that
introduced the deepest chunk it shares, unless that chunk is shared by so many
that it is a common prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from kvstore.simulation import Trace

__all__ = ["merged", "sessions", "shuffled", "thinned"]

Request = tuple[float, Sequence[int]]
"""When it came, in seconds, and its chunks."""

COMMON = 50
"""A chunk that this many requests have branched from is a common prompt from then on."""


def sessions(trace: Trace) -> list[list[Request]]:
    """The requests by session, sessions in order of their beginning."""
    followers: Counter[int] = Counter()
    owner: dict[int, int] = {}
    found: list[list[Request]] = []
    for request in zip(trace.times, trace.requests, strict=True):
        deepest = None
        for chunk in request[1]:
            if chunk not in owner:
                break
            deepest = chunk
        session = None
        if deepest is not None:
            followers[deepest] += 1
            if followers[deepest] < COMMON:
                session = owner[deepest]
        if session is None:
            session = len(found)
            found.append([])
        found[session].append(request)
        for chunk in request[1]:
            owner.setdefault(chunk, session)
    return found


def shuffled(trace: Trace, seed: int) -> Trace:
    """Every session with its own pauses, begun at a time drawn from all beginnings."""
    rng = random.Random(seed)
    groups = sessions(trace)
    starts = [group[0][0] for group in groups]
    rng.shuffle(starts)
    return _in_order(
        (seconds - group[0][0] + start, chunks)
        for group, start in zip(groups, starts, strict=True)
        for seconds, chunks in group
    )


def thinned(trace: Trace, share: float, seed: int) -> Trace:
    """A random `share` of the sessions."""
    rng = random.Random(seed)
    return _in_order(
        request for group in sessions(trace) if rng.random() < share for request in group
    )


def merged(one: Trace, other: Trace) -> Trace:
    """Both traces at once, the other stretched to last as long; no chunk is shared."""
    first, last = other.times[0], other.times[-1]
    scale = (one.times[-1] - one.times[0]) / max(last - first, 0.001)
    moved = [
        (one.times[0] + (seconds - first) * scale, [chunk + one.unique for chunk in chunks])
        for seconds, chunks in zip(other.times, other.requests, strict=True)
    ]
    return _in_order([*zip(one.times, one.requests, strict=True), *moved])


def _in_order(requests: Iterable[Request]) -> Trace:
    return Trace.of("made", sorted(requests, key=itemgetter(0)))
