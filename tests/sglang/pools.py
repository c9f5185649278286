"""SGLang's own pools and controller on the CPU, over a storage backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE = 4
"""Tokens of a page."""

SLOTS = 1024
LAYERS = 3
WAIT_S = 30


@dataclass(frozen=True)
class Shape:
    """Of a model with attention, and of its host pool."""

    page: int = PAGE
    heads: int = 2
    width: int = 8
    layers: int = LAYERS
    slots: int = SLOTS


def attention(
    layout: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    shape: Shape = Shape(),
) -> Any:
    """The host pool of a model with attention, full of noise, and the device's."""
    device = MHATokenToKVPool(
        *(shape.page, shape.page, dtype, shape.heads, shape.width, shape.layers, "cpu", False)
    )
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        *(2.0, 0, shape.page, layout),
        pin_memory=False,
        device_capacity_tokens=shape.page,
        start_layer=0,
        end_layer=shape.layers,
        host_token_capacity=shape.slots,
    )
    noise = torch.empty(host.kv_buffer.shape).normal_(generator=torch.Generator().manual_seed(seed))
    host.kv_buffer.copy_(noise)
    host.of_device = device
    return host


def states(
    layout: str = "page_first", *, slots: int = 64, numbers: torch.dtype = torch.float32
) -> Any:
    """The host pool of recurrent states, full of noise."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, 2, 4, dtype=numbers),
        conv=(torch.zeros(LAYERS, slots, 3, 2, dtype=torch.float16),),
    )
    host = MambaPoolHost(
        info, 1.0, 0, device_capacity=slots, pin_memory=False, device="cpu", layout=layout
    )
    for buffer in (host.temporal_buffer, *host.conv_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return host


def pages(host: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of the pages that begin at every PAGE-th of these slots."""
    size = host.page_size
    return [
        host.get_data_page(at, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
        for at in indices[::size].tolist()
    ]


def extra(path: Path | None, *, in_place: bool = True, **values: Any) -> dict[str, Any]:
    """What an operator gives to SGLang."""
    disk = {"type": "disk", "path": str(path), "capacity_bytes": "8MiB", "segment_bytes": "256KiB"}
    return {
        "backend_name": "kvstore",
        "module_path": "kvstore.sglang",
        "class_name": "HiCacheKVStore",
        "interface_v1": int(in_place),
        "kvstore": {
            "host": "64KiB",
            **({} if path is None else {"tiers": [disk]}),
            "identity": {"weights": "v1"},
            **values,
        },
    }


def config(given: dict[str, Any], **values: Any) -> HiCacheStorageConfig:
    """What SGLang hands to a backend."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    ranks |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    return HiCacheStorageConfig(
        **{
            **ranks,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "tiny",
            "extra_config": given,
            **values,
        }
    )


class Controller:
    """SGLang's controller of a hierarchical cache, driven as its scheduler drives it."""

    def __init__(self, host: Any, given: dict[str, Any], backend: str = "dynamic") -> None:
        self.host = host
        allocator = SimpleNamespace(get_kvcache=lambda: host.of_device)
        self._one = HiCacheController(
            allocator,
            host,
            host.page_size,
            torch.distributed.group.WORLD,
            threading.Event(),
            io_backend="direct",
            storage_backend=backend,
            prefetch_threshold=host.page_size,
            model_name="tiny",
            storage_backend_extra_config=given,
        )
        self.backend = self._one.storage_backend

    def write(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Back pages up; returns how many tokens are stored."""
        names = get_storage_hash_str(tokens, None, page_size=self.host.page_size)
        self._one.write_storage(indices, tokens, names)
        return int(self._one.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)

    def hits(self, tokens: list[int]) -> Any:
        """The fetch of a prompt, looked up; `storage_hit_count` tokens of it are there."""
        self._one.prefetch("request", tokens)
        return self._one.prefetch_hit_queue.get(timeout=WAIT_S)

    def fetch(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Look a prompt up and read it into these slots; returns how many tokens came."""
        found = self.hits(tokens)
        if not found.hash_value:
            return 0
        found.host_indices = indices[: len(found.hash_value) * self.host.page_size]
        self._one.prefetch_buffer.put(found)
        completed = 0
        while not (told := self._one.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            completed = told.completed_tokens
        return int(completed)

    def end(self) -> None:
        self._one.detach_storage_backend()


@contextmanager
def controller(host: Any, given: dict[str, Any], backend: str = "dynamic") -> Iterator[Controller]:
    one = Controller(host, given, backend)
    try:
        yield one
    finally:
        one.end()
