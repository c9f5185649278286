"""The worker's half of a connector, for any server.

Before each step a worker calls `start_transfers` with the metadata that the scheduler's half has
built. After the step it calls `get_finished`, whose result goes back to the scheduler. It does both
even if a step has nothing to compute.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvstore.connector.handler import OffloadingHandler, TransferResult
from kvstore.connector.mediums import ConnectorMetadata, ConnectorOutput, LoadStoreSpec, TransferJob
from kvstore.connector.spec import OffloadingSpec
from kvstore.errors import KVStoreError
from kvstore.types import about

if TYPE_CHECKING:
    import torch

__all__ = ["ConnectorWorker"]

logger = logging.getLogger("kvstore")

Way = tuple[type[LoadStoreSpec], type[LoadStoreSpec]]


class ConnectorWorker:
    """Runs a worker's transfers. One thread at a time calls it.

    Guarantees that

    * what a step computes is copied once the next step begins, so that copies do not delay
      its tokens; loads begin earlier;
    * copies whose blocks are about to be written again have ended when `start_transfers` returns;
    * each transfer is reported once, and those of one handler in order. A transfer that fails, or
      that no handler takes, is reported as failed; nothing raises. One that no handler takes is
      reported after all transfers that were taken before it.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        self._spec = spec
        self._ways: dict[Way, OffloadingHandler] = {}
        self._handlers: list[OffloadingHandler] = []
        self._held: dict[int, TransferJob] = {}
        """Stores of the last step, which begin with the next."""
        self._loading: set[int] = set()
        self._under_way: set[int] = set()
        self._refused: list[int] = []

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the tensors, one for each layer, whose blocks are copied.

        Args:
            attn_backends: see `OffloadingSpec.get_handlers`.

        Raises:
            KVStoreError: if tensors were registered before, or do not fit the configuration.
        """
        if self._handlers:
            raise KVStoreError("KV caches are already registered: a worker has one set of them")
        for source, target, handler in self._spec.get_handlers(kv_caches, attn_backends):
            self._ways[source, target] = handler
            if handler not in self._handlers:
                self._handlers.append(handler)

    def start_transfers(self, metadata: ConnectorMetadata) -> None:
        """Begin the transfers that are due at this step. To be called before it computes.

        Waits only for `metadata.jobs_to_flush`.

        Raises:
            KVStoreError: if no tensors were registered.
        """
        if not self._handlers:
            raise KVStoreError("no KV caches are registered: call register_kv_caches first")
        due, self._held = self._held, {}
        flush = metadata.jobs_to_flush
        for number, job in metadata.store_jobs.items():
            (due if number in flush else self._held)[number] = job
        if flush:
            self._begin_all(due)
            self._wait_for(self._under_way & flush)
            due = {}
        self._loading.update(metadata.load_jobs)
        self._begin_all(metadata.load_jobs)
        self._begin_all(due)

    def get_finished(self) -> ConnectorOutput:
        """Return the transfers that have ended since the last call. Never waits."""
        output = ConnectorOutput()
        for handler in self._handlers:
            for result in handler.get_finished():
                self._report(result, output)
        # After a reset two transfers may have the same keys: the older must end first.
        oldest = min(self._under_way, default=None)
        for number in list(self._refused):
            if oldest is None or number < oldest:
                self._refused.remove(number)
                self._report(TransferResult(number, False), output)
        return output

    def wait(self, job_ids: Collection[int] | None = None) -> None:
        """Wait until these transfers have ended, by default all.

        `get_finished` still reports them.
        """
        due, self._held = self._held, {}
        self._begin_all(due)
        wanted = self._under_way
        self._wait_for(wanted if job_ids is None else wanted.intersection(job_ids))

    def shutdown(self) -> None:
        """Wait for copies under way and release the tensors. Transfers not begun are dropped."""
        self._held.clear()
        for handler in self._handlers:
            handler.shutdown()
        self._handlers, self._ways = [], {}

    # -- inside ----------------------------------------------------------------------------

    def _begin_all(self, jobs: Mapping[int, TransferJob]) -> None:
        for number in sorted(jobs):
            job = jobs[number]
            source, target = job.src_spec, job.dst_spec
            handler = self._ways.get((type(source), type(target)))
            if handler is not None and handler.transfer_async(number, (source, target)):
                self._under_way.add(number)
                continue
            places = source.medium(), target.medium()
            logger.error(
                "transfer %d of request %s was refused: no handler copies from %s to %s",
                number,
                job.req_id,
                *places,
                extra=about("transfer.refused", transfer=number, request=job.req_id),
            )
            self._refused.append(number)

    def _wait_for(self, jobs: Collection[int]) -> None:
        if jobs:
            for handler in self._handlers:
                handler.wait(jobs)

    def _report(self, result: TransferResult, output: ConnectorOutput) -> None:
        number = result.job_id
        self._under_way.discard(number)
        moved = output.stored
        if number in self._loading:
            self._loading.discard(number)
            moved = output.loaded
        output.completed_jobs[number] += 1
        if not result.success:
            output.failed_jobs.add(number)
        else:
            moved.add(result.transfer_size, result.transfer_time)
