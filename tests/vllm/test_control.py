"""The control socket of a real engine: chunks named by tokens, sizes and policies changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.rounds import prompt
from tests.vllm.engines import FORKED, Run, run_engine

LENGTH = 256
CHUNKS = LENGTH // 32
CHUNK = 2 * 8 * 8 * 64 * 2 * 32
"""Bytes of one: keys and values, layers, heads, their size, 16 bits, tokens of a block."""
ROWS = 4 * CHUNKS
ONE, OTHERS = [[1, LENGTH]], [[n, LENGTH] for n in range(10, 16)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("control")
    socket, named = "control.sock", folder / "one.json"
    named.write_text(json.dumps({"tokens": prompt(1, LENGTH), "model": "tiny-model"}))
    # By the time that these have left host memory, those before them are on disk, too.
    last = folder / "last.json"
    tokens = prompt(OTHERS[2][0], LENGTH)
    last.write_text(json.dumps({"tokens": tokens, "model": "tiny-model"}))

    def ctl(*words: str) -> list[str]:
        return ["ctl", socket, *words]

    def after(name: str, prompts: Any, *commands: list[str]) -> dict[str, Any]:
        return {"name": name, "prompts": prompts, "commands": [*commands]}

    file = ("--file", str(named))
    return run_engine(
        folder,
        {
            "engine": {"num_gpu_blocks_override": 60, "max_model_len": 1024},
            "kvstore": {
                "cpu_bytes_to_use": ROWS * CHUNK,
                "disk": str(folder / "cache"),
                "disk_bytes": "512MiB",
                "control": socket,
            },
            "max_tokens": 6,
            "rounds": [
                after("first", ONE, ctl("demote", *file)),
                after("some", OTHERS[:3], ctl("demote", "--file", str(last))),
                after(
                    "others",
                    OTHERS[3:],
                    ctl("prefetch", "--dry-run", *file),
                    ctl("prefetch", *file),
                ),
                after("prefetched", ONE, ctl("remove", *file)),
                after(
                    "removed",
                    ONE,
                    ctl("set", f"host.bytes={ROWS // 2 * CHUNK}", "host.eviction_policy=arc"),
                    ctl("set", "tiers.0.capacity_bytes=256MiB", "tiers.0.eviction_policy=fifo"),
                ),
                after(
                    "smaller",
                    [*OTHERS, *ONE],
                    ctl("set", f"host.bytes={ROWS * CHUNK}", "tiers.0.capacity_bytes=512MiB"),
                    ctl("status"),
                ),
                after("larger", [*OTHERS, *ONE], ctl("reset")),
                after("reset", ONE),
            ],
        },
        # The engine in a process of its own, as an operator has it: idle, or busy.
        FORKED,
    )


def test_chunks_are_named_by_the_tokens_of_a_prompt(run: Run) -> None:
    assert f"prefetch: nothing was done; {CHUNKS} keys" in run.log
    before, after = run.rounds["others"].metrics, run.rounds["prefetched"].metrics
    assert after["prefetched_chunks"] - before.get("prefetched_chunks", 0) == CHUNKS
    assert run.rounds["prefetched"].cached == [LENGTH]
    assert after.get("deferrals", 0) == before.get("deferrals", 0), "it had to wait for the disk"


def test_what_is_removed_is_computed_again(run: Run) -> None:
    assert run.rounds["removed"].cached == [0]


def test_nothing_stops_while_sizes_and_policies_change(run: Run) -> None:
    for name in ("smaller", "larger"):
        # What did not fit host memory came from the disk.
        assert run.rounds[name].cached == [LENGTH] * (len(OTHERS) + 1)
    assert f"host: {ROWS // 2} chunks, 8.0 MiB of 16.0 MiB in use, arc" in run.log
    assert "at most 512.0 MiB, fifo" in run.log


def test_after_a_reset_nothing_is_found(run: Run) -> None:
    assert run.rounds["reset"].cached == [0]


def test_every_token_is_as_without_a_change(run: Run) -> None:
    (first,) = run.rounds["first"].tokens
    for name in ("prefetched", "removed", "reset"):
        assert run.rounds[name].tokens == [first]
    others = [*run.rounds["some"].tokens, *run.rounds["others"].tokens]
    for name in ("smaller", "larger"):
        assert run.rounds[name].tokens == [*others, first]
