"""SGLang's hierarchical cache over kvstore: its own controller, pools and names of pages."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from kvstore.config import Config, TierConfig
from kvstore.errors import ConfigError, KVStoreError
from kvstore.gate import Gate
from kvstore.sglang.backend import KV, HiCacheKVStore
from kvstore.tiers.disk.io.buffered import BufferedIO
from kvstore.tiers.remote.tier import StoreTier
from kvstore.tools.cli import main
from tests.sglang.pools import (
    PAGE,
    SLOTS,
    attention,
    config,
    controller,
    extra,
    pages,
    states,
)

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
TOKENS = list(range(100))
WAIT_S = 30
HERE, THERE = torch.arange(100), torch.arange(500, 600)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "as tensors"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_backed_up_is_fetched_into_other_slots_and_after_a_restart(
    tmp_path: Path, layout: str, in_place: bool
) -> None:
    given = extra(tmp_path, in_place=in_place)
    host = attention(layout)
    written = pages(host, HERE)
    with controller(host, dict(given)) as one:
        assert one.hits(TOKENS).storage_hit_count == 0
        assert one.write(TOKENS, HERE) == 100
        around = pages(host, torch.arange(400, 500))
        assert one.fetch(TOKENS, THERE) == 100
        assert pages(host, THERE) == written
        assert pages(host, torch.arange(400, 500)) == around
    other = attention(layout, seed=1)
    with controller(other, dict(given)) as one:
        assert one.fetch([*TOKENS, *TOKENS], torch.arange(300, 500)) == 100
        assert pages(other, torch.arange(300, 400)) == written


def test_a_prompt_larger_than_host_memory_passes_through_in_pieces(tmp_path: Path) -> None:
    host = attention("page_first")
    tokens, here = list(range(SLOTS // 2)), torch.arange(SLOTS // 2)
    written = pages(host, here)
    with controller(host, extra(tmp_path)) as one:
        rows = one.backend._pools["kv"].store.stats().rows
        assert rows < SLOTS // 2 // PAGE
        assert one.write(tokens, here) == len(tokens)
        there = torch.arange(SLOTS // 2, SLOTS)
        assert one.fetch(tokens, there) == len(tokens)
        assert pages(host, there) == written


def test_of_a_batch_that_takes_too_long_the_rest_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = SLOTS // 2 // PAGE
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        piece = one._pools["kv"]._piece
        assert piece < count
        names, here = _names(count), torch.arange(count * PAGE)
        assert one.batch_set_v1(names, here) == [True] * count
        monkeypatch.setattr("kvstore.sglang.pool.BATCH_SECONDS", 0.0)
        assert one.batch_get_v1(names, here) == [True] * piece + [False] * (count - piece)
        one.clear()
        monkeypatch.setattr("kvstore.sglang.pool.BATCH_SECONDS", 0.01)
        put = one._pools["kv"].store.put

        def slow(*told: Any, **named: Any) -> int:
            time.sleep(0.02)
            return int(put(*told, **{**named, "timeout": 5}))

        monkeypatch.setattr(one._pools["kv"].store, "put", slow)
        assert one.batch_set_v1(names, here) == [True] * piece + [False] * (count - piece)


def test_pages_as_tensors_have_the_same_limit_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = SLOTS // 2 // PAGE
    with _backend(attention("page_first"), extra(tmp_path, in_place=False)) as one:
        piece, names = one._pools["kv"]._piece, _names(count)
        assert piece < count
        assert all(one.batch_set_v1(names, torch.arange(count * PAGE)))
        monkeypatch.setattr("kvstore.sglang.pool.BATCH_SECONDS", 0.0)
        came = [page is not None for page in one.batch_get(names)]
        assert came == [True] * piece + [False] * (count - piece)


def test_a_store_is_not_asked_for_longer_than_sglang_waits_for_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: dict[str, Any] = {"tiers": [{"type": "object", "url": f"file://{tmp_path}/store"}]}
    (tmp_path / "store").mkdir()
    given, names = extra(None, host="64KiB", **shared), _names(40)
    with _backend(attention("page_first"), given) as one:
        assert all(one.batch_set_v1(names, torch.arange(40 * PAGE)))
        assert one._pools["kv"].store.flush(30)
    monkeypatch.setattr("kvstore.sglang.pool.BATCH_SECONDS", 1.0)
    read = StoreTier.read

    async def slow(self: StoreTier, *told: Any) -> Any:
        await asyncio.sleep(0.4)
        return await read(self, *told)

    with _backend(attention("page_first", seed=1), given) as other:
        monkeypatch.setattr(StoreTier, "read", slow)
        pool, begun = other._pools["kv"], time.monotonic()
        assert 0 < other.batch_exists(names) < 40
        assert time.monotonic() - begun < 1.5
        assert any(pool.each(names))
        assert not all(pool.each(names))


def test_the_file_backend_stores_the_same_bytes(tmp_path: Path) -> None:
    """The comparison of the two is one of equals."""
    host = attention("page_first")
    with controller(host, {"file_storage_path": str(tmp_path)}, "file") as one:
        assert one.write(TOKENS, HERE) == 100
        assert one.fetch(TOKENS, THERE) == 100
        assert pages(host, THERE) == pages(host, HERE)


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"tp_lcm_size": 4, "should_split_heads": True},
    ],
    ids=str,
)
def test_pages_of_another_model_or_rank_are_not_found(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    host = attention("page_first")
    names = _names(5)
    with _backend(host, extra(tmp_path)) as one:
        assert one.batch_set_v1(names, HERE[:20]) == [True] * 5
        one.close()
    for values, found in ((change, 0), ({}, 5)):
        with _backend(host, extra(tmp_path), **values) as one:
            assert one.batch_exists(names) == found


@pytest.mark.parametrize(
    "other",
    [
        lambda path: (attention("layer_first"), extra(path)),
        lambda path: (attention("page_first", dtype=torch.bfloat16), extra(path)),
        lambda path: (attention("page_first"), extra(path, in_place=False)),
        lambda path: (attention("page_first"), extra(path, identity={"weights": "v2"})),
    ],
    ids=["layout", "dtype", "interface", "weights"],
)
def test_pages_of_another_form_are_not_found(tmp_path: Path, other: Any) -> None:
    names = _names(5)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:20])
    host, given = other(tmp_path)
    with _backend(host, given) as one:
        assert one.batch_exists(names) == 0


def test_bytes_of_another_kind_of_numbers_are_not_found(tmp_path: Path) -> None:
    """SGLang's host pool holds all of them as bytes."""
    names = _names(5)
    host = attention("page_first", dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="does not say what they are"):
        _backend(host, extra(tmp_path)).__enter__()
    found = {}
    for numbers in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
        with (
            get_context().override_server_args(kv_cache_dtype=numbers),
            _backend(host, extra(tmp_path)) as one,
        ):
            found[numbers] = one.batch_exists(names)
            one.batch_set_v1(names, HERE[:20])
    assert found == {"fp8_e4m3": 5, "fp8_e5m2": 0}
    told = {"weights": "v1", "kv_cache_dtype": "fp8_e4m3"}
    with _backend(host, extra(tmp_path, identity=told)) as one:
        assert one.batch_exists(names) == 5


