"""Statistics: counters, gauges and histograms of the core.

`Durations` is a histogram of durations, in the form that monitors read. `Ages` measures how long
evicted chunks had not been used, which shows how far back a cache reaches. It follows only a
sample of the chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AGES",
    "BOUNDS",
    "EVERY",
    "MOST",
    "Ages",
    "CoreStats",
    "Durations",
    "TenantStats",
    "TierStats",
    "tier_names",
]

BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
)
"""Upper bounds of the buckets in seconds; one more bucket counts longer durations."""

AGES = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1200.0),
    *(3600.0, 7200.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0),
)
"""The same for ages, up to a week."""


@dataclass(slots=True)
class Durations:
    """A histogram of durations.

    Attributes:
        seconds: the sum of all durations.
        buckets: for each bucket, how many durations exceeded the bound before it, but not its own.
        bounds: see `BOUNDS`.
    """

    seconds: float = 0.0
    buckets: list[int] = field(default_factory=list)
    bounds: tuple[float, ...] = BOUNDS

    def __post_init__(self) -> None:
        if not self.buckets:
            self.buckets = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        """Average duration in seconds; 0 if there was none."""
        return self.seconds / max(self.count, 1)

    def quantile(self, share: float) -> float:
        """Return the bound in seconds that at least this share of the durations did not exceed.

        It is the bound of a bucket, so too long by at most the bucket's width; infinite for the
        last bucket, and 0 if there was no duration.

        Raises:
            ValueError: if `share` is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share!r}: must be from 0 to 1")
        count = self.count
        if not count:
            return 0.0
        seen = 0
        for bound, number in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += number
            if seen >= share * count and seen:
                return bound
        raise AssertionError("the buckets hold all")

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self.seconds += seconds
        self.buckets[bisect_left(self.bounds, seconds)] += 1

    def copy(self) -> Durations:
        """Return a copy."""
        return Durations(self.seconds, self.buckets.copy(), self.bounds)


def _now(value: float = 0) -> Any:
    """Return a gauge field. All other fields are totals, which never decrease."""
    return field(default=value, metadata={"now": True})


def _ages() -> Durations:
    return Durations(bounds=AGES)


@dataclass(slots=True)
class TierStats:
    """Statistics of a tier: totals since start, except where it says "now".

    Attributes:
        name, medium: the tier. owned: whether this process assigns its slots; values that only
            other owners know are 0. store: whether it has to be asked what it has;
            its `chunks` are those that it is known to have.
        chunks: entries now. free: ready slots that are empty, now. room: chunks that still
            fit before others have to leave, now.
        set_aside: empty slots that are not used because a write to them failed, now.
        segments, max_segments: now.
        loaded: chunks read from it and then loaded for the same request. saved: seconds of
            computing that these made unnecessary, as far as its pace is known.
        promoted: chunks read into host memory. failed_reads: chunks that could
            not be read or whose digest did not match.
        written: chunks written. failed_writes: chunks that could not be written.
        refused: chunks not copied because the tier could not take copies then.
        declined: chunks not copied because its admission filter did not want them.
        evicted: entries that made room for others.
        ages: how long a sample of these had not been used: see `Ages`.
        queued: host chunks waiting for their copy, now. writing: chunks that are being copied
            to it, reading: chunks that are being read from it, now.
        pinned: entries that are not evicted, now.
        relocated: chunks moved within the tier. removed_segments: segments emptied so and removed.
        asking: keys that a store is being asked about, now. asked: keys asked about. found: those
            that it had. unanswered: those without an answer, or without one in time.
            unawaited: requests that did not wait for its answer, as that was not worth it.
        closed, stalled, congested, slow, away, outpaced: see `Health`, now.
        read_pace: recent seconds to read a chunk; 0 if none was read.
        errors: moves that reported an error.
        read_bytes: bytes of `promoted`. written_bytes: bytes of `written` and `relocated`.
        used_bytes, free_bytes: bytes of `chunks` and `room`.
        reads, writes, asks: how long moves took that read chunks, wrote chunks or asked for them,
            failed ones included, from when they were handed out to when their ends were noticed.
    """

    name: str
    medium: str
    owned: bool = _now(True)
    store: bool = _now(False)
    chunks: int = _now()
    free: int = _now()
    room: int = _now()
    set_aside: int = _now()
    segments: int = _now()
    max_segments: int = _now()
    loaded: int = 0
    saved: float = 0.0
    promoted: int = 0
    failed_reads: int = 0
    corrupt: int = 0
    written: int = 0
    failed_writes: int = 0
    refused: int = 0
    declined: int = 0
    evicted: int = 0
    queued: int = _now()
    reading: int = _now()
    writing: int = _now()
    pinned: int = _now()
    relocated: int = 0
    removed_segments: int = 0
    closed: bool = _now(False)
    stalled: bool = _now(False)
    congested: bool = _now(False)
    slow: bool = _now(False)
    away: bool = _now(False)
    outpaced: bool = _now(False)
    read_pace: float = _now(0.0)
    errors: int = 0
    asking: int = _now()
    asked: int = 0
    found: int = 0
    unanswered: int = 0
    unawaited: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    used_bytes: int = _now()
    free_bytes: int = _now()
    reads: Durations = field(default_factory=Durations)
    writes: Durations = field(default_factory=Durations)
    asks: Durations = field(default_factory=Durations)
    ages: Durations = field(default_factory=_ages)

    def complete(self, loaded: int, saved: float, chunk_bytes: int) -> None:
        """Fill in what the tier itself does not know.

        Args:
            loaded: chunks that came from it. saved: seconds of computing that they made
                unnecessary. chunk_bytes: size of a chunk there.
        """
        self.loaded = loaded
        self.saved = saved
        self.read_bytes = self.promoted * chunk_bytes
        self.written_bytes = (self.written + self.relocated) * chunk_bytes
        self.used_bytes = self.chunks * chunk_bytes
        self.free_bytes = self.room * chunk_bytes


