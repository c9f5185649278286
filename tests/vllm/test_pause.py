"""An engine that sleeps keeps its cache when the weights stay, and serves none of it to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import FORKED, ONE_PROCESS, Run, run_engine

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file

from tests.vllm.checkpoints import CONFIG, save_llama

TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED, **ONE_PROCESS}
LENGTH = 256
PROMPTS = [[seed, LENGTH] for seed in range(3)]
NO_HIT, ALL_HIT = [0] * 3, [LENGTH] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, which differ in linear layers alone; the first is the engines'."""
    folder = tmp_path_factory.mktemp("pause")
    save_llama(folder / "tiny-model", 0)
    save_llama(folder / "other", 1)
    file = str(folder / "other" / "model.safetensors")
    first = load_file(str(folder / "tiny-model" / "model.safetensors"))
    linear = {name: one for name, one in load_file(file).items() if "_proj" in name}
    save_file({**first, **linear}, file)
    return folder


def run(
    folder: Path,
    rounds: list[dict[str, Any]],
    *,
    offload: bool = True,
    cache: str = "cache",
    workers: int = 1,
) -> Run:
    tier = {
        "type": "disk",
        "path": str(folder / cache),
        "capacity_bytes": "512MiB",
        "segment_bytes": "4MiB",
    }
    return run_engine(
        folder,
        {
            "config": CONFIG,
            "engine": {
                "load_format": "auto",
                "max_model_len": 1024,
                "tensor_parallel_size": workers,
            },
            "kvstore": {"cpu_bytes_to_use": "16MiB", "tiers": [tier]} if offload else None,
            "max_tokens": 6,
            "rounds": [{"prompts": PROMPTS, "reset": False, **one} for one in rounds],
        },
        ONE_PROCESS if workers == 1 else TWO_WORKERS,
    )


def other(folder: Path) -> dict[str, Any]:
    return {"weights": str(folder / "other")}


@pytest.fixture(scope="module")
def truth(folder: Path) -> Run:
    """Both models, without offload."""
    return run(
        folder, [{"name": "first", "sleep": other(folder)}, {"name": "other"}], offload=False
    )


@pytest.fixture(scope="module")
def slept(folder: Path) -> Run:
    """Each round but the last is followed by a sleep."""
    return run(
        folder,
        [
            {"name": "cold", "sleep": {"level": 1}},
            {"name": "after a sleep", "sleep": {"level": 2}},
            {"name": "after a deeper one", "sleep": other(folder)},
            {"name": "other", "sleep": {"level": 1}},
            {"name": "other again", "sleep": {"weights": str(folder / "tiny-model")}},
            {"name": "first again"},
        ],
    )


@pytest.fixture(scope="module")
def restarted(folder: Path, slept: Run) -> Run:
    return run(folder, [{"name": "restarted"}])


@pytest.mark.parametrize("name", ["after a sleep", "after a deeper one"])
def test_an_engine_that_wakes_up_with_its_weights_has_its_cache(
    truth: Run, slept: Run, name: str
) -> None:
    assert slept.rounds[name].cached == ALL_HIT
    assert slept.rounds[name].tokens == slept.rounds["cold"].tokens == truth.rounds["first"].tokens


def test_one_that_wakes_up_with_others_finds_nothing_and_answers_right(
    truth: Run, slept: Run
) -> None:
    assert truth.rounds["other"].tokens != truth.rounds["first"].tokens
    for name, right in (("other", "other"), ("first again", "first")):
        assert slept.rounds[name].cached == NO_HIT
        assert slept.rounds[name].tokens == truth.rounds[right].tokens
    assert slept.log.count("the weights have changed") == 2


def test_the_cache_of_other_weights_is_kept_in_host_memory_over_the_next_sleep(
    truth: Run, slept: Run
) -> None:
    assert slept.rounds["other again"].cached == ALL_HIT
    assert slept.rounds["other again"].tokens == truth.rounds["other"].tokens


def test_the_disk_keeps_what_the_weights_of_the_start_have_computed_and_nothing_else(
    truth: Run, restarted: Run
) -> None:
    assert restarted.rounds["restarted"].cached == ALL_HIT
    assert restarted.rounds["restarted"].tokens == truth.rounds["first"].tokens


def test_workers_in_processes_of_their_own_are_asked_without_waiting_for_them(folder: Path) -> None:
    rounds = run(
        folder,
        [
            {"name": "cold", "sleep": {"level": 1}},
            {"name": "after a sleep", "sleep": other(folder)},
            {"name": "other", "sleep": {"level": 1}},
            {"name": "other again"},
        ],
        cache="two workers",
        workers=2,
    ).rounds
    assert rounds["after a sleep"].cached == ALL_HIT
    assert rounds["after a sleep"].tokens == rounds["cold"].tokens != rounds["other"].tokens
    assert rounds["other"].cached == NO_HIT
    assert rounds["other again"].cached == ALL_HIT
    assert rounds["other again"].tokens == rounds["other"].tokens


def test_inside_vllms_multi_connector_prompts_are_found_and_a_pause_empties_the_cache(
    folder: Path, truth: Run
) -> None:
    # In a process of its own, as a server runs it: in one process, vLLM 0.29 takes the figures
    # of the connectors below for dictionaries and ends, whichever they are.
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host": "16MiB",
            "disk": str(folder / "multi"),
            "disk_bytes": "512MiB",
            "deadline_s": 30,
            "recompute_s": 0,
        },
    }
    found = run_engine(
        folder,
        {
            "config": CONFIG,
            "engine": {"load_format": "auto", "max_model_len": 1024},
            "kv_transfer_config": {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [ours]},
            },
            "max_tokens": 6,
            "rounds": [
                {"name": "cold", "prompts": PROMPTS},
                {"name": "again", "prompts": PROMPTS, "reset": False, "sleep": {"level": 1}},
                {"name": "after a sleep", "prompts": PROMPTS},
            ],
        },
        FORKED,
    ).rounds
    assert [found[name].cached for name in found] == [NO_HIT, ALL_HIT, NO_HIT]
    assert {str(one.tokens) for one in found.values()} == {str(truth.rounds["first"].tokens)}
