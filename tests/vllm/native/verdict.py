"""What came of a run, held against what is expected of it.

Of a test in which a part of ours takes part, either it passes or `expected/VERSION.toml` names it
under the reason why it cannot. A test that fails and is not named, one that is named
and passes, and a number of tests that is not the expected one: each of them is a fault of the run.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).parent / "expected"


@dataclass
class Verdict:
    """What a run showed.

    Attributes:
        table: of each place: tests that our part takes part in, those that pass, the others.
        reasons: place and reason, with the number of tests.
        faults: what is not as expected, one text each.
    """

    table: dict[str, Counter[str]]
    reasons: Counter[tuple[str, str]]
    faults: list[str] = field(default_factory=list)


def judge(version: str, outcomes: dict[str, dict[str, Any]]) -> Verdict:
    """Hold the outcomes of one release against what is expected."""
    expected = tomllib.loads((EXPECTED / f"{version}.toml").read_text())
    named = {
        (group["place"], test): group["reason"]
        for group in expected.get("exception", ())
        for test in group["tests"]
    }
    found = Verdict({}, Counter())
    used = set()
    for test, outcome in outcomes.items():
        place = outcome["place"]
        counts = found.table.setdefault(place, Counter())
        if not outcome.get("takes_part") or outcome["outcome"] == "skipped":
            counts["elsewhere"] += 1
            continue
        counts["applies"] += 1
        key = _key_of(place, test, named)
        if outcome["outcome"] == "passed":
            counts["passed"] += 1
            if key is not None:
                used.add(key)
                found.faults.append(f"passes, and is named as one that cannot: {test}")
        elif key is None:
            found.faults.append(f"FAILS: {test}\n{outcome['text']}")
        else:
            used.add(key)
            found.reasons[place, named[key]] += 1
    found.faults += [f"named, and not there: {key[0]} {key[1]}" for key in named.keys() - used]
    for place, number in expected["applies"].items():
        seen = found.table.get(place, Counter())["applies"]
        if seen != number:
            found.faults.append(f"{place}: ours takes part in {seen} tests, not in {number}")
    return found


def _key_of(place: str, test: str, named: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """How the list names a test: with all its parameters, or without for all variants of it."""
    for name in (test, test.split("[")[0]):
        if (place, name) in named:
            return place, name
    return None


def describe(version: str, found: Verdict, what: dict[str, str]) -> str:
    """The table, to be read by people."""
    lines = [f"vLLM {version}'s own tests, with ours in the place of", ""]
    lines += ["| place | tests | pass | cannot |", "|---|---|---|---|"]
    total: Counter[str] = Counter()
    for place, text in what.items():
        counts = found.table.get(place, Counter())
        total += counts
        applies, passed = counts["applies"], counts["passed"]
        lines.append(f"| {text} | {applies} | {passed} | {applies - passed} |")
    applies, passed = total["applies"], total["passed"]
    lines += [f"| together | {applies} | {passed} | {applies - passed} |", ""]
    lines.append(f"({total['elsewhere']} more ran in which no part of ours has a place.) Why not:")
    reasons: Counter[str] = Counter()
    for (_, reason), number in found.reasons.items():
        reasons[reason] += number
    lines += ["", *(f"{number:5}  {reason}" for reason, number in reasons.most_common())]
    return "\n".join(lines)