def test_states_of_other_numbers_are_not_found(tmp_path: Path) -> None:
    names, slots = _names(4), torch.arange(4)
    moved = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
    found = []
    for numbers in (torch.bfloat16, torch.float16, torch.bfloat16):
        given = extra(tmp_path, host="1MiB")
        given["kvstore"]["tiers"][0]["capacity_bytes"] = "64MiB"
        with _backend(attention("page_first"), given, states(numbers=numbers)) as one:
            found.append(all(one.batch_get_v2([moved])[PoolName.MAMBA]))
            one.batch_set_v2([moved])
    assert found == [False, False, True]


def test_a_stage_of_a_pipeline_finds_the_pages_of_its_own_layers_alone(tmp_path: Path) -> None:
    """Where stages begin may be configured, and as many layers be others."""
    names, indices = _names(4), torch.arange(4 * PAGE)
    found = []
    for start in (18, 22, 18):
        host = attention("page_first")
        host.start_layer, host.end_layer = start, start + host.layer_num
        one = HiCacheKVStore(config(extra(tmp_path), pp_rank=1, pp_size=3))
        one.register_mem_pool_host(host)
        one.on_host_pools_registered()
        found.append(one.batch_exists(names))
        one.batch_set_v1(names, indices)
        one.close()
    assert found == [0, 0, 4]


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_a_draft_in_the_targets_pages_are_those_of_that_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    names, indices = _names(4), torch.arange(4 * PAGE)
    found = []
    for draft in ("a", "b", "a"):
        told = {"kv_cache_dtype": "auto", "draft": [draft, None, None]}
        monkeypatch.setattr("kvstore.sglang.backend.served", lambda told=told: told)
        host = attention("page_first")
        host.target_layer_num = host.layer_num - packed
        with _backend(host, extra(tmp_path)) as one:
            found.append(one.batch_exists(names))
            one.batch_set_v1(names, indices)
    assert found == ([0, 0, 4] if packed else [0, 4, 4])