@dataclass(slots=True)
class TenantStats:
    """Statistics of one tenant, or of all that have no name in the configuration.

    Attributes:
        loaded, stored: chunks handed to the server, and taken from it.
        host_chunks: its chunks in host memory, now, without those that were given up and are still
            there, as with the flows that demote.
        tier_chunks: its chunks on the tiers of this process, now.
    """

    loaded: int = 0
    stored: int = 0
    host_chunks: int = _now()
    tier_chunks: int = _now()


@dataclass(slots=True)
class CoreStats:
    """Statistics of the core: totals since start, except where it says "now".

    Attributes:
        rows, free_rows, busy_rows, chunks: the host pool now. busy_rows are being filled or
            read, or pinned; pinned_rows are those that `pin` holds.
        pins: keys that are pinned now. prefetched: chunks whose fetch `prefetch` has begun.
        fetched_queued: chunks whose fetch was begun for requests that the server had queued.
            gave_way: how often such a request gave up its chunks for others.
        demoted: chunks that have left host memory on request.
        chunk_bytes: size of a chunk, where it is known. used_bytes, free_bytes: bytes of
            `chunks` and `free_rows`.
        waiting: requests that are deferred now. waits: how long others have waited for answers.
        misses: keys that answered "miss". outpaced: those that a tier has, but that are
            faster to compute again than to read.
        compute_pace: recent seconds to compute a chunk; 0 if not known.
        deferrals: waits begun.
        timeouts: waits ended by their deadline.
        truncations: waits ended with a shorter prefix because the rest cannot fit, or not before
            the server could compute it.
        lapses: requests whose leases ran out, or were ended early for others.
        loaded: chunks handed to the server. loaded_from: the same by the medium they came from.
            saved: seconds of computing that those made unnecessary that were in host memory
            already, as far as its pace is known.
        stored: chunks taken from the server. loaded_bytes, stored_bytes: bytes of both.
        stores_deferred: stores answered "not now, offer it again".
        chunks_refused: chunks of stores that found no room.
        declined: chunks of stores that the admission filter or the policy did not want.
        evicted: chunks that left host memory for others, those shed included. ages: how long
            a sample of them had not been used: see `Ages`.
        shed: chunks evicted from host memory before their copy to a slower tier.
        stray: harmless calls that matched nothing (a completion after a reset).
        illegal: illegal transitions of chunks that were tried: bugs of the core.
        plugin_faults: failures of policies and filters that are not kvstore's own.
        hints, hints_ignored: hints that came with requests, as managers count them;
            hints_refused: chunks that could not be retained or fetched because of a limit.
        events_lost: changes that were dropped because the events were not taken.
        outlived: chunks whose views were still in use when their lease ended, as counted by the
            library. watched_rows: rows that are pinned for that reason now, those included of
            which only the view object is left.
        tenants: by name, where the configuration has `tenants`.
    """

    rows: int = _now()
    free_rows: int = _now()
    busy_rows: int = _now()
    pinned_rows: int = _now()
    pins: int = _now()
    prefetched: int = 0
    fetched_queued: int = 0
    gave_way: int = 0
    demoted: int = 0
    chunks: int = _now()
    waiting: int = _now()
    misses: int = 0
    outpaced: int = 0
    compute_pace: float = _now(0.0)
    deferrals: int = 0
    timeouts: int = 0
    truncations: int = 0
    lapses: int = 0
    loaded: int = 0
    loaded_from: dict[str, int] = field(default_factory=dict)
    saved: float = 0.0
    stored: int = 0
    stores_deferred: int = 0
    chunks_refused: int = 0
    declined: int = 0
    evicted: int = 0
    shed: int = 0
    stray: int = 0
    illegal: int = 0
    plugin_faults: int = 0
    events_lost: int = 0
    hints: int = 0
    hints_ignored: int = 0
    hints_refused: int = 0
    outlived: int = 0
    watched_rows: int = _now()
    chunk_bytes: int = _now()
    loaded_bytes: int = 0
    stored_bytes: int = 0
    used_bytes: int = _now()
    free_bytes: int = _now()
    waits: Durations = field(default_factory=Durations)
    ages: Durations = field(default_factory=_ages)
    tiers: list[TierStats] = field(default_factory=list)
    tenants: dict[str, TenantStats] = field(default_factory=dict)


