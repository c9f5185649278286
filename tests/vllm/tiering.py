"""vLLM's own tiering over our tier, without an engine: the calls that its scheduler makes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvstore.testing.bench import payload_of
from tests.patience import PATIENCE
from tests.vllm.parts import offloading_config

CHUNK = 64 * 1024
SLOTS = 16

_servers = itertools.count()


def key_of(number: int, group: int = 0) -> bytes:
    """A key as vLLM makes them."""
    return b"%032d" % number + group.to_bytes(4, "big")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [key_of(number) for number in numbers]


def options(path: Path, **more: Any) -> dict[str, Any]:
    """What an operator would write, with small segments, and an identity by hand."""
    return {
        "type": "KVStoreTier",
        "module_path": "kvstore.vllm",
        "path": str(path),
        "capacity_bytes": 4 * segment_bytes(),
        "segment_bytes": segment_bytes(),
        "automatic_identity": False,
        "identity": {"model": "test"},
        **more,
    }


def segment_bytes() -> int:
    from kvstore.tiers.disk.format import Geometry

    return Geometry(SLOTS, CHUNK, CHUNK).file_bytes


class Server:
    """A scheduler's calls to vLLM's `TieringOffloadingManager`, and a device that is the test's.

    Every chunk that is loaded is compared with what was stored under its key.

    Args:
        tier: what stands in ``secondary_tiers``.
        rows: chunks of host memory.
    """

    def __init__(
        self, tier: dict[str, Any], rows: int = 32, *, groups: int = 1, **more: Any
    ) -> None:
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        extra = {"cpu_bytes_to_use": rows * CHUNK, "secondary_tiers": [tier], **more}
        name = f"tiering-{os.getpid()}-{next(_servers)}"
        self.spec = TieringOffloadingSpec(offloading_config(extra, CHUNK, name, groups=groups))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.counters: dict[str, float] = {}
        self._requests = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.manager is not None:
            manager, self.manager = self.manager, None
            del self.rows
            manager.shutdown()

    def request(self) -> Any:
        """A request has come."""
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(f"r{next(self._requests)}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step, and take what was counted."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        stats = self.manager.get_stats()
        for name, values in ({} if stats is None else stats.data["data"]).items():
            short = name.removeprefix("vllm:kvstore_")
            if stats.data["types"][name] == "counter":
                self.counters[short] = self.counters.get(short, 0) + sum(values.values())
            elif stats.data["types"][name] == "gauge":
                self.counters[short] = sum(values.values())

    def settle(self) -> None:
        """Steps until every job has ended."""
        end = time.monotonic() + PATIENCE
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "jobs do not end"
            self.step()
        self.step()

    def put(self, keys: Sequence[bytes], *, settle: bool = True) -> list[bytes]:
        """The device stores chunks; returns those that vLLM took into its host memory."""
        context = self.request()
        out = self.manager.prepare_store(keys, context)
        taken = [] if out is None else out.keys_to_store
        if taken:
            for key, row in zip(taken, out.store_spec.chunk_ids, strict=True):
                self.rows[row] = np.frombuffer(payload_of(key, CHUNK), np.uint8)
            self.manager.complete_store(taken, context)
        self.manager.on_request_finished(context)
        if settle:
            self.settle()
        return list(taken)

    def get(self, keys: Sequence[bytes]) -> int:
        """The device loads the longest prefix that is there; returns its length.

        Raises:
            AssertionError: if it gets other bytes than were stored.
        """
        context = self.request()
        end = time.monotonic() + PATIENCE
        while (found := self._ask(keys, context)) is None:
            assert time.monotonic() < end, "deferred for ever"
            self.step()
        if found:
            head = list(keys[:found])
            spec = self.manager.prepare_load(head, context)
            for key, row in zip(head, spec.chunk_ids, strict=True):
                assert self.rows[row].tobytes() == payload_of(key, CHUNK), "wrong bytes"
            self.manager.complete_load(head, context)
        self.manager.on_request_finished(context)
        self.settle()
        return found

    def forget_host(self) -> None:
        """vLLM resets its host memory; what tiers have stays."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def each(self, numbers: Sequence[int]) -> set[int]:
        """Which chunks are found on disk, one by one."""
        found = set()
        for number in numbers:
            self.forget_host()
            if self.get([key_of(number)]):
                found.add(number)
        return found

    def _ask(self, keys: Sequence[bytes], context: Any) -> int | None:
        """As `OffloadingConnectorScheduler` looks for a prefix."""
        from vllm.v1.kv_offload.base import LookupResult

        found, later = 0, False
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            later |= answer is not LookupResult.HIT
            found += 1
        return None if later else found
