"""Corrections: what vLLM's half of the connector would store, or wait for, wrongly.

It takes the whole prompt of each request that has ended for computed, but for aborts. It stores
what another connector has failed to load, and after a reset what is in blocks that a window has
left. Before 0.33 it takes sessions and preempted requests wrongly, does not see into which blocks
another connector loads, and gives rows away at a reset that workers still use. It offers nobody a
way to say so, so this module reads and writes its private parts, and no other does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvstore.vllm.version import KNOWS_SESSIONS, TELLS_OF_FLUSHES

__all__ = ["Corrections"]


class Corrections:
    """Corrects one scheduler's half: see the module's text.

    Args:
        scheduler: vLLM's half.
    """

    def __init__(self, scheduler: OffloadingConnectorScheduler) -> None:
        # vLLM declares no types for what is private.
        self._half: Any = scheduler
        # Stores that are under way, of bytes that are wrong.
        self._spoiled: set[int] = set()
        # Transfers that were under way at a reset, with the workers that have not reported them.
        self._unflushed: dict[int, int] = {}

    def flushed(self) -> bool:
        """Return whether all transfers that were under way at a reset have ended.

        From 0.33 on vLLM itself keeps their rows from others.
        """
        return not self._unflushed

    @contextlib.contextmanager
    def reset(self) -> Iterator[None]:
        """Let vLLM's half forget everything.

        It fails at a second reset before the next step. Where layers have a window it would offer
        all chunks of the requests that go on once more, also those that the window has left, with
        what others have in these blocks now: requests that have begun store nothing more.
        """
        half = self._half
        groups = half.config.kv_group_configs
        windows = any(group.sliding_window_size_in_chunks is not None for group in groups)
        states = self._states.values() if windows else ()
        begun = [each for each in states if each.transfer_jobs or each.req.num_computed_tokens]
        flushing = half._current_batch_jobs_to_flush  # noqa: SLF001
        half._current_batch_jobs_to_flush = set()  # noqa: SLF001
        if not TELLS_OF_FLUSHES:
            self._unflushed.update({name: job.pending_count for name, job in self._jobs.items()})
        try:
            yield
        finally:
            half._current_batch_jobs_to_flush |= flushing  # noqa: SLF001
        for state in begun:
            state.max_offload_tokens = 0

    @contextlib.contextmanager
    def scheduled(self, output: Any) -> Iterator[None]:
        """Let vLLM's half take in what a step has scheduled.

        Before 0.33, a session that gets more input comes as a new request, with all of its blocks,
        which would be added to those that it has noted in earlier turns. All that preempted
        requests have under way are taken for writes, but one may have been scheduled again in the
        same step, and read.
        """
        if KNOWS_SESSIONS:
            yield
            return
        for new in output.scheduled_new_reqs:
            for group in self._groups_of(new.req_id):
                group.block_ids.clear()
        preempted = output.preempted_req_ids
        if preempted:
            output.preempted_req_ids = {
                name for name in preempted if not self._jobs_of(name, stores=False)
            }
        try:
            yield
        finally:
            output.preempted_req_ids = preempted

    def allocated(self, blocks: Any) -> None:
        """Take in blocks into which another connector may load: stores from them are waited for.

        From 0.33 on vLLM's half does so itself.
        """
        if not KNOWS_SESSIONS:
            ids = (block.block_id for group in blocks.blocks for block in group)
            known = self._half._current_batch_allocated_block_ids  # noqa: SLF001
            known.update(filter(None, ids))

    def finished(self, request: Any) -> None:
        """Take in that a request has ended: nothing is stored of it beyond what was computed.

        Of one that ended with an error nobody knows what was. One that was preempted has no blocks
        any more, though vLLM's half still has their numbers. Nor has it those that a window has
        left: where `prefix_cache_retention_interval` is None and blocks have several sizes, vLLM
        goes back to chunks that it had passed over.
        """
        failed = request.status is RequestStatus.FINISHED_ERROR
        if failed:
            self._spoiled.update(self._jobs_of(request.request_id, stores=True))
        computed = 0 if failed else request.num_computed_tokens
        config = self._half.config
        for group, state in zip(
            config.kv_group_configs, self._groups_of(request.request_id), strict=False
        ):
            chunks = computed // group.tokens_per_chunk
            del state.block_ids[chunks * config.blocks_per_chunk :]
            if group.sliding_window_size_in_chunks is not None:
                passed = state.next_stored_chunk_idx * config.blocks_per_chunk
                state.block_ids[:passed] = [0] * min(passed, len(state.block_ids))

    @contextlib.contextmanager
    def reported(self, output: Any) -> Iterator[None]:
        """Let vLLM's half take in what the workers report.

        What was stored of blocks that another connector could not load, or behind them, is not
        kept. If its request goes on, it is offered again, once it was computed.
        """
        if self._unflushed:
            for job, workers in self._completed(output).items():
                if job in self._unflushed:
                    self._unflushed[job] -= workers
            self._unflushed = {job: left for job, left in self._unflushed.items() if left > 0}
        wrong = output.invalid_block_ids
        if wrong:
            for name in self._states:
                if any(not wrong.isdisjoint(group.block_ids) for group in self._groups_of(name)):
                    self._spoiled.update(self._jobs_of(name, stores=True))
        ended = self._take_spoiled(output) if self._spoiled else []
        if not ended:
            yield
            return
        manager = self._half.manager
        self._half.manager = _Failing(manager, [job.keys for job in ended])
        try:
            yield
        finally:
            self._half.manager = manager
        for job in ended:
            for group in self._groups_of(job.req_id):
                keys = group.offload_keys
                first = next((at for at, key in enumerate(keys) if key in job.keys), None)
                if first is not None:
                    group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)

    def _take_spoiled(self, output: Any) -> list[Any]:
        """Return the stores of wrong bytes that end with this report."""
        completed = self._completed(output)
        # A reset has forgotten the others.
        self._spoiled &= self._jobs.keys()
        ended = [
            job
            for job in self._spoiled & completed.keys()
            if completed[job] >= self._jobs[job].pending_count
        ]
        self._spoiled.difference_update(ended)
        return [self._jobs[job] for job in ended]

    @staticmethod
    def _completed(output: Any) -> Mapping[int, int]:
        """The transfers that workers report as ended, with the number of these workers."""
        told: Mapping[int, int] | None = getattr(
            output.kv_connector_worker_meta, "completed_jobs", None
        )
        return told or {}

    @property
    def _jobs(self) -> dict[int, Any]:
        """The transfers that vLLM's half has under way, by their numbers."""
        jobs: dict[int, Any] = self._half._jobs  # noqa: SLF001
        return jobs

    @property
    def _states(self) -> dict[str, Any]:
        """What vLLM's half knows of each request."""
        states: dict[str, Any] = self._half._req_status  # noqa: SLF001
        return states

    def _groups_of(self, name: str) -> Collection[Any]:
        """What it knows of a request, for each KV cache group."""
        state = self._states.get(name)
        return () if state is None else state.group_states

    def _jobs_of(self, name: str, *, stores: bool) -> list[int]:
        """The stores, or the loads, that a request has under way."""
        state = self._states.get(name)
        jobs = () if state is None else state.transfer_jobs
        return [job for job in jobs if job in self._jobs and self._jobs[job].is_store == stores]


class _Failing:
    """A manager that is told of a failure where vLLM's half tells a success: of these stores."""

    def __init__(self, manager: Any, stores: Sequence[Collection[bytes]]) -> None:
        self._manager = manager
        self._stores = stores

    def complete_store(self, keys: Any, req_context: Any, success: bool = True) -> None:
        failed = any(keys is store for store in self._stores)
        self._manager.complete_store(keys, req_context, success=success and not failed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
