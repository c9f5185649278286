"""A spec without an engine, built from the configuration that vLLM would hand over."""

from __future__ import annotations

import itertools
from typing import Any

_engines = itertools.count()


def make_spec(
    extra_config: dict[str, Any], block_bytes: int, *, blocks_per_chunk: int = 1, groups: int = 1
) -> Any:
    """`KVStoreOffloadingSpec` for a model with blocks of `block_bytes` and one worker."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    from kvstore.vllm import KVStoreOffloadingSpec

    # There is no engine that could tell.
    extra_config = {"automatic_identity": False, "identity": {"model": "test"}, **extra_config}
    parallel = OffloadingParallelConfig(
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
    )
    return KVStoreOffloadingSpec(
        OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(
                    tokens_per_block=16, layer_names=(f"layer-{group}",), group_id=group
                )
                for group in range(groups)
            ),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=True,
            extra_config=extra_config,
            engine_id=f"test-{next(_engines)}",
            model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
            parallel=parallel,
        )
    )
