"""The canonical layout, byte by byte: what ranks of one shape store, ranks of another load.

vLLM's own code says where the heads of a rank belong; the workers, the rows and the copies are
kvstore's.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvstore.errors import ConfigError  # noqa: E402
from kvstore.tiers.pinned import PinnedRegion  # noqa: E402
from kvstore.vllm.version import CANONICAL_FORMAT  # noqa: E402
from kvstore.vllm.worker import HostCopyWorker, create_worker, row_views  # noqa: E402
from tests.vllm.parts import make_spec  # noqa: E402

pytestmark = pytest.mark.skipif(
    CANONICAL_FORMAT is None, reason="this vLLM has no canonical layout"
)

BLOCKS, TOKENS, HEADS, SIZE, LAYERS = 12, 16, 4, 8, 3
ROWS = 6

Shape = tuple[str, int]
"""The kind of KV cache (MLA, or the order of heads and tokens in a page) and the ranks."""


def whole(kind: str, layer: int) -> Any:
    """What one worker alone has of a layer: float32 in the logical shape of vLLM."""
    random = torch.Generator().manual_seed(layer)
    if kind == "mla":
        return torch.randn((BLOCKS, TOKENS, SIZE), generator=random)
    return torch.randn((BLOCKS, HEADS, TOKENS, 2 * SIZE), generator=random)


def bytes_of(kind: str, layer: int, block: int) -> bytes:
    """How a block of a layer should lie in a row, for whatever number of ranks."""
    page = whole(kind, layer)[block]
    if kind == "tokens first":
        page = page.transpose(0, 1)
    return bytes(page.contiguous().numpy().tobytes())


class Rank:
    """One worker's KV cache: its heads of all layers, or nothing yet."""

    def __init__(self, shape: Shape, rank: int, *, filled: bool) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
            derive_canonical_mappings,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )

        kind, ranks = shape
        self.shape, self.rank = shape, rank
        self.heads = max(1, HEADS // ranks)
        first = rank * self.heads * HEADS // max(HEADS, ranks)
        self.its = slice(first, first + self.heads)
        if kind == "mla":
            kind_of, heads = MLAAttentionSpec, 1
        else:
            kind_of, heads = FullAttentionSpec, self.heads
        spec = kind_of(block_size=TOKENS, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)
        names = [f"layer-{layer}" for layer in range(LAYERS)]
        self.layers = {name: self._layer(layer, filled) for layer, name in enumerate(names)}
        mappings = derive_canonical_mappings(
            SimpleNamespace(
                parallel_config=SimpleNamespace(
                    tensor_parallel_size=ranks,
                    prefill_context_parallel_size=1,
                    decode_context_parallel_size=1,
                    cp_kv_cache_interleave_size=1,
                    world_size=ranks,
                    rank=rank,
                ),
                model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
            ),
            SimpleNamespace(
                num_blocks=BLOCKS,
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)],
            ),
            self.layers,
        )
        self.page = int(spec.page_size_bytes)
        flat = [tensor.untyped_storage() for tensor in self.layers.values()]
        self.caches = CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(
                    torch.empty(0, dtype=torch.int8).set_(one, 0, (BLOCKS, self.page)), self.page
                )
                for one in flat
            ],
            [
                [
                    CanonicalKVCacheRef(place, self.page, mappings[name])
                    for place, name in enumerate(names)
                ]
            ],
        )

    def _layer(self, layer: int, filled: bool) -> Any:
        kind, _ = self.shape
        its = whole(kind, layer)
        if kind != "mla":
            its = its[:, self.its]
        if not filled:
            its = torch.zeros_like(its)
        if kind == "tokens first":
            # As vLLM makes it, so that strides tell the order of a single head, too.
            return torch.empty(its.transpose(1, 2).shape).copy_(its.transpose(1, 2)).transpose(1, 2)
        return its.contiguous()

    def block(self, layer: int, block: int) -> Any:
        return self.layers[f"layer-{layer}"][block]

    def wanted(self, layer: int, block: int) -> Any:
        kind, _ = self.shape
        page = whole(kind, layer)[block]
        return page if kind == "mla" else page[self.its]


def spec_of(shape: Shape, rank: int, page: int, per_chunk: int) -> Any:
    kind, ranks = shape
    return make_spec(
        {"cpu_bytes_to_use": "1MiB", "canonical_layout": True},
        LAYERS * page,
        blocks_per_chunk=per_chunk,
        workers=ranks,
        rank=rank,
        replicated=kind == "mla",
    )


def places(blocks: list[int], first: int, rows: list[int]) -> tuple[Any, Any]:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return GPULoadStoreSpec(blocks, [len(blocks)], [first]), CPULoadStoreSpec(rows)


def workers(shape: Shape, region: PinnedRegion, per_chunk: int, *, filled: bool) -> list[Any]:
    """Each rank's KV cache and worker, over the same rows."""
    found = []
    for number in range(shape[1]):
        rank = Rank(shape, number, filled=filled)
        spec = spec_of(shape, number, rank.page, per_chunk)
        found.append((rank, HostCopyWorker(spec, rank.caches, region)))
    return found


ALL = [
    *[(kind, ranks) for kind in ("heads first", "tokens first") for ranks in (1, 2, 4, 8)],
    ("mla", 1),
    ("mla", 2),
]


