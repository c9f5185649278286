"""Resets of a real engine beside a neighbour; `make reset` runs a hundred of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.vllm.conftest import SHORT
from tests.vllm.engines import Run

RESETS = Path(__file__).resolve().parents[2] / "benchmarks" / "reset_engine.py"
TOKENS = 6
"""What it lets each request complete."""

FIGURES = re.compile(
    r"(\d+) amid device copies; (\d+) completions, 0 wrong; "
    r".* chunks loaded from (\{.*\}); 0 rows held"
)


def test_resets_amid_stores_and_loads_never_give_a_wrong_token(
    tmp_path: Path, reference: Run
) -> None:
    tokens = reference.rounds["short"].tokens
    right = [(seed, each[:TOKENS]) for (seed, _), each in zip(SHORT, tokens, strict=True)]
    told = tmp_path / "right.json"
    told.write_text(json.dumps(right))
    done = subprocess.run(
        [sys.executable, str(RESETS), "--resets", "5", "--seed", "3", "--right", str(told)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = FIGURES.search(done.stdout)
    assert found is not None, done.stdout
    amid, completions, sources = found.groups()
    assert int(amid) > 0
    assert int(completions) > 20
    assert sum(map(int, re.findall(r": (\d+)", sources))) > 0, "nothing was loaded"
