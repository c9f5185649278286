"""Table of metrics: the name, kind and help text of each.

Metrics of slower tiers have a label that names the tier, those of tenants one that names the
tenant. There are none of tenants where the configuration has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvstore.core import AGES, BOUNDS, CoreStats, Durations, TenantStats, TierStats

__all__ = ["METRICS", "TIER_LABEL", "Metric"]

TIER_LABEL = "tier"
"""Label that names a slower tier: `disk`, `disk-2` for the second disk of `tiers`, `remote` for a
store. `disk:others` stands for the lanes of other processes on the paths of `disk`."""


TENANT_LABEL = "tenant"
"""Label that names a tenant of the configuration; `others` stands for all that it does not name."""


_Kind = Literal["counter", "gauge", "histogram"]
_Of = Literal["core", "tier", "target", "owned tier", "store", "tenant"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its name without a prefix and without Prometheus' suffixes (`_total`, `_bucket`, ...).
        of: who reports it: the core, every slower tier ("tier"), tiers that chunks are copied to
            ("target"), tiers that this process owns, remote stores, or each tenant.
        take: reads the value from the statistics. text: its help in Prometheus.
        bounds: upper bounds of a histogram's buckets.
    """

    name: str
    kind: _Kind
    of: _Of
    take: Callable[[Any], Any]
    text: str
    bounds: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        return {"core": (), "tenant": (TENANT_LABEL,)}.get(self.of, (TIER_LABEL,))


_Stats = TypeVar("_Stats", CoreStats, TierStats, TenantStats)


def _of(
    kind: _Kind, of: _Of, stats: type[_Stats], bounds: tuple[float, ...] = ()
) -> Callable[[str, Callable[[_Stats], float | Durations], str], Metric]:
    """Return what makes metrics of a kind, whose values are taken from such `stats`."""
    return lambda name, take, text: Metric(name, kind, of, take, text, bounds)


_core, _core_now = _of("counter", "core", CoreStats), _of("gauge", "core", CoreStats)
_tier, _tier_now = _of("counter", "tier", TierStats), _of("gauge", "tier", TierStats)
_target, _target_now = _of("counter", "target", TierStats), _of("gauge", "target", TierStats)
_owned, _owned_now = _of("counter", "owned tier", TierStats), _of("gauge", "owned tier", TierStats)
_tenant, _tenant_now = _of("counter", "tenant", TenantStats), _of("gauge", "tenant", TenantStats)
_store, _store_now = _of("counter", "store", TierStats), _of("gauge", "store", TierStats)

