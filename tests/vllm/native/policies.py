"""Our eviction policies in vLLM's own CPU manager, and in the place of its policies."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvstore.vllm import policy as ours


class Policies:
    """Hands out managers and policies, and counts them."""

    def __init__(self) -> None:
        self.built = 0

    def manager(self, cache_policy: str = "lru", **options: Any) -> CPUOffloadingManager:
        """vLLM's manager with our policy of that name, if it is a name of vLLM's own."""
        if cache_policy in ("lru", "arc"):
            self.built += 1
            cache_policy = f"kvstore-{cache_policy}"
            options["cache_policy_module_path"] = "kvstore.vllm.policy"
        return CPUOffloadingManager(cache_policy=cache_policy, **options)

    def close(self) -> None:
        """Policies hold nothing open."""

    def named(self, name: str) -> type:
        """Our policy of that name, for tests that build a policy themselves."""
        return _Counting(f"kvstore-{name}", (getattr(ours, f"kvstore-{name}"),), {"places": self})


class _Counting(type(getattr(ours, "kvstore-lru"))):  # type: ignore[misc]
    """Counts what is built, and knows what vLLM's manager has built as its own."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.places.built += 1
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])
