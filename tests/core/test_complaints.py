"""How few lines a fault costs."""

from __future__ import annotations

from kvstore.core.complaints import EVERY, Complaints


def test_a_fault_that_comes_a_thousand_times_costs_a_line_a_minute() -> None:
    lines: list[str] = []
    complaints = Complaints(lines.append)
    for number in range(1500):
        first = complaints.failed("promote", f"error {number}", now=number * 0.1)
        assert first == (number == 0)
    complaints.went_well("promote", "promote works again", now=150.0)
    assert len(lines) == 3, "an end that may be the middle is not told"
    complaints.went_well("promote", "promote works again", now=150.0 + EVERY)
    complaints.went_well("promote", "promote works again", now=151.0 + EVERY)
    assert lines == [
        "promote: error 0",
        "promote: 600 more in 60 s, the last one: error 600",
        "promote: 600 more in 60 s, the last one: error 1200",
        "promote works again; it had failed 1500 times in 150 s",
    ]


def test_a_fault_that_comes_and_goes_costs_few_lines_too() -> None:
    lines: list[str] = []
    complaints = Complaints(lines.append, quiet=0.0)
    for second in range(600):
        complaints.failed("store", "no", now=float(second))
        complaints.went_well("store", "it stores again", now=second + 0.5)
    assert len(lines) <= 2 * (600 / EVERY) + 2


def test_chunks_are_counted_and_faults_are_kept_apart() -> None:
    lines: list[str] = []
    complaints = Complaints(lines.append, quiet=0.0)
    complaints.failed("one", "no", 0.0, count=7)
    complaints.failed("other", "never", 1.0)
    complaints.went_well("one", "one is well", 2.0)
    complaints.went_well("third", "third is well", 2.0)
    assert lines == ["one: no", "other: never", "one is well; it had failed 7 times in 0 s"]
