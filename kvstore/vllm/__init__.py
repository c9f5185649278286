"""kvstore as an offloading spec of vLLM's OffloadingConnector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm", "cpu_bytes_to_use": "8GiB",
        "tiers": [{"type": "disk", "path": "/nvme/kv", "capacity_bytes": "500GiB"}]}}'

`KVStoreTier` is its disk tier alone, as a secondary tier of vLLM's own `TieringOffloadingSpec`.

This module is imported in several processes of the server; it imports nothing
until one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.vllm.secondary_tier import KVStoreTier
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["KVStoreOffloadingSpec", "KVStoreTier"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreOffloadingSpec":
        from kvstore.vllm.version import check_version

        # Before anything is asked of a vLLM that may not have it.
        check_version()

        from kvstore.vllm.spec import KVStoreOffloadingSpec

        return KVStoreOffloadingSpec
    if name == "KVStoreTier":
        from kvstore.vllm.secondary_tier import KVStoreTier

        return KVStoreTier
    raise AttributeError(f"module 'kvstore.vllm' has no attribute {name!r}")
