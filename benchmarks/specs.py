"""Offloading specs of kvstore and of vLLM without an engine, for measuring their managers."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

__all__ = ["offloading_config"]


def offloading_config(
    extra_config: dict[str, Any], block_bytes: int, engine_id: str = "bench", groups: int = 1
) -> OffloadingConfig:
    """What vLLM would hand to a spec for a model with blocks of `block_bytes`."""
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"layer-{g}",), group_id=g)
            for g in range(groups)
        ),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        # There is no engine that could tell what it is.
        extra_config={"automatic_identity": False, "identity": {"model": "bench"}, **extra_config},
        engine_id=engine_id,
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
