"""Our manager in the place of vLLM's CPU manager and of its tiering manager."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from parts import make_spec  # type: ignore[import-not-found]
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)

from kvstore.vllm.layout import release_region, worker_region
from kvstore.vllm.manager import KVStoreOffloadingManager

ROW = 4096
GROUPS = 3
"""As many KV cache groups as the keys of any of these tests speak of."""
PATIENCE = 10
"""Seconds for copies to the disk."""

END = ScheduleEndContext((), ())


class Stepping(KVStoreOffloadingManager):
    """Adds what vLLM's connector does around the calls of these tests.

    A request begins with the first call for it, and a step ends before each store, where
    vLLM 0.32 ends it.
    """

    medium = Medium.CPU

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self._policy = self._core._pool.policy
        self._req_state: dict[str, bool] = {}
        """Requests that have begun: tests of tiering look here whether to begin one."""

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        self._begin(req_context)
        return super().lookup(key, req_context)

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> LoadStoreSpec:
        self._begin(req_context)
        return super().prepare_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[Any], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._begin(req_context)
        self.on_schedule_end(END)
        return super().prepare_store(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> Any:
        self._req_state[req_context.req_id] = True
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._req_state.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Copies to a disk end here: these tests have tiers that need no time."""
        super().on_schedule_end(context)
        end = time.monotonic() + PATIENCE
        while self._core.unsaved:
            assert time.monotonic() < end, "copies to the disk do not end"
            time.sleep(0.001)
            super().on_schedule_end(context)

    def _begin(self, req_context: ReqContext) -> None:
        if req_context.req_id not in self._req_state:
            self.on_new_request(req_context)


class Managers:
    """Builds managers, and closes them when a test has ended."""

    def __init__(self) -> None:
        self.built = 0
        self._ends: list[Callable[[], None]] = []

    def cpu(
        self,
        num_chunks: int = 4,
        cache_policy: str = "lru",
        store_threshold: int = 0,
        **_: Any,
    ) -> Stepping:
        """For `CPUOffloadingManager`."""
        return self._build(
            {
                "cpu_bytes_to_use": num_chunks * ROW,
                "eviction_policy": cache_policy,
                "store_threshold": store_threshold,
            }
        )

    def primary(self, num_chunks: int, **_: Any) -> Primary:
        """For `CPUPrimaryTierOffloadingManager`."""
        return Primary(num_chunks)

    def tiering(self, primary_tier: Primary, secondary_tiers: list[Any], **_: Any) -> Stepping:
        """For `TieringOffloadingManager`: a disk stands for all secondary tiers."""
        extra: dict[str, Any] = {"cpu_bytes_to_use": primary_tier.num_chunks * ROW}
        if secondary_tiers:
            folder = tempfile.TemporaryDirectory()
            self._ends.append(folder.cleanup)
            path = str(Path(folder.name) / "cache")
            extra["tiers"] = [{"type": "disk", "path": path, "capacity_bytes": "300MiB"}]
        manager = self._build(extra)
        primary_tier.manager = manager
        return manager

    def close(self) -> None:
        while self._ends:
            self._ends.pop()()

    def _build(self, extra: dict[str, Any]) -> Stepping:
        self.built += 1
        spec = make_spec(extra, ROW, groups=GROUPS)
        engine = spec.config.engine_id
        region = worker_region(engine, 1, spec.region_shape)
        self._ends.append(lambda: release_region(engine, region))
        manager = Stepping(spec)
        self._ends.append(manager.shutdown)
        return manager


class Primary:
    """What a test asks of the primary tier, the manager above it answers."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.manager: Stepping | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


class Rows:
    """Holds what a manager gives against the rows that a test expects of vLLM's.

    Which free row a chunk gets is nobody's business. So the rows of a store are learnt, and
    those of a load must be the ones that were learnt.
    """

    def __init__(self, to_keys: Callable[[list[int]], list[Any]]) -> None:
        self._to_keys = to_keys
        self._ours: dict[int, int] = {}

    def verify_store(self, out: PrepareStoreOutput | None, expected: Any) -> None:
        assert out is not None
        assert out.keys_to_store == self._to_keys(expected.keys_to_store)
        assert out.evicted_keys == self._to_keys(expected.evicted_keys)
        rows = [int(row) for row in out.store_spec.block_ids]
        assert len(set(rows)) == len(expected.store_chunk_ids)
        self._ours.update(zip(expected.store_chunk_ids, rows, strict=True))

    def verify_load(self, spec: Any, expected: list[int]) -> None:
        assert [int(row) for row in spec.block_ids] == [self._ours[row] for row in expected]
