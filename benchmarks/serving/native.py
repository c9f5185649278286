"""vLLM's tiering where the KV cache lies in host memory.

vLLM's worker copies with CUDA or XPU and refuses other platforms. Here it copies as
kvstore's worker does; manager, tiers, region, files and threads are vLLM's own.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.device import HostCopies, Pages

__all__ = ["HostTieringOffloadingSpec"]


class HostTieringOffloadingSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with a worker for the CPU platform."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies between a KV cache in host memory and vLLM's region; done when a call returns."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region: SharedOffloadRegion | None = region
        self._done: list[TransferResult] = []
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        begins = list(itertools.accumulate((page * blocks_per_chunk for page in pages), initial=0))
        groups, places = [], []
        for refs in kv_caches.group_data_refs:
            groups.append([_pages(kv_caches.tensors[ref.tensor_idx], ref) for ref in refs])
            places.append([(begins[ref.tensor_idx], pages[ref.tensor_idx]) for ref in refs])
        rows = region.base_tensor.view(region.num_chunks, -1).numpy().view(np.uint8)
        self._copies: HostCopies | None = HostCopies(groups, rows, blocks_per_chunk, places)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            self._copies = None
            region.cleanup()

    def _copy(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool
    ) -> bool:
        started, copies = time.perf_counter(), self._copies
        assert copies is not None, "the worker was shut down"
        moved = copies.store(device, host) if store else copies.load(host, device)
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - started))
        return True


def _pages(cache: Any, ref: Any) -> Pages:
    """What a layer has of the blocks of one tensor, which lie one after the other."""
    tensor, step = cache.tensor, int(cache.page_size_bytes)
    item = tensor.element_size()
    count = tensor.numel() * item // step
    return Pages(tensor, count, tensor.storage_offset() * item, step, int(ref.page_size_bytes))
