"""One cache for engines of several parallel shapes: real engines, real bytes, right tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.random_model import write_model
from examples.rounds import LLAMA
from tests.vllm.engines import FORKED, ONE_PROCESS, Round, run_engine

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

PROMPTS = [[seed, 300] for seed in range(4)]

OTHERS = [[seed, 300] for seed in range(4, 8)]

FOUND = [256] * 4
"""Of 300 tokens: whole chunks of two blocks of 32."""


def asked(name: str, prompts: list[list[int]] = PROMPTS, **more: Any) -> dict[str, Any]:
    return {"name": name, "prompts": prompts, **more}


def engine(
    folder: Path,
    workers: int,
    rounds: list[dict[str, Any]],
    *,
    launcher: int = 0,
    offload: bool = True,
) -> dict[str, Round]:
    """Rounds of prompts on so many tensor parallel workers; kvstore with a disk."""
    disk = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "256MiB"}
    kvstore = {
        "cpu_bytes_to_use": "64MiB",
        "blocks_per_chunk": 2,
        "canonical_layout": True,
        "tiers": [{**disk, "segment_bytes": "34MiB"}],
    }
    scenario = {
        "config": SMALL,
        "engine": {"load_format": "auto", "tensor_parallel_size": workers},
        "kvstore": kvstore if offload else None,
        # Two workers wait for each other many times for each.
        "max_tokens": 4,
        "rounds": rounds,
    }
    environment = ONE_PROCESS
    if workers > 1:
        # Workers that wait spin on every core: the threads of the kernel that end a write may
        # not run for seconds. vLLM kills an engine in a process of its own unless it ends within
        # five, whatever it still has to copy; one in the process that asks has its time.
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED, **ONE_PROCESS}
    return run_engine(folder / "run", scenario, environment, launcher=launcher).rounds


def test_with_a_canonical_layout_one_worker_and_two_find_what_the_other_has_stored(
    tmp_path: Path,
) -> None:
    """Without it they share nothing: see `test_layout.py`."""
    write_model(tmp_path / "run" / "tiny-model", {**LLAMA, **SMALL})
    plain = [asked("one"), asked("other", OTHERS)]
    right = engine(tmp_path, 1, plain, offload=False)
    tokens = {name: found.tokens for name, found in right.items()}
    assert len({str(answer) for its in tokens.values() for answer in its}) == 8
    first = engine(tmp_path, 1, [asked("cold"), asked("host")])
    # Time to copy what the last request has stored.
    rounds = [asked("disk"), asked("host"), asked("cold", OTHERS, pause=2)]
    two = engine(tmp_path, 2, rounds, launcher=1)
    last = engine(tmp_path, 1, [asked("disk", OTHERS)])
    assert first["cold"].cached == two["cold"].cached == [0] * 4
    for found in (first["cold"], first["host"], two["disk"], two["host"]):
        assert found.tokens == tokens["one"]
    assert two["cold"].tokens == last["disk"].tokens == tokens["other"]
    for found in (first["host"], two["disk"], two["host"], last["disk"]):
        assert found.cached == FOUND
    assert len(list((tmp_path / "cache").iterdir())) == 1