def test_states_may_have_layers_of_a_draft_and_are_those_of_that_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pools do not say how many layers are the target's."""
    names, slots = _names(4), torch.arange(4)
    moved = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
    found = []
    for draft in (["a", None, None], ["b", None, None], None, ["a", None, None]):
        told = {"kv_cache_dtype": "auto", "draft": draft}
        monkeypatch.setattr("kvstore.sglang.backend.served", lambda told=told: told)
        given = extra(tmp_path, host="1MiB")
        given["kvstore"]["tiers"][0]["capacity_bytes"] = "64MiB"
        with _backend(attention("page_first"), given, states()) as one:
            found.append(all(one.batch_get_v2([moved])[PoolName.MAMBA]))
            one.batch_set_v2([moved])
    assert found == [False, False, False, True]


def test_heads_of_a_draft_are_not_shared_between_ranks(tmp_path: Path) -> None:
    """Of a model with latent attention SGLang's first rank stores for all."""
    draft = attention("page_first", seed=1)
    for ranks, fine in ((1, True), (2, False)):
        given = extra(tmp_path, host="1MiB")
        one = HiCacheKVStore(config(given, is_mla_model=True, tp_size=ranks))
        one.register_mem_pool_host(attention("page_first"))
        one.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        refused = pytest.raises(ConfigError, match="pool draft is split by heads")
        with contextlib.nullcontext() if fine else refused:
            one.on_host_pools_registered()
        one.close()


def test_ranks_with_the_same_attention_share_it(tmp_path: Path) -> None:
    """As with latent attention, where the first rank writes for all."""
    names = _names(5)
    first, second = attention("page_first"), attention("page_first", seed=1)
    ranks = {"is_mla_model": True, "tp_size": 2}
    with _backend(first, extra(tmp_path), tp_rank=0, **ranks) as writer:
        writer.batch_set_v1(names, HERE[:20])
    with _backend(second, extra(tmp_path), tp_rank=1, **ranks) as reader:
        assert reader.batch_get_v1(names, HERE[:20]) == [True] * 5
    assert pages(second, HERE[:20]) == pages(first, HERE[:20])


def test_a_damaged_page_ends_the_prefix_and_is_written_nowhere(tmp_path: Path) -> None:
    host = attention("page_first")
    names = _names(10)
    with _backend(host, extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:40])
    written = pages(host, HERE[:40])
    segments = sorted(tmp_path.rglob("segment-*"))
    for file in segments:
        data = file.read_bytes()
        at = data.find(written[6][:96])
        if at >= 0:
            with file.open("r+b") as damaged:
                damaged.seek(at)
                damaged.write(b"\xff" * 16)
            break
    else:
        pytest.fail(f"the page is in none of {segments}")
    other = attention("page_first", seed=1)
    before = pages(other, THERE[:40])
    with _backend(other, extra(tmp_path)) as one:
        assert one.batch_exists(names) == 10
        assert one.batch_get_v1(names, THERE[:40]) == [True] * 6 + [False] * 4
        assert one.batch_exists(names) == 6
    assert pages(other, THERE[:40]) == written[:6] + before[6:]


