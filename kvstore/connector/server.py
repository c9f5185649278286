"""What a connector reads of a server: configuration, requests, blocks and steps.

The names are those of published integrations. A server may use the plain classes here, or pass
objects of its own that satisfy the protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Block",
    "BlockLike",
    "BlocksLike",
    "CacheConfig",
    "CachedRequests",
    "CachedRequestsLike",
    "KVBlocks",
    "KVCacheConfig",
    "KVCacheConfigLike",
    "KVCacheGroup",
    "KVCacheGroupLike",
    "KVCacheSpec",
    "KVCacheSpecLike",
    "KVTransferConfig",
    "NewRequest",
    "NewRequestLike",
    "ParallelConfig",
    "ParallelConfigLike",
    "RequestLike",
    "ServerConfig",
    "ServerConfigLike",
    "StepOutput",
    "StepOutputLike",
]

BlockIds = Sequence[Sequence[int]]
"""Block numbers of the device for each KV cache group, in prompt order. In a group with a sliding
window, 0 stands for a block that the window has passed; no block has the number 0."""


class RequestLike(Protocol):
    """A request of the server.

    Optional attributes: ``kv_transfer_params`` (a mapping or None) may have ``do_remote_decode``
    and hints, ``kv_hints`` hints: see `kvstore.core.hints`. If ``skip_reading_prefix_cache`` is
    true, nothing is loaded. ``trace_headers`` name the parent span: see
    `kvstore.connector.contract.ReqContext`.
    """

    @property
    def request_id(self) -> str:
        """Name of the request, unique while it lives."""

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: those of the prompt, and those generated so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading tokens whose KV cache is in the request's blocks, computed or loaded.

        Excludes what the present step computes; includes earlier steps that are still under way.
        """

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash for each whole hashed block of known tokens; covers all tokens before it."""

    def is_finished(self) -> bool: ...


class BlockLike(Protocol):
    """A block of the device.

    Attributes:
        is_null: whether it is a placeholder for a missing block.
        block_hash: None unless the device's own prefix cache knows its contents.
    """

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool: ...

    @property
    def block_hash(self) -> Any: ...


class BlocksLike(Protocol):
    @property
    def blocks(self) -> Sequence[Sequence[BlockLike]]:
        """All blocks of a request, for each KV cache group."""


class NewRequestLike(Protocol):
    """A request that is scheduled for the first time.

    Optional attribute: ``num_computed_tokens``. Blocks of that many leading tokens are only read,
    so transfers from them go on while other requests use them, too.
    """

    @property
    def req_id(self) -> str: ...

    @property
    def block_ids(self) -> BlockIds:
        """All blocks of the request."""


class CachedRequestsLike(Protocol):
    """Requests that were scheduled before.

    Attributes:
        new_block_ids: for each of `req_ids` the blocks that it got in this step, or None; all of
            its blocks if it is one of `resumed_req_ids`.
        resumed_req_ids: requests that were preempted before.

    Optional attribute: ``num_computed_tokens``, one number for each of `req_ids`, as in
    `NewRequestLike`.
    """

    @property
    def req_ids(self) -> Sequence[str]: ...

    @property
    def new_block_ids(self) -> Sequence[BlockIds | None]: ...

    @property
    def resumed_req_ids(self) -> Collection[str]: ...


class StepOutputLike(Protocol):
    """A scheduler's decisions for a step.

    Attributes:
        num_scheduled_tokens: tokens that each scheduled request computes in this step.
        finished_req_ids: requests that have finished since the step before.
        preempted_req_ids: requests that have lost their blocks in this step; None: no request.
    """

    @property
    def scheduled_new_reqs(self) -> Iterable[NewRequestLike]: ...

    @property
    def scheduled_cached_reqs(self) -> CachedRequestsLike: ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def finished_req_ids(self) -> Collection[str]: ...

    @property
    def preempted_req_ids(self) -> Collection[str] | None: ...


@dataclass(slots=True)
class Block:
    """See `BlockLike`."""

    block_id: int
    is_null: bool = False
    block_hash: Any = None


@dataclass(slots=True)
class KVBlocks:
    """See `BlocksLike`."""

    blocks: Sequence[Sequence[Block]]


@dataclass(slots=True)
class NewRequest:
    """See `NewRequestLike`."""

    req_id: str
    block_ids: BlockIds
    num_computed_tokens: int = 0


@dataclass(slots=True)
class CachedRequests:
    """See `CachedRequestsLike`."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class StepOutput:
    """See `StepOutputLike`."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


class CacheConfigLike(Protocol):
    @property
    def block_size(self) -> int:
        """Tokens of a hashed block."""


class KVTransferConfigLike(Protocol):
    @property
    def kv_connector_extra_config(self) -> Mapping[str, Any]:
        """The connector's configuration, as the operator wrote it."""


class ParallelConfigLike(Protocol):
    """The workers. A server without this has one, in its scheduler's process."""

    @property
    def world_size(self) -> int:
        """Number of workers; each has a part of every block."""

    @property
    def rank(self) -> int:
        """Number of this worker, from 0; ignored in the scheduler's process."""


class ServerConfigLike(Protocol):
    """Configuration of a server.

    If workers are processes of their own, ``parallel_config`` (a `ParallelConfigLike`) says how
    many there are, and ``kv_transfer_config.engine_id`` is the server's name, unique among the
    servers of the same user on the machine.
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
        """Bytes of a block in one layer."""


class KVCacheGroupLike(Protocol):
    @property
    def layer_names(self) -> Sequence[str]: ...

    @property
    def kv_cache_spec(self) -> KVCacheSpecLike: ...


class KVCacheConfigLike(Protocol):
    """The KV cache groups. Optional attribute: ``num_blocks``, for checks of tensors."""

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroupLike]: ...


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """See `CacheConfigLike`.

    Attributes:
        enable_prefix_caching: whether the device keeps blocks for other requests. If so, a request
            waits for chunks that another request is loading into blocks that it can share.
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
        """Build a configuration. With a `world_size`, workers are processes of their own."""
        return cls(
            CacheConfig(hash_block_size, enable_prefix_caching),
            KVTransferConfig(extra_config, engine_id),
            None if world_size is None else ParallelConfig(world_size, rank),
        )


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """See `KVCacheSpecLike`.

    Attributes:
        sliding_window: tokens that a token attends to, itself included, if the server frees the
            blocks that no later token needs; None if it keeps all blocks.
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
