"""docs/faults.md and these tests name each other."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_fault_has_a_row_and_every_row_has_a_test() -> None:
    table = (HERE.parents[1] / "docs" / "faults.md").read_text()
    named = re.findall(r"`(test_\w+)` \|$", table, re.MULTILINE)
    files = [file for file in HERE.glob("test_*.py") if file != Path(__file__)]
    tests = re.findall(r"^async def (test_\w+)", "".join(f.read_text() for f in files), re.M)
    assert sorted(named) == sorted(tests)
