"""Policies for vLLM's own CPU tier, without the rest of kvstore.

    "kv_connector_extra_config": {"cpu_bytes_to_use": N,
      "eviction_policy": "hit-density", "cache_policy_module_path": "kvstore.vllm.policy"}

Every name that `kvstore.policies.policy_names` knows is an attribute of this module: a
class for vLLM's policy factory, with the policy's default parameters. vLLM looks
among its own names first, and has an "lru" and an "arc"; ours are also called
``kvstore-lru``, ``kvstore-arc`` and so on.

This module imports nothing of vLLM until a class is asked for.
"""

from __future__ import annotations

from typing import Any

from kvstore.policies import find_policy

__all__: list[str] = []

PREFIX = "kvstore-"

_made: dict[str, type] = {}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    policy = name.removeprefix(PREFIX)
    if policy not in _made:
        try:
            find_policy(policy)
        except ValueError as error:
            raise AttributeError(f"module {__name__!r}: {error}") from None
        from kvstore.vllm.cache_policy import KVStoreCachePolicy

        _made[policy] = type(f"KVStore[{policy}]", (KVStoreCachePolicy,), {"policy_name": policy})
    return _made[policy]
