"""How the KV pages of a vLLM worker lie in a row of host memory.

row:   | rank 0 | rank 1 | ... | padding to a page |
rank:  | tensor 0: blocks_per_chunk pages | tensor 1 | ... |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError

__all__ = ["Layout"]


class Layout:
    """Sizes and identity of the chunks of one engine.

    Attributes:
        chunk_bytes: bytes of a chunk, all ranks together.
        rank_bytes: bytes that one rank has in a chunk.
        copies: ranks side by side in a row; 1 when all hold the same bytes.
        identity: what must be equal for chunks to be exchanged.
    """

    def __init__(self, config: Any) -> None:
        if getattr(config, "canonical_layout", False):
            raise ConfigError("canonical_layout = true: kvstore keeps each rank's own layout")
        parallel, cache = config.parallel, config.cache
        per_block = int(config.worker_kv_bytes_per_block)
        if per_block <= 0:
            raise ConfigError("this model has no KV cache that could be offloaded")
        replicated = bool(getattr(config, "replicated_layout", False))
        self.replicated = replicated
        self.copies = 1 if replicated else int(parallel.world_size)
        self.rank_bytes = per_block * int(cache.blocks_per_chunk)
        self.chunk_bytes = self.rank_bytes * self.copies
        self.identity: Mapping[str, Any] = {
            "engine": "vllm",
            "model": str(config.model.name),
            "dtype": str(config.model.dtype),
            "tokens_per_hash": int(cache.tokens_per_hash),
            "blocks_per_chunk": int(cache.blocks_per_chunk),
            "rank_bytes_per_block": per_block,
            "replicated": replicated,
            "kv_cache_layout": getattr(config, "kv_cache_layout", None),
            "parallel": {
                name: int(getattr(parallel, name))
                for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
            },
            "groups": [
                {
                    "group": int(group.group_id),
                    "tokens_per_block": int(group.tokens_per_block),
                    "layers": list(group.layer_names),
                }
                for group in config.groups
            ],
        }

    def rank_offset(self, rank: int) -> int:
        """Where a rank's bytes begin in a row."""
        return 0 if self.replicated else rank * self.rank_bytes
