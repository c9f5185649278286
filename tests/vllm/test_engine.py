"""A real vLLM engine keeps its KV cache through kvstore and answers as without it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.support import flip
from tests.tools.support import command
from tests.vllm.conftest import LENGTH, PROMPTS
from tests.vllm.engines import FORKED, ONE_PROCESS, Run, SharedMemory, run_engine

CHUNK = 512 * 1024
"""Bytes of a block of 32 tokens of the tiny Llama."""


def disk(path: Path, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "disk",
            "path": str(path),
            "capacity_bytes": "1GiB",
            "segment_bytes": "34MiB",
            **more,
        }
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    """An engine whose device cache holds half of the prompts, over roomy host memory and disk."""
    return run_engine(
        tmp_path_factory.mktemp("first"),
        {
            "kvstore": {"cpu_bytes_to_use": "384MiB", "tiers": disk(cache)},
            "rounds": [
                {"name": "cold", "prompts": PROMPTS},
                {"name": "host 1", "prompts": PROMPTS},
                {"name": "host 2", "prompts": PROMPTS},
                {"name": "host together", "prompts": PROMPTS, "together": True},
            ],
        },
        ONE_PROCESS,
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, cache: Path, first: Run) -> Path:
    """A copy of what the first engine left on disk."""
    copy = tmp_path_factory.mktemp("stored") / "cache"
    shutil.copytree(cache, copy)
    return copy


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, cache: Path, stored: Path) -> Run:
    """The next engine over the same disk, with host room for one prompt only."""
    return run_engine(
        tmp_path_factory.mktemp("second"),
        {
            "kvstore": {"cpu_bytes_to_use": LENGTH // 32 * CHUNK, "tiers": disk(cache)},
            "engine": {"num_gpu_blocks_override": 600},
            "rounds": [
                {"name": "disk 1", "prompts": PROMPTS},
                {"name": "disk 2", "prompts": PROMPTS},
                {"name": "disk 3", "prompts": PROMPTS},
                {"name": "together", "prompts": PROMPTS, "together": True},
                {"name": "long cold", "prompts": [[100, 2 * LENGTH]]},
                {"name": "long again", "prompts": [[100, 2 * LENGTH]]},
                {"name": "before reset", "prompts": [[200, 512]], "reset_connector": True},
                {"name": "after reset", "prompts": [[200, 512], PROMPTS[0]]},
            ],
        },
        ONE_PROCESS,
        launcher=1,
    )


def test_completions_are_those_of_an_engine_without_offload(reference: Run, first: Run) -> None:
    for name in ("cold", "host 1", "host 2"):
        assert first.rounds[name].tokens == reference.rounds["each"].tokens, name


def test_whole_prompts_come_from_host_memory_once_the_device_forgot_them(first: Run) -> None:
    for name in ("host 1", "host 2", "host together"):
        assert first.rounds[name].cached == [LENGTH] * 8, name


def test_whole_prompts_come_from_disk_after_a_restart(reference: Run, second: Run) -> None:
    for name in ("disk 1", "disk 2", "disk 3"):
        assert second.rounds[name].cached == [LENGTH] * 8, name
        assert second.rounds[name].tokens == reference.rounds["each"].tokens, name


def test_eight_prompts_at_once_with_host_room_for_one_all_hit(second: Run) -> None:
    assert second.rounds["together"].cached == [LENGTH] * 8


def test_a_prompt_larger_than_host_memory_gives_at_least_what_host_memory_holds(
    reference: Run, second: Run
) -> None:
    assert second.rounds["long again"].cached[0] >= LENGTH
    assert second.rounds["long cold"].tokens == reference.rounds["long"].tokens
    assert second.rounds["long again"].tokens == reference.rounds["long"].tokens


def test_a_reset_forgets_host_memory_and_disk(second: Run) -> None:
    assert second.rounds["after reset"].cached == [0, 0]


def test_one_line_in_the_log_names_tiers_sizes_policies_and_io(first: Run) -> None:
    (line,) = [line for line in first.log.splitlines() if "kvstore: host" in line]
    for word in ("384.0 MiB", "disk", "segments", "lru", "I/O"):
        assert word in line


def test_damage_on_disk_costs_the_damaged_chunks_and_never_a_wrong_token(
    tmp_path: Path, reference: Run, stored: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(stored, cache)
    (namespace,) = cache.iterdir()
    segments = sorted((namespace / "lane-0").glob("segment-*.safetensors"))
    assert len(segments) >= 4, "prompts must lie in different segments for this test"
    assert command("verify", str(cache)).returncode == 0
    listed = json.loads(command("inspect", str(cache), "--json").stdout)
    by_path = {
        Path(segment["path"]): segment
        for segment in listed["namespaces"][0]["lanes"][0]["segments"]
    }
    full = [path for path in segments if by_path[path]["live"] > 8]
    flip(full[0], by_path[full[0]]["file_bytes"] - 20 * CHUNK)  # in a payload
    flip(full[1], 4096 + 5 * 128 + 70)  # in a record
    with full[2].open("r+b") as handle:
        handle.truncate(by_path[full[2]]["file_bytes"] // 2)
    foreign = full[0].with_name("segment-99.safetensors")
    foreign.write_bytes(b"\xff" * 8192)
    told = command("verify", str(cache))
    assert told.returncode == 1
    for path in (*full[:3], foreign):
        assert path.name in told.stdout
    again = run_engine(
        tmp_path / "load",
        {
            "kvstore": {"cpu_bytes_to_use": "384MiB", "tiers": disk(cache)},
            "rounds": [{"name": "again", "prompts": PROMPTS}],
        },
        ONE_PROCESS,
    )
    assert again.rounds["again"].tokens == reference.rounds["each"].tokens
    assert 0 < sum(again.rounds["again"].cached) < 8 * LENGTH


def test_what_was_carried_by_a_bundle_is_hit_with_equal_tokens(
    tmp_path: Path, reference: Run, stored: Path
) -> None:
    file, cache = tmp_path / "bundle.safetensors", tmp_path / "cache"
    assert command("export", str(stored), str(file)).returncode == 0
    done = command("import", str(file), str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    there = run_engine(
        tmp_path / "load",
        {
            "kvstore": {"cpu_bytes_to_use": "384MiB", "tiers": disk(cache)},
            "rounds": [{"name": "there", "prompts": PROMPTS}],
        },
        ONE_PROCESS,
    )
    assert there.rounds["there"].cached == [LENGTH] * 8
    assert there.rounds["there"].tokens == reference.rounds["each"].tokens


def test_two_tensor_parallel_workers_share_the_rows_and_never_have_more(tmp_path: Path) -> None:
    size = 512 * 2**20
    prompts = [[seed, 512] for seed in range(2)]
    before = set(os.listdir("/dev/shm"))
    with SharedMemory() as memory:
        found = run_engine(
            tmp_path,
            {
                "engine": {"tensor_parallel_size": 2},
                "kvstore": {"cpu_bytes_to_use": size, "tiers": disk(tmp_path / "cache")},
                "rounds": [
                    {"name": "cold", "prompts": prompts},
                    {"name": "host", "prompts": prompts},
                ],
                # The workers wait for each other many times for each.
                "max_tokens": 4,
            },
            {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED},
            memory=memory,
        )
    assert found.rounds["host"].cached == [512, 512]
    assert found.rounds["host"].tokens == found.rounds["cold"].tokens
    left = {name for name in set(os.listdir("/dev/shm")) - before if "kvstore" in name}
    assert not left, "shared memory left its rendezvous"
    assert memory.regions == 1
    assert memory.holders >= 3, "the scheduler's process and both workers hold it"
    assert size <= memory.peak <= 1.05 * size
