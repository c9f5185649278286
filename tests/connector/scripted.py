"""A manager whose answers are scripted, and requests that are only sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.connector.contract import OffloadingManager, PrepareStoreOutput
from kvstore.connector.mediums import HostLoadStoreSpec, LoadStoreSpec
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import KVCacheConfig, KVCacheGroup, KVCacheSpec, ServerConfig
from kvstore.connector.spec import OffloadingSpec

__all__ = ["Prompt", "Scripted", "Sizes", "key", "scheduler_over"]

Key = tuple[int, int]
"""A group, and a chunk in it."""


@dataclass
class Prompt:
    """See `kvstore.connector.server.RequestLike`. Hash n is the number n."""

    num_tokens: int
    hash_size: int
    request_id: str = "r"
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [n.to_bytes(8, "big") for n in range(self.num_tokens // self.hash_size)]

    def is_finished(self) -> bool:
        return False


def key(group: int, chunk: int, hashes_per_chunk: int) -> bytes:
    """The key of a chunk of a `Prompt`."""
    return ((chunk + 1) * hashes_per_chunk - 1).to_bytes(8, "big") + group.to_bytes(4, "big")


@dataclass
class Scripted(OffloadingManager):
    """Answers as it was told; a key that it was not told of is a miss.

    Attributes:
        asked: keys that were looked up.
        takes: whether it takes what is to be stored, all of it each time.
    """

    answers: dict[bytes, bool | None] = field(default_factory=dict)
    asked: set[bytes] = field(default_factory=set)
    takes: bool = False

    def lookup(self, keys: Any, req_context: Any = None) -> Any:
        assert isinstance(keys, bytes)
        self.asked.add(keys)
        return self.answers.get(keys, False)

    def prepare_load(self, keys: Iterable[bytes], req_context: Any = None) -> LoadStoreSpec:
        keys = list(keys)
        for one in keys:
            if not self.answers.get(one, False):
                raise KeyError(one)
        return HostLoadStoreSpec(range(len(keys)))

    def prepare_store(
        self, keys: Iterable[bytes], req_context: Any = None
    ) -> PrepareStoreOutput | None:
        keys = list(keys)
        return PrepareStoreOutput(keys, HostLoadStoreSpec(range(len(keys)))) if self.takes else None


class Sizes(OffloadingSpec):
    """Sizes, and a manager that was made before."""

    manager: OffloadingManager

    def get_manager(self) -> OffloadingManager:
        return self.manager

    def get_handlers(
        self, kv_caches: Mapping[str, Any], attn_backends: Mapping[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError


def scheduler_over(
    manager: OffloadingManager,
    hash_size: int,
    groups: Iterable[tuple[int, int | None]],
    factor: int = 1,
    *,
    enable_prefix_caching: bool = True,
    **extra: Any,
) -> ConnectorScheduler:
    """The scheduler's half over `manager`.

    Args:
        groups: for each group the tokens of a block of the device, and the window.
        extra: more keys of ``kv_connector_extra_config``.
    """
    groups = list(groups)
    if factor > 1:
        extra["block_size"] = groups[0][0] * factor
    spec = Sizes(
        ServerConfig.of(hash_size, extra, enable_prefix_caching=enable_prefix_caching),
        KVCacheConfig(
            [
                KVCacheGroup([f"layer-{n}"], KVCacheSpec(size, 64, window))
                for n, (size, window) in enumerate(groups)
            ]
        ),
    )
    spec.manager = manager
    return ConnectorScheduler(spec)
