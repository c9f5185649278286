"""Our worker in the place of vLLM's CPU worker, over a KV cache in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parts import make_spec  # type: ignore[import-not-found]
from vllm.v1.kv_offload.base import CanonicalKVCaches, TransferResult

from kvstore.vllm.layout import release_region, worker_region
from kvstore.vllm.worker import HostCopyWorker, row_views


class Workers:
    """Builds workers, and closes what tests leave open."""

    def __init__(self) -> None:
        self.built = 0
        self._ends: list[Callable[[], None]] = []

    def worker(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_cpu_chunks: int, **_: Any
    ) -> Seen:
        """For `CPUOffloadingWorker`."""
        self.built += 1
        block = sum(tensor.page_size_bytes for tensor in kv_caches.tensors)
        row = -(-block * blocks_per_chunk // 4096) * 4096
        spec = make_spec(
            {"cpu_bytes_to_use": num_cpu_chunks * row}, block, blocks_per_chunk=blocks_per_chunk
        )
        engine = spec.config.engine_id
        region = worker_region(engine, 1, spec.region_shape)
        self._ends.append(lambda: release_region(engine, region))
        worker = spec.get_worker(kv_caches)
        assert isinstance(worker, HostCopyWorker)
        self._ends.append(worker.shutdown)
        return Seen(worker, kv_caches, region, blocks_per_chunk)

    def close(self) -> None:
        while self._ends:
            self._ends.pop()()


class Seen:
    """Our worker, with both sides of its copies as tensors, the way these tests look at them.

    They want host memory as one tensor for each of the device's, without gaps. So it is shown
    to them as copies, which go to the rows before a transfer and come from them after it.
    """

    def __init__(
        self, worker: HostCopyWorker, kv_caches: CanonicalKVCaches, region: Any, factor: int
    ) -> None:
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._worker = worker
        self._rows = row_views(region, 0, pages, factor)
        self._shown = [rows.contiguous() for rows in self._rows]
        self._under_way: list[TransferResult] = []
        device = [tensor.tensor for tensor in kv_caches.tensors]
        self._store_handler = Direction(device, self._shown, kv_caches, self._under_way)
        self._load_handler = Direction(self._shown, device, kv_caches, self._under_way)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._transfer(self._worker.submit_store, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._transfer(self._worker.submit_load, job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done = list(self._under_way)
        self._under_way.clear()
        return done

    def shutdown(self) -> None:
        self._rows.clear()
        self._worker.shutdown()

    def _transfer(self, submit: Callable[..., bool], job_id: int, src: Any, dst: Any) -> bool:
        for rows, shown in zip(self._rows, self._shown, strict=True):
            rows.copy_(shown)
        submitted = submit(job_id, src, dst)
        for rows, shown in zip(self._rows, self._shown, strict=True):
            shown.copy_(rows)
        self._under_way.extend(self._worker.get_finished())
        return submitted


class Direction:
    """What these tests look at of the handler for one direction."""

    def __init__(
        self,
        src: list[torch.Tensor],
        dst: list[torch.Tensor],
        kv_caches: CanonicalKVCaches,
        under_way: list[TransferResult],
    ) -> None:
        self.src_tensors, self.dst_tensors = src, dst
        self.layer_refs_per_group = kv_caches.group_data_refs
        self._transfers = under_way
