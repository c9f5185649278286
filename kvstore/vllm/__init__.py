"""kvstore in vLLM, by three doors.

* `KVStoreConnector`: a connector class; what to use.
* `KVStoreOffloadingSpec`: a spec of vLLM's own `OffloadingConnector`, which tells it less.
* `KVStoreTier`: the disk tier alone, as a secondary tier of vLLM's own `TieringOffloadingSpec`.

This module is imported in several processes of the server; it imports nothing
until one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.vllm.connector import KVStoreConnector
    from kvstore.vllm.secondary_tier import KVStoreTier
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["KVStoreConnector", "KVStoreOffloadingSpec", "KVStoreTier"]


def __getattr__(name: str) -> Any:
    if name in ("KVStoreConnector", "KVStoreOffloadingSpec"):
        from kvstore.vllm.version import check_version

        # Before anything is asked of a vLLM that may not have it.
        check_version()
    if name == "KVStoreConnector":
        from kvstore.vllm.connector import KVStoreConnector

        return KVStoreConnector
    if name == "KVStoreOffloadingSpec":
        from kvstore.vllm.spec import KVStoreOffloadingSpec

        return KVStoreOffloadingSpec
    if name == "KVStoreTier":
        from kvstore.vllm.secondary_tier import KVStoreTier

        return KVStoreTier
    raise AttributeError(f"module 'kvstore.vllm' has no attribute {name!r}")
