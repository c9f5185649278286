"""Policies hit what those of libCacheSim hit, a simulator of others.

S3-FIFO alone differs: until the first eviction libCacheSim puts new objects that do not fit in
the small queue into the main one, where they stay for long. A model of either rule gives the
figures of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvstore.plugins import Choice
from kvstore.simulation import Setup, Trace, read_trace, replay

libcachesim = pytest.importorskip("libcachesim", reason="make libcachesim runs this")

CONVERSATION = (
    Path(__file__).parents[2] / "benchmarks" / "traces" / "mooncake_conversation.jsonl.xz"
)

THEIRS = {
    "lru": libcachesim.LRU,
    "arc": libcachesim.ARC,
    "sieve": libcachesim.Sieve,
    "s3-fifo": libcachesim.S3FIFO,
}

HALF_A_POINT = 0.005


class Cache(Protocol):
    """What the rules of the published figures ask of a cache."""

    def has(self, chunk: int) -> bool: ...

    def get(self, chunk: int) -> None:
        """Use a chunk, or insert it."""


class Independent:
    """A cache of libCacheSim; every chunk has the size 1."""

    def __init__(self, make: Callable[[int], Any], capacity: int) -> None:
        self._cache = make(capacity)
        self._request = libcachesim.Request()
        self._request.obj_size = 1

    def _named(self, chunk: int) -> Any:
        self._request.obj_id = chunk + 1
        return self._request

    def has(self, chunk: int) -> bool:
        return self._cache.find(self._named(chunk), False) is not None

    def get(self, chunk: int) -> None:
        self._cache.get(self._named(chunk))


class S3FIFO:
    """S3-FIFO in as few lines as it takes, with either rule for the time before evictions."""

    def __init__(self, capacity: int, *, fills_main: bool) -> None:
        self._capacity, self._small_most = capacity, max(1, capacity // 10)
        self._main_most = capacity - self._small_most
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._fills_main = fills_main

    def has(self, chunk: int) -> bool:
        return chunk in self._small or chunk in self._main

    def get(self, chunk: int) -> None:
        for queue in (self._small, self._main):
            if chunk in queue:
                queue[chunk] = min(3, queue[chunk] + 1)
                return
        ghost = chunk in self._ghosts
        self._ghosts.pop(chunk, None)
        while len(self._small) + len(self._main) >= self._capacity:
            self._fills_main = False
            if len(self._main) > self._main_most or not self._small:
                self._evict_main()
            else:
                self._evict_small()
        into_main = ghost or (self._fills_main and len(self._small) >= self._small_most)
        (self._main if into_main else self._small)[chunk] = 0

    def _evict_main(self) -> None:
        chunk, turns = self._main.popitem(last=False)
        while turns:
            self._main[chunk] = turns - 1
            chunk, turns = self._main.popitem(last=False)

    def _evict_small(self) -> None:
        while self._small:
            chunk, uses = self._small.popitem(last=False)
            if uses < 2:
                self._ghosts[chunk] = None
                if len(self._ghosts) > self._main_most:
                    self._ghosts.popitem(last=False)
                return
            self._main[chunk] = 0


def hits(trace: Trace, cache: Cache, *, lru: bool = False) -> int:
    """Hits under the rules of the published figures: prefixes, tail to head."""
    count = 0
    for chunks in trace.requests:
        there = [cache.has(chunk) for chunk in chunks]
        count += there.index(False) if False in there else len(chunks)
        backwards = list(zip(reversed(chunks), reversed(there), strict=True))
        for wanted in (True, False):
            for chunk, held in backwards:
                if held is wanted:
                    cache.get(chunk)
        if lru:
            for chunk, _ in backwards:
                if cache.has(chunk):
                    cache.get(chunk)
    return count


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace(CONVERSATION)


@pytest.mark.parametrize("percent", [1, 10])
@pytest.mark.parametrize("policy", ["lru", "arc", "sieve"])
def test_both_hit_the_same(conversation: Trace, policy: str, percent: int) -> None:
    capacity = conversation.unique * percent // 100
    theirs = hits(conversation, Independent(THEIRS[policy], capacity), lru=policy == "lru")
    assert replay(conversation, Setup(capacity, host_policy=Choice(policy))).hits == theirs


@pytest.mark.parametrize("percent", [1, 10])
def test_s3_fifo_differs_by_what_happens_before_the_first_eviction(
    conversation: Trace, percent: int
) -> None:
    capacity = conversation.unique * percent // 100
    theirs = hits(conversation, Independent(THEIRS["s3-fifo"], capacity))
    assert hits(conversation, S3FIFO(capacity, fills_main=True)) == theirs
    ours = replay(conversation, Setup(capacity, host_policy=Choice("s3-fifo")))
    same_rule = hits(conversation, S3FIFO(capacity, fills_main=False))
    assert ours.hits == pytest.approx(same_rule, abs=HALF_A_POINT * ours.accesses)