def test_as_the_file_backend_it_answers_for_several_pools(tmp_path: Path) -> None:
    """SGLang's own file backend, asked the same at random, says what is right."""
    chance = random.Random(7)
    kv, side = attention("page_first"), states()
    with _backend(kv, extra(tmp_path / "ours", host="1MiB"), side) as ours:
        theirs = HiCacheFile(config({"file_storage_path": str(tmp_path / "theirs")}))
        theirs.register_mem_pool_host(kv)
        for name, pool in ((PoolName.KV, kv), (PoolName.MAMBA, side)):
            theirs.register_mem_host_pool_v2(pool, name)
        chain = _names(24)
        found = 0
        for _ in range(120):
            begin = chance.randrange(20)
            names = chain[begin : begin + chance.randint(1, 4)]
            slots = torch.arange(len(names)) + chance.randrange(16)
            tokens = torch.cat([torch.arange(PAGE) + PAGE * slot for slot in slots.tolist()])
            kv_pages = PoolTransfer(PoolName.KV, host_indices=tokens, keys=names)
            state = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
            which = [kv_pages, state, kv_pages, state][chance.randrange(4) :]
            if chance.random() < 0.4:
                assert ours.batch_set_v2(which) == theirs.batch_set_v2(which)
            for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                ask = chain[: chance.randint(1, 24)]
                needs = [
                    PoolTransfer(PoolName.MAMBA, keys=ask[-chance.randint(1, 2) :],
                                 hit_policy=policy)
                ]  # fmt: skip
                here, there = (one.batch_exists_v2(ask, needs) for one in (ours, theirs))
                assert here == there
                found += here.kv_hit_pages
            for mine, right in zip(
                ours.batch_get_v2([state])[PoolName.MAMBA],
                theirs.batch_get_v2([state])[PoolName.MAMBA],
                strict=True,
            ):
                # Ours reads a prefix: what follows a missing page is not asked for.
                assert right or not mine
        assert found > 100


def test_states_come_back_with_every_byte(tmp_path: Path) -> None:
    kv, side = attention("page_first"), states()
    names, slots = _names(8), torch.arange(8)
    moved = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
    with _backend(kv, extra(tmp_path, host="1MiB"), side) as one:
        assert one.batch_set_v2([moved]) == {PoolName.MAMBA: [True] * 8}
    written = pages(side, slots)
    other = states()
    with _backend(kv, extra(tmp_path, host="1MiB"), other) as one:
        moved = PoolTransfer(PoolName.MAMBA, host_indices=slots + 20, keys=names)
        assert one.batch_get_v2([moved]) == {PoolName.MAMBA: [True] * 8}
    assert pages(other, slots + 20) == written


def test_host_memory_and_disk_are_divided_as_sglang_divides_its_own(tmp_path: Path) -> None:
    kv, side = attention("page_first"), states()
    with _backend(kv, extra(tmp_path, host="1MiB"), side) as one:
        rows = {name: pool.store.stats().rows for name, pool in one._pools.items()}
        whole = kv.size * kv.size_per_token + side.size * side.size_per_token
        for name, pool in (("kv", kv), ("mamba", side)):
            share = pool.size * pool.size_per_token / whole
            assert rows[name] == pytest.approx(2**20 * share / 4096, abs=1)


