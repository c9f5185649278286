"""Tenants of a real store: whose chunks are found, and what a flood costs others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import tenant_keys
from kvstore.config import Config
from kvstore.errors import BlockKeyError, ConfigError
from kvstore.types import MAX_KEY_BYTES
from tests.patience import PATIENCE
from tests.store.support import CHUNK, Open, contents, keys_of, payloads, small

EVEN: dict[str, Any] = {"alice": {}, "mallory": {}}


async def put(store: kvstore.Store, keys: list[bytes]) -> int:
    return await store.put(keys, payloads(keys))


async def flood(store: kvstore.Store, tenant: str, prompts: int, length: int = 4) -> None:
    """New prompts, each of which is asked for twice, as if it were worth something."""
    for prompt in range(prompts):
        keys = tenant_keys(tenant, keys_of(f"flood {prompt}", length))
        await put(store, keys)
        await contents(store, keys)
        await store.flush(PATIENCE)


async def test_what_one_has_stored_is_not_there_for_another(open_store: Open) -> None:
    keys = keys_of("prompt", 4)
    async with open_store(rows=16, disk=32, tenants={}) as store:
        await put(store, tenant_keys("alice", keys))
        assert store.contains(tenant_keys("alice", keys)) == [True] * 4
        for others in (keys, tenant_keys("mallory", keys), tenant_keys("", keys)):
            assert store.contains(others) == [False] * 4
            assert await contents(store, others) == []


async def test_what_is_public_is_stored_once_and_found_by_all(open_store: Open) -> None:
    keys = keys_of("prompt", 6)
    async with open_store(rows=16, disk=32, tenants=EVEN) as store:
        for tenant in ("alice", "mallory"):
            mixed = tenant_keys("public", keys[:3]) + tenant_keys(tenant, keys[3:])
            assert await contents(store, mixed) == payloads(mixed)[: 3 * (tenant != "alice")]
            assert await put(store, mixed) == 6
            assert await contents(store, mixed) == payloads(mixed)
        assert store.stats().stored == 9


@pytest.mark.parametrize(
    ("policy", "flow"),
    [
        *(("lru", flow) for flow in ("write-through", "demote", "exclusive")),
        *((policy, "write-through") for policy in ("arc", "hit-density", "s3-fifo")),
    ],
)
async def test_a_flood_leaves_to_others_what_is_theirs(
    open_store: Open, policy: str, flow: str, tmp_path: Any
) -> None:
    keys = tenant_keys("alice", keys_of("prompt", 10))
    (tier,) = small(tmp_path / "shared", disk=48)["tiers"]
    tier |= {"eviction_policy": policy, "flow": flow}
    settings = {"rows": 24, "tiers": [tier], "eviction_policy": policy}
    async with open_store(**settings, tenants=EVEN) as store:
        await put(store, keys)
        await store.flush(PATIENCE)
        await flood(store, "mallory", 100)
        assert store.contains(keys) == [True] * 10
        told = store.stats().tenants
        assert told["alice"].stored == 10
        assert told["mallory"].stored >= told["mallory"].host_chunks > 0
        assert told["mallory"].loaded > 0
        await flood(store, "bob", 100)
        assert store.contains(keys) == [True] * 10
    async with open_store(**settings, tenants=EVEN) as store:
        assert store.stats().tenants["alice"].tier_chunks >= 10 * (flow != "exclusive")
        await flood(store, "mallory", 60)
        assert await contents(store, keys) == payloads(keys)


async def test_what_one_retains_ends_no_pin_of_another(open_store: Open) -> None:
    """However short it is, and whether the chunks are there or not."""
    theirs, mine = tenant_keys("alice", keys_of("a", 4)), tenant_keys("mallory", keys_of("m", 4))
    async with open_store(rows=8, tenants={"alice": {}, "mallory": {}}) as store:
        pins, now = store._core._pins, time.monotonic()
        assert pins.begin(theirs, now + 600.0, yields=True) == 4
        assert pins.begin(mine, now + 1.0, yields=True) == 0
        assert all(map(pins.is_pinned, theirs))
        # Of one's own those that end later give way.
        sooner = tenant_keys("alice", keys_of("b", 2))
        assert pins.begin(sooner, now + 10.0, yields=True) == 2
        assert [pins.is_pinned(key) for key in theirs] == [True, True, False, False]


async def test_what_another_pins_leaves_a_tenant_what_is_guaranteed_to_it(
    open_store: Open,
) -> None:
    theirs = tenant_keys("mallory", keys_of("mallory", 16))
    keys = tenant_keys("alice", keys_of("alice", 12))
    async with open_store(rows=16, disk=64, tenants={"alice": {"guaranteed": 0.75}}) as store:
        await put(store, theirs)
        # As many as the disk may pin, which is larger than host memory.
        disk = store._core.tiers[0].index
        # What it stores waits for their end.
        assert store.pin(theirs, 2.0) == 16
        assert store.pin(tenant_keys("mallory", keys_of("more", 400)), 2.0) == (
            disk.policy.capacity // 4 - 16
        )
        assert store.stats().pinned_rows == 4
        assert await put(store, keys) == 12
        await store.flush(PATIENCE)
        assert store.stats().tenants["alice"].host_chunks == 12
        await flood(store, "mallory", 60)
        assert store.stats().tenants["alice"].host_chunks == 12


async def test_a_put_whose_tenant_gets_less_while_it_waits_goes_on_in_smaller_pieces(
    open_store: Open,
) -> None:
    prompts = [
        tenant_keys(tenant, keys_of(f"{tenant} {n}", 48)) for tenant in ("a", "b") for n in (1, 2)
    ]
    async with open_store(rows=64, disk=512, tenants={"a": {}, "b": {}}, deadline_s=5.0) as store:
        assert store._core.reach(prompts[1]) == 64
        assert await asyncio.gather(*(put(store, keys) for keys in prompts)) == [48] * 4
        assert store._core.reach(prompts[1]) == 32


@pytest.mark.parametrize("length", [12, 40])
async def test_a_prompt_larger_than_a_share_passes_through_it(
    open_store: Open, length: int
) -> None:
    theirs = tenant_keys("alice", keys_of("alice", 12))
    keys = tenant_keys("mallory", keys_of("mallory", length))
    async with open_store(rows=16, disk=64, tenants={"alice": {"guaranteed": 0.5}}) as store:
        await put(store, theirs)
        assert await put(store, keys) == length
        await store.flush(PATIENCE)
        buffers = [bytearray(CHUNK) for _ in keys]
        assert await store.get_into(keys, buffers) == length
        assert list(map(bytes, buffers)) == payloads(keys)
        assert len(await contents(store, keys)) in range(4, 13)
        assert store.stats().tenants["alice"].host_chunks >= 8
        assert store.contains(theirs) == [True] * 12


@pytest.mark.parametrize("flow", ["write-through", "demote"])
@pytest.mark.parametrize("public", [0, 8])
async def test_of_a_prompt_larger_than_a_part_of_the_disk_the_head_stays(
    tmp_path: Path, flow: str, public: int
) -> None:
    keys = [*tenant_keys("public", keys_of("all", public)), *tenant_keys("bob", keys_of("b", 200))]
    tenants = {"bob": {"maximal": 0.25}, "public": {}}
    config = small(tmp_path, 32, 160, tenants=tenants)
    config["tiers"][0]["flow"] = flow
    async with kvstore.open(config) as store:
        await store.put(keys, payloads(keys), "long")
        store.release("long")
        assert await store.flush()
        most = config["tiers"][0]["capacity_bytes"] // CHUNK // 4
        assert public + 30 <= store.contains_prefix(keys) <= public + most + 32


async def test_beyond_its_maximum_nobody_has_anything_for_long(open_store: Open) -> None:
    shares = {"alice": {"maximal": 0.25}}
    async with open_store(rows=16, disk=64, tenants=shares) as store:
        await put(store, tenant_keys("alice", keys_of("prompt", 12)))
        await store.flush(PATIENCE)
        await put(store, tenant_keys("bob", keys_of("prompt", 4)))
        assert store.stats().tenants["alice"].host_chunks <= 4
        most = store._core.tiers[0].index.policy.capacity // 4
        for prompt in range(20):
            await put(store, tenant_keys("alice", keys_of(f"{prompt}", 4)))
            await store.flush(PATIENCE)
        await put(store, tenant_keys("bob", keys_of("other", 1)))
        assert store.stats().tenants["alice"].tier_chunks <= most


async def test_shares_hold_for_policies_and_sizes_that_are_set_later(
    open_store: Open, tmp_path: Any
) -> None:
    keys = tenant_keys("alice", keys_of("prompt", 10))
    socket = str(tmp_path / "socket")
    async with open_store(rows=16, disk=64, tenants=EVEN, control=socket) as store:
        await put(store, keys)
        commands = store._assembly.commands
        assert commands is not None
        told = await commands.run(
            "settings",
            {
                "host": {"eviction_policy": "arc"},
                "tiers": {"0": {"eviction_policy": "hit-density", "capacity_bytes": 2**19}},
            },
        )
        job = commands.job(told.get("job", -1))
        if job is not None:
            await asyncio.wait_for(job.ended.wait(), PATIENCE)
        await flood(store, "mallory", 60)
        assert store.contains(keys) == [True] * 10


async def test_a_key_with_a_tag_may_be_as_long_as_any(open_store: Open) -> None:
    async with open_store(rows=16, tenants={}) as store:
        (whole,) = tenant_keys("alice", [b"k" * (MAX_KEY_BYTES - 8)])
        assert await put(store, [whole]) == 1
        with pytest.raises(BlockKeyError, match=str(MAX_KEY_BYTES)):
            store.contains(tenant_keys("alice", [b"k" * (MAX_KEY_BYTES - 7)]))


@pytest.mark.parametrize(
    ("tenant", "keys"), [(b"alice", [b"k"]), (None, [b"k"]), ("alice", ["k"]), ("alice", "k")]
)
def test_a_tenant_is_text_and_its_keys_are_bytes(tenant: Any, keys: Any) -> None:
    with pytest.raises(TypeError, match="must be"):
        tenant_keys(tenant, keys)


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        ({"a": 1}, "a: must be a table of guaranteed, maximal, weight"),
        ({"a": {"share": 1}}, "a.share: unknown key, allowed are guaranteed, maximal, weight"),
        ({"a": {"weight": 0}}, "a.weight: must be from 1e-06 to 1e+06"),
        ({"a": {"weight": 5e-324}}, "a.weight: must be from 1e-06"),
        ({"a": {"weight": 10**400}}, "a.weight: must be from 1e-06"),
        ({"others": {}}, "others: all that have no share of their own are called so"),
        ({"a": {"weight": -1}}, "a.weight: must be a number of at least 0"),
        ({"a": {"weight": True}}, "a.weight: must be a number"),
        ({"a": {"weight": float("nan")}}, "a.weight: must be a number"),
        ({"a": {"maximal": 0}}, "a.maximal: must be above 0, and at most 1"),
        ({"a": {"maximal": 1.5}}, "a.maximal: must be above 0, and at most 1"),
        ({"a": {"guaranteed": 0.6, "maximal": 0.5}}, "a.guaranteed: must be at most maximal"),
        ({"a": {"guaranteed": 0.6}, "*": {"guaranteed": 0.6}}, "1.2 is guaranteed in all"),
        ([], "must be a table"),
    ],
)
def test_shares_that_cannot_be_are_refused_by_name(tenants: Any, why: str) -> None:
    with pytest.raises(ConfigError, match="tenants = .*") as refused:
        Config.from_mapping({"host": "1MiB", "tenants": tenants})
    assert why in str(refused.value)
