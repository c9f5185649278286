"""What hits save: seconds of computing, which grow with the depth, less those of reading."""

from __future__ import annotations

import math

import pytest

from kvstore.plugins import Choice
from kvstore.simulation import Costs, Outcome, Setup, Trace, replay
from tests.simulation.traces import conversations


def test_a_deeper_hit_saves_more_and_a_read_takes_the_same() -> None:
    # Chunk n of a prompt takes 10 + 2n ms; a disk serves the last 2 of the 4 hits.
    trace = Trace.of("trace", [(0, "abcde"), (1, "abcdx")])
    outcome = replay(trace, Setup(10))
    assert (outcome.hits, outcome.hit_depths) == (4, 0 + 1 + 2 + 3)
    assert (outcome.accesses, outcome.depths) == (10, 2 * (0 + 1 + 2 + 3 + 4))
    costs = Costs.parse("10,20@5")
    assert costs.saved(outcome) == pytest.approx(0.010 + 0.012 + 0.014 + 0.016)
    assert costs.computing(outcome.accesses, outcome.depths) == pytest.approx(2 * 0.070)
    outcome.host_hits, outcome.disk_hits = 2, 2
    read = Costs(costs.compute, costs.deeper, read=0.003)
    assert read.saved(outcome) == pytest.approx(0.052 - 0.006)
    assert Costs().saved(outcome) is None
    assert read.share_saved(outcome) == pytest.approx(0.046 / 0.140)
    assert Costs().share_saved(outcome) == outcome.hit_ratio


@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_where_depth_costs_nothing_savings_are_hits(policy: str) -> None:
    trace = conversations(3)
    outcome = replay(trace, Setup(trace.unique // 5, host_policy=Choice(policy)))
    saved = Costs.parse("8").saved(outcome)
    assert outcome.hits > 0
    assert saved == pytest.approx(0.008 * outcome.hits)


def test_a_disk_pays_from_a_depth_on() -> None:
    assert Costs(compute=0.002, deeper=0.0001, read=0.003).pays_from == pytest.approx(10)
    assert Costs(compute=0.002, read=0.003).pays_from == math.inf
    assert Costs(compute=0.004, read=0.003).pays_from == 0
    assert Costs(compute=0.002).pays_from is None
    assert Costs(read=0.002).pays_from is None


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "12@4", "12,30", "12,6@4", "12,30@0", "1e99",
                                  "nan", "12,30@4,5", "12 ms"])  # fmt: skip
def test_what_is_no_cost_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="12,30@60: 12 ms for the first chunk"):
        Costs.parse(text)


def test_without_the_cost_of_reads_nothing_is_said_of_what_a_disk_saves() -> None:
    costs = Costs(0.01)
    assert costs.saved(Outcome(Setup(4), host_hits=3, accesses=9)) is not None
    assert costs.saved(Outcome(Setup(4, 8), host_hits=3, accesses=9, disk_hits=1)) is None
