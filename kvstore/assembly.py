"""Putting core, host memory and tiers together, the same for every face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.choice import build_filters, build_policy
from kvstore.config import Config
from kvstore.core import Core, Flow, HostPool, OwnedTier, PeerTier
from kvstore.core.tier import TierView
from kvstore.errors import ConfigError
from kvstore.recording import Recorder
from kvstore.sizes import format_size
from policies.table import COMPILED
from tiers import PinnedRegion, Tier
from tiers.disk import DiskTier, PeerLanes
from tiers.disk.namespace import Namespace
from tiers.pinned import round_to_page

__all__ = ["Assembly", "assemble", "rows_for"]


@dataclass(slots=True)
class Assembly:
    """An open store without an engine."""

    core: Core
    region: PinnedRegion
    tiers: list[Tier]
    description: str
    recorder: Recorder | None = None

    def recency(self) -> list[list[tuple[bytes, int]]]:
        """For each tier its (key, slot), coldest first."""
        recency = []
        for tier in self.core.tiers:
            entries = tier.entries
            ordered = [key for key in tier.index.policy.order() if key in entries]
            recency.append([(key, entries[key]) for key in ordered])
        return recency


def rows_for(config: Config, chunk_bytes: int) -> tuple[int, int]:
    """Rows, and bytes of a row, that host memory has for chunks of `chunk_bytes`.

    Raises:
        ConfigError: if not even one row fits.
    """
    row_bytes = round_to_page(chunk_bytes)
    rows = config.cpu_bytes_to_use // row_bytes
    if rows < 1:
        raise ConfigError(
            f"cpu_bytes_to_use = {config.cpu_bytes_to_use}: must hold at least one chunk "
            f"of {row_bytes} bytes"
        )
    return rows, row_bytes


def assemble(
    config: Config,
    region: PinnedRegion,
    chunk_bytes: int,
    label: str,
    identity: Mapping[str, Any],
    *,
    events: bool,
) -> Assembly:
    """Open the tiers of `config` over `region` and build the core that rules them.

    Raises:
        KVStoreError: if a tier cannot be opened; those opened before are closed.
    """
    whole = {**identity, "chunk_bytes": chunk_bytes, "slot_bytes": region.row_bytes}
    namespace = Namespace.of(label, whole)
    if config.namespace is not None:
        namespace = Namespace(config.namespace, whole)
    tiers: list[Tier] = []
    try:
        return _assemble(config, region, chunk_bytes, namespace, tiers, events)
    except BaseException:
        for opened in tiers:
            opened.abandon()
        raise


def _assemble(
    config: Config,
    region: PinnedRegion,
    chunk_bytes: int,
    namespace: Namespace,
    tiers: list[Tier],
    events: bool,
) -> Assembly:
    """Opened tiers are put into `tiers` one by one, so that a failure leaves them there."""
    in_flight = max(1, min(region.rows, config.write_queue_bytes // region.row_bytes))
    views: list[TierView] = []
    parts: list[str] = []
    for tier_config in config.tiers:
        disk = DiskTier(
            tier_config.paths,
            namespace,
            chunk_bytes,
            tier_config.capacity_bytes,
            segment_bytes=tier_config.segment_bytes,
            io=tier_config.io,
            io_threads=tier_config.io_threads,
            lane=tier_config.lane,
            strict_modes=tier_config.strict_modes,
            share_after_reset=tier_config.share_after_reset,
        )
        recovered = disk.open(region)
        tiers.append(disk)
        slots = max(1, recovered.max_segments * recovered.segment_slots)
        policy = build_policy(tier_config.eviction_policy, slots)
        filters = build_filters(tier_config.admission, slots, chunk_bytes)
        flow = tier_config.flow
        view = OwnedTier(len(views), recovered, policy, in_flight, filters, flow)
        view.compact_at(tier_config.compaction_rate / region.row_bytes)
        views.append(view)
        rules = [str(tier_config.eviction_policy), flow.value, *map(str, tier_config.admission)]
        found = len(recovered.entries)
        parts.append(f"{disk.description}, {', '.join(rules)}, {found} chunks found")
        if tier_config.share:
            others = PeerLanes(disk)
            shared = others.open(region)
            tiers.append(others)
            views.append(PeerTier(len(views), shared, in_flight))
            if shared.entries:
                parts.append(f"{others.description} with {len(shared.entries)} chunks")
    demotes = any(view.flow is not Flow.WRITE_THROUGH for view in views)
    pool = HostPool(
        region.rows,
        build_policy(config.host_policy, region.rows),
        build_filters(config.host_filters, region.rows, chunk_bytes),
        int(region.rows * config.demote_ahead) if demotes else 0,
    )
    core = Core(
        pool,
        views,
        deadline=config.deadline_s,
        max_wait=config.max_wait_s,
        lease=config.lease_s,
        events=events,
    )
    rules = [region.description, str(config.host_policy), *map(str, config.host_filters)]
    host = f"host {format_size(region.size)} ({', '.join(rules)})"
    recorder = None
    if config.record_trace is not None:
        recorder = Recorder(config.record_trace, config.record_trace_bytes, chunk_bytes)
        core.chains.listen(recorder.add)
        parts.append(f"requests recorded in {recorder.path}")
    if not COMPILED:
        parts.append("installed without a C compiler: steps over large tiers have pauses")
    return Assembly(core, region, tiers, "; ".join([host, *parts]), recorder)
