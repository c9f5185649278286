"""vLLM's offloading manager over the core: the scheduler's side.

`Scans` ends vLLM's scan of a request that waits after a few keys. vLLM asks again for the keys of a
deferred request in each step, one KV cache group after the other: those of a group that attends to
everything from the first on, until one is a miss, and those of a group with a window from the last
on, until as many as the window has chunks are hits. Any answer "ask again" defers the request; how
the scan ends does not matter then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.connector.contract import ReqContext as Request
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.connector.queued import GroupSizes, QueuedKeys
from kvstore.core.chunk import READY
from kvstore.types import about
from kvstore.vllm.layout import EngineShape, manager_region, release_region
from kvstore.vllm.metrics_report import Reporter, facts_of
from kvstore.vllm.signals import ending, outlive_signals
from kvstore.vllm.version import (
    GROUP_BYTES,
    PENDING_IS_HOST,
    TELLS_OF_FLUSHES,
    hints_of,
    mediums,
    position_of,
)
from kvstore.vllm.weights import LiveWeights

if TYPE_CHECKING:
    from kvstore.vllm.engine import Engine

__all__ = ["KVStoreOffloadingManager", "Scans"]

logger = logging.getLogger("kvstore")


class Scans:
    """Answers for the keys of requests that wait, within one step."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[bytes, int | None]] = {}
        """The group that is scanned of each request, and where in the prompt the scan began."""

    def answer(
        self, key: bytes, request: str, place_of: Callable[[bytes], int | None] | None
    ) -> LookupResult:
        """Return the answer for a key that lets the scan of its group end soon.

        Args:
            place_of: returns where in the prompt a key ends; None if not known.
        """
        group = key[-GROUP_BYTES:]
        first = self._first.get(request)
        if first is None or first[0] != group:
            self._first[request] = group, None if place_of is None else place_of(key)
            return RETRY
        before = first[1]
        place = None if before is None or place_of is None else place_of(key)
        if before is None or place is None:
            # The kind of the group is not known. For one kind a miss ends the scan; for the
            # other it only costs time.
            return MISS
        return MISS if place >= before else PENDING

    def end_step(self) -> None:
        """All scans have ended."""
        self._first.clear()


MEDIUM = mediums()
ANY_TIER = base.TierFilter.ALL
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


