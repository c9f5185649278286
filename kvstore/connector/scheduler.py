"""The scheduler's half of a connector, for any server.

At each step of its scheduler a server

1. calls `get_num_new_matched_tokens` for requests that it may begin; None: not in this step;
2. calls `update_state_after_alloc` with the blocks of a request that it begins. The tokens that
   were found are loaded, and the request computes nothing until the load has ended;
3. ends the step with `build_connector_meta`, and passes the result to the workers' halves before
   they compute;
4. passes what the workers report to `update_connector_output`.

When a request has finished, or was aborted between steps, the server calls `request_finished` and
lists it in `finished_req_ids` of the next step. Its blocks, and those of a preempted request, may
be given to others at once, provided the step that gives a block out names it: transfers that still
use the block end before it is written. The request's name may be used again once a step has
listed it and its load, if any, has ended.

Steps go on while `has_pending_work`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvstore.connector.contract import OffloadingEvent, OffloadingManager
from kvstore.connector.device_transfers import ConnectorStats, EndedLoads, Jobs, Loads, Stores
from kvstore.connector.match import Matcher
from kvstore.connector.mediums import ConnectorMetadata, ConnectorOutput, TransferJob
from kvstore.connector.server import BlockIds, BlocksLike, RequestLike, StepOutputLike
from kvstore.connector.spec import OffloadingSpec
from kvstore.connector.tracked_request import TrackedRequest, groups_of
from kvstore.errors import KVStoreError
from kvstore.types import about

__all__ = ["ConnectorScheduler", "ConnectorStats", "EndedLoads"]

logger = logging.getLogger("kvstore")


class ConnectorScheduler:
    """Decides what workers load and store. One thread at a time calls it.

    Attributes:
        manager: knows what is offloaded.
    """

    def __init__(self, spec: OffloadingSpec, manager: OffloadingManager | None = None) -> None:
        """
        Args:
            manager: used instead of the one that `spec` creates.
        """
        self.manager: OffloadingManager = manager or spec.get_manager()
        self._groups = groups_of(spec)
        self._sizes = tuple(group.sizes for group in self._groups)
        self._windowed = any(group.window is not None for group in self._groups)
        self._matcher = Matcher(self.manager, self._groups)
        self._jobs = Jobs(spec.num_workers)
        self._loads = Loads(self.manager, self._jobs, shares_blocks=spec.enable_prefix_caching)
        self._stores = Stores(self.manager, self._jobs, prompt_only=spec.offload_prompt_only)
        self._requests: dict[str, TrackedRequest] = {}
        self._given_out: set[int] = set()
        """Blocks that were given to a request in this step."""
        self._written: set[int] = set()
        """Those of them that this step writes; the others are only read, and may be shared."""
        self._stats = ConnectorStats()

    # -- what can be loaded ----------------------------------------------------------------

    def on_new_request(self, request: RequestLike) -> None:
        """Note that a request has been queued: what it can load is fetched until its turn comes.

        Optional: without it, that is fetched when the server asks for the request.
        """
        tracked = self._track(request)
        tracked.name_chunks()
        if not getattr(request, "skip_reading_prefix_cache", False):
            self.manager.on_request_queued(tracked.context, tracked.queued_keys())

    def get_num_new_matched_tokens(
        self, request: RequestLike, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens after the first `num_computed_tokens` that can be loaded.

        None means: ask again in a later step. Some chunks are being fetched, or another request
        is loading them into blocks that this one can share, or earlier transfers of this request
        are under way. Each of these ends.

        All known tokens may be found. A server that needs the output of the last token to sample
        the next one still computes the last token.

        Args:
            num_computed_tokens: leading tokens, in whole blocks of every group, that the device's
                own prefix cache has.

        Returns:
            The number, and whether the tokens are loaded between steps: True unless it is 0.
        """
        tracked = self._track(request)
        self.manager.on_request_turn(tracked.context)
        tracked.drop_blocks()
        if tracked.jobs:
            self._stats.deferred += 1
            return None, False
        tracked.look_up(num_computed_tokens)
        matched: int | None = 0
        if not (tracked.load_failed or getattr(request, "skip_reading_prefix_cache", False)):
            matched = self._match(tracked)
        if matched is None:
            self._stats.deferred += 1
            return None, False
        start = num_computed_tokens + matched
        self.manager.on_request_decided(tracked.context, loads=matched > 0, start=start)
        used = tracked.take_used(loaded=not self.manager.loads_are_uses)
        if used:
            self.manager.touch(used, tracked.context)
        return matched, matched > 0

    def _match(self, tracked: TrackedRequest) -> int | None:
        keys = [state.keys for state in tracked.groups]
        # The last token is always computed, so a window has to reach back from there.
        end = tracked.request.num_tokens - self._windowed
        most = tracked.computed + self.manager.most_tokens(self._sizes, keys[0])
        if most < end:
            # Of a chunk with a window only the end may be stored: a load must not end before it.
            end = most - most % max(size for size, _ in self._sizes)
        matched = self._matcher.match(keys, tracked.computed, end, tracked.context)
        if matched and self._loads.under_way(tracked, matched):
            return None
        return matched

    def update_state_after_alloc(
        self, request: RequestLike, blocks: BlocksLike, num_external_tokens: int
    ) -> None:
        """Load the next `num_external_tokens` tokens of `request` into its blocks.

        Blocks that already hold them according to the device's own prefix cache are skipped, and
        so are blocks that a window has passed.

        Args:
            blocks: all blocks of the request.
            num_external_tokens: as many as were found in this step, or 0; fewer are allowed if no
                group has a window.

        Raises:
            KVStoreError: if the request has too few blocks, or was never looked up.
            KeyError: if some of the tokens were not found in this step.
        """
        if num_external_tokens == 0:
            return
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            raise KVStoreError(
                f"request {request.request_id} has nothing to load: it was not looked up"
            )
        self._loads.begin(tracked, blocks, num_external_tokens)
        for its in blocks.blocks:
            known = [block for block in its if not block.is_null]
            self._given_out.update(block.block_id for block in known)
            # A block with a hash already holds its tokens.
            self._written.update(block.block_id for block in known if block.block_hash is None)
        self._stats.loads += 1
        self._stats.matched_tokens += num_external_tokens

    # -- the end of a step ---------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: StepOutputLike) -> ConnectorMetadata:
        """End the step and return the workers' jobs.

        Chunks that are computed by the end of the step are stored: workers copy them when the next
        step begins.
        """
        flush: set[int] = set()
        # First, because a preempted request may have got new blocks in this step.
        for req_id in scheduler_output.preempted_req_ids or ():
            tracked = self._requests.get(req_id)
            if tracked is not None:
                tracked.drop_blocks()
                flush |= tracked.jobs
        self._take_blocks(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens.values()
        self.manager.on_schedule_end(computes=any(count > 1 for count in counts))
        loads = self._loads.take_begun()
        # The blocks of this step's loads were given out for these loads.
        flush |= self._jobs.using(self._written)
        flush -= loads.keys()
        stores: dict[int, TransferJob] = {}
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            self._store(req_id, count, stores)
        for req_id in scheduler_output.finished_req_ids:
            flush |= self._store(req_id, None, stores)
            self._end(req_id)
        self._given_out, self._written = set(), set()
        return ConnectorMetadata(loads, stores, flush)

    def _take_blocks(self, output: StepOutputLike) -> None:
        """Note which blocks requests have got in this step, and take them from earlier users."""
        given: dict[str, tuple[BlockIds, bool]] = {}
        for new in output.scheduled_new_reqs:
            given[new.req_id] = new.block_ids, True
            self._give_out(new.block_ids, getattr(new, "num_computed_tokens", 0))
        cached = output.scheduled_cached_reqs
        computed = getattr(cached, "num_computed_tokens", None) or [0] * len(cached.req_ids)
        for req_id, ids, had in zip(cached.req_ids, cached.new_block_ids, computed, strict=True):
            if ids is not None:
                given[req_id] = ids, req_id in cached.resumed_req_ids
                self._give_out(ids, had if req_id in cached.resumed_req_ids else 0)
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            self._give_out([[copy.dst_block_id]], 0)
        self._given_out.discard(0)
        self._written.discard(0)
        if self._windowed and self._given_out:
            for tracked in self._requests.values():
                # As vLLM does, also of those that are only read.
                tracked.left_by(self._given_out)
        for req_id, (ids, anew) in given.items():
            if req_id in self._requests:
                self._requests[req_id].give_blocks(ids, anew=anew)

    def _give_out(self, block_ids: BlockIds, computed: int) -> None:
        """Note that a request got these blocks, and only reads those of its first `computed`."""
        for group, its in zip(self._groups, block_ids, strict=False):
            self._given_out.update(its)
            self._written.update(its[computed // group.tokens_per_block :])

    def _store(
        self, req_id: str, scheduled: int | None, stores: dict[int, TransferJob]
    ) -> set[int]:
        """Offer a request's chunks; return jobs that must end before the step computes."""
        tracked = self._requests.get(req_id)
        begun = None if tracked is None else self._stores.offer(tracked, scheduled)
        if begun is None:
            return set()
        job, transfer = begun
        stores[job.number] = transfer
        self._stats.stores += 1
        return set() if self._written.isdisjoint(job.block_ids) else {job.number}

    # -- what has ended ------------------------------------------------------------------------

    def update_connector_output(self, connector_output: ConnectorOutput) -> EndedLoads:
        """Process the report of one worker, or the merged reports of several.

        Returns:
            The requests whose loads have ended at all workers and which can be scheduled. May
            include requests that have finished meanwhile.
        """
        stats = self._stats
        stats.count_copies(connector_output)
        ended = EndedLoads([], [])
        # If a key is prepared again after a reset, its older transfer must end first.
        for number, workers in sorted(connector_output.completed_jobs.items()):
            failed = number in connector_output.failed_jobs
            if number not in self._jobs:
                stats.unknown_jobs += 1
                logger.warning(
                    "transfer %d was reported, but is not under way",
                    number,
                    extra=about("transfer.unknown", transfer=number),
                )
                continue
            job = self._jobs.ended(number, workers, failed=failed)
            if job is None:
                continue
            tracked = job.tracked
            if job.is_store:
                self._stores.end(job)
                stats.failed_stores += job.failed
            else:
                self._loads.end(job)
                stats.failed_loads += job.failed
                (ended.failed if job.failed else ended.loaded).append(tracked.context.req_id)
            self._forget_if_done(tracked)
        return ended

    def on_step_reported(self) -> None:
        """Note that the workers have computed the oldest step that was not reported yet.

        Optional. If a server reports every step, no request waits for chunks that are faster to
        compute.
        """
        self.manager.on_step_reported()

    # -- requests ------------------------------------------------------------------------------

    def request_finished(
        self, request: RequestLike, block_ids: Any = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request that has ended or was aborted.

        Chunks that were not stored yet are offered in the step that lists the request in
        `finished_req_ids`.

        Returns:
            Whether its blocks have to be kept (never), and parameters for the client (none).
        """
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.finish()
        return False, None

    def _track(self, request: RequestLike) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.ended:
            tracked = TrackedRequest(request, self._groups)
            self._requests[request.request_id] = tracked
            self.manager.on_new_request(tracked.context)
        return tracked

    def _end(self, req_id: str) -> None:
        tracked = self._requests.get(req_id)
        if tracked is not None and not tracked.ended:
            tracked.end()
            self.manager.on_request_finished(tracked.context)
            self._forget_if_done(tracked)

    def _forget_if_done(self, tracked: TrackedRequest) -> None:
        req_id = tracked.context.req_id
        if tracked.ended and not tracked.jobs and self._requests.get(req_id) is tracked:
            del self._requests[req_id]

    # -- the rest ------------------------------------------------------------------------------

    @property
    def stats(self) -> ConnectorStats:
        """Counters since the start."""
        return replace(self._stats, refused_stores=self._stores.refused)

    def has_pending_work(self) -> bool:
        """Whether steps must go on even if there is no request to compute."""
        return len(self._jobs) > 0 or self.manager.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored on and removed from each medium since the last call."""
        return self.manager.take_events()

    def reset(self) -> None:
        """Forget everything that is offloaded. To be called between steps.

        Loads under way complete; what is being stored is forgotten. What running requests have
        computed is offered again; of finished requests nothing more is stored. If the weights
        change, the server must first preempt running requests and wait for loads, because it
        manages the contents of the device.
        """
        self.manager.reset()
        for tracked in self._requests.values():
            tracked.store_anew()

    def shutdown(self) -> None:
        """Release everything. No call follows."""
        self.manager.shutdown()