def tier_names(tiers: Iterable[TierStats]) -> list[str]:
    """Return a name for each tier that reveals nothing about the machine: ``disk-2:others``."""
    names: list[str] = []
    owned: Counter[str] = Counter()
    for tier in tiers:
        ours = tier.owned or tier.store
        owned[tier.medium] += ours
        number = owned[tier.medium]
        name = tier.medium if number < 2 else f"{tier.medium}-{number}"
        names.append(name if ours else f"{name}:others")
    return names


EVERY = 32
"""At first, one in this many new chunks is followed."""

MOST = 4096
"""Most chunks that are followed. Beyond that every second one is dropped, and from then on half as
many of the new chunks are followed."""


class Ages:
    """The times at which the chunks of a sample were added or last used.

    Chunks from before the first step are not sampled, as their age is not known.

    Attributes:
        left: seconds since the last use of chunks that were evicted.
    """

    def __init__(self) -> None:
        self.left = Durations(bounds=AGES)
        self._used: dict[bytes, float] = {}
        self._now: float | None = None
        self._every = EVERY
        # How many new chunks are passed over until the next one is followed.
        self._skip = 0

    def __len__(self) -> int:
        """Chunks that are followed."""
        return len(self._used)

    def begin_step(self, now: float) -> None:
        """Set the time of what happens in this step."""
        self._now = now

    def come(self, keys: Sequence[bytes]) -> None:
        """Add new chunks, if they are in the sample."""
        used, now = self._used, self._now
        if now is None:
            return
        for key in keys[self._skip :: self._every]:
            used[key] = now
        self._skip = (self._skip - len(keys)) % self._every
        if len(used) > MOST:
            self._used = {key: used[key] for key in list(used)[::2]}
            self._every *= 2

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were used."""
        used, now = self._used, self._now
        if used and now is not None:
            for key in used.keys() & keys:
                used[key] = now

    def leave(self, keys: Iterable[bytes]) -> None:
        """Record the ages of these chunks, which were evicted."""
        used, now = self._used, self._now
        if used and now is not None:
            for key in used.keys() & keys:
                self.left.add(now - used.pop(key))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget these chunks, which were not evicted but are gone."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                del used[key]

    def reset(self) -> None:
        """Forget all chunks."""
        self._used.clear()
