"""Preemption, aborts amid loads, resets amid stores, sleep: real engines give the right tokens.

`python benchmarks/turmoil.py` runs more of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENGINE_SECONDS, FORKED, run_script

TURMOIL = Path(__file__).resolve().parents[2] / "benchmarks" / "turmoil.py"

TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED}


@pytest.mark.parametrize(
    ("model", "engine", "environment"),
    [
        pytest.param("llama", {}, {}, id="one group"),
        pytest.param("gemma", {}, {}, id="sliding windows"),
        pytest.param("llama", {"tensor_parallel_size": 2}, TWO_WORKERS, id="two workers"),
    ],
)
def test_tokens_are_those_without_offload_whatever_makes_requests_start_over(
    tmp_path: Path, model: str, engine: dict[str, Any], environment: dict[str, str]
) -> None:
    same = ["--model", model, "--engine", json.dumps(engine), "--folder", str(tmp_path)]
    texts = []
    for number, more in enumerate((["--reference"], ["--episodes", "6"])):
        log = tmp_path / f"log-{number}.txt"
        status = run_script(
            TURMOIL,
            [*same, *more],
            tmp_path,
            log,
            environment,
            launcher=number,
            timeout=ENGINE_SECONDS,
        )
        texts.append(log.read_text())
        assert status == 0, texts[-1][-4000:]
    found = json.loads(next(line for line in texts[1].splitlines() if line.startswith("{")))
    assert found["wrong"] == 0
    assert found["compared"] > 5 * found["completed"], "tokens; the rest comes after ties"
    for what in ("preempted", "aborted while loading", "resets amid copies", "sleeps"):
        assert found.get(what, 0) > 0, f"never {what}: {found}"
    # Two workers leave the disk's writes so little of two cores that they may come too late.
    for medium in ("host",) if environment else ("host", "disk"):
        assert found["loaded"].get(medium, 0) > 0, f"nothing came from {medium}: {found}"