def test_the_limit_of_a_shared_directory_is_divided_too(tmp_path: Path) -> None:
    kv, side = attention("page_first"), states()
    shared = {"type": "object", "url": tmp_path.as_uri(), "capacity_bytes": "64MiB"}
    with _backend(kv, extra(None, host="1MiB", tiers=[shared]), side) as one:
        pools = list(one._pools.values())
        whole = sum(pool.bytes for pool in pools)
        given = [one._config_of(pool, pool.bytes / whole).tiers[0] for pool in pools]
    sizes = [tier.parameters["capacity_bytes"] for tier in given if isinstance(tier, TierConfig)]
    assert sum(sizes) == pytest.approx(2**26, abs=2)


def test_tenants_are_refused_as_nobody_says_whose_a_page_is(tmp_path: Path) -> None:
    told = _backend(attention("page_first"), extra(tmp_path, tenants={}))
    with pytest.raises(ConfigError, match="tenants: SGLang does not say"), told:
        pass


def test_a_codec_of_other_numbers_is_refused(tmp_path: Path) -> None:
    Gate("int8", "bfloat16", {}, {}).write(tmp_path / "gate")
    told = extra(tmp_path / "kv", disk_codec=str(tmp_path / "gate"))
    refused = pytest.raises(ConfigError, match="the codec encodes bfloat16, and SGLang's pool kv")
    with refused, _backend(attention("page_first"), told):
        pass
    with _backend(attention("page_first", dtype=torch.bfloat16), told):
        pass


def test_a_codec_of_some_of_a_pools_numbers_is_refused(tmp_path: Path) -> None:
    Gate("int8", "float16", {}, {}).write(tmp_path / "gate")
    told = extra(tmp_path / "kv", host="1MiB", disk_codec=str(tmp_path / "gate"))
    refused = pytest.raises(ConfigError, match="mamba has float16 and float32")
    with refused, _backend(attention("page_first"), told, states()):
        pass


def test_a_share_that_is_too_small_is_told_as_one(tmp_path: Path) -> None:
    message = r"at least one chunk .*SGLang's pool mamba gets 4\.\d% of each size"
    small = _backend(attention("page_first"), extra(tmp_path), states())
    with pytest.raises(ConfigError, match=message), small:
        pass


def test_a_pool_that_comes_late_is_not_kept_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.register_mem_host_pool_v2(states(), PoolName.SWA)
        assert "pool swa came late" in caplog.text
        names = _names(2)
        moved = PoolTransfer(PoolName.SWA, host_indices=torch.arange(2), keys=names)
        assert one.batch_set_v2([moved]) == {PoolName.SWA: [False, False]}
        one.batch_set_v1(names, HERE[:8])
        needs = [PoolTransfer(PoolName.SWA, keys=names[-1:])]
        assert one.batch_exists_v2(names, needs).kv_hit_pages == 0


def test_clear_forgets_everything(tmp_path: Path) -> None:
    names = _names(5)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:20])
        assert one.batch_exists(names) == 5
        assert one.clear()
        assert one.batch_exists(names) == 0


