"""Servers for the streams: what is configured, for vLLM and for ours."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvstore.connector.scheduler import ConnectorScheduler
from tests.connector.scripted import scheduler_over
from tests.vllm.pretend import Layer
from tests.vllm.scripted import Contents, OurManager
from tests.vllm.tiny import MODEL

LONGEST = 96


@dataclass(frozen=True)
class Shape:
    """A server.

    Attributes:
        groups: for each KV cache group its window, or None.
        block: tokens of a block, or of each group's.
        hashed: tokens of a hashed block; None: vLLM's choice.
        factor: blocks of an offloaded chunk.
        retained: `prefix_cache_retention_interval` of vLLM; None: all chunks of windows.
        role: of the connector. Of a "kv_producer" whose steps overlap vLLM preempts requests that
            are being computed, and gives their blocks away at once.
        resumed_as_new: vLLM's second model runner gets resumed requests like new ones.
    """

    groups: tuple[int | None, ...]
    block: int | tuple[int, ...] = 4
    hashed: int | None = None
    factor: int = 1
    blocks: int = 40
    caching: bool = True
    prompt_only: bool = False
    asynchronous: bool = False
    resumed_as_new: bool = False
    retained: int | None = None
    role: str = "kv_both"
    requests: int = 5
    batch: int = 24
    resets: bool = False
    script: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> list[Layer]:
        sizes = self.block if isinstance(self.block, tuple) else (self.block,) * len(self.groups)
        return [
            Layer(index, size, window)
            for index, (size, window) in enumerate(zip(sizes, self.groups, strict=True))
        ]


@cache
def model(folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONGEST
    )


def vllm_groups(layers: list[Layer]) -> list[KVCacheGroupSpec]:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    return [
        KVCacheGroupSpec(
            [f"layer-{layer.index}"],
            FullAttentionSpec(block_size=layer.block, **sizes)
            if layer.window is None
            else SlidingWindowSpec(block_size=layer.block, sliding_window=layer.window, **sizes),
        )
        for layer in layers
    ]


def vllm_scheduler(shape: Shape, contents: Contents, folder: Path) -> tuple[Scheduler, int]:
    """vLLM's own scheduler, with both connectors, and how many tokens a hashed block has."""
    layers = shape.layers
    cache_config = CacheConfig(
        block_size=min(layer.block for layer in layers),
        enable_prefix_caching=shape.caching,
        prefix_match_unit=shape.hashed,
        prefix_cache_retention_interval=shape.retained,
    )
    cache_config.num_gpu_blocks = shape.blocks
    extra = {
        "spec_name": "TheirSpec",
        "spec_module_path": "tests.vllm.scripted",
        "blocks_per_chunk": shape.factor,
        "offload_prompt_only": shape.prompt_only,
        "contents": contents,
    }
    config = VllmConfig(
        model_config=model(folder),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.requests,
            max_num_batched_tokens=shape.batch,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=shape.asynchronous,
            disable_hybrid_kv_cache_manager=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="Mirror",
            kv_connector_module_path="tests.vllm.mirror",
            kv_role=shape.role,
            kv_connector_extra_config=extra,
        ),
    )
    # On a CPU it would be switched off.
    config.scheduler_config.async_scheduling = shape.asynchronous
    groups = KVCacheConfig(
        shape.blocks, [], vllm_groups(layers), prefix_cache_retention_interval=shape.retained
    )
    block_size, hash_size = resolve_kv_cache_block_sizes(groups, config)
    kind = AsyncScheduler if shape.asynchronous else Scheduler
    scheduler = kind(
        config,
        groups,
        StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_size,
    )
    scheduler.use_v2_model_runner = shape.resumed_as_new
    init_none_hash(sha256)
    return scheduler, hash_size


def our_scheduler(shape: Shape, contents: Contents, hash_size: int) -> ConnectorScheduler:
    """Ours, out of plain classes."""
    return scheduler_over(
        OurManager(contents),
        hash_size,
        [(layer.block, layer.window) for layer in shape.layers],
        shape.factor,
        enable_prefix_caching=shape.caching,
        offload_prompt_only=shape.prompt_only,
    )
