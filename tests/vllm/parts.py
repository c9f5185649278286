"""A spec without an engine, built from the configuration that vLLM would hand over."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

_engines = itertools.count()


def _of(kind: Any, **values: Any) -> Any:
    """One of vLLM's classes, with those of the values that this release knows."""
    known = {each.name for each in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def offloading_config(
    extra_config: dict[str, Any],
    block_bytes: int,
    engine_id: str,
    *,
    blocks_per_chunk: int = 1,
    groups: int = 1,
    windows: tuple[int | None, ...] = (),
    workers: int = 1,
    rank: int = 0,
    replicated: bool = False,
) -> Any:
    """What vLLM hands over for a model with blocks of `block_bytes` in each worker."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    canonical = bool(extra_config.get("canonical_layout", False))
    return _of(
        OffloadingConfig,
        groups=tuple(
            _of(
                OffloadingGroupConfig,
                tokens_per_block=16,
                layer_names=(f"layer-{group}",),
                group_id=group,
                sliding_window_size_in_chunks=windows[group] if windows else None,
            )
            for group in range(groups)
        ),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=True,
        extra_config=extra_config,
        engine_id=engine_id,
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
        parallel=_of(
            OffloadingParallelConfig,
            rank=rank,
            world_size=workers,
            tp_size=workers,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=canonical,
        ),
        replicated_layout=replicated,
        canonical_layout=canonical,
    )


def kv_cache_config(spec: Any = None, layers: tuple[str, ...] = ("layer-0",)) -> Any:
    """The scheduler's configuration of one group of layers, plain attention unless told."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return KVCacheConfig(1, [], [KVCacheGroupSpec(list(layers), spec or plain)])


def make_spec(
    extra_config: dict[str, Any], block_bytes: int, *, engine: Any = None, **shape: Any
) -> Any:
    """`KVStoreOffloadingSpec` for a model with blocks of `block_bytes` in each worker.

    Args:
        engine: what vLLM's connector class was given.
        shape: as of `offloading_config`.
    """
    from kvstore.vllm import KVStoreOffloadingSpec

    # There is no engine that could tell.
    extra_config = {"automatic_identity": False, "identity": {"model": "test"}, **extra_config}
    name = f"test-{next(_engines)}"
    return KVStoreOffloadingSpec(
        offloading_config(extra_config, block_bytes, name, **shape), engine
    )


def engine_like(
    groups: Any = None, *, lora: Any = None, parallel: Any = None, **workers: Any
) -> Any:
    """An engine, as far as it matters here.

    Args:
        groups: the `KVCacheConfig`; of one group of plain attention by default.
        workers: of its one worker what `WorkerFacts` has; by default it has no layers, and
            cannot tell its weights.
    """
    from types import SimpleNamespace

    from kvstore.vllm.engine import Engine, WorkerFacts

    told = {(0, 0): WorkerFacts(**{"layers": {}, "weights": None, **workers})}
    config = SimpleNamespace(lora_config=lora, parallel_config=parallel)
    return Engine(config, groups or kv_cache_config(), told)