class KVStoreOffloadingManager(OffloadingManager):
    """`kvstore.connector`'s manager in vLLM's words.

    A step of the core begins with the first call after `on_schedule_end`.

    Attributes:
        pauses: the next reset is that of an engine that pauses: if it goes on with the same
            weights, its chunks are kept.
    """

    def __init__(self, spec: EngineShape) -> None:
        super().__init__()
        self._spec = spec
        engine = spec.config.engine_id
        self._uncounted: frozenset[bytes] = frozenset()
        """Groups whose chunks are pending in vLLM's sense only if they have a row."""
        if PENDING_IS_HOST:
            self._uncounted = frozenset(
                int(group.group_id).to_bytes(4, "big")
                for group in spec.config.groups
                if group.sliding_window_size_in_chunks is None
            )
        self._below: LookupResult | None = None
        """The answer for any key that only a slower tier has; None: see `_deferral`."""
        if len(self._uncounted) in (0, len(spec.config.groups)):
            self._below = RETRY if self._uncounted else PENDING
        config = evolve(
            spec.store_config,
            chunk_bytes=spec.layout.chunk_bytes,
            identity=spec.identity,
            keep_events=spec.config.enable_kv_cache_events,
        )
        its = spec.config.parallel
        region = manager_region(engine, its.world_size, spec.region_shape, stages=its.pp_size)
        self._manager = KVStoreManager(
            config,
            region,
            one_group=len(spec.config.groups) == 1,
            steady=True,
            late_completions=False,
            label=spec.config.model.name.rstrip("/").rsplit("/", 1)[-1],
            release=lambda: release_region(engine, region, scheduler=True),
        )
        if config.tiers:
            outlive_signals(self)
        self.commands = self._manager.commands
        self._traced = config.spans
        self._stepper = self._manager.stepper
        self._core = self._stepper.core
        self._lookup, self._is_waiting = self._core.lookup, self._core.is_waiting
        self._streak, self._chunk_of = self._core.streak, self._core.chunks.get
        self._missed = self._manager.computing.missed
        self._reporter = Reporter()
        self._scans = Scans()
        self._requests: dict[str, bool] = {}
        """Requests that go on, and whether they did so at a reset."""
        self._computes: bool | None = None
        """Whether the step that ends next computes tokens of prompts; None: vLLM does not tell."""
        self._sent = 0
        """Steps whose orders have gone to the workers."""
        self._reported = 0
        """Steps that the workers have reported."""
        self._weights = _weights_of(spec.engine)
        self.pauses = False
        self._unsure = False
        """The engine has paused or was reset, and its weights are not known since."""
        self._asked = False
        """The workers were asked for the digests of the weights."""
        self._kept = False
        """The engine has paused, and its chunks were kept."""
        self._flushed_by: int | None = None
        """The step before which the workers end transfers that were under way at a reset."""

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Written for speed: vLLM calls this for every key of every request.
        streak = self._streak
        if req_context is streak.whose:
            chunk = self._chunk_of(key)
            if chunk is None:
                if key in streak.below:
                    streak.note(key)
                    answer = self._below
                    return self._deferral(key) if answer is None else answer
            elif chunk.state >= READY:
                streak.note(key)
                return HIT
        if not self._stepper.begun:
            self._begin_step()
        if self._unsure:
            return RETRY
        request = req_context.req_id
        filtered = req_context.load_tier_filter is not ANY_TIER
        if filtered and not self._allowed(key, req_context):
            return MISS
        found = self._lookup(key, request)
        if found is False:
            self._missed(request, key)
            return MISS
        if not found and self._is_waiting(request):
            return self._scans.answer(key, request, position_of(req_context))
        if not filtered:
            self._core.go_on(req_context)
        return HIT if found else self._deferral(key)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        (kept,) = self._own_keys([key], req_context)
        medium = self._core.load_source(kept)
        return {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}.get(
            medium, CacheHitSource.EXTERNAL_UNSPECIFIED
        )

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch(self._own_keys(keys, req_context))

    def _own_keys(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """The keys under which what vLLM calls `keys` is kept for this request, in their order."""
        return [*keys]

    # -- load and store ------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        kept = self._own_keys(keys, req_context)
        return CPULoadStoreSpec(self._manager.prepare_load(kept, req_context).block_ids)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.complete_load(self._own_keys(keys, req_context), req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if self._unsure:
            self._look()
        if self._unsure:
            return None
        if self._requests.get(req_context.req_id):
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        out = self._manager.prepare_store(keys, req_context)
        if out is None:
            return None
        assert isinstance(out.store_spec, HostLoadStoreSpec)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in out.keys_to_store],
            store_spec=CPULoadStoreSpec(out.store_spec.block_ids),
            evicted_keys=[OffloadKey(key) for key in out.evicted_keys],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._manager.complete_store(self._own_keys(keys, req_context), req_context, success)

    # -- requests and steps ----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        params, envelope = self._params_of(req_context), hints_of(req_context)
        name = req_context.req_id
        self._requests[name] = False
        headers = None
        if self._traced:
            engine = self._spec.engine
            request = None if engine is None else engine.opened(name)
            headers = getattr(request, "trace_headers", None)
        place = _place_in(req_context)
        self._manager.on_new_request(Request(name, place, params, envelope, headers))
        if self._core.wants_all(name):
            # Hints speak of the whole prompt, also of what the device has itself.
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def _params_of(self, req_context: ReqContext) -> Any:
        """The transfer parameters of a request, as far as hints may be in them."""
        return req_context.kv_transfer_params

    def on_request_queued(self, name: str, groups: Sequence[QueuedKeys]) -> None:
        """Note what a request that was just opened will look up, for each KV cache group."""
        if not self._unsure:
            self._manager.on_request_queued(Request(name), groups)

    def on_request_turn(self, name: str) -> None:
        """Note that vLLM asks about a request, which has no blocks then, nor KV from before."""
        self._requests[name] = False
        self._manager.on_request_turn(Request(name))

    def on_request_decided(self, name: str, *, loads: bool, start: int) -> None:
        """Note that vLLM asks no more: it loads what was found, and computes from `start` on."""
        self._manager.on_request_decided(Request(name), loads=loads, start=start)

    def most_tokens(self, groups: GroupSizes, name: str = "") -> int:
        """Return how many tokens a request, by its name, can load at once."""
        return self._manager.most_tokens(groups)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._manager.on_request_finished(req_context)

    def step_computes(self, computes: bool) -> None:
        """Note whether the step that `on_schedule_end` ends computes tokens of prompts."""
        self._computes = computes

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._sent += 1
        self._scans.end_step()
        self._manager.on_schedule_end(computes=self._computes)

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=MEDIUM.CPU if event.medium == "host" else MEDIUM.STORAGE,
                removed=event.removed,
                ownership=event.tier or None,
                removal_expected=event.medium != "host" and not self._spec.layout.one_block,
            )
            for event in self._manager.take_events()
        ]

    def reset_cache(self) -> None:
        # vLLM reports no transfer that is under way now, but the workers are told to
        # end them all before they begin the next step. Until then rows stay theirs.
        self._flushed_by = self._sent + 1
        # vLLM offers all chunks of these once more, from the blocks that it remembers. One that a
        # sliding window has left holds another request's tokens by now, and KV that was computed
        # before the weights changed is not theirs.
        self._requests = dict.fromkeys(self._requests, True)
        if self._requests:
            logger.info(
                "a reset: of %d requests those that have begun store no more",
                len(self._requests),
                extra=about("store.reset", requests=len(self._requests)),
            )
        # Weights may change between a reset and the next step, as they do in a pause.
        self._unsure = self._weights is not None
        self._asked = False
        self._kept = self._unsure and self.pauses
        if self._kept:
            self._manager.abandon_transfers()
        else:
            self._manager.reset()

    def on_reset_flushed(self) -> None:
        self._flushed_by = None
        self._manager.transfers_ended()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # vLLM asks once for each step, in order, after the workers have reported it.
        self._reported = min(self._reported + 1, self._sent)
        self._manager.on_step_reported()
        awaited = None if TELLS_OF_FLUSHES else self._flushed_by
        if awaited is not None and self._reported >= awaited:
            self.on_reset_flushed()
        return self._reporter.report(self._manager.stats())

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        return [facts_of(self._spec)]

    def shutdown(self) -> None:
        """Finish copies to the tiers, within ``shutdown_timeout_s``, and close them."""
        with ending(self):
            self._manager.shutdown()

    # -- weights -------------------------------------------------------------------------------

    @property
    def look(self) -> int:
        """Number of the look at the weights that the workers shall take; 0 for none."""
        weights = self._weights
        wanted = weights is not None and self._unsure and self._asked and weights.missing
        return weights.look if weights is not None and wanted else 0

    def weights_told(self, look: int, digests: Mapping[int, str | None]) -> None:
        """Take in digests of the weights, by worker."""
        if self._weights is not None:
            self._weights.told(look, digests)

    # -- inside ------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._unsure:
            self._look()
        self._manager.begin_step()

    def _look(self) -> None:
        """Keep chunks and use the tiers again if the weights are the same as before."""
        assert self._weights is not None
        if not self._asked:
            self._weights.ask()
            self._asked = True
        same = self._weights.same()
        if same is None:
            return
        self._unsure = False
        if not same:
            self._manager.reset(close_tiers=True)
            if self._core.tiers:
                logger.warning(
                    "the weights have changed, or may have, while the engine paused or "
                    "since a reset: slower tiers keep their chunks for the next start, and are "
                    "not used until then",
                    extra=about("weights.changed"),
                )
        elif self._kept:
            # vLLM has told those that follow its events that nothing is left.
            self._core.tell_again()
            logger.info(
                "the weights are those from before the pause: all that is kept is used",
                extra=about("weights.same"),
            )

    def _deferral(self, key: bytes) -> LookupResult:
        """Return the answer for a key whose chunk is being fetched, or will be."""
        # In the search for a window, RETRY would make vLLM ask for all of the prompt.
        uncounted = self._uncounted and key[-4:] in self._uncounted
        return RETRY if uncounted and key not in self._core.chunks else PENDING

    def _allowed(self, key: bytes, req_context: ReqContext) -> bool:
        """Whether a request wants a chunk from where it is: as in vLLM, what is in host memory."""
        if key in self._core.chunks:
            return True
        local = any(tier.store is None and key in tier.entries for tier in self._core.tiers)
        where = Locality.LOCAL if local else Locality.REMOTE
        return bool(req_context.load_tier_filter.allows(MEDIUM.STORAGE, where))


def _weights_of(engine: Engine | None) -> LiveWeights | None:
    """The weights of an engine, unknown if no worker has told; None where vLLM gave no engine."""
    if engine is None:
        return None
    parallel = getattr(engine.vllm_config, "parallel_config", None)
    told = [engine.workers[place].weights for place in sorted(engine.workers)]
    workers = int(getattr(parallel, "world_size", len(told)))
    if len(told) != workers:
        # vLLM hands on what some of the workers tell, as with prefill context parallel.
        told = [None] * workers
    return LiveWeights(told, moving=bool(getattr(parallel, "enable_eplb", False)))


def _place_in(context: ReqContext) -> Callable[[bytes], int] | None:
    """Says where in a request's prompt a key ends, in tokens; None if vLLM does not tell."""
    position = position_of(context)
    return None if position is None else lambda key: position(key) or 0
