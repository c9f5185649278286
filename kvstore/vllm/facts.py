"""What never changes while an engine runs, as labels of `vllm:kv_offload_config_info`.

vLLM 0.33 reads the names in one process and the values in another. The first four are those of its
own host tier, and mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore._version import __version__
from kvstore.config import DiskConfig

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["LABELS", "facts_of"]

LABELS = (
    "cpu_num_chunks",
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "cpu_kv_cache_size_tokens",
    "kvstore_version",
    "kvstore_eviction_policy",
    "kvstore_tiers",
    "kvstore_disk_bytes",
)


def facts_of(spec: KVStoreOffloadingSpec) -> dict[str, str | int]:
    """The value of each label; `kvstore_tiers` is how many there are."""
    config = spec.store_config
    tokens = _tokens(spec)
    policy = config.host_policy
    disks = [tier for tier in config.tiers if isinstance(tier, DiskConfig)]
    values: Sequence[str | int] = (
        spec.region_shape.rows,
        spec.blocks_per_chunk,
        spec.region_shape.size,
        "None" if tokens is None else tokens,
        __version__,
        policy if isinstance(policy, str) else policy.name,
        len(config.tiers),
        sum(tier.capacity_bytes for tier in disks),
    )
    return dict(zip(LABELS, values, strict=True))


def _tokens(spec: KVStoreOffloadingSpec) -> int | None:
    """How many tokens of the longest requests host memory holds; None if nobody tells."""
    longest = int(spec.config.model.max_model_len)
    if longest <= 0:
        return None
    chunks = 0
    for group in spec.config.groups:
        its = -(-longest // (int(group.tokens_per_block) * spec.blocks_per_chunk))
        window = group.sliding_window_size_in_chunks
        chunks += its if window is None else min(its, int(window))
    return spec.region_shape.rows * longest // chunks
