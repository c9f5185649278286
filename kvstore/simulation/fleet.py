"""Fleet: replay a trace over several servers behind a router, with or without a store.

Each server is a real core, as in `replay`; its last tier is the store. Only the store is simulated:
it completes each move at once, and evicts by LRU.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.simulation.replay import DEFAULT_CHUNK_BYTES, Server, Setup
from kvstore.simulation.sample import anchors
from kvstore.simulation.trace import Trace
from kvstore.types import Move, Op

__all__ = ["ROUTERS", "Fleet", "FleetOutcome", "replay_fleet"]

MOST_ABOVE_MEAN = 1.25
"""Most load that a router by prefix gives a server, as a multiple of the mean."""

ROUTERS = ("round-robin", "session", "prefix")
"""Servers in turn; one server for each conversation; the server that had the longest prefix of a
request, unless it has more than its share of the load."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers to replay a trace with.

    Attributes:
        replicas: number of servers.
        each: the caches of each server.
        store: capacity in chunks of the store that all share; 0 for none.
        router: one of `ROUTERS`.
    """

    replicas: int
    each: Setup
    store: int = 0
    router: str = "round-robin"


@dataclass(slots=True)
class FleetOutcome:
    """Result of a replay, over all servers.

    Attributes:
        accesses: chunks looked up.
        host_hits, disk_hits, store_hits: chunks loaded, by where they were found.
        store_questions, store_asked: questions to the store, and keys in them.
        store_read, store_written: chunks read from the store and written to it.
        store_evicted: chunks evicted from the store.
        busiest: accesses of the busiest server, as a multiple of the mean.
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
    """The simulated store: its chunks, least recently used first."""

    capacity: int
    outcome: FleetOutcome
    chunks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def end(self, move: Move) -> list[bool]:
        """Complete a move; return for each key whether it succeeded."""
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
            # Reversed, so that the end of a prompt is evicted before its beginning.
            for key in reversed(move.keys):
                outcome.store_written += key not in chunks
                chunks[key] = None
                chunks.move_to_end(key)
            while len(chunks) > self.capacity:
                chunks.popitem(last=False)
                outcome.store_evicted += 1
        return [True] * len(move.keys)


def replay_fleet(
    trace: Trace,
    fleet: Fleet,
    *,
    chunk_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> FleetOutcome:
    """Replay the whole trace from a cold start.

    Args:
        progress: called now and then with the number of requests done.

    Raises:
        ValueError: as `Setup.core`, and for an unknown router.
    """
    size = chunk_bytes or trace.chunk_bytes or DEFAULT_CHUNK_BYTES
    outcome = FleetOutcome(fleet, chunk_bytes=size)
    store = SharedStore(fleet.store, outcome) if fleet.store else None
    replicas = []
    for _ in range(fleet.replicas):
        core = fleet.each.core(size, unique=trace.unique, shares=store is not None)
        replicas.append(Server(core, fleet.each.reserve, None if store is None else store.end))
    route = _router(trace, fleet)
    keys = trace.keys()
    loads = [0] * fleet.replicas
    began = time.perf_counter()
    for number, (seconds, request) in enumerate(zip(trace.times, trace.requests, strict=True)):
        place = route(number, request)
        replica = replicas[place]
        replica.now = seconds
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
"""Chooses the server for a request, given its number and its chunks."""


def _router(trace: Trace, fleet: Fleet) -> Route:
    count = fleet.replicas
    if fleet.router == "round-robin":
        return lambda number, request: number % count
    if fleet.router == "session":
        names = anchors(trace)
        # Number conversations in the order of their first requests.
        numbered = {anchor: n for n, anchor in enumerate(dict.fromkeys(names))}
        return lambda number, request: numbered[names[number]] % count
    if fleet.router == "prefix":
        return _ByPrefix(count)
    raise ValueError(f"router {fleet.router!r}: must be one of: {', '.join(ROUTERS)}")


class _ByPrefix:
    """Router by prefix: remembers which server last had each chunk, and the load of each server."""

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
