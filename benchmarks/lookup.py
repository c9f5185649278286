"""Cost of a lookup through vLLM's manager interface, beside vLLM's own manager.

    python benchmarks/lookup.py

Prints one JSON row per case: microseconds per key (hit, miss) and per step for
a deferred request, and the ratio to vLLM's host-only manager in the same run.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.region import worker_region

sys.path.insert(0, str(Path(__file__).parent))
from specs import offloading_config

CHUNKS = 50_000
PER_REQUEST = 500
BLOCK = 4096


def keys_of(prefix: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prefix}{i}".encode()).digest() + b"\0\0\0\0" for i in range(count)]


def fill(manager: Any, keys: list[bytes]) -> None:
    for start in range(0, len(keys), 1000):
        context = ReqContext(f"fill-{start}")
        manager.on_new_request(context)
        out = manager.prepare_store(keys[start : start + 1000], context)
        manager.complete_store(set(out.keys_to_store), context)
        manager.on_request_finished(context)
        manager.on_schedule_end(ScheduleEndContext((), ()))


def settle(manager: Any) -> None:
    """Let it copy all that it has to the disk: threads that copy take time from lookups."""
    while manager.has_pending_work():
        manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.001)


def per_key(manager: Any, requests: list[list[bytes]]) -> float:
    """Median microseconds per key over the requests, one step each."""
    times = []
    for number, keys in enumerate(requests):
        context = ReqContext(f"look-{number}")
        manager.on_new_request(context)
        began = time.perf_counter()
        for key in keys:
            manager.lookup(key, context)
        times.append((time.perf_counter() - began) / len(keys) * 1e6)
        manager.on_request_finished(context)
        manager.on_schedule_end(ScheduleEndContext((), ()))
    return statistics.median(times)


def deferred(manager: Any, keys: list[bytes], core: Any) -> tuple[float, float]:
    """Microseconds of the first scan per key, and of each later step of a deferred request."""
    context = ReqContext("deferred")
    manager.on_new_request(context)
    manager._stepper.engine.submit = lambda moves: None  # The answer never comes.
    began = time.perf_counter()
    for key in keys:
        manager.lookup(key, context)
    first = (time.perf_counter() - began) / len(keys) * 1e6
    manager.on_schedule_end(ScheduleEndContext((), ()))
    times = []
    for _ in range(200):
        began = time.perf_counter()
        for key in keys:
            if manager.lookup(key, context).name == "MISS":
                break
        times.append((time.perf_counter() - began) * 1e6)
        manager.on_schedule_end(ScheduleEndContext((), ()))
    return first, statistics.median(times)


def main() -> None:
    rng = random.Random(0)
    keys = keys_of("k", CHUNKS)
    hits = [
        keys[start : start + PER_REQUEST]
        for start in rng.sample(range(0, CHUNKS, PER_REQUEST), CHUNKS // PER_REQUEST)
    ]
    misses = [keys_of(f"m{n}-", PER_REQUEST) for n in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        extra = {
            "cpu_bytes_to_use": CHUNKS * BLOCK,
            "tiers": [
                {"type": "disk", "path": folder, "capacity_bytes": "512MiB"},
            ],
        }
        spec = KVStoreOffloadingSpec(offloading_config(extra, BLOCK))
        worker_region("bench", 1, spec.rows, spec.row_bytes)
        ours = spec.get_manager()
        peer = CPUOffloadingManager(CHUNKS)
        rows: list[tuple[str, Callable[[], float], Callable[[], float]]] = [
            ("hit", lambda: per_key(ours, hits), lambda: per_key(peer, hits)),
            ("miss", lambda: per_key(ours, misses), lambda: per_key(peer, misses)),
        ]
        fill(ours, keys)
        fill(peer, keys)
        settle(ours)
        for name, our, their in rows:
            ratios, values = [], []
            for _ in range(5):
                mine, other = our(), their()
                values.append(mine)
                ratios.append(mine / other)
            row = {
                "case": name,
                "us_per_key": round(statistics.median(values), 3),
                "ratio_to_vllm_host_manager": round(statistics.median(ratios), 2),
            }
            print(json.dumps(row), flush=True)
        # Push the first chunks out of host memory, so that they are on disk only.
        fill(ours, keys_of("other", 5000))
        settle(ours)
        gone = [key for key in keys if key not in ours._core.pool.chunks][:PER_REQUEST]
        first, step = deferred(ours, gone, ours._core)
        print(
            json.dumps(
                {
                    "case": "deferred",
                    "keys": len(gone),
                    "first_scan_us_per_key": round(first, 3),
                    "us_per_step": round(step, 2),
                }
            )
        )


if __name__ == "__main__":
    main()
