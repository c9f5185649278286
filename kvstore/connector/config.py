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
    """See `CacheConfigLike`."""

    block_size: int


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
    def of(cls, hash_block_size: int, extra_config: Mapping[str, Any]) -> ServerConfig:
        """Both in one."""
        return cls(CacheConfig(hash_block_size), KVTransferConfig(extra_config))


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """See `KVCacheSpecLike`."""

    block_size: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated together. See `KVCacheGroupLike`."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """See `KVCacheConfigLike`."""

    kv_cache_groups: Sequence[KVCacheGroup]
