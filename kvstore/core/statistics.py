"""Statistics: counters, gauges and histograms of the core.

`Durations` counts how long things took, by length, as monitors read them. `Ages` counts how long
chunks had not been used when they were evicted, which tells how far back a cache reaches. Only a
sample of the chunks is followed for it, so nothing is kept for each chunk.
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
    "TierStats",
    "tier_names",
]

BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
)
"""Seconds up to which each bucket counts; one bucket more counts what is longer."""

AGES = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1200.0),
    *(3600.0, 7200.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0),
)
"""The same for ages, up to a week."""


@dataclass(slots=True)
class Durations:
    """So many things took so long.

    Attributes:
        seconds: all together.
        buckets: how many took longer than the bound before, and no longer than that of
            the bucket.
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
        """How many there were."""
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        """Seconds of one, on average; 0 where there was none."""
        return self.seconds / max(self.count, 1)

    def quantile(self, share: float) -> float:
        """Seconds that no more than the rest, beyond this share of them, exceeded.

        A bound of a bucket, so too long by its width at most; infinite for the last, and 0 where
        there was none.

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
        """One more took so long."""
        self.seconds += seconds
        self.buckets[bisect_left(self.bounds, seconds)] += 1

    def copy(self) -> Durations:
        """As it is now."""
        return Durations(self.seconds, self.buckets.copy(), self.bounds)


def _now(value: float = 0) -> Any:
    """A field that says how things are now. All the others are totals, which never become less."""
    return field(default=value, metadata={"now": True})


def _ages() -> Durations:
    return Durations(bounds=AGES)


@dataclass(slots=True)
class TierStats:
    """Totals since start, except where "now" is said.

    Attributes:
        name, medium: the tier. owned: whether its slots are this process's to give; of others'
            tiers what only their owners know is 0. store: whether it has to be asked what it has;
            its `chunks` are those of which that is known.
        chunks: entries now. free: ready slots that hold nothing, now. room: chunks that still
            fit before others have to leave, now.
        set_aside: slots that hold nothing and are not used, as a write to them failed, now.
        segments, max_segments: now.
        promoted: chunks read into host memory. failed_reads: chunks that could
            not be read or whose digest did not match.
        written: chunks written. failed_writes: chunks that could not be.
        refused: chunks not copied because the tier could not take copies then.
        declined: chunks not copied because its admission filter did not want them.
        evicted: entries that made room for others.
        ages: how long these had not been used, of a sample: see `Ages`.
        queued: host chunks waiting for their copy, now. writing: chunks that are being copied
            to it, reading: chunks that are being read from it, now.
        pinned: entries that do not leave for others, now.
        relocated: chunks moved within the tier. removed_segments: those emptied so and removed.
        asking: keys about which a store is being asked, now. asked: all of them. found: those
            that it had. unanswered: those of which it did not say so, or not in time.
            unawaited: requests that did not wait for its answer, as that was not worth it.
        closed, stalled, congested, slow, away, outpaced: see `Health`, now.
        read_pace: seconds in which a chunk is read, of late; 0 where nothing was.
        errors: moves that reported an error.
        read_bytes, written_bytes: those of `promoted` and `written`.
        used_bytes, free_bytes: those of `chunks` and `room`.
        reads, writes, asks: how long moves took that read or wrote chunks, or asked for some,
            failed ones included, from when they were handed out to when their ends were heard of.
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

    def complete(self, loaded: int, chunk_bytes: int) -> None:
        """Tell what the tier itself does not know.

        Args:
            loaded: chunks that came from it. chunk_bytes: their size.
        """
        self.loaded = loaded
        self.read_bytes = self.promoted * chunk_bytes
        self.written_bytes = self.written * chunk_bytes
        self.used_bytes = self.chunks * chunk_bytes
        self.free_bytes = self.room * chunk_bytes


