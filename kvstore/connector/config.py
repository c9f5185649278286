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


class ServerConfigLike(Protocol):
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
    """See `KVTransferConfigLike`."""

    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """See `ServerConfigLike`."""

    cache_config: CacheConfig
    kv_transfer_config: KVTransferConfig

    @classmethod
    def of(
        cls,
        hash_block_size: int,
        extra_config: Mapping[str, Any],
        *,
        enable_prefix_caching: bool = True,
    ) -> ServerConfig:
        """Both in one."""
        cache = CacheConfig(hash_block_size, enable_prefix_caching)
        return cls(cache, KVTransferConfig(extra_config))


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
