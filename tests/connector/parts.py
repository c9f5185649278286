"""Parts of a simulated server: requests, blocks of the device, steps."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.connector.mediums import ConnectorMetadata
from kvstore.connector.server import CachedRequests
from tests.connector.chaos import Content, Setup

__all__ = ["Cached", "Pool", "Request", "Seen", "Step", "Work"]


class Request:
    """See `kvstore.connector.server.RequestLike`.

    Attributes:
        prefixes: what names each token and all before it, also of tokens yet to be generated.
        num_tokens: tokens that are known.
        sampling: tokens that are being sampled.
        target: it finishes once it has so many; the scheduler does not know.
        table: its blocks, for each group.
        state: "waiting", "loading", "ready", "running" or "gone".
        stale: what is being loaded is not wanted any more.
    """

    def __init__(
        self, name: str, prefixes: list[int], prompt: int, target: int, setup: Setup
    ) -> None:
        self.request_id = name
        self.prefixes: Content = np.array(prefixes, np.uint64)
        self._hashes = [
            int(prefixes[n]).to_bytes(8, "big")
            for n in range(setup.hash_size - 1, len(prefixes), setup.hash_size)
        ]
        self._hash_size = setup.hash_size
        self.num_prompt_tokens = prompt
        self.num_tokens = prompt
        self.target = target
        self.num_computed_tokens = 0
        self.sampling = 0
        self.table: list[list[int]] = [[] for _ in setup.groups]
        self.state = "waiting"
        self.stale = False
        self.preempted = False
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: dict[str, Any] | None = None

    @property
    def block_hashes(self) -> list[bytes]:
        return self._hashes[: self.num_tokens // self._hash_size]

    def hash_at(self, tokens: int) -> bytes:
        return self._hashes[tokens // self._hash_size - 1]

    def is_finished(self) -> bool:
        return self.state == "gone"


class Pool:
    """Blocks of the device. Block 0 is nobody's."""

    def __init__(self, blocks: int, *, newest_first: bool) -> None:
        self.free = deque(range(1, blocks))
        self.users: Counter[int] = Counter()
        self.hash_of: dict[int, tuple[int, bytes]] = {}
        self.cached: dict[tuple[int, bytes], int] = {}
        self._newest_first = newest_first

    def take(self) -> int:
        block = self.free.popleft()
        self.forget(block)
        self.users[block] = 1
        return block

    def share(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def give_back(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            if self._newest_first:
                self.free.appendleft(block)
            else:
                self.free.append(block)

    def keep(self, block: int, name: tuple[int, bytes]) -> None:
        if block not in self.hash_of and name not in self.cached:
            self.hash_of[block] = name
            self.cached[name] = block

    def forget(self, block: int) -> None:
        name = self.hash_of.pop(block, None)
        if name is not None:
            del self.cached[name]


@dataclass
class Work:
    """Tokens of a request that a step computes."""

    request: Request
    begin: int
    end: int
    table: list[list[int]]
    samples: bool


@dataclass
class Cached(CachedRequests):
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Step:
    meta: ConnectorMetadata
    work: list[Work]
    fresh: list[set[int]]
    """For each group the blocks that somebody got in it to compute into."""


@dataclass
class Seen:
    """Jobs, and who has reported them."""

    made: dict[int, str] = field(default_factory=dict)
    reports: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)

    @property
    def under_way(self) -> bool:
        return len(self.reports) < len(self.made)
