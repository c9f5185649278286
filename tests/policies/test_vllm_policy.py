"""Our policies in vLLM's own CPU tier, as its manager calls them."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from benchmarks.eviction import trace
from kvstore.policies import policy_names

MODULE = "kvstore.vllm.policy"


def manager(policy: str, chunks: int) -> CPUOffloadingManager:
    ours = None if policy in ("lru", "arc") else MODULE
    return CPUOffloadingManager(chunks, policy, ours)


def serve(tier: CPUOffloadingManager, name: str, keys: list[bytes]) -> int:
    """One request from lookup to end; returns how many leading keys were hits."""
    request = ReqContext(name)
    for position, key in enumerate(keys):
        request.set_offload_key_position(key, position + 1)
    tier.on_new_request(request)
    hits = 0
    for key in keys:
        if tier.lookup(key, request) is not LookupResult.HIT:
            break
        hits += 1
    tier.prepare_load(keys[:hits], request)
    tier.complete_load(keys[:hits], request)
    out = tier.prepare_store(keys, request)
    if out is not None:
        tier.complete_store(out.keys_to_store, request)
    tier.on_request_finished(request)
    return hits


def chain(name: str, length: int, group: int = 0) -> list[bytes]:
    return [f"{name}-{depth:04d}".encode() + bytes([0, 0, 0, group]) for depth in range(length)]


def replayed(policy: str, percent: float, requests: int = 4000) -> float:
    conversation = trace("conversation", requests)
    keys = conversation.keys()
    tier = manager(policy, int(conversation.unique * percent / 100))
    hits = sum(
        serve(tier, str(number), [keys[chunk] for chunk in chunks])
        for number, chunks in enumerate(conversation.requests)
    )
    return 100 * hits / conversation.accesses


def test_every_policy_is_a_class_for_vllms_factory() -> None:
    for name in policy_names():
        cls = CachePolicyFactory.get_cache_policy_cls(f"kvstore-{name}", MODULE)
        assert issubclass(cls, CachePolicy)
        assert cls(cache_capacity=4)._policy.name == name
    assert CachePolicyFactory.get_cache_policy_cls("sieve", MODULE) is (
        CachePolicyFactory.get_cache_policy_cls("kvstore-sieve", MODULE)
    )


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match="unknown policy 'mru'; known are: .*hit-density"):
        CachePolicyFactory.get_cache_policy_cls("mru", MODULE)


def test_the_module_loads_without_vllm() -> None:
    code = "import sys, kvstore.vllm.policy; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [f"kvstore-{name}" for name in ("lru", "arc", "hit-density")])
def test_a_store_that_does_not_fit_beside_what_is_in_use_is_refused_and_harms_nobody(
    name: str,
) -> None:
    tier = manager(name, 8)
    first = chain("first", 6)
    serve(tier, "a", first)
    request = ReqContext("b")
    tier.on_new_request(request)
    tier.prepare_load(first, request)
    assert tier.prepare_store(chain("second", 4), ReqContext("c")) is None
    out = tier.prepare_store(chain("third", 2), ReqContext("d"))
    assert out is not None
    assert out.evicted_keys == []
    tier.complete_load(first, request)
    assert [tier.lookup(key, request) for key in first] == [LookupResult.HIT] * 6


@pytest.mark.parametrize("name", [f"kvstore-{name}" for name in ("lru", "arc", "hit-density")])
def test_a_chain_is_shed_from_its_end(name: str) -> None:
    tier = manager(name, 8)
    old = chain("old", 6)
    serve(tier, "a", old)
    serve(tier, "b", chain("new", 5))
    look = ReqContext("look")
    assert [tier.lookup(key, look) is LookupResult.HIT for key in old] == [True] * 3 + [False] * 3


def test_groups_are_chains_of_their_own() -> None:
    tier = manager("kvstore-hit-density", 8)
    pairs = zip(chain("p", 4, group=0), chain("p", 4, group=1), strict=True)
    serve(tier, "a", [key for pair in pairs for key in pair])
    serve(tier, "b", chain("new", 4))
    look = ReqContext("look")
    for group in (0, 1):
        kept = [tier.lookup(key, look) is LookupResult.HIT for key in chain("p", 4, group=group)]
        assert kept == sorted(kept, reverse=True), "a hole in the chain"


def test_a_failed_store_leaves_no_trace() -> None:
    tier = manager("hit-density", 4)
    request = ReqContext("a")
    tier.on_new_request(request)
    keys = chain("a", 4)
    assert tier.prepare_store(keys, request) is not None
    tier.complete_store(keys, request, success=False)
    tier.on_request_finished(request)
    assert serve(tier, "b", keys) == 0
    assert serve(tier, "c", keys) == 4


def test_the_signature_of_later_versions_is_accepted() -> None:
    policy: Any = CachePolicyFactory.get_cache_policy_cls("hit-density", MODULE)(cache_capacity=2)
    policy.insert(b"key", ChunkStatus(0), ReqContext("a"))
    policy.insert(key=b"other", chunk=ChunkStatus(1), req_context=ReqContext("a"))
    assert policy.get(b"key").chunk_id == 0
    assert policy.evict(1, set()) is None, "neither is ready yet"
    policy.get(b"key").ref_cnt = 0
    assert [key for key, _ in policy.evict(1, set())] == [b"key"]


@pytest.mark.parametrize("name", policy_names())
def test_the_manager_stays_consistent(name: str) -> None:
    """Random requests, some overlapping: chunks are neither lost nor given out twice."""
    rng = random.Random(name)
    tier = manager(f"kvstore-{name}", 30)
    loads: list[tuple[ReqContext, list[bytes]]] = []
    for number in range(400):
        keys = chain(f"s{rng.randrange(12)}", rng.randrange(1, 12))
        request = ReqContext(str(number))
        tier.on_new_request(request)
        hits = list(
            itertools.takewhile(lambda key: tier.lookup(key, request) is LookupResult.HIT, keys)  # noqa: B023
        )
        tier.prepare_load(hits, request)
        loads.append((request, hits))
        out = tier.prepare_store(keys, request)
        if out is not None:
            tier.complete_store(out.keys_to_store, request, success=rng.random() < 0.9)
        while len(loads) > 3 or (loads and rng.random() < 0.5):
            done, those = loads.pop(rng.randrange(len(loads)))
            tier.complete_load(those, done)
            tier.on_request_finished(done)
        held = [chunk.chunk_id for chunk in tier._policy._chunks.values()]
        assert len(held) == len(set(held))
        assert sorted(held + tier._free_list) == list(range(tier._num_allocated_chunks))


def test_our_lru_hits_as_much_as_vllms_and_hit_density_more() -> None:
    theirs = replayed("lru", 5)
    assert replayed("kvstore-lru", 5) == pytest.approx(theirs, abs=0.3)
    assert replayed("hit-density", 5) >= theirs + 1.0


def test_our_arc_hits_more_than_vllms() -> None:
    assert replayed("kvstore-arc", 2) > replayed("arc", 2)