METRICS: tuple[Metric, ...] = (
    # -- is it hitting, and from where? --------------------------------------------------
    _core(
        "loaded_host_chunks",
        lambda s: s.loaded_from.get("host", 0),
        "Chunks loaded to the device that were already in host memory.",
    ),
    _tier(
        "loaded_tier_chunks",
        lambda t: t.loaded,
        "Chunks loaded to the device that were read from this tier for the same request.",
    ),
    _core(
        "saved_host_seconds",
        lambda s: s.saved,
        "Seconds of computing that chunks already in host memory made unnecessary, by the measured "
        "time to compute a chunk.",
    ),
    _tier(
        "saved_tier_seconds",
        lambda t: t.saved,
        "Seconds of computing that chunks read from this tier made unnecessary; what requests "
        "waited for them is in wait_seconds.",
    ),
    _core("missed_keys", lambda s: s.misses, "Looked-up keys that were answered with a miss."),
    _core(
        "outpaced_keys",
        lambda s: s.outpaced,
        "Misses although a tier holds the chunk, because computing it is faster than reading it.",
    ),
    _core("stored_chunks", lambda s: s.stored, "Chunks copied from the device to host memory."),
    # -- what does waiting cost? -----------------------------------------------------------
    _core("deferrals", lambda s: s.deferrals, "Requests that were told to wait for a slower tier."),
    _of("histogram", "core", CoreStats, BOUNDS)(
        "wait_seconds",
        lambda s: s.waits,
        "Seconds that a request waited for a slower tier before it was answered.",
    ),
    _core(
        "timeouts",
        lambda s: s.timeouts,
        "Requests whose wait for a slower tier was ended by the deadline.",
    ),
    _core(
        "truncations",
        lambda s: s.truncations,
        "Requests that were answered with a shorter prefix because host memory had no "
        "room for more, or had none before the server could compute it.",
    ),
    _core(
        "lapses",
        lambda s: s.lapses,
        "Requests that did not load the chunks fetched for them before their leases ended.",
    ),
    _core_now(
        "waiting_requests", lambda s: s.waiting, "Requests that are waiting for a slower tier now."
    ),
    # -- is there room? ----------------------------------------------------------------------
    _core_now(
        "host_used_ratio",
        lambda s: s.chunks / s.rows,
        "Fraction of the rows of host memory that hold a chunk, from 0 to 1.",
    ),
    _core_now(
        "host_busy_ratio",
        lambda s: s.busy_rows / s.rows,
        "Fraction of the rows of host memory that are being written or read, leased or "
        "pinned, from 0 to 1.",
    ),
    _core_now(
        "host_pinned_ratio",
        lambda s: s.pinned_rows / s.rows,
        "Fraction of the rows of host memory that hold a pinned chunk, from 0 to 1.",
    ),
    _core_now("host_used_bytes", lambda s: s.used_bytes, "Bytes of host memory that hold chunks."),
    _core_now(
        "host_free_bytes",
        lambda s: s.free_bytes,
        "Bytes of host memory that hold no chunk; near 0 once the cache is full.",
    ),
    _tier_now("tier_chunks", lambda t: t.chunks, "Chunks that this tier is known to hold now."),
    _owned_now("tier_used_bytes", lambda t: t.used_bytes, "Bytes of the chunks on this tier."),
    _owned_now(
        "tier_free_bytes",
        lambda t: t.free_bytes,
        "Bytes of chunks that this tier can still take before it has to evict others.",
    ),
    _owned_now(
        "tier_pinned_chunks", lambda t: t.pinned, "Chunks on this tier that are pinned now."
    ),
    _core(
        "host_evicted_chunks",
        lambda s: s.evicted,
        "Chunks evicted from host memory to make room for others.",
    ),
    _owned(
        "tier_evicted_chunks",
        lambda t: t.evicted,
        "Chunks evicted from this tier to make room for others.",
    ),
    _of("histogram", "core", CoreStats, AGES)(
        "host_eviction_age_seconds",
        lambda s: s.ages,
        "Seconds between the last use of a chunk and its eviction from host memory, for "
        "a sample of chunks.",
    ),
    _of("histogram", "owned tier", TierStats, AGES)(
        "tier_eviction_age_seconds",
        lambda t: t.ages,
        "Seconds between the last use of a chunk and its eviction from this tier, for a "
        "sample of chunks.",
    ),
    # -- what is not stored, or lost? --------------------------------------------------------
    _core(
        "stores_deferred",
        lambda s: s.stores_deferred,
        "Stores that were put off to a later step for lack of room in host memory.",
    ),
    _core(
        "refused_chunks",
        lambda s: s.chunks_refused,
        "Chunks that were not stored because host memory had no room for them.",
    ),
    _core(
        "declined_chunks",
        lambda s: s.declined,
        "Chunks that the admission filter or the eviction policy kept out of host memory.",
    ),
    _core(
        "shed_chunks",
        lambda s: s.shed,
        "Chunks evicted from host memory before they were copied to a slower tier.",
    ),
    _target(
        "tier_refused_chunks",
        lambda t: t.refused,
        "Chunks not copied to this tier because it was full, slow or failing.",
    ),
    _target(
        "tier_declined_chunks",
        lambda t: t.declined,
        "Chunks that this tier's admission filter kept out.",
    ),
    # -- is the disk well? -------------------------------------------------------------------
    _tier("tier_read_chunks", lambda t: t.promoted, "Chunks read from this tier and verified."),
    _tier(
        "tier_read_bytes",
        lambda t: t.read_bytes,
        "Bytes of the chunks read from this tier and verified.",
    ),
    _of("histogram", "tier", TierStats, BOUNDS)(
        "tier_read_seconds",
        lambda t: t.reads,
        "Seconds that a read of one or more chunks from this tier took, including time "
        "in the queue.",
    ),
    _target("tier_written_chunks", lambda t: t.written, "Chunks written to this tier."),
    _target(
        "tier_written_bytes",
        lambda t: t.written_bytes,
        "Bytes of the chunks written to this tier, those that compaction moved included.",
    ),
    _of("histogram", "target", TierStats, BOUNDS)(
        "tier_write_seconds",
        lambda t: t.writes,
        "Seconds that a write of one or more chunks to this tier took, including time in "
        "the queue.",
    ),
    _target(
        "tier_failed_reads",
        lambda t: t.failed_reads,
        "Chunks that could not be read from this tier or did not match their digest.",
    ),
    _target(
        "tier_corrupt_chunks",
        lambda t: t.corrupt,
        "Chunks read from this tier whose bytes were wrong; also counted as failed reads.",
    ),
    _target(
        "tier_failed_writes",
        lambda t: t.failed_writes,
        "Chunks that could not be written to this tier.",
    ),
    _owned_now(
        "tier_set_aside_slots",
        lambda t: t.set_aside,
        "Free slots of this tier that are not used now because a write to them failed.",
    ),
    _tier(
        "tier_errors",
        lambda t: t.errors,
        "Reads, writes and other operations on this tier that reported an error.",
    ),
    _tier_now(
        "tier_reading_chunks", lambda t: t.reading, "Chunks that are being read from this tier now."
    ),
    _target_now(
        "tier_writing_chunks",
        lambda t: t.writing,
        "Chunks that are being written to this tier now.",
    ),
    _target_now(
        "tier_queued_chunks",
        lambda t: t.queued,
        "Chunks that are waiting to be written to this tier now.",
    ),
    _tier_now(
        "tier_stalled", lambda t: int(t.stalled), "1 while this tier does not respond, 0 otherwise."
    ),
    _tier_now(
        "tier_congested",
        lambda t: int(t.congested),
        "1 while so many reads of this tier are queued that new requests do not wait for "
        "it, 0 otherwise.",
    ),
    _tier_now(
        "tier_outpaced",
        lambda t: int(t.outpaced),
        "1 while the server computes a chunk faster than this tier reads one, 0 otherwise.",
    ),
    _tier_now(
        "tier_closed",
        lambda t: int(t.closed),
        "1 once this tier is no longer used because the model's weights have changed, 0 otherwise.",
    ),
    _tier_now(
        "tier_seconds_per_chunk",
        lambda t: t.read_pace,
        "Average seconds to read a chunk from this tier, over recent reads; 0 before the first.",
    ),
    _core_now(
        "compute_seconds_per_chunk",
        lambda s: s.compute_pace,
        "Average seconds in which the server recently computed a chunk; 0 while unknown.",
    ),
    _tier_now(
        "tier_slow",
        lambda t: int(t.slow),
        "1 while writes to this tier, or making room on it, take seconds, 0 otherwise.",
    ),
    _owned(
        "tier_relocated_chunks",
        lambda t: t.relocated,
        "Chunks that compaction moved to another place on this tier.",
    ),
    _owned(
        "tier_segments_removed",
        lambda t: t.removed_segments,
        "Segment files of this tier that compaction emptied and removed.",
    ),
    # -- is the store well? ------------------------------------------------------------------
    _store("store_asked_chunks", lambda t: t.asked, "Chunks that this store was asked about."),
    _store(
        "store_found_chunks", lambda t: t.found, "Chunks that this store was asked about and has."
    ),
    _store(
        "store_unanswered_chunks",
        lambda t: t.unanswered,
        "Chunks that this store was asked about and gave no answer for, or not in time.",
    ),
    _store(
        "store_unawaited_requests",
        lambda t: t.unawaited,
        "Requests that did not wait for this store's answer because the wait would cost "
        "more than it could save.",
    ),
    _of("histogram", "store", TierStats, BOUNDS)(
        "store_answer_seconds",
        lambda t: t.asks,
        "Seconds that this store took to answer a question about one or more chunks, "
        "including time in the queue.",
    ),
    _store_now(
        "store_asking_chunks",
        lambda t: t.asking,
        "Chunks that this store is being asked about now.",
    ),
    _store_now(
        "store_away",
        lambda t: int(t.away),
        "1 while this store is not used because a call to it failed, 0 otherwise.",
    ),
    # -- hints, and what should not be --------------------------------------------------------
    _core("hints", lambda s: s.hints, "Hints of requests that were taken."),
    _core(
        "hints_ignored",
        lambda s: s.hints_ignored,
        "Hints that were ignored because they were malformed or unknown.",
    ),
    _core(
        "hints_refused_chunks",
        lambda s: s.hints_refused,
        "Chunks that hints asked to pin or prefetch beyond the allowed number.",
    ),
    _core(
        "prefetched_chunks",
        lambda s: s.prefetched,
        "Chunks that began to be fetched to host memory because of a hint.",
    ),
    _core(
        "queued_fetched_chunks",
        lambda s: s.fetched_queued,
        "Chunks that began to be fetched for requests in the queue of the server.",
    ),
    _core(
        "queued_gave_way",
        lambda s: s.gave_way,
        "How often a request in the queue gave up fetched chunks, as another one needed room.",
    ),
    _core(
        "demoted_chunks",
        lambda s: s.demoted,
        "Chunks that left host memory because of a hint.",
    ),
    _core(
        "events_lost",
        lambda s: s.events_lost,
        "KV events that were dropped because no client collected them in time.",
    ),
    _core(
        "internal_errors",
        lambda s: s.illegal,
        "Internal errors of kvstore, none of which did harm; please report them.",
    ),
    _core(
        "plugin_faults",
        lambda s: s.plugin_faults,
        "Failures of policies and filters that are not kvstore's own; the log names each.",
    ),
    # -- who has what? -----------------------------------------------------------------------
    _tenant(
        "tenant_loaded_chunks",
        lambda t: t.loaded,
        "Chunks of this tenant that were loaded to the device.",
    ),
    _tenant(
        "tenant_stored_chunks",
        lambda t: t.stored,
        "Chunks of this tenant that were copied from the device to host memory.",
    ),
    _tenant_now(
        "tenant_host_chunks",
        lambda t: t.host_chunks,
        "Chunks of this tenant in host memory. Those that are on their way out do not count.",
    ),
    _tenant_now(
        "tenant_tier_chunks",
        lambda t: t.tier_chunks,
        "Chunks of this tenant on the slower tiers of this process.",
    ),
)
"""All metrics, in the order of the questions that operators ask."""
