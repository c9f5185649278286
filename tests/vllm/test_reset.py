"""Resets of a real engine beside a neighbour; `make reset` runs a hundred of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.vllm.conftest import SHORT
from tests.vllm.engines import ENGINE_SECONDS, Run, run_script

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
    log = tmp_path / "log.txt"
    status = run_script(
        RESETS,
        ["--resets", "3", "--seed", "3", "--right", str(told)],
        tmp_path,
        log,
        {},
        timeout=ENGINE_SECONDS,
    )
    text = log.read_text()
    assert status == 0, text[-4000:]
    found = FIGURES.search(text)
    assert found is not None, text
    amid, completions, sources = found.groups()
    assert int(amid) > 0
    assert int(completions) > 20
    assert sum(map(int, re.findall(r": (\d+)", sources))) > 0, "nothing was loaded"