@dataclass(slots=True)
class CoreStats:
    """Totals since start, except where "now" is said.

    Attributes:
        rows, free_rows, busy_rows, chunks: the host pool now. busy_rows are being filled or
            read, or pinned; pinned_rows are those that `pin` holds.
        pins: keys that are pinned now. prefetched: chunks whose fetch `prefetch` has begun.
        demoted: chunks that have left host memory because somebody said so.
        chunk_bytes: size of a chunk, where it is known. used_bytes, free_bytes: those of
            `chunks` and `free_rows`.
        waiting: requests that are deferred now. waits: how long others have waited for answers.
        misses: keys that answered "miss". outpaced: those that a tier has, but which are
            sooner computed again than read.
        compute_pace: seconds in which the server computes a chunk, of late; 0 where nobody knows.
        deferrals: waits begun.
        timeouts: waits ended by their deadline.
        truncations: waits ended with a shorter prefix because the rest cannot fit.
        lapses: requests whose leases ran out, or were ended early for others.
        loaded: chunks handed to the server. loaded_from: the same by the medium they came from.
        stored: chunks taken from the server. loaded_bytes, stored_bytes: those of both.
        stores_deferred: stores answered "not now, offer it again".
        chunks_refused: chunks of stores that found no room.
        declined: chunks of stores that the admission filter or the policy did not want.
        evicted: chunks that left host memory for others, those shed included. ages: how long
            they had not been used, of a sample: see `Ages`.
        shed: chunks evicted from host memory before their copy to a slower tier.
        stray: harmless calls that matched nothing (a completion after a reset).
        illegal: transitions of chunks that were asked for and may not be: mistakes of the core.
        hints, hints_ignored: those that came with requests, as managers count them;
            hints_refused: chunks that they could not hold, beyond what may be.
        events_lost: changes that were dropped because nobody took the events.
        outlived: chunks that were looked at when their lease had ended, as the library's faces
            count them. watched_rows: rows that are pinned for that reason now, those included of
            which only the view object lives on.
    """

    rows: int = _now()
    free_rows: int = _now()
    busy_rows: int = _now()
    pinned_rows: int = _now()
    pins: int = _now()
    prefetched: int = 0
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
    stored: int = 0
    stores_deferred: int = 0
    chunks_refused: int = 0
    declined: int = 0
    evicted: int = 0
    shed: int = 0
    stray: int = 0
    illegal: int = 0
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


def tier_names(tiers: Iterable[TierStats]) -> list[str]:
    """A name for each tier that says nothing of the machine, for monitors: ``disk-2:others``."""
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
"""Of so many chunks that come one is followed, at first."""

MOST = 4096
"""Most chunks that are followed. Where there would be more, every second one is let go, and from
then on half as many of those that come are followed."""


class Ages:
    """When the chunks of a sample came or were last used.

    Chunks that were there before the start are in no sample: nobody knows their age.

    Attributes:
        left: seconds since the last use, of those that left for others.
    """

    def __init__(self) -> None:
        self.left = Durations(bounds=AGES)
        self._used: dict[bytes, float] = {}
        self._now = 0.0
        self._every = EVERY
        # How many of those that come are passed over until the next is followed.
        self._skip = 0

    def __len__(self) -> int:
        """Chunks that are followed."""
        return len(self._used)

    def begin_step(self, now: float) -> None:
        """What happens from now on happens at this time."""
        self._now = now

    def come(self, keys: Sequence[bytes]) -> None:
        """These chunks have come."""
        used, now = self._used, self._now
        for key in keys[self._skip :: self._every]:
            used[key] = now
        self._skip = (self._skip - len(keys)) % self._every
        if len(used) > MOST:
            self._used = {key: used[key] for key in list(used)[::2]}
            self._every *= 2

    def use(self, keys: Iterable[bytes]) -> None:
        """These chunks were used."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                used[key] = self._now

    def leave(self, keys: Iterable[bytes]) -> None:
        """These chunks have left for others."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                self.left.add(self._now - used.pop(key))

    def forget(self, keys: Iterable[bytes]) -> None:
        """These chunks are gone, and for no other's sake."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                del used[key]

    def reset(self) -> None:
        """All chunks are gone."""
        self._used.clear()
