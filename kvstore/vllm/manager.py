"""The scheduler's side: vLLM's offloading manager over the core and an engine thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
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
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.assembly import Assembly, assemble
from kvstore.engine import EngineThread
from kvstore.vllm.metrics import Reporter
from kvstore.vllm.region import manager_region, release_region
from kvstore.vllm.turns import in_turns

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["KVStoreOffloadingManager"]

logger = logging.getLogger("kvstore")

IDLE_STEP_SECONDS = 0.0005
"""A step shorter than this had nothing to do but wait."""

WAIT_SECONDS = 0.001
"""How long an idle step waits for the next completion, instead of spinning."""

IDLE_SECONDS = 0.25
"""Without a step for so long, a server is idle."""

UPKEEP_SECONDS = 0.02
"""How often compaction goes on while the server is idle."""

TELLS_OF_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")
"""vLLM 0.33 says when the workers have ended what was under way at a reset."""

ANY_TIER = TierFilter.ALL
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


@in_turns(
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "take_events",
    "reset_cache",
    "on_reset_flushed",
    "get_stats",
    "shutdown",
    "_begin_step",
)
class KVStoreOffloadingManager(OffloadingManager):
    """Answers the scheduler from memory; no call waits for I/O.

    A step of the core begins with the first call after `on_schedule_end`. While the server
    is idle and takes no steps, compaction goes on from the engine's thread.
    """

    def __init__(self, spec: KVStoreOffloadingSpec) -> None:
        super().__init__()
        if not hasattr(self, "lock"):
            # vLLM 0.33 takes it around calls from other threads.
            self.lock = threading.RLock()
        config = spec.store_config
        self._engine_id = spec.config.engine_id
        self._drain = config.shutdown_timeout_s
        self._single_group = len(spec.config.groups) == 1
        self._events = spec.kv_events_config.enable_kv_cache_events
        self._region = manager_region(
            self._engine_id, spec.config.parallel.world_size, spec.rows, spec.row_bytes
        )
        try:
            self._assembly = assemble(
                config,
                self._region,
                spec.layout.chunk_bytes,
                spec.config.model.name.rstrip("/").rsplit("/", 1)[-1],
                spec.identity,
                events=self._events,
            )
            self._engine = _engine_over(self._assembly)
        except BaseException:
            release_region(self._engine_id, self._region)
            raise
        self._core = self._assembly.core
        self._core.log_to(logger.warning)
        self._reporter = Reporter()
        self._turn = threading.RLock()
        """Held by whoever uses the core; within a step the scheduler needs no lock."""
        self._in_step = False
        self._retried: set[str] = set()
        self._step_ended = 0.0
        self._sent = 0
        """Steps whose orders have gone to the workers."""
        self._reported = 0
        """Steps that the workers have reported."""
        self._flushed_by: int | None = None
        """The step before which the workers end what was under way at a reset."""
        self._closed = False
        self._lookup = self._core.lookup
        if any(tier.compaction_rate for tier in self._core.tiers):
            self._engine.repeat(weakref.WeakMethod(self._go_on_while_idle))
        logger.info("kvstore: %s", self._assembly.description)

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._in_step:
            self._begin_step()
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
        self._core.touch(keys)

    # -- load and store ------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return CPULoadStoreSpec(self._core.prepare_load(keys, req_context.req_id))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._core.complete_load(keys, req_context.req_id)
        self._hand_over()

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._core.absorb(self._engine.take())
        grant = self._core.prepare_store(keys, req_context.req_id)
        if grant is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in grant.keys],
            store_spec=CPULoadStoreSpec(grant.rows),
            evicted_keys=[OffloadKey(key) for key in grant.evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._core.complete_store(keys, req_context.req_id, success)
        self._hand_over()

    # -- requests and steps ----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._core.on_new_request(
            req_context.req_id, _place_in(req_context), one_group=self._single_group
        )
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._core.on_request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if not self._in_step:
            self._begin_step()
        self._sent += 1
        self._hand_over()
        self._in_step = False
        self._retried.clear()
        now = time.monotonic()
        idle = now - self._step_ended < IDLE_STEP_SECONDS
        core = self._core
        if idle and core.in_flight and (core.waiting or core.unsaved) and not core.behind:
            self._engine.wait(WAIT_SECONDS)
            now = time.monotonic()
        self._step_ended = now

    def has_pending_work(self) -> bool:
        # Copies to a tier queue up here and go out as earlier ones end.
        return self._core.unsaved > 0

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium.CPU if event.medium == "host" else Medium.STORAGE,
                removed=event.removed,
            )
            for event in self._core.take_events()
        ]

    def reset_cache(self) -> None:
        # vLLM reports no transfer that is under way now, but the workers are told to
        # end them all before they begin the next step. Until then rows stay theirs.
        self._core.reset()
        self._flushed_by = self._sent + 1
        self._hand_over()

    def on_reset_flushed(self) -> None:
        self._flushed_by = None
        self._core.transfers_ended()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # vLLM asks once for each step, in order, after the workers have reported it.
        self._reported = min(self._reported + 1, self._sent)
        awaited = None if TELLS_OF_FLUSHES else self._flushed_by
        if awaited is not None and self._reported >= awaited:
            self.on_reset_flushed()
        stats = self._core.stats()
        report = OffloadingConnectorStats()
        for name, increment in self._reporter.counters(stats).items():
            report.increase_counter(name, increment)
        for name, value in self._reporter.gauges(stats).items():
            report.set_gauge(name, value)
        return report

    def shutdown(self) -> None:
        """Finish copies to the tiers, within ``shutdown_timeout_s``, and close them."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + self._drain
        try:
            self._save(end)
        except Exception:
            logger.exception("chunks that were not copied yet are lost")
        try:
            left = max(0.1, end - time.monotonic())
            if self._engine.close(self._assembly.recency(), left):
                release_region(self._engine_id, self._region)
        except Exception:
            # The memory stays: a tier may still use it.
            logger.exception("the tiers could not be closed")
        logger.info("kvstore: closed, %d chunks not copied", self._core.unsaved)

    # -- inside ------------------------------------------------------------------------------

    def _save(self, end: float) -> None:
        """Copy what is on its way to the tiers, until `end` at most."""
        self._core.save()
        while self._core.unsaved and time.monotonic() < end:
            self._begin_step()
            self._hand_over()
            if not self._core.behind:
                self._engine.wait(0.01)

    def _begin_step(self) -> None:
        self._in_step = True
        self._core.poll(time.monotonic(), self._engine.take())

    def _go_on_while_idle(self) -> float:
        """Make a step of upkeep if there was none for a while; returns seconds to the next look."""
        if not self._turn.acquire(blocking=False):
            return IDLE_SECONDS
        try:
            now = time.monotonic()
            if self._closed or self._in_step or now - self._step_ended < IDLE_SECONDS:
                return IDLE_SECONDS
            self._core.poll(now, self._engine.take())
            self._hand_over()
            return UPKEEP_SECONDS if self._core.in_flight else IDLE_SECONDS
        finally:
            self._turn.release()

    def _hand_over(self) -> None:
        self._engine.submit(self._core.flush(time.monotonic()))

    def _allowed(self, key: bytes, req_context: ReqContext) -> bool:
        medium = Medium.CPU if key in self._core.pool.chunks else Medium.STORAGE
        return bool(req_context.load_tier_filter.allows(medium, Locality.LOCAL))


def _engine_over(assembly: Assembly) -> EngineThread:
    try:
        return EngineThread(assembly.tiers, assembly.beside)
    except BaseException:
        for tier in assembly.tiers:
            tier.abandon()
        raise


def _place_in(context: ReqContext) -> Callable[[bytes], int]:
    """Says where in a request's prompt a key ends, in tokens."""
    position = context.get_offload_key_position

    def place(key: bytes) -> int:
        return position(key) or 0

    return place
