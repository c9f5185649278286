"""Table of metrics: the name, kind and help of each, whoever reports it.

Those of slower tiers have a label for the tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.core import AGES, BOUNDS, CoreStats, TierStats

__all__ = ["METRICS", "TIER_LABEL", "Metric"]

TIER_LABEL = "tier"
"""Names a slower tier: `disk`, `disk-2` for the second disk of `tiers`. `disk:others` are the lanes
of other processes on the paths of `disk`. A store is `remote`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without a prefix, and without what Prometheus adds to it (`_total`, `_bucket`, ...).
        of: what it is of: the core as a whole, a slower tier, one that chunks are copied to, one
            whose slots are this engine's to give, or one that has to be asked what it has.
        take: its value. text: what Prometheus says of it.
        bounds: of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    of: Literal["core", "tier", "target", "owned tier", "store"]
    take: Callable[[Any], Any]
    text: str
    bounds: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        return () if self.of == "core" else (TIER_LABEL,)


def _core(name: str, take: Callable[[CoreStats], int], text: str) -> Metric:
    return Metric(name, "counter", "core", take, text)


def _tier(name: str, take: Callable[[TierStats], int], text: str) -> Metric:
    return Metric(name, "counter", "tier", take, text)


def _target(name: str, take: Callable[[TierStats], int], text: str) -> Metric:
    return Metric(name, "counter", "target", take, text)


def _owned(name: str, take: Callable[[TierStats], int], text: str) -> Metric:
    return Metric(name, "counter", "owned tier", take, text)


def _core_now(name: str, take: Callable[[CoreStats], float], text: str) -> Metric:
    return Metric(name, "gauge", "core", take, text)


def _tier_now(name: str, take: Callable[[TierStats], float], text: str) -> Metric:
    return Metric(name, "gauge", "tier", take, text)


def _target_now(name: str, take: Callable[[TierStats], float], text: str) -> Metric:
    return Metric(name, "gauge", "target", take, text)


def _store(name: str, take: Callable[[TierStats], int], text: str) -> Metric:
    return Metric(name, "counter", "store", take, text)


def _store_now(name: str, take: Callable[[TierStats], float], text: str) -> Metric:
    return Metric(name, "gauge", "store", take, text)


def _owned_now(name: str, take: Callable[[TierStats], float], text: str) -> Metric:
    return Metric(name, "gauge", "owned tier", take, text)


