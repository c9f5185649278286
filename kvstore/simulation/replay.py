"""Replay: run a trace through the real core.

The core is the one used in production: `kvstore.core.Core` with its pool, tiers,
policies and filters. Only the server and the disk are simulated: the server handles
one request after the other, and the disk completes each move at once.

For each request the server looks up its prompt, loads what is found, stores the
rest and ends the request. The hits of a request are its longest prefix that host
memory and disk hold together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core import UNBOUNDED, AskedTier, Core, Flow, HostPool, OwnedTier
from kvstore.core.hints import MOST_SECONDS, Hints
from kvstore.core.residency.base import TierView
from kvstore.errors import ConfigError
from kvstore.plugins import Choice, build_filters, build_policy
from kvstore.policies import AdmissionFilter
from kvstore.policies.shares import Shares
from kvstore.simulation.trace import Trace
from kvstore.types import Completion, Move, RecoveredTier

__all__ = ["Outcome", "Server", "Setup", "announced", "replay"]

LRU = Choice("lru")

OFFERS = 8
"""How often a store is offered before chunks that find no room are dropped."""

PATIENCE = 1.25
SLACK = 10.0
"""A client retains chunks for `PATIENCE` times its pause, plus `SLACK` seconds."""

DEFAULT_CHUNK_BYTES = 2**20
"""Size of a chunk if neither the trace nor the user gives it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The caches to replay a trace with.

    Attributes:
        host, disk: capacity in chunks; without a disk tier if `disk` is 0. Host memory has
            `reserve` additional rows.
        host_policy, disk_policy: eviction policies.
        host_admission, disk_admission: filters, all of which must admit a chunk.
        flow: between host memory and disk.
        reserve: rows of host memory that demotion keeps free or about to be free.
        tenants: shares of tenants, if keys are of several.
        hints: whether clients announce when conversations go on: see `announced`.
    """

    host: int
    disk: int = 0
    host_policy: Choice = LRU
    disk_policy: Choice = LRU
    host_admission: tuple[Choice, ...] = ()
    disk_admission: tuple[Choice, ...] = ()
    flow: Flow = Flow.WRITE_THROUGH
    reserve: int = 0
    hints: bool = False
    tenants: Shares | None = None

    def core(
        self, chunk_bytes: int, *, unique: int = sys.maxsize // 2, shares: bool = False
    ) -> Core:
        """Create an empty core with these caches.

        Args:
            unique: chunks of the trace: more room than for twice as many makes no difference, but
                to filters and tenants.
            shares: whether its last tier is a store.

        Raises:
            ValueError: for a policy or filter that does not exist, or its parameters.
            ConfigError: for a filter that there is not enough memory for.
        """
        most = 2 * max(1, unique) if self.tenants is None else sys.maxsize
        host, disk = min(self.host, most), min(self.disk, most)
        pool = HostPool(
            host + self.reserve,
            build_policy(self.host_policy, host, self.tenants, guards=False),
            self._filters(self.host_admission, self.host, chunk_bytes),
            self.reserve,
        )
        tiers: list[TierView] = []
        if self.disk:
            opening = RecoveredTier("disk", "disk", [], disk, [0], 1)
            tiers.append(
                OwnedTier(
                    0,
                    opening,
                    build_policy(self.disk_policy, disk, self.tenants, guards=False),
                    host,
                    self._filters(self.disk_admission, self.disk, chunk_bytes),
                    self.flow,
                )
            )
        if shares:
            opening = RecoveredTier("store", "remote", [], 1, [], 0)
            tiers.append(AskedTier(len(tiers), opening, host))
        return Core(pool, tiers, events=False, pace=UNBOUNDED)

    @staticmethod
    def _filters(
        choices: tuple[Choice, ...], chunks: int, chunk_bytes: int
    ) -> AdmissionFilter | None:
        try:
            return build_filters(choices, chunks, chunk_bytes, guards=False)
        except (MemoryError, OverflowError) as error:
            raise ConfigError(f"{chunks} chunks: a filter for so many needs more memory") from error


@dataclass(slots=True)
class Outcome:
    """Result of a replay.

    Attributes:
        requests, accesses: number of requests, and of the chunks they looked up.
        host_hits, disk_hits: chunks loaded, by where they were found.
        depths, hit_depths: how many chunks come before each that was looked up, and before each
            hit, in their prompts, added up.
        host_writes: chunks copied into host memory, by stores and promotions.
        disk_writes: chunks written to disk.
        host_evictions, disk_evictions: chunks evicted to make room.
        declined: chunks that filters and policies kept out of host memory or disk.
        chunk_bytes: size of a chunk.
        seconds: how long the replay took.
    """

    setup: Setup
    requests: int = 0
    accesses: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    depths: int = 0
    hit_depths: int = 0
    host_writes: int = 0
    disk_writes: int = 0
    host_evictions: int = 0
    disk_evictions: int = 0
    declined: int = 0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Chunks loaded."""
        return self.host_hits + self.disk_hits

    @property
    def hit_ratio(self) -> float:
        """Hits per access."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def written_per_hit(self) -> float:
        """Bytes written to disk, or without a disk to host memory, for each hit."""
        writes = self.disk_writes if self.setup.disk else self.host_writes
        return writes * self.chunk_bytes / self.hits if self.hits else 0.0


class Server:
    """The simulated server and engine around a core.

    Args:
        store: completes the moves of the last tier, and returns which keys succeeded. All other
            moves succeed.
    """

    def __init__(
        self, core: Core, reserve: int, store: Callable[[Move], list[bool]] | None = None
    ) -> None:
        self.core = core
        self.reserve = reserve
        self.now = 0.0
        self._store = store

    def _ended(self, move: Move) -> Completion:
        """Complete a move that was begun in this step."""
        if self._store is not None and move.tier == len(self.core.tiers) - 1:
            return Completion(move.id, self._store(move))
        return Completion(move.id, [True] * len(move.keys))

    def step(self) -> None:
        """End the step, complete its moves, and begin the next."""
        core, now = self.core, self.now
        while True:
            moves = core.flush(now)
            core.poll(now, [self._ended(move) for move in moves])
            if not moves:
                break
        if self.reserve:
            # Chunks that were given up and copied leave: they must not be hits any more.
            core.make_room(self.reserve)

    def serve(self, keys: list[bytes], name: str, hints: Hints | None = None) -> int:
        """Serve one request from its first lookup to its end; return its hits."""
        core = self.core
        # What a pause ends, as pins and old answers of a store, has ended before the request comes.
        core.poll(self.now)
        count = core.lookup_prefix(keys, name)
        while count is None:
            self.step()
            count = core.lookup_prefix(keys, name)
        if count:
            loaded = keys[:count]
            core.prepare_load(loaded, name)
            core.complete_load(loaded, name)
            # After the step the policy may evict these chunks again.
            self.step()
        if count < len(keys):
            for _ in range(OFFERS):
                grant = core.prepare_store(keys, name)
                if grant is not None:
                    core.complete_store(grant.keys, name)
                    break
                if not core.unsaved:
                    break
                self.step()
        core.on_request_finished(name)
        if hints is not None:
            core.follow(hints, keys, self.now)
        self.step()
        return count


def announced(trace: Trace) -> list[Hints]:
    """Return for each request the hints of a client that knows when its conversation goes on.

    It goes on with the next request that has the last chunk of this one. If none has, it has ended.
    """
    nearest: dict[int, float] = {}
    hints: list[Hints] = []
    requests = zip(reversed(trace.times), reversed(trace.requests), strict=True)
    for seconds, request in requests:
        back = nearest.get(request[-1]) if request else None
        its = Hints(release=True)
        if back is not None:
            its = Hints(retain_s=min(MOST_SECONDS, (back - seconds) * PATIENCE + SLACK))
        hints.append(its)
        nearest.update(dict.fromkeys(request, seconds))
    hints.reverse()
    return hints


def replay(
    trace: Trace,
    setup: Setup,
    *,
    chunk_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay the whole trace from a cold start.

    Args:
        chunk_bytes: size of a chunk; by default that of the trace, or 1 MiB.
        progress: called now and then with the number of requests done.

    Raises:
        ValueError: as `Setup.core`.
    """
    size = chunk_bytes or trace.chunk_bytes or DEFAULT_CHUNK_BYTES
    core = setup.core(size, unique=trace.unique)
    server = Server(core, setup.reserve)
    keys = trace.keys()
    outcome = Outcome(setup, chunk_bytes=size)
    began = time.perf_counter()
    hints = announced(trace) if setup.hints else [None] * len(trace.requests)
    requests = zip(trace.times, trace.requests, hints, strict=True)
    for number, (seconds, request, hint) in enumerate(requests):
        server.now = seconds
        count = server.serve([keys[chunk] for chunk in request], str(number), hint)
        outcome.accesses += len(request)
        outcome.depths += len(request) * (len(request) - 1) // 2
        outcome.hit_depths += count * (count - 1) // 2
        if progress is not None and not number % 256:
            progress(number)
    outcome.seconds = time.perf_counter() - began
    stats = core.stats()
    outcome.requests = len(trace.requests)
    outcome.host_hits = stats.loaded_from.get("host", 0)
    outcome.disk_hits = stats.loaded_from.get("disk", 0)
    outcome.host_writes = stats.stored
    outcome.host_evictions = stats.evicted
    outcome.declined = stats.declined
    for tier in stats.tiers:
        outcome.host_writes += tier.promoted
        outcome.disk_writes += tier.written
        outcome.disk_evictions += tier.evicted
        outcome.declined += tier.declined
    return outcome
