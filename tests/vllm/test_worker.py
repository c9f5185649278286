"""Copies between a KV cache and rows, by the real worker over real tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.vllm.parts import make_spec  # noqa: E402


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
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    from kvstore.errors import ConfigError

    spec = make_spec({"cpu_bytes_to_use": "1MiB"}, 100)
    tensor = CanonicalKVCacheTensor(torch.zeros((4, 256), dtype=torch.int8), 256)
    with pytest.raises(ConfigError, match="256 bytes in a chunk where vLLM announced 100"):
        spec.get_worker(CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 256)]]))
