"""How few lines a fault costs."""

from __future__ import annotations

from kvstore.core.reports import EVERY, Complaints
from kvstore.types import LogLine


def test_a_fault_that_comes_a_thousand_times_costs_a_line_a_minute() -> None:
    lines: list[LogLine] = []
    complaints = Complaints(lines.append)
    for number in range(1500):
        first = complaints.failed("promote", f"error {number}", now=number * 0.1)
        assert first == (number == 0)
    complaints.went_well("promote", "promote works again", now=150.0)
    assert len(lines) == 3, "an end that may be the middle is not told"
    complaints.went_well("promote", "promote works again", now=150.0 + EVERY)
    complaints.went_well("promote", "promote works again", now=151.0 + EVERY)
    assert [line.text for line in lines] == [
        "promote: error 0",
        "promote: 600 more in 60 s, the last one: error 600",
        "promote: 600 more in 60 s, the last one: error 1200",
        "promote works again; it had failed 1500 times in 150 s",
    ]


def test_a_fault_that_comes_and_goes_costs_few_lines_too() -> None:
    lines: list[LogLine] = []
    complaints = Complaints(lines.append, quiet=0.0)
    for second in range(600):
        complaints.failed("store", "no", now=float(second))
        complaints.went_well("store", "it stores again", now=second + 0.5)
    assert len(lines) <= 2 * (600 / EVERY) + 2


def test_chunks_are_counted_and_faults_are_kept_apart() -> None:
    lines: list[LogLine] = []
    complaints = Complaints(lines.append, quiet=0.0)
    complaints.failed("one", "no", 0.0, count=7)
    complaints.failed("other", "never", 1.0)
    complaints.went_well("one", "one is well", 2.0)
    complaints.went_well("third", "third is well", 2.0)
    assert [line.text for line in lines] == [
        "one: no",
        "other: never",
        "one is well; it had failed 7 times in 0 s",
    ]


def test_a_line_names_the_fault_how_often_and_what_the_caller_adds() -> None:
    lines: list[LogLine] = []
    complaints = Complaints(lines.append, quiet=0.0)
    complaints.failed("promote", "no", 0.0, count=7, tier="disk")
    complaints.failed("promote", "never", EVERY, count=2, tier="disk")
    complaints.went_well("promote", "promote works again", EVERY + 1.0, tier="disk")
    fault = {"what": "promote", "tier": "disk"}
    assert [(line.event, line.about) for line in lines] == [
        ("fault.begun", {**fault, "error": "no", "failures": 7}),
        ("fault.goes_on", {**fault, "error": "never", "failures": 2}),
        ("fault.over", {**fault, "failures": 9, "seconds": EVERY}),
    ]