@pytest.mark.parametrize("call", ["read", "write"])
def test_what_is_cleared_amid_a_transfer_is_not_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Its pages are of the weights before."""
    count = SLOTS // 2 // PAGE
    names, here = _names(count), torch.arange(SLOTS // 2)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        if call == "read":
            assert all(one.batch_set_v1(names, here))
        pool = one._pools["kv"]
        real = getattr(pool, call)

        def cleared(*args: Any) -> Iterator[int]:
            for number, moved in enumerate(real(*args)):
                if number == 1:
                    clearing.start()
                    end = time.monotonic() + WAIT_S
                    while not pool.store.resets:
                        assert time.monotonic() < end
                        time.sleep(0.001)
                yield moved

        told: list[bool] = []
        clearing = threading.Thread(target=lambda: told.append(one.clear()))
        monkeypatch.setattr(pool, call, cleared)
        move = one.batch_get_v1 if call == "read" else one.batch_set_v1
        assert not any(move(names, here))
        clearing.join(WAIT_S)
        assert told == [True]
        assert not any(pool.each(names))


def test_tensors_that_are_read_amid_a_clear_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _names(4)
    with _backend(attention("page_first"), extra(tmp_path, in_place=False)) as one:
        pool = one._pools["kv"]
        assert one.batch_set(names, [torch.ones(pool.page_bytes, dtype=torch.uint8)] * 4)
        real = pool.read_into

        def cleared(*args: Any) -> Iterator[int]:
            yield from real(*args)
            clearing.start()
            end = time.monotonic() + WAIT_S
            while not one._clears:
                assert time.monotonic() < end
                time.sleep(0.001)

        clearing = threading.Thread(target=one.clear)
        monkeypatch.setattr(pool, "read_into", cleared)
        # It waits for what is being stored; the weights are others already.
        with one._storing:
            assert one.batch_get(names) == [None] * 4
        clearing.join(WAIT_S)


@pytest.mark.parametrize("call", ["read", "write"])
def test_what_begins_while_a_clear_waits_is_not_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    names, here = _names(4), torch.arange(4 * PAGE)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        if call == "read":
            assert all(one.batch_set_v1(names, here))
        clearing = threading.Thread(target=one.clear)
        told: list[list[bool]] = []
        move = one.batch_get_v1 if call == "read" else one.batch_set_v1
        moving = threading.Thread(target=lambda: told.append(move(names, here)))
        pool, begun = one._pools["kv"], threading.Event()
        real = getattr(pool, call)

        def noted(*args: Any) -> Any:
            begun.set()
            return real(*args)

        monkeypatch.setattr(pool, call, noted)
        with one._storing:
            clearing.start()
            end = time.monotonic() + WAIT_S
            while not one._clears:
                assert time.monotonic() < end
                time.sleep(0.001)
            moving.start()
            assert begun.wait(WAIT_S)
            if call == "read":
                moving.join(WAIT_S)
        for each in (clearing, moving):
            each.join(WAIT_S)
        assert told == [[False] * 4]
        assert not any(one._pools["kv"].each(names))
        # What begins later is done as ever.
        assert all(one.batch_set_v1(names, here))


def test_where_a_store_cannot_be_closed_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = HiCacheKVStore(config(extra(tmp_path, host="1MiB")))
    one.register_mem_pool_host(attention("page_first"))
    one.register_mem_host_pool_v2(states(), PoolName.MAMBA)
    one.on_host_pools_registered()
    stores = [pool.store for pool in one._pools.values()]
    for store in stores:
        real = store.close

        def fails(real: Callable[[], None] = real) -> None:
            real()
            raise OSError("input/output error")

        monkeypatch.setattr(store, "close", fails)
    with pytest.raises(OSError, match="input/output error"):
        one.close()
    for store in stores:
        with pytest.raises(KVStoreError, match="closed"):
            store.contains([bytes(32)])


def test_a_pool_that_cannot_be_cleared_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, slots = _names(8), torch.arange(8)
    moved = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
    with _backend(attention("page_first"), extra(tmp_path, host="1MiB"), states()) as one:
        assert one.batch_set_v2([moved]) == {PoolName.MAMBA: [True] * 8}

        def late(timeout: float) -> None:
            raise TimeoutError("reset took longer than 1 s")

        monkeypatch.setattr(one._pools["kv"].store, "reset", late)
        # As SGLang asks, which looks at no result.
        with pytest.raises(KVStoreError, match="pages are not cleared: reset took longer"):
            one.clear()
        assert not any(one._pools[str(PoolName.MAMBA)].each(names))


@pytest.mark.parametrize("token", [False, True])
def test_only_the_first_rank_has_the_control_socket(tmp_path: Path, token: bool) -> None:
    given = extra(tmp_path / "kv", control=str(tmp_path / "ctl"))
    if token:
        (tmp_path / "token").write_text("a token of some length")
        (tmp_path / "token").chmod(0o600)
        given["kvstore"]["control_token_file"] = str(tmp_path / "token")
    with _backend(attention("page_first"), given):
        assert (tmp_path / "ctl").is_socket()
        with _backend(attention("page_first"), given, tp_rank=1, tp_size=2) as other:
            assert other.batch_set_v1(_names(1), HERE[:4]) == [True]


def test_the_control_socket_forgets_nothing_as_other_pools_and_ranks_would_keep_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = extra(tmp_path / "kv", control=str(tmp_path / "ctl"))
    with _backend(attention("page_first"), given) as one:
        assert one.batch_set_v1(_names(1), HERE[:4]) == [True]
        for what in (["reset"], ["remove", "00"]):
            assert main(["ctl", str(tmp_path / "ctl"), *what]) == 2
            assert "/hicache/storage-backend/clear" in capsys.readouterr().err
        assert one.exists(_names(1)[0])


def test_a_disk_that_hangs_holds_a_rank_no_longer_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, given = _names(5), extra(tmp_path, deadline_s=0.5)
    given["kvstore"]["tiers"][0]["io"] = "buffered"
    with _backend(attention("page_first"), given) as one:
        assert one.batch_set_v1(names, HERE[:20]) == [True] * 5
    hung, read = threading.Event(), BufferedIO.read

    def hang(self: BufferedIO, *told: Any) -> int:
        assert hung.wait(60)
        return read(self, *told)

    with _backend(attention("page_first"), given) as one:
        monkeypatch.setattr(BufferedIO, "read", hang)
        begun = time.monotonic()
        assert one.batch_exists(names) == 5, "the disk is not read for this"
        assert time.monotonic() - begun < 5
        assert one.batch_get_v1(names, HERE[:20]) == [False] * 5
        assert time.monotonic() - begun < 20
        hung.set()


def test_a_fault_is_a_miss_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = _names(5)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:20])
        one.close()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert one.batch_exists(names) == 0
            assert one.batch_get_v1(names, HERE[:20]) == [False] * 5
            assert one.batch_set_v1(names, HERE[:20]) == [False] * 5
            assert one.batch_get(names) == [None] * 5
            assert not one.exists(names[0])
        for kind in ("looked up", "read", "stored"):
            assert caplog.text.count(f"pages are not {kind}: the store of SGLang's pool kv") == 1


def test_a_fault_of_one_kind_is_told_once_among_calls_that_go_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        for _ in range(3):
            assert one.batch_set_v1(_names(2), HERE[:7]) == [False, False]
            assert one.batch_exists(_names(2)) == 0
        assert caplog.text.count("pages are not stored: 7 slots for 2 pages of 4") == 1


def test_a_store_is_asked_for_all_pages_and_for_the_last_states(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"tiers": [{"type": "object", "url": f"file://{tmp_path}/store"}]}
    (tmp_path / "store").mkdir()
    names, kv, side = _names(40), attention("page_first"), states()
    tokens, slots = torch.arange(40 * PAGE), torch.arange(40)
    moved = PoolTransfer(PoolName.MAMBA, host_indices=slots, keys=names)
    given = extra(None, host="1MiB", **shared)
    with _backend(kv, given, side) as one:
        assert all(one.batch_set_v1(names, tokens))
        assert all(one.batch_set_v2([moved])[PoolName.MAMBA])
        assert all(pool.store.flush(30) for pool in one._pools.values())
    needs = [PoolTransfer(PoolName.MAMBA, keys=names[-1:],
                          hit_policy=PoolHitPolicy.TRAILING_PAGES)]  # fmt: skip
    with _backend(attention("page_first", seed=1), given, states()) as other:
        found = other.batch_exists_v2(names, needs)
        assert (found.kv_hit_pages, found.extra_pool_hit_pages[KV]) == (40, 40)
        assert all(other.batch_get_v1(names, tokens))
        assert all(other.batch_get_v2([moved])[PoolName.MAMBA])


def test_a_pool_that_is_not_kept_gates_nothing_if_its_policy_says_so(tmp_path: Path) -> None:
    names = _names(3)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:12])
        groups = PoolTransfer(PoolName.INDEXER, keys=names, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert one.batch_exists_v2(names, [groups]).kv_hit_pages == 3


def test_a_pool_without_pages_is_refused_by_name(tmp_path: Path) -> None:
    host = attention("page_first")
    host.get_page_buffer_meta = lambda indices: None
    unusable = _backend(host, extra(tmp_path))
    message = "SGLang's pool kv .* no pages that can be stored in place"
    with pytest.raises(KVStoreError, match=message), unusable:
        pass
    with _backend(host, extra(tmp_path, in_place=False)) as one:
        assert one.batch_exists(_names(1)) == 0


def test_slots_that_are_no_whole_pages_are_a_miss(tmp_path: Path) -> None:
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        assert one.batch_set_v1(_names(2), HERE[:7]) == [False, False]
        assert one.batch_exists(_names(2)) == 0


def test_the_old_calls_for_one_page_work_too(tmp_path: Path) -> None:
    host = attention("page_first")
    with _backend(host, extra(tmp_path, in_place=False)) as one:
        page = host.get_data_page(8, flat=True)
        assert one.set("a name that is no hash", page)
        assert one.exists("a name that is no hash")
        assert torch.equal(one.get("a name that is no hash").view(page.dtype), page)
        into = host.get_dummy_flat_data_page()
        assert one.get("a name that is no hash", into) is into
        assert torch.equal(into, page)
        assert one.get("another") is None


def test_what_was_moved_is_told_to_sglangs_metrics(tmp_path: Path) -> None:
    names = _names(5)
    with _backend(attention("page_first"), extra(tmp_path)) as one:
        one.batch_set_v1(names, HERE[:20])
        one.batch_get_v1(names, HERE[:20])
        told = one.get_stats()
        assert (told.backup_pgs, told.prefetch_pgs) == ([5], [5])
        assert told.prefetch_bandwidth[0] > 0
        assert one.get_stats().prefetch_pgs == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interface_v1": 1}, "missing key kvstore in hicache-storage-backend-extra-config"),
        ({"kvstore": {"host": "1MiB", "chunk_bytes": 4}}, "kvstore.chunk_bytes: SGLang decides"),
        ({"kvstore": {"hosst": "1MiB"}}, "did you mean"),
        ({"kvstore": {"host": "1MiB", "disk": "/proc/x", "disk_bytes": "1GiB"}}, "/proc/x"),
    ],
    ids=["nothing", "decided", "misspelt", "path"],
)
def test_what_cannot_be_used_is_named_before_anything_is_served(
    given: dict[str, Any], message: str
) -> None:
    unusable = _backend(attention("page_first"), {**extra(None), "kvstore": None, **given})
    with pytest.raises(KVStoreError, match=message), unusable:
        pass


def _names(count: int) -> list[str]:
    return [f"{number + 1:064x}" for number in range(count)]


@contextmanager
def _backend(host: Any, given: dict[str, Any], side: Any = None, **values: Any) -> Iterator[Any]:
    """The backend as SGLang's factory makes it, without a controller."""
    given = {key: value for key, value in given.items() if value is not None}
    one = StorageBackendFactory.create_backend("dynamic", config(given, **values), host)
    try:
        one.register_mem_pool_host(host)
        if side is not None:
            one.register_mem_host_pool_v2(host, PoolName.KV)
            one.register_mem_host_pool_v2(side, PoolName.MAMBA)
        one.on_host_pools_registered()
        yield one
    finally:
        one.close()


def test_the_line_in_the_docs_is_one_that_sglang_takes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    line = text[text.index("$ sglang serve ") :].partition("```")[0]
    _, _, *arguments = shlex.split(line.removeprefix("$ ").replace("\\\n", " "))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args(arguments)
    given = json.loads(options.hicache_storage_backend_extra_config)
    assert options.hicache_storage_backend == "dynamic"
    assert options.hicache_mem_layout == "page_first"
    assert given.keys() == extra(None).keys()
    assert given["class_name"] in importlib.import_module(given["module_path"]).__all__
    Config.from_mapping(given["kvstore"])
