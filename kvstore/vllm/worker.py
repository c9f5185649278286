"""Worker: copy between the device's KV cache and rows of host memory."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvstore.device import HostCopies, Pages
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import about
from kvstore.vllm.layout import (
    EngineShape,
    Piece,
    has_writer,
    pieces,
    release_region,
    row_pages,
    worker_region,
)

__all__ = ["DeviceCopyWorker", "HostCopyWorker", "create_worker"]

logger = logging.getLogger("kvstore")

WORD = 8
"""Bytes that vLLM's copy kernel moves at once."""


def create_worker(spec: EngineShape, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    """The worker for the device that the KV cache lives on.

    Raises:
        ConfigError: if kvstore cannot copy from and to that kind of device.
    """
    device = kv_caches.tensors[0].tensor.device.type
    if device not in ("cpu", "cuda", "xpu"):
        raise ConfigError(f"kvstore runs on cpu, cuda and xpu devices, not on {device!r}")
    needed = sum(row_pages(kv_caches, spec.layout.canonical)) * spec.config.cache.blocks_per_chunk
    if needed > spec.layout.rank_bytes:
        raise ConfigError(
            f"the KV cache has {needed} bytes in a chunk where vLLM announced "
            f"{spec.layout.rank_bytes}"
        )
    parallel = spec.config.parallel
    region = worker_region(
        spec.config.engine_id,
        parallel.world_size,
        spec.region_shape,
        apart=spec.worker_apart,
        stages=parallel.pp_size,
    )
    kind = HostCopyWorker if device == "cpu" else DeviceCopyWorker
    try:
        return kind(spec, kv_caches, region)
    except BaseException:
        release_region(spec.config.engine_id, region)
        raise


def row_views(
    region: PinnedRegion, first_byte: int, pages: Sequence[int], blocks_per_chunk: int
) -> list[torch.Tensor]:
    """For each tensor its part of all rows: int8 of shape (rows, page x blocks_per_chunk)."""
    flat = torch.frombuffer(region.view, dtype=torch.int8)
    views = []
    for page in pages:
        width = page * blocks_per_chunk
        views.append(torch.as_strided(flat, (region.rows, width), (region.stride, 1), first_byte))
        first_byte += width
    return views


class HostCopyWorker(OffloadingWorker):
    """For a KV cache in host memory (vLLM's CPU platform).

    A copy is done when `submit_store` or `submit_load` returns: it takes a few
    milliseconds of the cores that would compute, whichever thread does it, and
    a load is usable one step earlier.
    """

    def __init__(
        self, spec: EngineShape, kv_caches: CanonicalKVCaches, region: PinnedRegion
    ) -> None:
        self._engine_id = spec.config.engine_id
        self._region: PinnedRegion | None = region
        self._done: list[TransferResult] = []
        canonical, tables = spec.layout.canonical, _Tables(spec, kv_caches)
        refs = [ref for refs in kv_caches.group_data_refs for ref in refs]
        self._loads: HostCopies | None = tables.copies(region, lambda _: True)
        self._stores: HostCopies | None = self._loads
        if not all(has_writer(ref, canonical) for ref in refs):
            self._stores = tables.copies(region, lambda ref: has_writer(ref, canonical))

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
        region, self._region = self._region, None
        if region is not None:
            self._stores = self._loads = None
            release_region(self._engine_id, region)

    def _copy(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool
    ) -> bool:
        started, copies = time.perf_counter(), self._stores if store else self._loads
        assert copies is not None, "the worker was shut down"
        moved = copies.store(device, host) if store else copies.load(host, device)
        seconds = time.perf_counter() - started
        self._done.append(TransferResult(job_id, True, moved, seconds))
        return True


class DeviceCopyWorker(OffloadingWorker):
    """For a KV cache in device memory: vLLM's own copy engines over kvstore's rows.

    Stores, loads, and loads that a step waits for have queues of their own.
    """

    def __init__(
        self, spec: EngineShape, kv_caches: CanonicalKVCaches, region: PinnedRegion
    ) -> None:
        from vllm.v1.kv_offload.cpu import gpu_worker
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

        self._engine_id = spec.config.engine_id
        self._region: PinnedRegion | None = region
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        first = spec.layout.rank_offset(spec.config.parallel.rank)
        rows = row_pages(kv_caches, spec.layout.canonical)
        host = row_views(region, first, rows, spec.config.cache.blocks_per_chunk)
        device = [
            tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            for tensor in kv_caches.tensors
        ]
        options = {
            "gpu_tensors": device,
            "cpu_tensors": host,
            "blocks_per_chunk": spec.config.cache.blocks_per_chunk,
            "layer_refs_per_group": kv_caches.group_data_refs,
            "canonical_layout": spec.layout.canonical,
            # It means that kernels may read the rows, and they do so in words.
            "host_memory_is_pinned": region.register_with_cuda()
            and _in_words([*pages, *_cuts(kv_caches, spec.layout.canonical)], device, host),
        }
        pinned = options["host_memory_is_pinned"]
        known = inspect.signature(SingleDirectionOffloadingHandler).parameters
        if spec.layout.canonical and "canonical_layout" not in known:
            raise ConfigError("canonical_layout = true: this vLLM has no copies for it")
        options = {name: value for name, value in options.items() if name in known}
        self._stores = SingleDirectionOffloadingHandler(**options, gpu_to_cpu=True)
        self._loads = SingleDirectionOffloadingHandler(**options, gpu_to_cpu=False)
        self._expedited = SingleDirectionOffloadingHandler(**options, gpu_to_cpu=False)
        self._handlers = (self._stores, self._loads, self._expedited)
        if not pinned and "host_memory_is_pinned" not in known:
            # This vLLM takes for granted that kernels may read the rows.
            for handler in self._handlers:
                handler._swap_blocks_batch = gpu_worker.ops.swap_blocks_batch

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, *_: Any, **__: Any
    ) -> bool:
        return self._submit(self._stores, job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
        **_: Any,
    ) -> bool:
        handler = self._expedited if expedited else self._loads
        return self._submit(handler, job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        return [result for handler in self._handlers for result in handler.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        for handler in self._handlers:
            handler.wait(job_ids)

    def shutdown(self) -> None:
        region, self._region = self._region, None
        if region is None:
            return
        ended = [_ended(handler) for handler in self._handlers]
        if not all(ended):
            # Its copies may still be under way, into rows that are about to go.
            try:
                torch.accelerator.synchronize()
            except Exception:
                logger.exception(
                    "the device does not answer; its host memory is released nevertheless",
                    extra=about("device.silent"),
                )
        release_region(self._engine_id, region)

    def _submit(self, handler: Any, job_id: int, src: LoadStoreSpec, dst: LoadStoreSpec) -> bool:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            # It would become a part of the graph: not done now, and done again at each replay.
            logger.error(
                "copy job %d was submitted while a CUDA graph is captured: refused",
                job_id,
                extra=about("job.refused", job=job_id),
            )
            return False
        return bool(handler.transfer_async(job_id, src, dst))


def _in_words(
    pages: Sequence[int], device: Sequence[torch.Tensor], host: Sequence[torch.Tensor]
) -> bool:
    """Whether every page on either side begins at a multiple of eight bytes."""
    starts = [one.data_ptr() for side in (device, host) for one in side]
    steps = [one.stride(0) for side in (device, host) for one in side]
    if not any(number % WORD for number in (*pages, *starts, *steps)):
        return True
    logger.info(
        "pages of %s bytes do not all begin at a word: the copy engine loads them",
        pages,
        extra=about("device.odd_pages"),
    )
    return False


def _cuts(kv_caches: CanonicalKVCaches, canonical: bool) -> list[int]:
    """Where pages are cut, and into how many bytes."""
    return [
        number
        for refs in kv_caches.group_data_refs
        for ref in refs
        for piece in (pieces(ref, canonical) if canonical else ())
        for number in (piece.local, piece.canonical, piece.size)
    ]


def _ended(handler: Any) -> bool:
    """Wait for what a handler has under way and let it go; False if it could not."""
    try:
        handler.shutdown()
    except Exception:
        logger.exception(
            "copies between the device and host memory did not end well",
            extra=about("device.copies_failed"),
        )
        return False
    return True


class _Tables:
    """The tables of pages of a worker in host memory, and where they lie in a row."""

    def __init__(self, spec: EngineShape, kv_caches: CanonicalKVCaches) -> None:
        self._canonical, self._per_chunk = spec.layout.canonical, spec.config.cache.blocks_per_chunk
        self._caches = kv_caches
        self._steps = row_pages(kv_caches, self._canonical)
        widths = [step * self._per_chunk for step in self._steps]
        first = spec.layout.rank_offset(spec.config.parallel.rank)
        self._begins = list(itertools.accumulate(widths, initial=first))

    def copies(self, region: PinnedRegion, wanted: Callable[[Any], bool]) -> HostCopies:
        """Copies of those layers that are wanted."""
        groups: list[list[Pages]] = []
        places: list[list[tuple[int, int]]] = []
        for refs in self._caches.group_data_refs:
            its = [
                (ref, piece)
                for ref in refs
                if wanted(ref)
                for piece in pieces(ref, self._canonical)
            ]
            groups.append([self._pages(ref, piece) for ref, piece in its])
            places.append([self._place(ref, piece) for ref, piece in its])
        return HostCopies(groups, region.array, self._per_chunk, places)

    def _pages(self, ref: Any, piece: Piece) -> Pages:
        """Return a layer's part of the blocks of one tensor, which are contiguous."""
        cache = self._caches.tensors[ref.tensor_idx]
        tensor, step = cache.tensor, int(cache.page_size_bytes)
        item = tensor.element_size()
        count = tensor.numel() * item // step
        return Pages(tensor, count, tensor.storage_offset() * item + piece.local, step, piece.size)

    def _place(self, ref: Any, piece: Piece) -> tuple[int, int]:
        return self._begins[ref.tensor_idx] + piece.canonical, self._steps[ref.tensor_idx]
