"""Tenants of a real engine: whose chunks a request finds, and what a flood leaves.

Each has a key of its own on disk; one is forgotten in the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.cli import main
from tests.vllm.engines import ONE_PROCESS, Run, run_engine
from tests.vllm.parts import make_spec

pytest.importorskip("vllm")
from vllm.v1.kv_offload.base import LookupResult

from kvstore.vllm.layout import release_region, worker_region
from kvstore.vllm.tenants import TenantOffloadingManager

LENGTH = 256
CHUNK = 2 * 8 * 4 * 64 * 4 * 32
"""Bytes of one: keys and values, layers, heads, their size, 32 bits, tokens of a block."""
CHUNKS = LENGTH // 32
FIRST, SECOND, THIRD, FOURTH = ([[n, LENGTH]] for n in range(1, 5))
FLOOD = [[n, LENGTH] for n in range(10, 18)]


def serve(folder: Path, rounds: list[dict[str, Any]]) -> Run:
    """Host memory has room for four prompts, the disk for eight."""
    capacity = 8 * CHUNKS * CHUNK + 2**20
    tier = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": capacity}
    keys = folder / "keys.toml"
    if not keys.exists():
        assert all(main(["keys", str(keys), "--add", name]) == 0 for name in ("alice", "mallory"))
    return run_engine(
        folder,
        {
            "engine": {"max_model_len": 1024},
            "kvstore": {
                "cpu_bytes_to_use": 4 * CHUNKS * CHUNK,
                "eviction_policy": "lru",
                "tiers": [{**tier, "segment_bytes": "8MiB"}],
                "tenants": {"alice": {"guaranteed": 0.3}, "mallory": {}},
                "encryption_keys": str(keys),
            },
            "max_tokens": 4,
            "rounds": rounds,
        },
        ONE_PROCESS,
    )


def of(tenant: str | None, name: str, prompts: Any, **more: Any) -> dict[str, Any]:
    told = {"tenant": tenant} if tenant is not None else {}
    params = {"kvstore": {**told, **more}}
    return {"name": name, "prompts": prompts, "kv_transfer_params": params}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def first(folder: Path) -> Run:
    return serve(
        folder,
        [
            of("alice", "alice", FIRST),
            of("mallory", "mallory", FIRST),
            {"name": "nobody", "prompts": FIRST},
            of("alice", "alice again", FIRST),
            {"name": "salted", "prompts": SECOND, "salt": "pepper"},
            {"name": "salted otherwise", "prompts": SECOND, "salt": "sugar"},
            # What finds no room beside chunks that wait for a busy disk is not stored.
            {"name": "salted again", "prompts": SECOND, "salt": "pepper", "pause": 2.0},
            of("bob", "public in part", THIRD, public_tokens=128),
            of("carol", "public to carol", THIRD, public_tokens=150),
            of("dave", "not public to dave", THIRD) | {"pause": 2.0},
            of("public", "called public", FOURTH),
            of("public", "called public again", FOURTH),
            of("erin", "all public to erin", FOURTH, public_tokens=LENGTH),
            of("mallory", "flood", FLOOD),
            of("mallory", "flood again", FLOOD, retain_s=60.0),
            of("alice", "alice after the flood", FIRST),
        ],
    )


@pytest.fixture(scope="module")
def second(folder: Path, first: Run) -> Run:
    return serve(
        folder,
        [
            of("mallory", "flood", [[n, LENGTH] for n in range(20, 28)]),
            of("alice", "alice", FIRST),
            # A busy disk may be late with the flood, and what finds no room for it is not stored.
            of("eve", "eve", FIRST) | {"pause": 1.0},
            of("mallory", "mallory", [[28, LENGTH]]),
        ],
    )


@pytest.fixture(scope="module")
def third(folder: Path, second: Run) -> Run:
    """After alice was forgotten."""
    assert main(["keys", str(folder / "keys.toml"), "--forget", "alice"]) == 0
    return serve(
        folder,
        [
            of("mallory", "mallory", [[28, LENGTH]]),
            of("alice", "alice", FIRST),
            of("alice", "alice again", FIRST),
        ],
    )


def test_whose_key_is_forgotten_has_nothing_on_disk_any_more(second: Run, third: Run) -> None:
    assert third.rounds["mallory"].cached == [LENGTH]
    assert third.rounds["alice"].cached == [0]
    assert third.rounds["alice again"].cached == [LENGTH]
    assert third.rounds["alice"].tokens == second.rounds["alice"].tokens


def test_only_its_own_tenant_finds_a_chunk(first: Run) -> None:
    rounds = first.rounds
    assert rounds["alice"].cached == rounds["mallory"].cached == rounds["nobody"].cached == [0]
    assert rounds["alice again"].cached == [LENGTH]


def test_a_salt_names_a_tenant(first: Run) -> None:
    rounds = first.rounds
    assert rounds["salted"].cached == rounds["salted otherwise"].cached == [0]
    assert rounds["salted again"].cached == [LENGTH]


def test_what_is_said_to_be_public_is_found_by_who_says_so_too(first: Run) -> None:
    rounds = first.rounds
    assert rounds["public in part"].cached == [0]
    assert rounds["public to carol"].cached == [128]
    assert rounds["not public to dave"].cached == [0]


def test_what_is_public_belongs_to_no_tenant_that_a_request_can_name(first: Run) -> None:
    rounds = first.rounds
    assert rounds["called public"].cached == [0]
    # Many tenants share what is not guaranteed: for a whole prompt its part is too small.
    assert rounds["called public again"].cached >= [128]
    assert rounds["all public to erin"].cached == [0]


def test_a_flood_leaves_to_a_tenant_what_is_guaranteed(first: Run, second: Run) -> None:
    assert first.rounds["alice after the flood"].cached == [LENGTH]
    assert second.rounds["alice"].cached == [LENGTH], "from disk, in another process"
    assert second.rounds["eve"].cached == [0]


def test_every_completion_is_as_without_tenants(first: Run, second: Run) -> None:
    names = ("alice", "mallory", "nobody", "alice again", "alice after the flood")
    tokens = [first.rounds[name].tokens for name in names]
    tokens += [second.rounds[name].tokens for name in ("alice", "eve")]
    assert tokens == [tokens[0]] * len(tokens)
    thirds = ("public in part", "public to carol", "not public to dave")
    assert len({str(first.rounds[name].tokens) for name in thirds}) == 1


def test_what_tenants_have_is_told(first: Run) -> None:
    told = first.rounds["alice after the flood"].metrics
    # Of the flood something is found again where a busy disk did not take all of it.
    found = sum(sum(its.cached) for its in first.rounds.values())
    assert told["tenant_loaded_chunks"] == found * CHUNKS / LENGTH >= 3.5 * CHUNKS
    assert told["tenant_host_chunks"] == 4 * CHUNKS
    assert told["hints_ignored"] == 0


def test_vllm_hears_of_its_own_keys_alone(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

    spec = make_spec({"cpu_bytes_to_use": 4 * 4096, "tenants": {}}, 4096)
    region = worker_region(spec.config.engine_id, 1, spec.region_shape)
    manager = spec.get_manager()
    assert isinstance(manager, TenantOffloadingManager)
    keys = [OffloadKey(bytes([n]) * 32 + bytes(4)) for n in range(6)]
    told = []
    try:
        for name, some in (("a", keys[:4]), ("b", keys[4:])):
            params = {"kvstore": {"tenant": name}}
            context = ReqContext(name, kv_transfer_params=params)
            manager.on_new_request(context)
            stored = manager.prepare_store(some, context)
            assert stored is not None
            assert stored.keys_to_store == some
            assert set(stored.evicted_keys) <= {*keys[:4]}
            manager.complete_store(some, context)
            assert manager.lookup(some[0], context) is LookupResult.HIT
            told += [(event.removed, *event.keys) for event in manager.take_events()]
            manager.on_request_finished(context)
            other = ReqContext("other", kv_transfer_params={"kvstore": {"tenant": "c"}})
            manager.on_new_request(other)
            assert manager.lookup(some[0], other) is LookupResult.MISS
            manager.on_request_finished(other)
        # What is no number of tokens is a malformed hint.
        odd = {"kvstore": {"tenant": 5, "public_tokens": "1024"}}
        manager.on_new_request(ReqContext("odd", kv_transfer_params=odd))
        manager.on_request_finished(ReqContext("odd"))
        assert manager._core.stats().hints_ignored == 1
    finally:
        manager.shutdown()
        release_region(spec.config.engine_id, region)
    assert told == [(False, *keys[:4]), (True, *keys[3:1:-1]), (False, *keys[4:])]
