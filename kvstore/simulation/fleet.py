"""Fleet: replay a trace over several servers behind a router, with a store or without.

Each server is a real core, as in `replay`; behind its host memory and its disk it knows of a store.
Only that is simulated: it does at once what it is asked, and evicts by LRU.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.simulation.replay import DEFAULT_CHUNK_BYTES, Server, Setup
from kvstore.simulation.sample import anchors
from kvstore.simulation.trace import Trace
from kvstore.types import Completion, Move, Op

__all__ = ["ROUTERS", "Fleet", "FleetOutcome", "replay_fleet"]

MOST_ABOVE_MEAN = 1.25
"""A router by prefix gives no server more of the load than so many times the mean."""

ROUTERS = ("round-robin", "session", "prefix")
"""Requests in turns; all of a conversation to one server; each to the server that had the longest
prefix of it, unless that one has more than its share of the load."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to replay a trace with.

    Attributes:
        replicas: servers. each: the caches of every one of them.
        store: chunks that fit in the store that all share; 0 for none.
        router: one of `ROUTERS`.
    """

    replicas: int
    each: Setup
    store: int = 0
    router: str = "round-robin"


@dataclass(slots=True)
class FleetOutcome:
    """What a replay brought, all servers together.

    Attributes:
        accesses: chunks asked for. host_hits, disk_hits, store_hits: those of them that were
            loaded, by where they were.
        store_asked: keys about which the store was asked, in `store_questions` questions.
        store_read, store_written: chunks on the wire. store_evicted: those that left it.
        busiest: the largest part of the accesses that one server had, times their number.
        seconds: how long the replay took.
    """

    fleet: Fleet
    accesses: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    store_hits: int = 0
    store_questions: int = 0
    store_asked: int = 0
    store_read: int = 0
    store_written: int = 0
    store_evicted: int = 0
    busiest: float = 0.0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Chunks loaded."""
        return self.host_hits + self.disk_hits + self.store_hits

    @property
    def hit_ratio(self) -> float:
        """Hits per access."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def wire_per_hit(self) -> float:
        """Bytes read from the store and written to it, for each hit."""
        moved = (self.store_read + self.store_written) * self.chunk_bytes
        return moved / self.hits if self.hits else 0.0


@dataclass(slots=True)
class SharedStore:
    """The imagined store: which chunks it has, least recently used first."""

    capacity: int
    outcome: FleetOutcome
    chunks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def end(self, move: Move) -> list[bool]:
        """Do what a move asks; for each key whether that went well."""
        outcome, chunks = self.outcome, self.chunks
        if move.op is Op.ASK:
            outcome.store_questions += 1
            outcome.store_asked += len(move.keys)
            return [key in chunks for key in move.keys]
        if move.op is Op.PROMOTE:
            found = [key in chunks for key in move.keys]
            for key in reversed(move.keys):
                if key in chunks:
                    chunks.move_to_end(key)
            outcome.store_read += sum(found)
            return found
        if move.op is Op.CASCADE:
            # The end of a prompt leaves before its beginning.
            for key in reversed(move.keys):
                outcome.store_written += key not in chunks
                chunks[key] = None
                chunks.move_to_end(key)
            while len(chunks) > self.capacity:
                chunks.popitem(last=False)
                outcome.store_evicted += 1
        return [True] * len(move.keys)


class _Replica(Server):
    """One server of a fleet."""

    def __init__(self, setup: Setup, chunk_bytes: int, store: SharedStore | None) -> None:
        super().__init__(setup.core(chunk_bytes, shares=store is not None), setup.reserve)
        self._store = store
        self._store_tier = len(self.core.tiers) - 1

    def ended(self, move: Move) -> Completion:
        """The end of a move that was begun in this step."""
        if self._store is not None and move.tier == self._store_tier:
            return Completion(move.id, self._store.end(move))
        return super().ended(move)


def replay_fleet(
    trace: Trace,
    fleet: Fleet,
    *,
    chunk_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> FleetOutcome:
    """Replay the whole trace from a cold start.

    Args:
        progress: told now and then how many requests are done.

    Raises:
        ValueError: as `Setup.core`, and for a router that does not exist.
    """
    size = chunk_bytes or trace.chunk_bytes or DEFAULT_CHUNK_BYTES
    outcome = FleetOutcome(fleet, chunk_bytes=size)
    store = SharedStore(fleet.store, outcome) if fleet.store else None
    replicas = [_Replica(fleet.each, size, store) for _ in range(fleet.replicas)]
    route = _router(trace, fleet)
    keys = trace.keys()
    loads = [0] * fleet.replicas
    began = time.perf_counter()
    for number, (seconds, request) in enumerate(zip(trace.times, trace.requests, strict=True)):
        place = route(number, request)
        replica = replicas[place]
        replica.now = seconds
        # What the store has said long ago counts no more.
        replica.step()
        replica.serve([keys[chunk] for chunk in request], str(number))
        loads[place] += len(request)
        if progress is not None and not number % 256:
            progress(number)
    outcome.seconds = time.perf_counter() - began
    outcome.accesses = sum(loads)
    outcome.busiest = max(loads) * fleet.replicas / max(1, outcome.accesses)
    for replica in replicas:
        loaded = replica.core.stats().loaded_from
        outcome.host_hits += loaded.get("host", 0)
        outcome.disk_hits += loaded.get("disk", 0)
        outcome.store_hits += loaded.get("remote", 0)
    return outcome


Route = Callable[[int, Sequence[int]], int]
"""The server for a request, by its number and its chunks."""


def _router(trace: Trace, fleet: Fleet) -> Route:
    count = fleet.replicas
    if fleet.router == "round-robin":
        return lambda number, request: number % count
    if fleet.router == "session":
        names = anchors(trace)
        # Conversations in the order of their first requests.
        numbered = {anchor: n for n, anchor in enumerate(dict.fromkeys(names))}
        return lambda number, request: numbered[names[number]] % count
    if fleet.router == "prefix":
        return _ByPrefix(count)
    raise ValueError(f"router {fleet.router!r}: must be one of: {', '.join(ROUTERS)}")


class _ByPrefix:
    """Remembers which server had each chunk last, and how much each has had."""

    def __init__(self, count: int) -> None:
        self._last: dict[int, int] = {}
        self._loads = [0] * count

    def __call__(self, number: int, request: Sequence[int]) -> int:
        loads, last = self._loads, self._last
        known = next((last[chunk] for chunk in reversed(request) if chunk in last), None)
        most = MOST_ABOVE_MEAN * (sum(loads) + len(request)) / len(loads)
        if known is None or loads[known] + len(request) > max(most, len(request)):
            known = loads.index(min(loads))
        loads[known] += len(request)
        last.update(dict.fromkeys(request, known))
        return known
