"""Composition root: put core, host memory and tiers together, the same for every user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.concurrency import Daemons
from kvstore.config import Config, DiskConfig, TierConfig
from kvstore.core import AskedTier, Core, Flow, HostPool, OwnedTier, PeerTier
from kvstore.core.residency.base import TierView
from kvstore.core.residency.index import ColdestFirst
from kvstore.core.residency.remote_answers import MOST_ANSWERS
from kvstore.core.statistics import tier_names
from kvstore.engine.engine import Beside
from kvstore.errors import ConfigError, PathUnusableError
from kvstore.gate import codecs_of
from kvstore.observe.logs import warn_with
from kvstore.observe.recorder import Recorder
from kvstore.plugins import (
    TierPlace,
    abandon_tiers,
    build_filters,
    build_policy,
    create_tier,
    find_tier,
    open_tier,
)
from kvstore.policies.shares import Places, Shares, tag_of
from kvstore.policies.table import COMPILED
from kvstore.sizes import format_size
from kvstore.tiers import Tier
from kvstore.tiers.codec import Codec
from kvstore.tiers.disk import DiskTier, PeerLanes
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.pinned import PAGE, PinnedRegion, RegionShape, round_to_page
from kvstore.tiers.sealing import CIPHER
from kvstore.types import RecoveredTier

if TYPE_CHECKING:
    from kvstore.control.commands import Commands
    from kvstore.control.server import ControlServer
    from kvstore.observe.tracing import SpanWriter

__all__ = [
    "NAMES_ADDED",
    "Assembly",
    "assemble",
    "build",
    "key_ring",
    "namespace_of",
    "open_tiers",
    "rows_for",
    "spans_of",
]

logger = logging.getLogger("kvstore")

NOT_COMPILED = (
    "installed without a C compiler: steps over large tiers have pauses, and fast disks are slower"
)

NAMES_ADDED = {"chunk_bytes", "slot_bytes", "encryption"}
"""What `namespace_of` adds to an identity, besides codecs."""

TAIL_SHARE = 16
"""Chunks of at least this many times the bytes of a tail have one: at most 6 % of host memory."""


@dataclass(slots=True)
class Assembly:
    """An open store without an engine."""

    core: Core
    region: PinnedRegion
    tiers: list[Tier]
    description: str
    recorder: Recorder | None = None
    spans: SpanWriter | None = None
    control: ControlServer | None = None
    commands: Commands | None = None

    @property
    def beside(self) -> list[Beside]:
        """The companions of the engine."""
        return [one for one in (self.recorder, self.spans, self.control) if one is not None]

    def abandon(self, *, region: bool = False) -> None:
        """Let go of what is open, and of the memory if wanted, without waiting."""
        abandon_tiers(self.tiers)
        for one in (self.recorder, self.control):
            if one is not None:
                one.abandon()
        if region:
            self.region.close()

    def recency(self) -> list[ColdestFirst]:
        """Return the entries of each tier, coldest first."""
        return [tier.index.coldest_first() for tier in self.core.tiers]


def rows_for(config: Config, chunk_bytes: int) -> RegionShape:
    """Return the number and size of host memory's rows for chunks of `chunk_bytes`.

    Raises:
        ConfigError: if not even one row fits.
    """
    row_bytes = round_to_page(chunk_bytes)
    kinds = [find_tier(tier.type) for tier in config.tiers if isinstance(tier, TierConfig)]
    tail_bytes = round_to_page(max((kind.tail_bytes for kind in kinds), default=0))
    if chunk_bytes % PAGE or tail_bytes * TAIL_SHARE > chunk_bytes:
        # Chunks are small, or end before their row does.
        tail_bytes = 0
    rows = config.cpu_bytes_to_use // (row_bytes + tail_bytes)
    if rows < 1:
        raise ConfigError(
            f"cpu_bytes_to_use = {config.cpu_bytes_to_use}: must hold at least one chunk "
            f"of {row_bytes + tail_bytes} bytes"
        )
    return RegionShape(rows, row_bytes, tail_bytes)


def assemble(
    config: Config,
    region: PinnedRegion,
    chunk_bytes: int,
    label: str,
    identity: Mapping[str, Any],
    *,
    events: bool,
) -> Assembly:
    """Open the tiers of `config` over `region` and build their core.

    Raises:
        KVStoreError: if a tier cannot be opened; those opened before are closed.
    """
    namespace = namespace_of(config, chunk_bytes, region.row_bytes, label, identity)
    with ExitStack() as opened:
        tiers: list[Tier] = []
        opened.callback(abandon_tiers, tiers)
        views, parts = open_tiers(config, region, chunk_bytes, namespace, tiers)
        demotes = any(view.flow is not Flow.WRITE_THROUGH for view in views)
        policy = build_policy(config.host_policy, region.rows, config.tenants)
        filters = build_filters(config.host_filters, region.rows, chunk_bytes, config.tenants)
        spare = int(region.rows * config.demote_ahead) if demotes else 0
        pool = HostPool(region.rows, policy, filters, spare)
        # What is pinned leaves to tenants what is guaranteed to them.
        guaranteed = 0.0 if config.tenants is None else config.tenants.guaranteed
        core = Core(
            pool,
            views,
            deadline=config.deadline_s,
            max_wait=config.max_wait_s,
            lease=config.lease_s,
            events=events,
            pinned_share=min(config.pinned_share, 1 - guaranteed),
            recompute=config.compute_pace,
            chunk_bytes=chunk_bytes,
            log=warn_with(logger),
        )
        rules = [region.description, str(config.host_policy), *map(str, config.host_filters)]
        if config.tenants is not None:
            rules.append(f"shares of tenants: {', '.join([*config.tenants.named, 'others'])}")
        host = f"host {format_size(region.size)} ({', '.join(rules)})"
        recorder = None
        if config.record_trace is not None:
            recorder = Recorder(config.record_trace, config.record_trace_bytes, chunk_bytes)
            opened.callback(recorder.abandon)
            core.on_prompt_end(recorder.add)
            parts.append(f"requests recorded in {recorder.path}")
        if not COMPILED:
            parts.append(NOT_COMPILED)
        description = "; ".join([host, *parts])
        spans = spans_of(config, views, core.want_spans, chunk_bytes)
        control, commands = control_of(config, tiers, region, description)
        opened.pop_all()
        return Assembly(core, region, tiers, description, recorder, spans, control, commands)


def control_of(
    config: Config, tiers: Sequence[Tier], region: PinnedRegion, description: str
) -> tuple[ControlServer, Commands] | tuple[None, None]:
    """Return the control server and its commands, if `config` wants them.

    Raises:
        ConfigError: if aiohttp is not installed, or the socket or the token cannot be used.
    """
    if config.control is None:
        if config.control_token_file is not None:
            raise ConfigError("control_token_file belongs to control, which is not given")
        return None, None
    # Imported here, as most configurations do not need it.
    try:
        from kvstore.control.commands import Commands
        from kvstore.control.server import ControlServer
    except ImportError as error:
        raise ConfigError(
            f"control = {config.control!r}: needs aiohttp, "
            f"pip install 'kvstore-offload[control]' ({error})"
        ) from error
    commands = Commands(config, tiers, region.rows, region.row_bytes, description)
    return ControlServer(config.control, config.control_token_file, commands), commands


def spans_of(
    config: Config, views: Sequence[TierView], want: Callable[[], None], chunk_bytes: int
) -> SpanWriter | None:
    """Return the writer of OpenTelemetry spans, if `config` wants one, and call `want`.

    Raises:
        ConfigError: if OpenTelemetry is not installed.
    """
    if not config.spans:
        return None
    # Imported here, as most configurations do not need it.
    from kvstore.observe.tracing import SpanWriter

    want()
    return SpanWriter(tier_names([view.stats() for view in views]), chunk_bytes)


def namespace_of(
    config: Config, chunk_bytes: int, slot_bytes: int, label: str, identity: Mapping[str, Any]
) -> Namespace:
    """Return the namespace of chunks of this size and identity, named by `config` or `label`.

    Raises:
        ConfigError: if chunks cannot be encoded as `config` demands, if `identity` has a name that
            is added here, or if `config` has tiers and names it as no folder may be called.
    """
    if taken := NAMES_ADDED & identity.keys():
        raise ConfigError(
            f"identity has {min(taken)!r}, which kvstore adds itself: call it otherwise"
        )
    whole = {**identity, "chunk_bytes": chunk_bytes, "slot_bytes": slot_bytes}
    codecs = codecs_of(config, chunk_bytes, identity)
    if "codec" in codecs:
        # What is on disk has other sizes, and is a chunk of its own for those who only copy it.
        size = codecs["codec"].coded_bytes(chunk_bytes)
        whole |= {"chunk_bytes": size, "slot_bytes": round_to_page(size)}
    whole |= {name: codec.identity(chunk_bytes) for name, codec in codecs.items()}
    if config.encryption_keys is not None:
        whole["encryption"] = CIPHER
    if config.namespace is None:
        return Namespace.of(label, whole)
    namespace = Namespace(config.namespace, whole)
    try:
        if config.tiers:
            namespace.check_name()
    except PathUnusableError as error:
        raise ConfigError(f"namespace: {error}") from error
    return namespace


def key_ring(config: Config) -> KeyRing | None:
    """Return the keys that tiers are encrypted with, if they are; a ConfigError if that fails."""
    if config.encryption_keys is None:
        return None
    try:
        ring = KeyRing(config.encryption_keys, None if config.tenants is None else tag_of)
        if not config.tiers:
            raise ConfigError("there is no tier, and host memory is never encrypted")
    except ConfigError as error:
        raise ConfigError(f"encryption_keys: {error}") from error
    return ring


def open_tiers(
    config: Config,
    region: PinnedRegion,
    chunk_bytes: int,
    namespace: Namespace,
    tiers: list[Tier],
) -> tuple[list[TierView], list[str]]:
    """Open the tiers of `config`; each is added to `tiers` at once, so the caller can close it.

    Returns:
        The core's view of each tier, and a description of each for the log.

    Raises:
        KVStoreError: if a tier cannot be opened.
    """
    in_flight = max(1, min(region.rows, config.write_queue_bytes // region.row_bytes))
    views: list[TierView] = []
    parts: list[str] = []
    keys = key_ring(config)
    if keys is not None:
        parts.append(f"tiers are encrypted with keys of {keys.source}")
    partitions = None if config.tenants is None else Places(config.tenants)
    # The files of the gates may be others by now.
    on_disks, in_stores = (
        None if gate is None else Codec(namespace.identity[name]["dtype"])
        for name, gate in (("codec", config.disk_codec), ("store_codec", config.store_codec))
    )
    place = TierPlace(namespace.name, namespace.identity, chunk_bytes, keys, partitions, in_stores)
    for tier_config in config.tiers:
        for tier in _tiers_of(tier_config, place, on_disks):
            tiers.append(tier)
            recovered = open_tier(tier, region)
            number, found = len(views), len(recovered.entries)
            if tier.is_peer:
                views.append(PeerTier(number, recovered, in_flight))
                if found:
                    parts.append(f"{_label(views)}: {tier.description} with {found} chunks")
                continue
            size = recovered.payload_bytes or chunk_bytes
            if isinstance(tier_config, DiskConfig):
                size = round_to_page(size)
            view = _view(number, recovered, tier_config, in_flight, size, config.tenants)
            views.append(view)
            said = [tier_config.flow.value]
            if isinstance(view, OwnedTier):
                said.insert(0, str(tier_config.eviction_policy))
                said += [*map(str, tier_config.admission), f"{found} chunks found"]
                if isinstance(tier_config, DiskConfig):
                    view.compactor.set_rate(tier_config.compaction_rate / size)
            parts.append(f"{_label(views)}: {', '.join([tier.description, *said])}")
    return views, parts


def _label(views: Sequence[TierView]) -> str:
    """The name of the last of these tiers in metrics."""
    return tier_names([view.stats() for view in views])[-1]


def _tiers_of(config: DiskConfig | TierConfig, place: TierPlace, codec: Codec | None) -> list[Tier]:
    """Create the tiers of one entry of `tiers`, not opened: a tier, and perhaps its peers.

    Raises:
        ConfigError: if its kind refuses it.
    """
    if isinstance(config, TierConfig):
        try:
            # The codec of stores is not for other kinds of tiers.
            its = place if config.is_store else replace(place, codec=None)
            return [create_tier(config.type, its, config.parameters)]
        except ValueError as error:
            raise ConfigError(f"tier {config.type!r}: {error}") from error
    disk = DiskTier(
        config.paths,
        Namespace(place.namespace, place.identity),
        place.chunk_bytes,
        config.capacity_bytes,
        segment_bytes=config.segment_bytes,
        io=config.io,
        io_threads=config.io_threads,
        lane=config.lane,
        strict_modes=config.strict_modes,
        share_after_reset=config.share_after_reset,
        keys=place.keys,
        codec=codec,
    )
    return [disk, PeerLanes(disk)] if config.share else [disk]


def _view(
    number: int,
    recovered: RecoveredTier,
    config: DiskConfig | TierConfig,
    in_flight: int,
    chunk_bytes: int,
    shares: Shares | None,
) -> OwnedTier | AskedTier:
    """Return the core's view of an opened tier."""
    slots = max(1, recovered.max_segments * recovered.segment_slots)
    most = MOST_ANSWERS if config.is_store else slots
    filters = build_filters(config.admission, most, chunk_bytes, shares)
    if config.is_store:
        return AskedTier(number, recovered, in_flight, filters, config.flow)
    policy = build_policy(config.eviction_policy, slots, shares)
    return OwnedTier(number, recovered, policy, in_flight, filters, config.flow)


async def build(config: Config) -> Assembly:
    """Create the host memory of a store and open its tiers.

    If it is cancelled, or its loop is closed, nothing stays open.

    Raises:
        KVStoreError: if a path or a value cannot be used.
    """
    chunk_bytes, identity = config.given_chunk_bytes, config.given_identity
    shape = rows_for(config, chunk_bytes)

    def opened() -> Assembly:
        region = PinnedRegion.private(*shape)
        try:
            label = str(identity.get("model", "kv"))
            return assemble(config, region, chunk_bytes, label, identity, events=config.keep_events)
        except BaseException:
            region.close()
            raise

    # The loop's own executor may be full of calls that wait for the store.
    opening = Daemons("kvstore-open").submit(opened)
    try:
        return await asyncio.wrap_future(opening)
    except BaseException:
        # It is cancelled, or its loop closed. A thread cannot be stopped: what it opens is closed
        # once it is done.
        opening.add_done_callback(_abandon)
        raise


def _abandon(opening: Future[Assembly]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abandon(region=True)
