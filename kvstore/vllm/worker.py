"""The workers' side: copies between the device's KV cache and rows of host memory."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvstore.errors import ConfigError
from kvstore.vllm.region import release_region, worker_region
from tiers.pinned import PinnedRegion

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["HostCopyWorker", "create_worker"]


def create_worker(spec: KVStoreOffloadingSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    """The worker for the device that the KV cache lives on.

    Raises:
        ConfigError: if kvstore cannot copy from and to that kind of device.
    """
    device = kv_caches.tensors[0].tensor.device.type
    if device not in ("cpu", "cuda", "xpu"):
        raise ConfigError(f"kvstore runs on cpu, cuda and xpu devices, not on {device!r}")
    pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    needed = sum(pages) * spec.blocks_per_chunk
    if needed > spec.layout.rank_bytes:
        raise ConfigError(
            f"the KV cache has {needed} bytes in a chunk where vLLM announced "
            f"{spec.layout.rank_bytes}"
        )
    region = worker_region(
        spec.config.engine_id, spec.config.parallel.world_size, spec.rows, spec.row_bytes
    )
    kind = HostCopyWorker if device == "cpu" else DeviceCopyWorker
    return kind(spec, kv_caches, region)


def row_views(
    region: PinnedRegion, first_byte: int, pages: Sequence[int], blocks_per_chunk: int
) -> list[torch.Tensor]:
    """For each tensor its part of all rows: int8 of shape (rows, page x blocks_per_chunk)."""
    flat = torch.frombuffer(region.view, dtype=torch.int8)
    views = []
    for page in pages:
        width = page * blocks_per_chunk
        views.append(
            torch.as_strided(flat, (region.rows, width), (region.row_bytes, 1), first_byte)
        )
        first_byte += width
    return views


class HostCopyWorker(OffloadingWorker):
    """For a KV cache in host memory (vLLM's CPU platform).

    A copy is done when `submit_store` or `submit_load` returns: it takes a few
    milliseconds of the cores that would compute, whichever thread does it, and
    a load is usable one step sooner.
    """

    def __init__(
        self, spec: KVStoreOffloadingSpec, kv_caches: CanonicalKVCaches, region: PinnedRegion
    ) -> None:
        self._engine_id = spec.config.engine_id
        self._region = region
        self._blocks_per_chunk = spec.blocks_per_chunk
        self._done: list[TransferResult] = []
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        first = spec.layout.rank_offset(spec.config.parallel.rank)
        rows = row_views(region, first, pages, spec.blocks_per_chunk)
        # For each group, for each of its layers: pages of the device and of the rows.
        # Items are whole pages, so that indexing copies page by page.
        self._groups: list[list[tuple[npt.NDArray[np.void], npt.NDArray[np.void], int]]] = []
        for refs in kv_caches.group_data_refs:
            layers = []
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx]
                page, size = tensor.page_size_bytes, ref.page_size_bytes
                device = tensor.tensor.view(torch.int8).view(-1, page).numpy()
                host = rows[ref.tensor_idx].numpy()
                layers.append(
                    (
                        _as_pages(device, size, (device.shape[0],), (device.strides[0],)),
                        _as_pages(
                            host,
                            size,
                            (host.shape[0], spec.blocks_per_chunk),
                            (host.strides[0], page),
                        ),
                        size,
                    )
                )
            self._groups.append(layers)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, *_: Any, **__: Any
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, *_: Any, **__: Any
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._groups = []
        release_region(self._engine_id, self._region)

    def _copy(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool
    ) -> bool:
        started = time.perf_counter()
        per_chunk = self._blocks_per_chunk
        all_rows: npt.NDArray[np.int32] = host.block_ids
        moved = block_at = row_at = 0
        for layers, size, first_block in zip(
            self._groups, device.group_sizes, device.block_indices, strict=True
        ):
            if not size:
                continue
            skip = first_block % per_chunk
            chunks = -(-(skip + size) // per_chunk)
            blocks = device.block_ids[block_at : block_at + size]
            position = np.arange(skip, skip + size)
            rows = all_rows[row_at : row_at + chunks][position // per_chunk]
            within = position % per_chunk
            for device_pages, row_pages, page in layers:
                if store:
                    row_pages[rows, within] = device_pages[blocks]
                else:
                    device_pages[blocks] = row_pages[rows, within]
                moved += page * size
            block_at += size
            row_at += chunks
        seconds = time.perf_counter() - started
        self._done.append(TransferResult(job_id, True, moved, seconds))
        return True


class DeviceCopyWorker(OffloadingWorker):
    """For a KV cache in device memory: vLLM's own copy engines over kvstore's rows."""

    def __init__(
        self, spec: KVStoreOffloadingSpec, kv_caches: CanonicalKVCaches, region: PinnedRegion
    ) -> None:
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

        self._engine_id = spec.config.engine_id
        self._region = region
        pinned = region.register_with_cuda()
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        first = spec.layout.rank_offset(spec.config.parallel.rank)
        host = row_views(region, first, pages, spec.blocks_per_chunk)
        device = [
            tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            for tensor in kv_caches.tensors
        ]
        options = {
            "gpu_tensors": device,
            "cpu_tensors": host,
            "blocks_per_chunk": spec.blocks_per_chunk,
            "layer_refs_per_group": kv_caches.group_data_refs,
            "host_memory_is_pinned": pinned,
        }
        known = inspect.signature(SingleDirectionOffloadingHandler).parameters
        options = {name: value for name, value in options.items() if name in known}
        self._stores = SingleDirectionOffloadingHandler(**options, gpu_to_cpu=True)
        self._loads = SingleDirectionOffloadingHandler(**options, gpu_to_cpu=False)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, *_: Any, **__: Any
    ) -> bool:
        return bool(self._stores.transfer_async(job_id, src_spec, dst_spec))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, *_: Any, **__: Any
    ) -> bool:
        return bool(self._loads.transfer_async(job_id, src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        return [*self._stores.get_finished(), *self._loads.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        self._stores.shutdown()
        self._loads.shutdown()
        release_region(self._engine_id, self._region)


def _as_pages(
    array: npt.NDArray[np.int8], size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """See memory that begins with `array` as items of `size` bytes."""
    pages = np.lib.stride_tricks.as_strided(array, (*shape, size), (*strides, 1))
    return pages.view(np.dtype(("V", size)))[..., 0]
