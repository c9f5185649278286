"""One cache for engines of several parallel shapes: real engines, real bytes, right tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import write_model
from examples.rounds import LLAMA
from tests.vllm.engines import FORKED, ONE_PROCESS, Round, Run, run_engine

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}

PROMPTS = [[seed, 300] for seed in range(4)]

CANONICAL = {"canonical_layout": True}
FOUND = [256] * 4
"""Of 300 tokens: whole chunks of two blocks of 32."""


def engine(
    folder: Path, workers: int, names: list[str], kvstore: dict[str, Any] | None, launcher: int = 0
) -> Run:
    """Rounds of the same prompts on so many tensor parallel workers; kvstore with a disk."""
    if kvstore is not None:
        disk = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "256MiB"}
        tiers = [{**disk, "segment_bytes": "34MiB"}]
        kvstore = {
            "cpu_bytes_to_use": "64MiB",
            "blocks_per_chunk": 2,
            "tiers": tiers,
            **kvstore,
        }
    rounds: list[dict[str, Any]] = [{"name": name, "prompts": PROMPTS} for name in names]
    if workers > 1 and "cold" in names:
        # Time to copy what the last request has stored.
        rounds[-1]["pause"] = 2.0
    shape = {"load_format": "auto", "dtype": "float32", "tensor_parallel_size": workers}
    scenario = {
        "config": SMALL,
        "engine": shape,
        "kvstore": kvstore,
        "rounds": rounds,
    }
    environment = ONE_PROCESS
    if workers > 1:
        # Workers that wait spin on every core: the threads of the kernel that end a write may
        # not run for seconds. vLLM kills an engine in a process of its own unless it ends within
        # five, whatever it still has to copy; one in the process that asks has its time.
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED, **ONE_PROCESS}
    return run_engine(folder / "run", scenario, environment, launcher=launcher)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the model answers without offload."""
    folder = tmp_path_factory.mktemp("without")
    write_model(folder / "run" / "tiny-model", {**LLAMA, **SMALL})
    answers = engine(folder, 1, ["each"], None).rounds["each"].tokens
    assert len({tuple(answer) for answer in answers}) == len(answers)
    return answers


def test_what_one_worker_has_stored_two_find_with_a_canonical_layout(
    tmp_path: Path, tokens: list[list[int]]
) -> None:
    write_model(tmp_path / "run" / "tiny-model", {**LLAMA, **SMALL})
    first = engine(tmp_path, 1, ["cold", "host"], CANONICAL).rounds
    check_that_all_is_found(
        first, engine(tmp_path, 2, ["disk", "host"], CANONICAL, 1).rounds, tokens
    )
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_it_two_shapes_share_nothing_and_with_it_one_worker_finds_what_two_have_stored(
    tmp_path: Path, tokens: list[list[int]]
) -> None:
    write_model(tmp_path / "run" / "tiny-model", {**LLAMA, **SMALL})
    engine(tmp_path, 1, ["cold"], {})
    other = engine(tmp_path, 2, ["disk"], {}, 1)
    assert "differs in group.0.num_kv_heads, parallel, rank_bytes_per_block" in other.log
    first = engine(tmp_path, 2, ["cold", "host"], CANONICAL).rounds
    for found in (other.rounds["disk"], first["cold"]):
        assert found.cached == [0] * 4
        assert found.tokens == tokens
    check_that_all_is_found(
        first, engine(tmp_path, 1, ["disk", "host"], CANONICAL, 1).rounds, tokens
    )


def check_that_all_is_found(
    first: dict[str, Round], again: dict[str, Round], tokens: list[list[int]]
) -> None:
    assert first["cold"].cached == [0] * 4
    for found in (first["host"], again["disk"], again["host"]):
        assert found.cached == FOUND
    for found in (*first.values(), *again.values()):
        assert found.tokens == tokens
