"""Our manager, rows and worker below vLLM's connector, beside the mocks of its tests.

A test tells its mock what to answer. Where it says that chunks are there, they are stored in
our manager, and where it takes keys to be stored, ours is offered them. What the connector then
gets is our manager's answer, and the rows in its orders are copied by our worker. Only what
keeps a request waiting, and a store that is refused, is the mock's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any
from unittest.mock import DEFAULT, MagicMock

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from xxhash import xxh3_128_digest

from kvstore.tiers.pinned import round_to_page
from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.layout import worker_region

ROWS = 1024
SEED = "seed"
PASSED_ON = ("on_request_finished", "on_schedule_end", "touch", "complete_load")
ANSWERED_BY_TEST = ("take_events", "has_pending_work", "on_new_request", "get_stats")


class Connectors:
    """Puts our parts below the connectors of one test."""

    def __init__(self) -> None:
        self.built = 0
        self._ends: list[Callable[[], None]] = []

    def put(self, runner: Any, mock_spec: Any) -> None:
        """Our manager beside the mock of a runner whose worker has ours already."""
        spec = mock_spec.handler.spec
        manager = spec.get_manager()
        self._ends.append(manager.shutdown)
        both = Both(runner.manager, manager, mock_spec.handler.region)
        runner.connector_scheduler.manager = both

    def worker(self, mock_spec: Any, kv_caches: CanonicalKVCaches) -> Any:
        """Our worker for a mock spec."""
        spec = spec_like(mock_spec.config, kv_caches)
        region = worker_region(
            spec.config.engine_id, spec.config.parallel.world_size, spec.region_shape
        )
        for cache in kv_caches.tensors:
            cache.tensor.random_()
        worker = spec.get_worker(kv_caches)
        self._ends.append(worker.shutdown)
        return copying_worker(spec, worker, region)

    def close(self) -> None:
        while self._ends:
            self._ends.pop()()


def spec_like(config: Any, kv_caches: CanonicalKVCaches) -> KVStoreOffloadingSpec:
    """Our spec for the configuration that vLLM's connector has made for the mock.

    These tests have one worker, however many they announce, and give each group a tensor of
    its own where vLLM announces one for all groups.
    """
    block = sum(tensor.page_size_bytes for tensor in kv_caches.tensors)
    size = round_to_page(block * config.cache.blocks_per_chunk) * ROWS
    return KVStoreOffloadingSpec(
        replace(
            config,
            worker_kv_bytes_per_block=block,
            extra_config={**config.extra_config, "cpu_bytes_to_use": size},
            parallel=replace(config.parallel, world_size=1),
        )
    )


class Both:
    """A mock that hears every call, and our manager, which answers."""

    def __init__(self, mock: MagicMock, ours: Any, region: Any) -> None:
        self.mock = mock
        self.ours = ours
        self.region = region
        self.digests: dict[bytes, bytes] = {}
        self.rows: dict[bytes, int] = {}
        self.pending: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        if name in PASSED_ON:
            return self._passed_on(name)
        if name in ANSWERED_BY_TEST:
            return self._answered(name)
        return getattr(self.mock, name)

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        told = self.mock.lookup(key, req_context)
        if told is LookupResult.RETRY:
            return told
        if told is LookupResult.HIT_PENDING:
            self._seed(key, whole=False)
        elif told is LookupResult.HIT:
            self._seed(key, whole=True)
        return self.ours.lookup(key, req_context)

    def prepare_store(
        self, keys: Collection[Any], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        told = self.mock.prepare_store(keys, req_context)
        if told is None:
            return None
        out = self.ours.prepare_store(told.keys_to_store, req_context)
        if out is None:
            return None
        rows = [int(row) for row in out.store_spec.block_ids]
        self.rows.update(zip(out.keys_to_store, rows, strict=True))
        spec = placed(out.keys_to_store, out.store_spec)
        return PrepareStoreOutput(out.keys_to_store, spec, out.evicted_keys)

    def complete_store(
        self, keys: Collection[Any], req_context: ReqContext, success: bool = True
    ) -> None:
        self.mock.complete_store(keys, req_context, success)
        self.ours.complete_store(keys, req_context, success)
        for key in keys:
            self.digests[key] = self._digest(self.rows[key])

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> Any:
        spec = self.ours.prepare_load(keys, req_context)
        for key, row in zip(keys, spec.block_ids, strict=True):
            assert self.digests.get(key, self._digest(row)) == self._digest(row), (
                f"row {row} does not hold what was stored under {key!r}"
            )
        return placed(keys, spec)

    def get_load_source(self, key: Any, req_context: ReqContext) -> Any:
        self.mock.get_load_source(key, req_context)
        return self.ours.get_load_source(key, req_context)

    def reset_cache(self) -> None:
        self.mock.reset_cache()
        self.ours.reset_cache()
        self.digests.clear()
        self.pending.clear()

    def on_reset_flushed(self) -> None:
        self.mock.on_reset_flushed()
        self.ours.on_reset_flushed()

    def _passed_on(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            getattr(self.mock, name)(*args, **kwargs)
            return getattr(self.ours, name)(*args, **kwargs)

        return call

    def _answered(self, name: str) -> Callable[..., Any]:
        """Ours answers, unless the test has told what to answer."""
        method = getattr(self.mock, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            theirs, ours = method(*args, **kwargs), getattr(self.ours, name)(*args, **kwargs)
            told = method.side_effect is not None or method._mock_return_value is not DEFAULT
            return theirs if told else ours

        return call

    def _seed(self, key: Any, *, whole: bool) -> None:
        context = ReqContext(req_id=SEED)
        if self.ours.prepare_store([key], context).keys_to_store:
            self.pending.add(key)
        if whole and key in self.pending:
            self.pending.discard(key)
            self.ours.complete_store([key], context)

    def _digest(self, row: int) -> bytes:
        return xxh3_128_digest(self.region.row(int(row)))


def placed(keys: Collection[Any], rows: CPULoadStoreSpec) -> Any:
    """Keys, as the mock's specs have them, and the rows that our manager gave them."""
    from tests.v1.kv_connector.unit.offloading_connector.utils import (  # type: ignore[import-not-found]
        MockLoadStoreSpec,
    )

    spec = MockLoadStoreSpec(keys)
    spec.rows = rows
    return spec


def copying_worker(spec: Any, ours: Any, region: Any) -> Any:
    """The mock's worker, which ends a job when the test says so, with our copies below it."""
    from tests.v1.kv_connector.unit.offloading_connector.utils import MockOffloadingWorker

    class CopyingWorker(MockOffloadingWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.spec, self.region = spec, region

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            assert ours.submit_store(job_id, src_spec, dst_spec.rows)
            self._check(job_id)
            begun: bool = super().submit_store(job_id, src_spec, dst_spec)
            return begun

        def submit_load(
            self, job_id: int, src_spec: Any, dst_spec: Any, *rest: Any, **kw: Any
        ) -> bool:
            assert ours.submit_load(job_id, src_spec.rows, dst_spec, *rest, **kw)
            self._check(job_id)
            begun: bool = super().submit_load(job_id, src_spec, dst_spec, *rest, **kw)
            return begun

        @staticmethod
        def _check(job_id: int) -> None:
            (result,) = ours.get_finished()
            assert isinstance(result, TransferResult)
            assert (result.job_id, result.success) == (job_id, True)

    return CopyingWorker()