@pytest.fixture
def region() -> Any:
    """Rows in which every byte is 255."""
    from kvstore.engine.host_memory import private_region, release_region
    from kvstore.tiers.pinned import RegionShape

    region = private_region("canonical", RegionShape(ROWS, 64 * 1024, 4096))
    region.array[:] = 255
    yield region
    release_region("canonical", region)


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_the_bytes_of_a_row_do_not_tell_how_many_ranks_have_written_them(
    region: PinnedRegion, shape: Shape, per_chunk: int
) -> None:
    kind, _ = shape
    blocks, rows = [7, 2, 5, 0, 1, 9][: 2 * per_chunk], [4, 1]
    for _, worker in workers(shape, region, per_chunk, filled=True):
        worker.submit_store(0, *places(blocks, 0, rows))
    for number, row in enumerate(rows):
        its = blocks[number * per_chunk : (number + 1) * per_chunk]
        expected = b"".join(
            bytes_of(kind, layer, block) for layer in range(LAYERS) for block in its
        )
        assert region.array[row].tobytes()[: len(expected)] == expected
        assert set(region.array[row].tobytes()[len(expected) :]) == {255}
    assert (region.array[[0, 2, 3, 5]] == 255).all()


@pytest.mark.parametrize("kind", ["heads first", "tokens first", "mla"])
@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 1), (2, 4), (8, 2), (1, 8)])
def test_what_one_shape_has_stored_another_loads(
    region: PinnedRegion, kind: str, one: int, other: int
) -> None:
    for _, worker in workers((kind, one), region, 3, filled=True):
        worker.submit_store(0, *places([7, 2, 5, 0, 1, 9], 0, [4, 1]))
    for rank, worker in workers((kind, other), region, 3, filled=False):
        # From the second block on, to blocks elsewhere.
        device, host = places([3, 8, 6, 11], 1, [4, 1])
        worker.submit_load(1, host, device)
        for layer in range(LAYERS):
            for block, was in zip([3, 8, 6, 11], [2, 5, 0, 1], strict=True):
                assert torch.equal(rank.block(layer, block), rank.wanted(layer, was))
            assert not rank.block(layer, 7).any()


def test_ranks_that_hold_the_same_bytes_write_them_once(region: PinnedRegion) -> None:
    moved = []
    for _, worker in workers(("heads first", 8), region, 1, filled=True):
        worker.submit_store(0, *places([7, 2], 0, [4, 1]))
        (result,) = worker.get_finished()
        assert result.success
        moved.append(result.transfer_size)
    page = 2 * TOKENS * SIZE * 4
    assert moved == [2 * LAYERS * page, 0] * 4


@pytest.mark.parametrize("shape", ALL, ids=str)
def test_vllms_copies_over_our_rows_bring_the_same_bytes(
    region: PinnedRegion, shape: Shape
) -> None:
    """What vLLM's handler would have a device copy, copied by hand: nobody needs a device."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    kind, ranks = shape
    blocks, rows = [7, 2, 5, 0, 1, 9], [4, 1]
    for number in range(ranks):
        rank = Rank(shape, number, filled=True)
        mapping = [ref.mapping for ref in rank.caches.group_data_refs[0]]
        views = row_views(region, 0, [one.canonical_page_size_bytes for one in mapping], 3)
        handler = gpu_worker.SingleDirectionOffloadingHandler.__new__(
            gpu_worker.SingleDirectionOffloadingHandler
        )
        handler.gpu_to_cpu, handler.src_blocks_per_chunk, handler.dst_blocks_per_chunk = True, 1, 3
        handler.src_tensors = [cache.tensor for cache in rank.caches.tensors]
        handler.dst_tensors = views
        handler.layer_refs_per_group = rank.caches.group_data_refs
        handler._canonical_copy_plans = [
            [gpu_worker._build_copy_plan(ref, True) for ref in rank.caches.group_data_refs[0]]
        ]
        handler._scratch_bases_src = handler._scratch_bases_dst = torch.zeros(
            0, dtype=torch.int64
        ).numpy()
        device, host = places(blocks, 0, rows)
        most = handler._estimate_max_copy_ops([len(blocks)])
        source, target, sizes = (torch.zeros(most, dtype=torch.int64).numpy() for _ in range(3))
        count, _ = handler._fill_canonical_ops(
            0, device.block_ids, host.block_ids, len(blocks), 0, 0, source, target, sizes, 0
        )
        for copy in range(count):
            ctypes.memmove(int(target[copy]), int(source[copy]), int(sizes[copy]))
    for number, row in enumerate(rows):
        expected = b"".join(
            bytes_of(kind, layer, block)
            for layer in range(LAYERS)
            for block in blocks[3 * number : 3 * number + 3]
        )
        assert region.array[row].tobytes()[: len(expected)] == expected


def test_pages_that_vllm_does_not_certify_are_refused() -> None:
    import dataclasses

    rank = Rank(("heads first", 1), 0, filled=True)
    spec = spec_of(("heads first", 1), 0, rank.page, 1)
    ref = rank.caches.group_data_refs[0][1]
    of_this_shape = dataclasses.replace(ref.mapping, parallelism_agnostic=False)
    for mapping in (None, of_this_shape):
        ref.mapping = mapping
        with pytest.raises(ConfigError, match="canonical_layout = true: vLLM does not certify"):
            create_worker(spec, rank.caches)
