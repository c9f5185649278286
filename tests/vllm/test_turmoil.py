"""Preemption, aborts amid loads, resets amid stores, sleep: real engines give the right tokens.

`python benchmarks/turmoil.py` runs more of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENGINE_SECONDS, FORKED, run_script

TURMOIL = Path(__file__).resolve().parents[2] / "benchmarks" / "turmoil.py"

TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **FORKED}


def turmoil(
    folder: Path,
    more: list[str],
    environment: dict[str, str],
    launcher: int,
) -> str:
    """What it says; it has to end well. The model and the right tokens lie in `folder`."""
    log = folder / f"log-{launcher}.txt"
    status = run_script(
        TURMOIL,
        ["--folder", str(folder), *more],
        folder,
        log,
        environment,
        launcher=launcher,
        timeout=ENGINE_SECONDS,
    )
    text = log.read_text()
    assert status == 0, text[-4000:]
    return text


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a model and its right tokens, which no number of workers changes."""

    @cache
    def made(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        turmoil(folder, ["--model", model, "--reference"], {}, 0)
        return folder

    return made


@pytest.mark.parametrize(
    ("model", "engine", "environment"),
    [
        pytest.param("llama", {}, {}, id="one group"),
        pytest.param("gemma", {}, {}, id="sliding windows"),
        pytest.param(
            "llama",
            {"tensor_parallel_size": 2},
            TWO_WORKERS,
            id="two workers",
        ),
    ],
)
def test_tokens_are_those_without_offload_whatever_makes_requests_start_over(
    tmp_path: Path,
    right: Callable[[str], Path],
    model: str,
    engine: dict[str, Any],
    environment: dict[str, str],
) -> None:
    same = ["--model", model, "--engine", json.dumps(engine)]
    shutil.copytree(right(model), tmp_path, dirs_exist_ok=True)
    # Two workers that share two cores take many times as long, and copy late.
    episodes = "4" if environment else "8"
    said = turmoil(tmp_path, [*same, "--episodes", episodes, "--seed", "5"], environment, 1)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["wrong"] == 0
    assert found["compared"] > 5 * found["completed"], "tokens; the rest comes after ties"
    for what in ("preempted", "aborted while loading", "sleeps"):
        assert found.get(what, 0) > 0, f"never {what}: {found}"
    resets = found.get("resets amid copies", 0)
    if environment:
        resets += found.get("resets", 0)
    assert resets > 0, f"never reset: {found}"
    # Two workers leave the disk's writes so little of two cores that they may come too late.
    for medium in ("host",) if environment else ("host", "disk"):
        assert found["loaded"].get(medium, 0) > 0, f"nothing came from {medium}: {found}"
