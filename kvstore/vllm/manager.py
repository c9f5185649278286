"""The scheduler's side: vLLM's offloading manager over ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.connector.manager import KVStoreManager
from kvstore.connector.manager import ReqContext as Request
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.vllm.metrics import Reporter
from kvstore.vllm.region import manager_region, release_region

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["KVStoreOffloadingManager"]

TELLS_OF_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")
"""vLLM 0.33 says when the workers have ended what was under way at a reset."""

ANY_TIER = TierFilter.ALL
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


class KVStoreOffloadingManager(OffloadingManager):
    """`kvstore.connector`'s manager in vLLM's words.

    A step of the core begins with the first call after `on_schedule_end`.
    """

    def __init__(self, spec: KVStoreOffloadingSpec) -> None:
        super().__init__()
        if not hasattr(self, "lock"):
            # vLLM 0.33 takes it around calls from other threads.
            self.lock = threading.RLock()
        engine = spec.config.engine_id
        self._single_group = len(spec.config.groups) == 1
        # Where a sliding window has left a part of a chunk meanwhile, vLLM would store the
        # rest as if it were whole.
        self._offered_again = self._single_group or spec.blocks_per_chunk == 1
        config = replace(
            spec.store_config,
            chunk_bytes=spec.layout.chunk_bytes,
            identity=spec.identity,
            keep_events=spec.kv_events_config.enable_kv_cache_events,
        )
        region = manager_region(engine, spec.config.parallel.world_size, spec.rows, spec.row_bytes)
        self._manager = KVStoreManager(
            config,
            region,
            one_group=self._single_group,
            steady=True,
            late_completions=False,
            label=spec.config.model.name.rstrip("/").rsplit("/", 1)[-1],
            release=lambda: release_region(engine, region),
        )
        self._stepper = self._manager.stepper
        self._core = self._stepper.core
        self._lookup = self._core.lookup
        self._reporter = Reporter()
        self._retried: set[str] = set()
        self._sent = 0
        """Steps whose orders have gone to the workers."""
        self._reported = 0
        """Steps that the workers have reported."""
        self._flushed_by: int | None = None
        """The step before which the workers end what was under way at a reset."""

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._stepper.begun:
            self._manager.begin_step()
        request = req_context.req_id
        if req_context.load_tier_filter is not ANY_TIER and not self._allowed(key, req_context):
            return MISS
        answer = self._lookup(key, request)
        if answer:
            return HIT
        if answer is not None:
            return MISS
        if not self._core.is_waiting(request):
            return PENDING
        if not self._single_group:
            return RETRY
        # One RETRY defers the request; the MISS after it ends the scan of its keys.
        if request in self._retried:
            return MISS
        self._retried.add(request)
        return RETRY

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        medium = self._core.load_source(key)
        return {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}.get(
            medium, CacheHitSource.EXTERNAL_UNSPECIFIED
        )

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch(keys)

    # -- load and store ------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return CPULoadStoreSpec(self._manager.prepare_load(keys, req_context).block_ids)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.complete_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        out = self._manager.prepare_store(keys, req_context)
        if out is None:
            return None if self._offered_again else PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        assert isinstance(out.store_spec, HostLoadStoreSpec)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in out.keys_to_store],
            store_spec=CPULoadStoreSpec(out.store_spec.block_ids),
            evicted_keys=[OffloadKey(key) for key in out.evicted_keys],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._manager.complete_store(keys, req_context, success)

    # -- requests and steps ----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        params, envelope = req_context.kv_transfer_params, req_context.kv_hints
        name = req_context.req_id
        self._manager.on_new_request(Request(name, _place_in(req_context), params, envelope))
        if self._manager.hinted.wants_all(name):
            # Hints speak of the whole prompt, also of what the device has itself.
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._sent += 1
        self._retried.clear()
        self._manager.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium.CPU if event.medium == "host" else Medium.STORAGE,
                removed=event.removed,
            )
            for event in self._manager.take_events()
        ]

    def reset_cache(self) -> None:
        # vLLM reports no transfer that is under way now, but the workers are told to
        # end them all before they begin the next step. Until then rows stay theirs.
        self._manager.reset()
        self._flushed_by = self._sent + 1

    def on_reset_flushed(self) -> None:
        self._flushed_by = None
        self._manager.transfers_ended()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # vLLM asks once for each step, in order, after the workers have reported it.
        self._reported = min(self._reported + 1, self._sent)
        awaited = None if TELLS_OF_FLUSHES else self._flushed_by
        if awaited is not None and self._reported >= awaited:
            self.on_reset_flushed()
        stats = self._manager.stats()
        report = OffloadingConnectorStats()
        for name, increment in self._reporter.counters(stats).items():
            report.increase_counter(name, increment)
        for name, value in self._reporter.gauges(stats).items():
            report.set_gauge(name, value)
        return report

    def shutdown(self) -> None:
        """Finish copies to the tiers, within ``shutdown_timeout_s``, and close them."""
        self._manager.shutdown()

    # -- inside ------------------------------------------------------------------------------

    def _allowed(self, key: bytes, req_context: ReqContext) -> bool:
        medium = Medium.CPU if key in self._core.pool.chunks else Medium.STORAGE
        return bool(req_context.load_tier_filter.allows(medium, Locality.LOCAL))


def _place_in(context: ReqContext) -> Callable[[bytes], int]:
    """Says where in a request's prompt a key ends, in tokens."""
    position = context.get_offload_key_position

    def place(key: bytes) -> int:
        return position(key) or 0

    return place
