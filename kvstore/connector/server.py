"""What a connector reads of a server's requests, blocks and steps, and plain classes for servers
without ones of their own.

The names are those that published integrations use. A server may pass its own objects, as long as
they have these attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Block",
    "BlockLike",
    "BlocksLike",
    "CachedRequests",
    "CachedRequestsLike",
    "KVBlocks",
    "NewRequest",
    "NewRequestLike",
    "RequestLike",
    "StepOutput",
    "StepOutputLike",
]

BlockIds = Sequence[Sequence[int]]
"""For each KV cache group the numbers of blocks of the device, in the order of the prompt. Where a
group has a sliding window, 0 stands for a block that the window has left, and no block has
the number 0."""


class RequestLike(Protocol):
    """A request of the server.

    Where there is one, ``kv_transfer_params`` (a mapping or None) is looked at for
    ``do_remote_decode`` and for hints, as is ``kv_hints``: see `kvstore.core.hints`. With a true
    ``skip_reading_prefix_cache`` nothing is loaded for it. ``trace_headers`` name the span that it
    belongs to, see `kvstore.connector.manager.ReqContext`.
    """

    @property
    def request_id(self) -> str:
        """No other's while this one lives."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: those of the prompt, and those generated so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV cache lies in its blocks, computed or loaded, before what the
        present step computes. Where steps overlap, those of steps under way are counted."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """A hash for each whole hashed block of its known tokens and all before it."""

    def is_finished(self) -> bool: ...


class BlockLike(Protocol):
    """A block of the device.

    Attributes:
        is_null: it stands for a block that is not there.
        block_hash: None unless the device's own prefix cache knows what it holds.
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
    """Where it has ``num_computed_tokens``, blocks of as many leading tokens are only read, and
    transfers from them go on although others have got them, too.
    """

    @property
    def req_id(self) -> str: ...

    @property
    def block_ids(self) -> BlockIds:
        """All of its blocks."""


class CachedRequestsLike(Protocol):
    """Requests that were scheduled before.

    Attributes:
        new_block_ids: for each of `req_ids` the blocks that it got in this step, or None; all of
            its blocks if it is one of `resumed_req_ids`.
        resumed_req_ids: those that were preempted before.

    Where there is ``num_computed_tokens``, one number for each of `req_ids`, it counts as for
    new requests.
    """

    @property
    def req_ids(self) -> Sequence[str]: ...

    @property
    def new_block_ids(self) -> Sequence[BlockIds | None]: ...

    @property
    def resumed_req_ids(self) -> Collection[str]: ...


class StepOutputLike(Protocol):
    """What a scheduler has decided for a step.

    Attributes:
        num_scheduled_tokens: tokens that each scheduled request computes in it.
        finished_req_ids: requests that have finished since the step before.
        preempted_req_ids: requests that have lost their blocks in this step; None: nobody.
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
