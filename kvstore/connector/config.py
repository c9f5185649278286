"""What a connector reads of a server's configuration, and plain classes for servers without one.

The names are those that published integrations use. A server may pass objects of its own, as
long as they have these attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "CacheConfig",
    "KVCacheConfig",
    "KVCacheConfigLike",
    "KVCacheGroup",
    "KVCacheGroupLike",
    "KVCacheSpec",
    "KVCacheSpecLike",
    "KVTransferConfig",
    "ParallelConfig",
    "ParallelConfigLike",
    "ServerConfig",
    "ServerConfigLike",
]


class CacheConfigLike(Protocol):
    @property
    def block_size(self) -> int:
        """Tokens of a hashed block."""


class KVTransferConfigLike(Protocol):
    @property
    def kv_connector_extra_config(self) -> Mapping[str, Any]:
        """What the operator has configured."""


class ParallelConfigLike(Protocol):
    """How many workers there are. A server without this has one, in its scheduler's process."""

    @property
    def world_size(self) -> int:
        """Workers, each of which has a part of every block."""

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0; the scheduler's does not matter."""


class ServerConfigLike(Protocol):
    """Where there are workers in processes of their own, ``parallel_config``, a
    `ParallelConfigLike`, says how many, and ``kv_transfer_config.engine_id`` is the
    server's name, no other's of the same user on the machine.
    """

    @property
    def cache_config(self) -> CacheConfigLike: ...

    @property
    def kv_transfer_config(self) -> KVTransferConfigLike: ...


class KVCacheSpecLike(Protocol):
    @property
    def block_size(self) -> int:
        """Tokens of a block of the device."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one layer has of a block."""


class KVCacheGroupLike(Protocol):
    @property
    def layer_names(self) -> Sequence[str]: ...

    @property
    def kv_cache_spec(self) -> KVCacheSpecLike: ...


class KVCacheConfigLike(Protocol):
    """Where it has ``num_blocks``, the blocks that are given out, tensors are checked by it."""

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroupLike]: ...


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """See `CacheConfigLike`.

    Attributes:
        enable_prefix_caching: whether the device keeps blocks for other requests. Who could share
            what another request is loading then waits for it.
    """

    block_size: int
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """See `KVTransferConfigLike` and `ServerConfigLike`."""

    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine_id: str | None = None


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """See `ParallelConfigLike`."""

    world_size: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """See `ServerConfigLike`."""

    cache_config: CacheConfig
    kv_transfer_config: KVTransferConfig
    parallel_config: ParallelConfig | None = None

    @classmethod
    def of(
        cls,
        hash_block_size: int,
        extra_config: Mapping[str, Any],
        *,
        enable_prefix_caching: bool = True,
        engine_id: str | None = None,
        world_size: int | None = None,
        rank: int = 0,
    ) -> ServerConfig:
        """All in one. With a `world_size` workers are in processes of their own."""
        return cls(
            CacheConfig(hash_block_size, enable_prefix_caching),
            KVTransferConfig(extra_config, engine_id),
            None if world_size is None else ParallelConfig(world_size, rank),
        )


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """See `KVCacheSpecLike`.

    Attributes:
        sliding_window: tokens that a token attends to, itself included, where the server gives
            back the blocks that no later token needs; None where it keeps all of them.
    """

    block_size: int
    page_size_bytes: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated together. See `KVCacheGroupLike`."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """See `KVCacheConfigLike`."""

    kv_cache_groups: Sequence[KVCacheGroup]
    num_blocks: int | None = None
