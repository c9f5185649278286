"""Copies between a KV cache and rows, by the real worker over real tensors."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvstore.errors import ConfigError  # noqa: E402
from tests.patience import until  # noqa: E402
from tests.vllm.engines import start_script, with_root  # noqa: E402
from tests.vllm.parts import make_spec, offloading_config  # noqa: E402


@pytest.fixture(params=[1, 3], ids=["one block a chunk", "three blocks a chunk"])
def parts(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A worker over two tensors of 40 blocks; group 1 uses both, group 0 a part of one."""
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    pages = [256, 640]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(-128, 127, (40, page), dtype=torch.int8, generator=generator)
        for page in pages
    ]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)],
        [
            [CanonicalKVCacheRef(0, 256)],
            [CanonicalKVCacheRef(0, 200), CanonicalKVCacheRef(1, 640)],
        ],
    )
    spec = make_spec(
        {"cpu_bytes_to_use": "1MiB"}, sum(pages), blocks_per_chunk=request.param, groups=2
    )
    worker = spec.get_worker(caches)
    yield spec, worker, tensors, request.param
    worker.shutdown()


def test_what_was_stored_is_what_is_loaded_for_any_blocks_rows_and_groups(parts: Any) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    _, worker, tensors, per_chunk = parts
    rng = random.Random(1)
    for job in range(30):
        before = [tensor.clone() for tensor in tensors]
        chunks = [rng.randint(0, 3), rng.randint(1, 3)]
        blocks = [rng.sample(range(20), count * per_chunk) for count in chunks]
        rows = rng.sample(range(100), sum(chunks))
        first = [rng.randrange(5) * per_chunk for _ in chunks]
        sizes = [len(group) for group in blocks]
        source = GPULoadStoreSpec([*blocks[0], *blocks[1]], sizes, first)
        assert worker.submit_store(2 * job, source, CPULoadStoreSpec(rows))
        # A load may begin in the middle of its first chunk.
        skip = [rng.randrange(per_chunk) if count else 0 for count in chunks]
        targets = [rng.sample(range(20, 40), size - s) for size, s in zip(sizes, skip, strict=True)]
        target = GPULoadStoreSpec(
            [*targets[0], *targets[1]],
            [len(group) for group in targets],
            [f + s for f, s in zip(first, skip, strict=True)],
        )
        assert worker.submit_load(2 * job + 1, CPULoadStoreSpec(rows), target)
        done = {result.job_id: result for result in worker.get_finished()}
        assert done.keys() == {2 * job, 2 * job + 1}
        assert all(result.success for result in done.values())
        for group, (tensor_sizes, s) in enumerate(
            zip(([(0, 256)], [(0, 200), (1, 640)]), skip, strict=True)
        ):
            for source_block, target_block in zip(blocks[group][s:], targets[group], strict=True):
                for index, size in tensor_sizes:
                    if group == 0 and target_block in targets[1]:
                        continue  # group 1 wrote over it
                    assert torch.equal(
                        tensors[index][target_block, :size], before[index][source_block, :size]
                    )


def test_bytes_outside_a_page_are_not_touched(parts: Any) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    _, worker, tensors, per_chunk = parts
    source = GPULoadStoreSpec(list(range(per_chunk)), [0, per_chunk], [0, 0])
    worker.submit_store(0, source, CPULoadStoreSpec([5]))
    before = [tensor.clone() for tensor in tensors]
    target = GPULoadStoreSpec(list(range(20, 20 + per_chunk)), [0, per_chunk], [0, 0])
    worker.submit_load(1, CPULoadStoreSpec([5]), target)
    assert torch.equal(tensors[0][:20], before[0][:20])
    assert torch.equal(tensors[0][20:, 200:], before[0][20:, 200:])
    assert torch.equal(tensors[0][20 + per_chunk :], before[0][20 + per_chunk :])


def test_a_kv_cache_larger_than_announced_is_refused() -> None:
    spec = make_spec({"cpu_bytes_to_use": "1MiB"}, 100)
    with pytest.raises(ConfigError, match="256 bytes in a chunk where vLLM announced 100"):
        spec.get_worker(caches(256))


# -- where workers and the scheduler meet --------------------------------------------------------

WORKER = """
import signal, sys
from types import SimpleNamespace
from kvstore.vllm import KVStoreOffloadingSpec
from tests.vllm.parts import engine_like, offloading_config
from tests.vllm.test_worker import caches

config = offloading_config({"cpu_bytes_to_use": "1MiB"}, 256, sys.argv[1])
parallel = SimpleNamespace(distributed_executor_backend="ray")
worker = KVStoreOffloadingSpec(config, engine_like(parallel=parallel)).get_worker(caches(256))
print("ready", flush=True)
signal.pause()
"""


def caches(page: int) -> Any:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    tensor = CanonicalKVCacheTensor(torch.zeros((4, page), dtype=torch.int8), page)
    return CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, page)]])


def test_the_only_worker_of_a_ray_cluster_shares_its_memory_with_the_scheduler(
    tmp_path: Path,
) -> None:
    """It has a process of its own, whose name does not say so."""
    from kvstore.vllm import KVStoreOffloadingSpec

    engine, script, log = f"ray-{os.getpid()}", tmp_path / "worker.py", tmp_path / "log.txt"
    script.write_text(WORKER)
    log.touch()
    worker = start_script(script, [engine], tmp_path, log, with_root())
    try:
        until(lambda: worker.poll() is not None or "ready\n" in log.read_text(), log.read_text)
        config = offloading_config({"cpu_bytes_to_use": "1MiB"}, 256, engine)
        KVStoreOffloadingSpec(config).get_manager().shutdown()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()


def test_pipeline_stages_with_different_numbers_of_layers_are_refused_by_their_name() -> None:
    first, second = (
        make_spec({"cpu_bytes_to_use": "1MiB"}, page, workers=2) for page in (4096, 8192)
    )
    engine, size = first.config.engine_id, first.config.parallel
    parallel = dataclasses.replace(size, tp_size=1, pp_size=2)
    for spec in (first, second):
        spec.config = dataclasses.replace(spec.config, engine_id=engine, parallel=parallel)
    worker = first.get_worker(caches(4096))
    try:
        with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: stages keep different"):
            second.get_worker(caches(8192))
    finally:
        worker.shutdown()


@pytest.mark.parametrize(("size", "index", "told"), [(1, 0, 0), (8, 0, 1), (1, 3, 1)])
def test_an_engine_of_several_says_what_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, index: int, told: int
) -> None:
    """vLLM tells the engines of a dense model their place alone."""
    disk = {"type": "disk", "path": str(tmp_path), "capacity_bytes": "300MiB"}
    spec = make_spec({"cpu_bytes_to_use": "1MiB", "tiers": [disk]}, 4096)
    parallel = dataclasses.replace(
        spec.config.parallel, data_parallel_size=size, data_parallel_index=index
    )
    spec.config = dataclasses.replace(spec.config, parallel=parallel)
    with caplog.at_level(logging.INFO, "kvstore"):
        worker = spec.get_worker(caches(4096))
        spec.get_manager().shutdown()
        worker.shutdown()
    line = (
        f"data parallel engine {index} takes {2**20} bytes of host memory, "
        f"and up to {300 * 2**20} bytes"
    )
    assert caplog.text.count(line) == told
