"""What kvstore reports through vLLM's statistics and Prometheus."""

from __future__ import annotations

from kvstore.core import CoreStats, TierStats

__all__ = ["COUNTERS", "GAUGES", "Reporter"]

_PREFIX = "vllm:kvstore_"

COUNTERS: dict[str, str] = {
    "loaded_host_chunks": "Chunks loaded to the device that were in host memory.",
    "loaded_disk_chunks": "Chunks loaded to the device that came from disk.",
    "stored_chunks": "Chunks taken from the device into host memory.",
    "missed_keys": "Looked-up keys that were nowhere.",
    "deferrals": "Lookups that had to wait for a slower tier.",
    "timeouts": "Waits that were ended by their deadline.",
    "truncations": "Waits that ended with a shorter prefix for want of room.",
    "refused_chunks": "Chunks that found no room in host memory.",
    "declined_chunks": "Chunks that admission filter or policy did not let into host memory.",
    "stores_deferred": "Stores that were deferred to a later step.",
    "shed_chunks": "Chunks evicted from host memory before their copy to disk.",
    "prefetched_chunks": "Chunks whose fetch to host memory was begun because of a hint.",
    "demoted_chunks": "Chunks that have left host memory because of a hint.",
    "hints": "Hints that requests came with.",
    "hints_ignored": "Hints that were malformed or not known.",
    "hints_refused_chunks": "Chunks that were to be retained or fetched, beyond what may be.",
    "disk_read_chunks": "Chunks read from disk and verified.",
    "disk_failed_reads": "Chunks on disk that could not be read or did not match their digest.",
    "disk_written_chunks": "Chunks written to disk.",
    "disk_failed_writes": "Chunks that could not be written to disk.",
    "disk_refused_chunks": "Chunks not copied because the disk could not take copies then.",
    "disk_declined_chunks": "Chunks that the disk's admission filter did not let in.",
    "disk_evicted_chunks": "Chunks evicted from disk.",
    "disk_relocated_chunks": "Chunks that compaction copied to another place on disk.",
    "disk_segments_removed": "Segment files that compaction emptied and removed.",
}

GAUGES: dict[str, str] = {
    "host_usage": "Fraction of the rows of host memory that hold a chunk.",
    "host_busy": "Fraction of the rows of host memory that are being written, read or leased.",
    "host_pinned": "Fraction of the rows of host memory that are retained.",
    "waiting_requests": "Requests that wait for a slower tier now.",
    "disk_chunks": "Chunks on disk now.",
    "disk_pinned_chunks": "Chunks on disk that are retained now.",
    "disk_stalled": "1 while the disk does not answer.",
    "disk_slow": "1 while copies to the disk, or making room there, take seconds.",
}


class Reporter:
    """Turns totals of the core into the increments that vLLM expects."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def counters(self, stats: CoreStats) -> dict[str, int]:
        """What was counted since the last call, by full metric name; zeros are left out."""
        disk = [tier for tier in stats.tiers if tier.medium == "disk"]
        sources = stats.loaded_from
        totals = {
            "loaded_host_chunks": sources.get("host", 0),
            "loaded_disk_chunks": sources.get("disk", 0),
            "stored_chunks": stats.stored,
            "missed_keys": stats.misses,
            "deferrals": stats.deferrals,
            "timeouts": stats.timeouts,
            "truncations": stats.truncations,
            "refused_chunks": stats.chunks_refused,
            "declined_chunks": stats.declined,
            "stores_deferred": stats.stores_deferred,
            "shed_chunks": stats.shed,
            "prefetched_chunks": stats.prefetched,
            "demoted_chunks": stats.demoted,
            "hints": stats.hints,
            "hints_ignored": stats.hints_ignored,
            "hints_refused_chunks": stats.hints_refused,
            "disk_read_chunks": _sum(disk, "promoted"),
            "disk_failed_reads": _sum(disk, "failed_reads"),
            "disk_written_chunks": _sum(disk, "written"),
            "disk_failed_writes": _sum(disk, "failed_writes"),
            "disk_refused_chunks": _sum(disk, "refused"),
            "disk_declined_chunks": _sum(disk, "declined"),
            "disk_evicted_chunks": _sum(disk, "evicted"),
            "disk_relocated_chunks": _sum(disk, "relocated"),
            "disk_segments_removed": _sum(disk, "removed_segments"),
        }
        increments = {
            _PREFIX + name: total - self._last.get(name, 0)
            for name, total in totals.items()
            if total != self._last.get(name, 0)
        }
        self._last = totals
        return increments

    @staticmethod
    def gauges(stats: CoreStats) -> dict[str, float]:
        """The state now, by full metric name."""
        disk = [tier for tier in stats.tiers if tier.medium == "disk"]
        values = {
            "host_usage": stats.chunks / stats.rows,
            "host_busy": stats.busy_rows / stats.rows,
            "host_pinned": stats.pinned_rows / stats.rows,
            "waiting_requests": stats.waiting,
            "disk_chunks": _sum(disk, "chunks"),
            "disk_pinned_chunks": _sum(disk, "pinned"),
            "disk_stalled": float(any(tier.stalled for tier in disk)),
            "disk_slow": float(any(tier.slow for tier in disk)),
        }
        return {_PREFIX + name: value for name, value in values.items()}

    @staticmethod
    def documentation() -> tuple[dict[str, str], dict[str, str]]:
        """Counters and gauges by full metric name, with their documentation."""
        return (
            {_PREFIX + name: text for name, text in COUNTERS.items()},
            {_PREFIX + name: text for name, text in GAUGES.items()},
        )


def _sum(tiers: list[TierStats], name: str) -> int:
    return sum(int(getattr(tier, name)) for tier in tiers)
