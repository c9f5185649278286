"""Counters and gauges of the core."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.durations import Durations

__all__ = ["CoreStats", "TierStats"]


@dataclass(slots=True)
class TierStats:
    """Totals since start, except where "now" is said.

    Attributes:
        name, medium: the tier.
        chunks: entries now. free: ready slots that hold nothing, now.
        segments, max_segments: now.
        promoted: chunks read into host memory. failed_reads: chunks that could
            not be read or whose digest did not match.
        written: chunks written. failed_writes: chunks that could not be.
        refused: chunks not copied because the tier could not take copies then.
        declined: chunks not copied because its admission filter did not want them.
        evicted: entries that made room for others.
        queued: host chunks waiting for their copy, now.
        pinned: entries that do not leave for others, now.
        relocated: chunks moved within the tier. removed_segments: those emptied so and removed.
        stalled, congested, slow: see `Health`, now.
        errors: moves that reported an error.
        read_bytes, written_bytes: those of `promoted` and `written`.
        reads, writes: how long moves took that read or wrote chunks, failed ones included, from
            when they were handed out to when their ends were heard of.
    """

    name: str
    medium: str
    chunks: int = 0
    free: int = 0
    segments: int = 0
    max_segments: int = 0
    promoted: int = 0
    failed_reads: int = 0
    written: int = 0
    failed_writes: int = 0
    refused: int = 0
    declined: int = 0
    evicted: int = 0
    queued: int = 0
    pinned: int = 0
    relocated: int = 0
    removed_segments: int = 0
    stalled: bool = False
    congested: bool = False
    slow: bool = False
    errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    reads: Durations = field(default_factory=Durations)
    writes: Durations = field(default_factory=Durations)

    def size_bytes(self, chunk_bytes: int) -> None:
        """Tell bytes too, of chunks of this size."""
        self.read_bytes = self.promoted * chunk_bytes
        self.written_bytes = self.written * chunk_bytes


@dataclass(slots=True)
class CoreStats:
    """Totals since start, except where "now" is said.

    Attributes:
        rows, free_rows, busy_rows, chunks: the host pool now. busy_rows are being filled or
            read, or pinned; pinned_rows are those that `pin` holds.
        pins: keys that are pinned now. prefetched: chunks whose fetch `prefetch` has begun.
        demoted: chunks that have left host memory because somebody said so.
        chunk_bytes: size of a chunk, where it is known.
        waiting: requests that are deferred now. waits: how long others have waited for answers.
        misses: keys that answered "miss".
        deferrals: waits begun.
        timeouts: waits ended by their deadline.
        truncations: waits ended with a shorter prefix because the rest cannot fit.
        lapses: requests whose leases ran out, or were ended early for others.
        loaded: chunks handed to the server. loaded_from: the same by the medium they came from.
        stored: chunks taken from the server. loaded_bytes, stored_bytes: those of both.
        stores_deferred: stores answered "not now, offer it again".
        chunks_refused: chunks of stores that found no room.
        declined: chunks of stores that the admission filter or the policy did not want.
        evicted: chunks that left host memory for others, those shed included.
        shed: chunks evicted from host memory before their copy to a slower tier.
        stray: harmless calls that matched nothing (a completion after a reset).
        illegal: transitions of chunks that were asked for and may not be: mistakes of the core.
        hints, hints_ignored: those that came with requests, as managers count them;
            hints_refused: chunks that they could not hold, beyond what may be.
        events_lost: changes that were dropped because nobody took the events.
        outlived: chunks that were looked at when their lease had ended, as the library's faces
            count them. watched_rows: rows that are pinned for that reason now.
    """

    rows: int = 0
    free_rows: int = 0
    busy_rows: int = 0
    pinned_rows: int = 0
    pins: int = 0
    prefetched: int = 0
    demoted: int = 0
    chunks: int = 0
    waiting: int = 0
    misses: int = 0
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
    watched_rows: int = 0
    chunk_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    waits: Durations = field(default_factory=Durations)
    tiers: list[TierStats] = field(default_factory=list)
