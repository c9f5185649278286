"""``kvstore advise``: what it chooses, and that a real store then does as it said."""

from __future__ import annotations

import json
import random
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import Config
from kvstore.simulation import read_trace
from kvstore.tools import advise
from kvstore.tools.cli import main
from tests.tools.support import error_of, json_of, run

CHUNK = 4096


def conversations(path: Path, *, users: int = 30, turns: int = 6, seed: int = 3) -> Path:
    """A trace of conversations that go on in turn; some prompts are never seen again."""
    chance = random.Random(seed)
    said: dict[int, list[int]] = {}
    left = [user for user in range(users) for _ in range(turns)]
    chance.shuffle(left)
    lines = []
    for number, user in enumerate(left):
        prompt = said.setdefault(user, [0, 1, 2, 3])
        prompt += [10_000 * (user + 1) + len(prompt) + at for at in range(chance.randint(2, 8))]
        ids = prompt if chance.random() < 0.8 else [10**7 + 100 * number + at for at in range(12)]
        lines.append(json.dumps({"timestamp": 1000 * number, "hash_ids": ids}))
    path.write_text("\n".join(lines))
    return path


def told(*arguments: object) -> Any:
    return json_of("advise", *arguments)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return conversations(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("costs", [(), ("--compute-ms", 10, "--read-ms", 2)], ids=["", "costs"])
async def test_a_real_store_hits_as_often_as_was_said(
    trace: Path, tmp_path: Path, costs: tuple[object, ...]
) -> None:
    options = ["--chunk-bytes", CHUNK, "--host", "15%", "--disk", "50%", *costs]
    advice = told(trace, *options)
    (tier,) = advice["config"]["tiers"]
    config = {
        **advice["config"],
        "tiers": [{**tier, "path": str(tmp_path / "kv")}],
    }
    asked = hits = 0
    requests = read_trace(trace)
    names = requests.keys()
    async with kvstore.open(config) as store:
        for chunks in requests.requests:
            keys = [names[chunk] for chunk in chunks]
            async with store.get(keys) as found:
                hits += len(found)
            asked += len(keys)
            await store.put(keys, [bytes(CHUNK)] * len(keys))
            await store.flush(30)
    assert hits / asked == pytest.approx(advice["best"]["hit_ratio"], rel=0.1)
    assert advice["best"]["hit_ratio"] > 0.3


def test_what_it_prints_can_be_put_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = conversations(tmp_path / "trace.jsonl", users=60)
    text = run("advise", trace, "--chunk-bytes", "2MiB", "--host", "10%")
    values = tomllib.loads(text[text.index("chunk_bytes =") :])
    assert Config.from_mapping(values).cpu_bytes_to_use == values["cpu_bytes_to_use"]
    assert "A disk pays where a chunk is read sooner than it is computed" in text
    (marked,) = (line for line in text.splitlines() if re.match(r"\* +\d", line))
    assert f"{round(values['cpu_bytes_to_use'] / 2**20)}" in marked
    for more in ((), ("--disk", "0")):
        text = run("advise", trace, "--chunk-bytes", "2MiB", *more)
        (tmp_path / "advised.toml").write_text(text[text.index("chunk_bytes =") :])
        assert main(["config", "check", str(tmp_path / "advised.toml")]) in (0, 1)
        assert "kvstore: " not in capsys.readouterr().err
        (config,) = re.findall("eviction_policy = .*hit-density.*", text) if more else [text]
        assert more == () or "whole_stores = true" in config


def test_a_disk_that_reads_slower_than_the_server_computes_does_not_pay(trace: Path) -> None:
    advice = told(trace, "--host", "5%", "--compute-ms", 1, "--read-ms", 2.5)
    assert advice["best"]["disk_chunks"] == 0
    said = "A disk does not pay: reading a chunk takes 2.5 ms, and computing it 1 ms."
    assert said in advice["advice"]


def repeated(path: Path, *, again: int, others: int, times: int) -> Path:
    """A trace of 10 prompts of `again` chunks, each asked for so often, and `others` new chunks
    after each, or between them as prompts of 10."""
    fresh, lines = 10**6, list[str]()
    for number in range(10 * times):
        ids = [1000 * (number % 10) + at for at in range(again)]
        new = list(range(fresh, fresh + others))
        fresh += others
        prompts = [[*ids, *new]]
        if again >= 100:
            prompts = [ids, *(new[at : at + 10] for at in range(0, others, 10))]
        for prompt in prompts:
            lines.append(json.dumps({"timestamp": len(lines), "hash_ids": prompt}))
    path.write_text("\n".join(lines))
    return path


def test_whether_a_disk_pays_is_told_by_where_the_hits_lie(tmp_path: Path) -> None:
    # Hits are the first chunks of long prompts, which are computed sooner than they are read.
    shallow = repeated(tmp_path / "shallow", again=10, others=90, times=3)
    costs = ("--host", 105, "--disk", 10_000, "--read-ms", 2, "--compute-ms")
    advice = told(shallow, *costs, "1,5@100")
    assert advice["best"]["disk_chunks"] == 0
    assert advice["best"]["saved_s"] >= 0
    # Hits are long prompts among many short ones, which alone are computed sooner.
    deep = repeated(tmp_path / "deep", again=100, others=300, times=3)
    advice = told(deep, *costs, "0.5,5@100")
    assert advice["best"]["disk_chunks"] > 0
    assert advice["best"]["saved_s"] == max(each["saved_s"] for each in advice["tried"][1:])
    assert advice["deeper_s"] == pytest.approx(0.000045)


def test_a_disk_below_memory_that_holds_all_does_not_pay(trace: Path) -> None:
    advice = told(trace, "--host", "100%")
    assert advice["best"]["disk_chunks"] == 0
    assert any("A disk does not pay: at best it brings" in one for one in advice["advice"])
    assert any("hold all that is asked for again" in one for one in advice["advice"])


def test_no_more_disk_is_advised_than_brings_hits(trace: Path) -> None:
    unique = read_trace(trace).unique
    advice = told(trace, "--host", "5%", "--disk", 8 * unique)
    assert 0 < advice["best"]["disk_chunks"] <= unique
    assert max(one["disk_chunks"] for one in advice["tried"]) <= unique
    little = told(trace, "--host", "5%", "--disk", unique // 8)
    assert "More disk than there is would bring more hits." in little["advice"]


def test_seconds_are_those_of_hits_less_those_of_reads(trace: Path) -> None:
    for one in told(trace, "--compute-ms", 10, "--read-ms", 4)["tried"]:
        hits = one["host_hits"] + one["disk_hits"]
        assert one["saved_s"] == pytest.approx(0.01 * hits - 0.004 * one["disk_hits"])


def test_without_the_size_of_a_chunk_there_is_no_configuration(trace: Path) -> None:
    assert told(trace)["config"] is None
    assert "cpu_bytes_to_use" not in run("advise", trace)


@contextmanager
def served(text: str) -> Iterator[str]:
    """The URL of metrics that never change."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Not to the output of tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()


METRICS = """\
vllm:kvstore_compute_seconds_per_chunk{engine="0"} 0.012
vllm:kvstore_tier_seconds_per_chunk{engine="0",tier="disk"} 0.003
"""


def test_a_server_tells_what_chunks_cost(trace: Path) -> None:
    with served(METRICS) as url:
        alone = told(url)
        beside = told(trace, "--server", url)
        given = told(trace, "--server", url, "--read-ms", 20)
    assert (alone["compute_s"], alone["read_s"]) == (0.012, 0.003)
    assert alone["advice"][0] == ("A disk pays: a chunk is computed in 12 ms, and read in 3 ms.")
    assert f"kvstore advise FILE --server {url}" in alone["advice"][1]
    assert (beside["compute_s"], beside["best"]["disk_chunks"] > 0) == (0.012, True)
    assert given["best"]["disk_chunks"] == 0


def test_a_server_that_has_done_little_says_so() -> None:
    with served("vllm:kvstore_hits_total 0\n") as url:
        assert "not yet computed and read enough" in told(url)["advice"][0]


def test_what_is_never_asked_for_again_needs_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "once.jsonl"
    lines = [json.dumps({"timestamp": n, "hash_ids": [3 * n, 3 * n + 1]}) for n in range(50)]
    path.write_text("\n".join(lines))
    advice = told(path)
    assert advice["advice"] == ["Nothing is asked for again: no cache helps, of any size."]
    run("advise", path)


def test_prompts_larger_than_host_memory_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    line = json.dumps({"timestamp": 1, "hash_ids": list(range(100))})
    path.write_text("\n".join([line] * 20))
    advice = told(path, "--host", 10)
    said = "The longest prompt has 100 chunks, more than host"
    assert any(said in one for one in advice["advice"])
    assert not any("-" in one for one in advice["advice"] if "brings" in one), "no gain below 0"


def test_of_a_sample_the_whole_is_told(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = ("--host", "30%", "--compute-ms", 10, "--read-ms", 1)
    monkeypatch.setattr(advise, "PROMPTS", 1)
    whole = told(trace, *costs)
    monkeypatch.setattr(advise, "REPLAYED", read_trace(trace).accesses // 2)
    part = told(trace, *costs)
    assert part["trace"]["sample"]["accesses"] < 0.8 * whole["trace"]["accesses"]
    for name in ("saved_s", "accesses"):
        assert part["tried"][0][name] == pytest.approx(whole["tried"][0][name], rel=0.25)
    # Of a memory that holds few prompts the sample's would hold none; of one conversation, as well.
    monkeypatch.setattr(advise, "PROMPTS", 8)
    assert told(trace, "--host", "5%")["trace"].get("sample") is None
    one = conversations(trace, users=1, turns=200)
    monkeypatch.setattr(advise, "REPLAYED", 400)
    assert told(one, "--host", "90%")["best"]["hit_ratio"] > 0.1


def test_of_several_engines_the_mean_counts_and_of_tiers_the_disk() -> None:
    engines = """\
vllm:kvstore_compute_seconds_per_chunk{engine="0"} 0.012
vllm:kvstore_compute_seconds_per_chunk{engine="1"} 0.004
vllm:kvstore_compute_seconds_per_chunk{engine="2"} 0
vllm:kvstore_tier_seconds_per_chunk{engine="0",tier="disk"} 0.015
vllm:kvstore_tier_seconds_per_chunk{engine="0",tier="remote"} 0.001
"""
    with served(engines) as url:
        found = told(url)
    assert (found["compute_s"], found["read_s"]) == (pytest.approx(0.008), 0.015)
    assert found["advice"][0].startswith("A disk does not pay")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0"), "--host 0: must be at least one chunk"),
        (("--host", "x"), "--host x"),
        (("--host", "1GiB"), "needs --chunk-bytes"),
    ],
    ids=str,
)
def test_bad_input_is_named(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of("advise", trace, *arguments)


def test_milliseconds_have_to_be_some(trace: Path) -> None:
    said = error_of("advise", trace, "--compute-ms", "0")
    assert "must be milliseconds, a number above 0" in said
    said = error_of("advise", trace, "--limit", "x")
    assert "argument --limit: must be a whole number, 1 at least" in said
