"""Real vLLM engines for the tests, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = Path(__file__).resolve().parents[2] / "examples" / "rounds.py"


@dataclass
class Round:
    """What one round of prompts gave."""

    seconds: float
    tokens: list[list[int]]
    cached: list[int]


@dataclass
class Run:
    """What one engine did, and its log."""

    rounds: dict[str, Round]
    log: str


def run_engine(
    folder: Path, scenario: dict[str, Any], environment: dict[str, str] | None = None
) -> Run:
    """Start an engine in a process of its own, run the scenario, fail loudly if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("scenario-*.json")))
    request = folder / f"scenario-{number}.json"
    answer = folder / f"report-{number}.json"
    log = folder / f"log-{number}.txt"
    # A relative path: the model has the same name wherever the test runs.
    request.write_text(json.dumps({"model_dir": "tiny-model", **scenario}))
    with log.open("w") as output:
        process = subprocess.run(
            [sys.executable, str(ROUNDS), str(request), str(answer)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            timeout=240,
            check=False,
        )
    text = log.read_text()
    assert process.returncode == 0, "\n".join(text.splitlines()[-60:])
    report = json.loads(answer.read_text())
    rounds = {
        found["name"]: Round(
            found["seconds"],
            [request["tokens"] for request in found["requests"]],
            [request["cached"] for request in found["requests"]],
        )
        for found in report["rounds"]
    }
    return Run(rounds, text)
