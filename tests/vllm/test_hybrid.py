"""A model with recurrent layers beside attention: hits from host and disk, and the same tokens.

`python benchmarks/turns.py` takes more turns.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENGINE_SECONDS, ONE_PROCESS, Run, run_engine, run_script

pytest.importorskip("vllm")

TURNS = Path(__file__).resolve().parents[2] / "benchmarks" / "turns.py"

LENGTHS = (90, 300, 500, 700)
PROMPTS = [[seed, LENGTHS[seed % 4]] for seed in range(12)]
BLOCK = 32
HITS = [length // BLOCK * BLOCK for _, length in PROMPTS]


def run(
    folder: Path,
    rounds: list[dict[str, Any]],
    *,
    rows: int = 1024,
    offload: bool = True,
    **options: Any,
) -> Run:
    tier = {
        "type": "disk",
        "path": str(folder / "cache"),
        "capacity_bytes": "256MiB",
        "segment_bytes": "16MiB",
    }
    return run_engine(
        folder,
        {
            "model": "lfm2",
            "engine": {
                "enable_prefix_caching": True,
                "max_model_len": 1024,
                "num_gpu_blocks_override": 400,
            },
            "kvstore": {"cpu_bytes_to_use": rows * 65536, "tiers": [tier], **options}
            if offload
            else None,
            "max_tokens": 6,
            "rounds": [{"prompts": PROMPTS, **one} for one in rounds],
        },
        ONE_PROCESS,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[list[int]]:
    """What the model answers without offload, each prompt alone."""
    return run(folder, [{}], offload=False).rounds["0"].tokens


def test_prompts_are_found_in_host_memory_and_after_a_restart_on_disk(
    folder: Path, truth: list[list[int]]
) -> None:
    first = run(folder, [{"name": "cold", "pause": 1}, {"name": "host"}])
    second = run(folder, [{"name": "disk"}, {"name": "together", "together": True}])
    assert first.rounds["cold"].tokens == truth
    assert first.rounds["host"].tokens == second.rounds["disk"].tokens == truth
    assert second.rounds["together"].tokens == truth
    for found in (first.rounds["host"], second.rounds["disk"], second.rounds["together"]):
        assert found.cached == HITS


def test_where_host_memory_is_tight_what_fits_with_its_states_is_loaded(
    folder: Path, truth: list[list[int]]
) -> None:
    """vLLM keeps the state at a prompt's end alone: either all of a prompt fits, or nothing."""
    rows = 16
    tight = run(folder, [{"name": "one by one"}, {"name": "together", "together": True}], rows=rows)
    for found in tight.rounds.values():
        assert found.tokens == truth
        assert found.metrics["timeouts"] == 0
    fits = [hit if hit // BLOCK + 1 <= rows else 0 for hit in HITS]
    assert tight.rounds["one by one"].cached == fits
    assert 0 in fits


def test_the_pace_of_computing_is_measured_though_all_chunks_are_on_disk(
    folder: Path, truth: list[list[int]]
) -> None:
    """Prompts that do not fit with their states are computed, and no lookup says so."""
    found = run(folder, [{}], rows=16, recompute_s="auto").rounds["0"]
    assert found.tokens == truth
    assert found.metrics["compute_seconds_per_chunk"] > 0


def test_answers_are_equal_to_the_last_bit_over_aborts_resets_and_a_restart(tmp_path: Path) -> None:
    """Its weights are such that wrong KV gives wrong tokens, which dummy weights may not."""
    options = ["--model", "lfm2", "--turns", "32", "--each", "16", "--seed", "7"]
    options += ["--folder", str(tmp_path)]

    def part(name: str, first: int = 0) -> str:
        log = tmp_path / f"{name}-{first}.txt"
        its = [*options, "--part", name, "--first", str(first)]
        status = run_script(TURNS, its, tmp_path, log, {}, timeout=ENGINE_SECONDS)
        assert status == 0, log.read_text()[-4000:]
        return log.read_text()

    part("turns")
    found: Counter[str] = Counter()
    for first in (0, 16):
        lines = part("engine", first).splitlines()
        found.update(json.loads(next(line for line in lines if line.startswith("{"))))
    assert found["turns"] == 32
    assert found["wrong tokens"] == found["wrong log probabilities"] == 0
    for what in ("aborted", "resets", "loaded from disk", "loaded from host"):
        assert found.get(what, 0) > 0, f"no {what}: {found}"