METRICS: tuple[Metric, ...] = (
    # -- is it hitting, and from where? --------------------------------------------------
    _core(
        "loaded_host_chunks",
        lambda s: s.loaded_from.get("host", 0),
        "Chunks loaded to the device that were in host memory.",
    ),
    _tier(
        "loaded_disk_chunks",
        lambda t: t.loaded,
        "Chunks loaded to the device that had come from this tier for the same request.",
    ),
    _core("missed_keys", lambda s: s.misses, "Looked-up keys that were nowhere."),
    _core(
        "outpaced_keys",
        lambda s: s.outpaced,
        "Those of them that a tier has, but which are sooner computed than read.",
    ),
    _core("stored_chunks", lambda s: s.stored, "Chunks taken from the device into host memory."),
    # -- what does waiting cost? -----------------------------------------------------------
    _core("deferrals", lambda s: s.deferrals, "Requests that had to wait for a slower tier."),
    Metric(
        "wait_seconds",
        "histogram",
        "core",
        lambda s: s.waits,
        "How long requests that had to wait for a slower tier have waited for their answer.",
        BOUNDS,
    ),
    _core("timeouts", lambda s: s.timeouts, "Waits that were ended by their deadline."),
    _core(
        "truncations",
        lambda s: s.truncations,
        "Waits that ended with a shorter prefix for want of room.",
    ),
    _core(
        "lapses",
        lambda s: s.lapses,
        "Requests for which chunks were fetched, and that did not come for them in time.",
    ),
    _core_now("waiting_requests", lambda s: s.waiting, "Requests that wait for a slower tier now."),
    # -- is there room? ----------------------------------------------------------------------
    _core_now(
        "host_usage",
        lambda s: s.chunks / s.rows,
        "Fraction of the rows of host memory that hold a chunk.",
    ),
    _core_now(
        "host_busy",
        lambda s: s.busy_rows / s.rows,
        "Fraction of the rows of host memory that are being written, read or leased.",
    ),
    _core_now(
        "host_pinned",
        lambda s: s.pinned_rows / s.rows,
        "Fraction of the rows of host memory that are retained.",
    ),
    _core_now("host_used_bytes", lambda s: s.used_bytes, "Bytes of the chunks in host memory."),
    _core_now(
        "host_free_bytes",
        lambda s: s.free_bytes,
        "Bytes of host memory that hold nothing; a cache that is full has next to none.",
    ),
    _tier_now("disk_chunks", lambda t: t.chunks, "Chunks on the tier now."),
    _owned_now("disk_used_bytes", lambda t: t.used_bytes, "Bytes of the chunks on the tier."),
    _owned_now(
        "disk_free_bytes",
        lambda t: t.free_bytes,
        "Bytes of chunks that still fit before others have to leave.",
    ),
    _owned_now(
        "disk_pinned_chunks", lambda t: t.pinned, "Chunks on the tier that are retained now."
    ),
    _core("host_evicted_chunks", lambda s: s.evicted, "Chunks that left host memory for others."),
    _owned("disk_evicted_chunks", lambda t: t.evicted, "Chunks that left the tier for others."),
    Metric(
        "host_eviction_age_seconds",
        "histogram",
        "core",
        lambda s: s.ages,
        "How long chunks that left host memory for others had not been used, of a sample.",
        AGES,
    ),
    Metric(
        "disk_eviction_age_seconds",
        "histogram",
        "owned tier",
        lambda t: t.ages,
        "How long chunks that left the tier for others had not been used, of a sample.",
        AGES,
    ),
    # -- what is not stored, or lost? --------------------------------------------------------
    _core(
        "stores_deferred", lambda s: s.stores_deferred, "Stores that were put off to a later step."
    ),
    _core(
        "refused_chunks", lambda s: s.chunks_refused, "Chunks that found no room in host memory."
    ),
    _core(
        "declined_chunks",
        lambda s: s.declined,
        "Chunks that admission filter or policy did not let into host memory.",
    ),
    _core(
        "shed_chunks",
        lambda s: s.shed,
        "Chunks evicted from host memory before their copy to a slower tier.",
    ),
    _target(
        "disk_refused_chunks",
        lambda t: t.refused,
        "Chunks not copied because the tier could not take copies then.",
    ),
    _target(
        "disk_declined_chunks",
        lambda t: t.declined,
        "Chunks that the tier's admission filter did not let in.",
    ),
    # -- is the disk well? -------------------------------------------------------------------
    _tier("disk_read_chunks", lambda t: t.promoted, "Chunks read from the tier and verified."),
    _tier("disk_read_bytes", lambda t: t.read_bytes, "Bytes of those."),
    Metric(
        "disk_read_seconds",
        "histogram",
        "tier",
        lambda t: t.reads,
        "How long reads took, of any number of chunks, time in the queue included.",
        BOUNDS,
    ),
    _target("disk_written_chunks", lambda t: t.written, "Chunks written to the tier."),
    _target("disk_written_bytes", lambda t: t.written_bytes, "Bytes of those."),
    Metric(
        "disk_write_seconds",
        "histogram",
        "target",
        lambda t: t.writes,
        "How long copies took, of any number of chunks, time in the queue included.",
        BOUNDS,
    ),
    _target(
        "disk_failed_reads",
        lambda t: t.failed_reads,
        "Chunks that could not be read or did not match their digest.",
    ),
    _target(
        "disk_corrupt_chunks",
        lambda t: t.corrupt,
        "Those of the failed reads whose bytes were not those of the chunk.",
    ),
    _target("disk_failed_writes", lambda t: t.failed_writes, "Chunks that could not be written."),
    _owned_now(
        "disk_set_aside_slots",
        lambda t: t.set_aside,
        "Free slots that are not used now, because a write to them failed.",
    ),
    _tier("disk_errors", lambda t: t.errors, "Moves that reported an error."),
    _tier_now(
        "disk_reading_chunks", lambda t: t.reading, "Chunks that are being read from the tier now."
    ),
    _target_now(
        "disk_writing_chunks", lambda t: t.writing, "Chunks that are being copied to the tier now."
    ),
    _target_now(
        "disk_queued_chunks", lambda t: t.queued, "Chunks that wait for their copy to the tier now."
    ),
    _tier_now("disk_stalled", lambda t: int(t.stalled), "1 while the tier does not answer."),
    _tier_now(
        "disk_congested",
        lambda t: int(t.congested),
        "1 while more is asked of the tier than it can give before requests stop waiting.",
    ),
    _tier_now(
        "disk_outpaced",
        lambda t: int(t.outpaced),
        "1 while the server computes a chunk sooner than the tier reads one.",
    ),
    _tier_now(
        "disk_closed",
        lambda t: int(t.closed),
        "1 once the tier is not used any more: the weights have changed.",
    ),
    _tier_now(
        "disk_seconds_per_chunk",
        lambda t: t.read_pace,
        "Seconds in which the tier reads a chunk, of late; 0 where nothing was read.",
    ),
    _core_now(
        "compute_seconds_per_chunk",
        lambda s: s.compute_pace,
        "Seconds in which the server computes a chunk, of late; 0 where nobody knows.",
    ),
    _tier_now(
        "disk_slow",
        lambda t: int(t.slow),
        "1 while copies to the tier, or making room there, take seconds.",
    ),
    _owned(
        "disk_relocated_chunks",
        lambda t: t.relocated,
        "Chunks that compaction copied to another place.",
    ),
    _owned(
        "disk_segments_removed",
        lambda t: t.removed_segments,
        "Segment files that compaction emptied and removed.",
    ),
    # -- is the store well? ------------------------------------------------------------------
    _store("store_asked_chunks", lambda t: t.asked, "Chunks about which the store was asked."),
    _store("store_found_chunks", lambda t: t.found, "Those of them that it had."),
    _store(
        "store_unanswered_chunks",
        lambda t: t.unanswered,
        "Those of them of which it did not say so, or not in time.",
    ),
    _store(
        "store_unawaited_requests",
        lambda t: t.unawaited,
        "Requests that did not wait for its answer, as that would take longer than it may save.",
    ),
    Metric(
        "store_answer_seconds",
        "histogram",
        "store",
        lambda t: t.asks,
        "How long answers took, of any number of chunks, time in the queue included.",
        BOUNDS,
    ),
    _store_now(
        "store_asking_chunks", lambda t: t.asking, "Chunks about which the store is asked now."
    ),
    _store_now(
        "store_away",
        lambda t: int(t.away),
        "1 while the store is left alone because a call to it failed.",
    ),
    # -- hints, and what should not be --------------------------------------------------------
    _core("hints", lambda s: s.hints, "Hints that requests came with."),
    _core("hints_ignored", lambda s: s.hints_ignored, "Hints that were malformed or not known."),
    _core(
        "hints_refused_chunks",
        lambda s: s.hints_refused,
        "Chunks that were to be retained or fetched, beyond what may be.",
    ),
    _core(
        "prefetched_chunks",
        lambda s: s.prefetched,
        "Chunks whose fetch to host memory was begun because of a hint.",
    ),
    _core(
        "demoted_chunks",
        lambda s: s.demoted,
        "Chunks that have left host memory because of a hint.",
    ),
    _core(
        "events_lost",
        lambda s: s.events_lost,
        "Changes that were not told as KV events because nobody took them.",
    ),
    _core(
        "internal_errors",
        lambda s: s.illegal,
        "Mistakes of kvstore itself, which did no harm: please report them.",
    ),
)
"""Everything that is reported, in the order in which operators ask."""
