"""What a run of vLLM's own tests is held against: `tests.vllm.native.verdict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.native import verdict

EXPECTED = """
[applies]
manager = 3

[[exception]]
place = "manager"
reason = "looks inside"
tests = ["m.py::test_inside"]
"""


def outcome(how: str, *, takes_part: bool = True) -> dict[str, Any]:
    return {"place": "manager", "takes_part": takes_part, "outcome": how, "text": "trace"}


GOOD = {
    "m.py::test_one[manager]": outcome("passed"),
    "m.py::test_inside[manager-lru]": outcome("failed"),
    "m.py::test_inside[manager-arc]": outcome("failed"),
    "m.py::test_other[manager]": outcome("failed", takes_part=False),
}


@pytest.fixture(autouse=True)
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.0.toml").write_text(EXPECTED)
    monkeypatch.setattr(verdict, "EXPECTED", tmp_path)


def test_a_run_that_goes_as_expected_has_no_faults_and_is_counted() -> None:
    found = verdict.judge("1.0", GOOD)
    assert found.faults == []
    assert found.table["manager"] == {"applies": 3, "passed": 1, "elsewhere": 1}
    assert found.reasons == {("manager", "looks inside"): 2}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"m.py::test_one[manager]": outcome("failed")}, "FAILS: m.py::test_one"),
        ({"m.py::test_inside[manager-arc]": outcome("passed")}, "passes, and is named"),
        ({"m.py::test_more[manager]": outcome("passed")}, "takes part in 4 tests, not in 3"),
        ({"m.py::test_one[manager]": outcome("passed", takes_part=False)}, "in 2 tests, not in 3"),
    ],
)
def test_whatever_goes_otherwise_is_a_fault(changed: dict[str, Any], fault: str) -> None:
    found = verdict.judge("1.0", {**GOOD, **changed})
    assert len(found.faults) == 1
    assert fault in found.faults[0]


def test_a_name_that_no_test_has_is_a_fault() -> None:
    gone = {name: one for name, one in GOOD.items() if "inside" not in name}
    faults = verdict.judge("1.0", gone).faults
    assert faults[0] == "named, and not there: manager m.py::test_inside"
