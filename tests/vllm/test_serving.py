"""The parts of `benchmarks/serving` that need no server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from aiohttp import web  # noqa: E402

from benchmarks.serving.__main__ import MAX_TOKENS  # noqa: E402
from benchmarks.serving.clients import Answer, Talk, Turn, hold, shares  # noqa: E402
from benchmarks.serving.figures import Figures, Round, grown, rows, table  # noqa: E402
from benchmarks.serving.servers import BLOCK, cached_by_source, counters, offload  # noqa: E402
from benchmarks.serving.settings import quick, room, sweep  # noqa: E402
from benchmarks.serving.throttle import whole_disk  # noqa: E402
from examples.tiny_model import CONFIG, kv_bytes_per_token, write_model  # noqa: E402

TALK = Talk(2, conversations=5, turns=3, first=8, grows=6, reply=2, think=0)


class Stand:
    """A stand-in for vLLM's server: an answer is the first token of its prompt and its length."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.at_once = self.most = 0
        self.status = 200

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["temperature"] == 0
        self.prompts.append(body["prompt"])
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for token in (body["prompt"][0], len(body["prompt"])):
            await asyncio.sleep(0.001)
            await self._send(response, {"choices": [{"token_ids": [token]}]})
        cached = {"prompt_tokens_details": {"cached_tokens": 3}}
        await self._send(response, {"choices": [], "usage": cached})
        await response.write(b"data: [DONE]\n\n")
        self.at_once -= 1
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def held(stand: Stand, talk: Talk, seed: int) -> Turn:
    app = web.Application()
    app.router.add_post("/v1/completions", stand.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        return await hold(f"http://127.0.0.1:{port}", talk, seed)
    finally:
        await runner.cleanup()


async def test_each_turn_sends_all_that_was_said_before() -> None:
    stand = Stand()
    done = await held(stand, TALK, 1)
    assert len(done.answers) == len(stand.prompts) == 15
    by_first: dict[int, list[list[int]]] = {}
    for ids in stand.prompts:
        by_first.setdefault(ids[0], []).append(ids)
    assert len(by_first) == 5
    for turns in by_first.values():
        assert [len(ids) for ids in turns] == [8, 14, 20]
        for ids, later in itertools.pairwise(turns):
            assert later[: len(ids)] == ids
            assert later[len(ids) : len(ids) + 2] == [ids[0], len(ids)]
    assert {answer.cached for answer in done.answers.values()} == {3}
    assert 1 <= stand.most <= TALK.clients


async def test_the_same_seed_says_the_same_words_and_another_says_others() -> None:
    first, again, other = Stand(), Stand(), Stand()
    await held(first, TALK, 1)
    await held(again, replace(TALK, clients=5), 1)
    await held(other, TALK, 2)
    assert sorted(first.prompts) == sorted(again.prompts)
    assert not {tuple(ids[:4]) for ids in first.prompts} & {tuple(ids[:4]) for ids in other.prompts}


async def test_an_answer_that_is_refused_or_too_short_ends_the_round() -> None:
    refused = Stand()
    refused.status = 500
    with pytest.raises(RuntimeError, match="the server answers 500"):
        await held(refused, TALK, 1)
    with pytest.raises(RuntimeError, match="2 tokens instead of 5"):
        await held(Stand(), replace(TALK, reply=5), 1)


def test_every_conversation_has_one_client() -> None:
    for clients in (1, 2, 5):
        dealt = shares(replace(TALK, clients=clients))
        assert len(dealt) == clients
        assert sorted(one for mine in dealt for one in mine) == [0, 1, 2, 3, 4]


def answered(*tokens: int, first_token: float = 1.0, seconds: float = 2.0) -> Round:
    answers = {(place, 0): Answer(first_token, 10, (token,)) for place, token in enumerate(tokens)}
    return Round(Turn(seconds, answers), 0.5, 3.0, {"disk": 7}, {"kvstore_shed_chunks": 2})


def test_ratios_are_to_the_servers_of_the_same_rounds_and_wrong_answers_are_counted() -> None:
    none, native, ours = Figures(), Figures(), Figures()
    for _ in range(2):
        right = answered(4, 5)
        none.add(right, right)
        native.add(answered(4, 5, first_token=0.5, seconds=1.0), right)
        ours.add(answered(4, 6, first_token=0.25, seconds=1.5), right)
    listed = rows("a setting", {"none": none, "native": native, "kvstore": ours})
    assert [row["different"] for row in listed] == [0, 0, 2]
    row = listed[2]
    assert row["of_none"]["ttft_mean_s"] == 0.25
    assert row["of_native"]["ttft_p95_s"] == 0.5
    assert row["of_native"]["total_s"] == 1.5
    assert row["rounds_of_none"] == [0.75, 0.75]
    assert (row["cached"], row["sources"], row["after"]) == (40, {"disk": 14}, [0.5, 0.5])
    assert row["counters"] == {"kvstore_shed_chunks": 4}
    text = table(listed)
    assert "250 ms (0.25, 0.50)" in text
    assert len(text.splitlines()) == 4
    json.dumps(listed)


def test_of_each_server_the_faster_half_of_its_rounds_counts() -> None:
    none, ours = Figures(), Figures()
    for slow, slower in ((1, 3), (9, 1), (2, 2)):
        right = answered(4, first_token=slow, seconds=slow)
        none.add(right, right)
        ours.add(answered(4, first_token=slower, seconds=slower), right)
    found = ours.measures()
    assert (found["ttft_mean_s"], found["ttft_p95_s"], found["total_s"]) == (1.5, 2, 1.5)
    assert none.measures() == found


def test_settings_fit_the_model_and_those_with_the_same_host_memory_are_neighbours() -> None:
    for settings in (quick(), sweep()):
        hosts = [setting.host for setting in settings]
        assert hosts == sorted(hosts)
        assert len({setting.name for setting in settings}) == len(settings)
        for setting in settings:
            talk = setting.talk
            assert talk.longest + talk.reply <= MAX_TOKENS
            assert talk.conversations >= talk.clients
            assert setting.host % BLOCK == 0
    assert room(TALK, 3) == 3 * BLOCK
    larger = [one for one in sweep() if one.talk.first > one.host]
    assert [one.name for one in larger] == ["prompts larger than host memory"]


def test_the_cached_tokens_by_source_are_read_from_the_metrics() -> None:
    text = """# HELP vllm:prompt_tokens_cached_by_source_total ...
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="disk"} 160.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="device"} 1.5e+06
vllm:prompt_tokens_cached_by_source_created{engine="0",model_name="tiny",source="disk"} 1.7e+09
"""
    assert cached_by_source(text) == {"disk": 160, "device": 1_500_000}


def test_what_a_cache_has_counted_is_added_over_its_tiers_and_only_growth_is_told() -> None:
    text = """vllm:kvstore_stored_chunks_total{engine="0"} 12.0
vllm:kvstore_host_used_ratio{engine="0"} 1.0
vllm:kv_offload_write_bytes_total{engine="0",tier="a"} 1e+03
vllm:kv_offload_write_bytes_total{engine="0",tier="b"} 5.0
"""
    assert counters(text) == {"kvstore_stored_chunks": 12, "kv_offload_write_bytes": 1005}
    assert grown({"a": 1, "b": 2}, {"a": 1, "b": 5, "c": 7}) == {"b": 3, "c": 7}


def test_the_model_has_the_weights_and_the_kv_that_are_counted(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_model(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        assert weights.get_tensor("model.embed_tokens.weight").shape == (8192, 256)
    assert len(names) == 3 + 9 * CONFIG["num_hidden_layers"]
    assert kv_bytes_per_token() == 2 * 8 * 256 * 4


def test_both_caches_get_the_same_host_memory(tmp_path: Path) -> None:
    native, ours = (offload(name, 2**20, 2**30, tmp_path) for name in ("native", "kvstore"))
    assert native is not None
    assert ours is not None
    assert native["cpu_bytes_to_use"] == ours["cpu_bytes_to_use"] == 2**20
    assert offload("none", 2**20, 2**30, tmp_path) is None


def test_limits_are_for_the_whole_disk_of_a_partition(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "devices" / "disk"
    part = disk / "part1"
    part.mkdir(parents=True)
    (disk / "dev").write_text("254:0\n")
    (part / "dev").write_text("254:1\n")
    (part / "partition").write_text("1\n")
    sysfs = tmp_path / "block"
    sysfs.mkdir()
    link = sysfs / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(part)
    assert whole_disk(tmp_path, sysfs) == "254:0"
    link.unlink()
    link.symlink_to(disk)
    assert whole_disk(tmp_path, sysfs) == "254:0"


def test_vllms_tiering_copies_on_the_cpu_between_blocks_and_its_own_region(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from benchmarks.serving.native import HostTieringOffloadingSpec
    from tests.vllm.parts import make_spec

    extra = offload("native", 2**20, 0, tmp_path / "files")
    assert extra is not None
    config = replace(make_spec({"cpu_bytes_to_use": "1MiB"}, 8192).config, extra_config=extra)
    spec = HostTieringOffloadingSpec(config)
    cache = torch.randint(-128, 127, (12, 8192), dtype=torch.int8)
    before = cache.clone()
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(cache, 8192)], [[CanonicalKVCacheRef(0, 8192)]]
    )
    manager = spec.get_manager()
    worker = spec.get_worker(caches)
    try:
        rows = CPULoadStoreSpec([7, 3])
        assert worker.submit_store(1, GPULoadStoreSpec([0, 1], [2], [0]), rows)
        seen = np.asarray(manager.primary_tier.get_kv_memoryview())[7].tobytes()
        assert seen == before[0].numpy().tobytes()
        assert worker.submit_load(2, rows, GPULoadStoreSpec([10, 11], [2], [0]))
        assert [result.job_id for result in worker.get_finished()] == [1, 2]
        assert torch.equal(cache[10:], before[:2])
        assert torch.equal(cache[:10], before[:10])
    finally:
        worker.shutdown()
        manager.shutdown()
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{config.engine_id}*"))
