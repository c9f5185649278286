"""Policies against figures that two independent simulators agreed on, hit for hit."""

from __future__ import annotations

import functools

import pytest

from benchmarks.eviction import trace
from kvstore.policies import create_policy
from tests.simulation.traces import hits_by_the_rules

kept = functools.lru_cache(maxsize=1)(trace)


def replayed(name: str, percent: float, policy: str) -> int:
    requests = kept(name)
    capacity = int(requests.unique * percent / 100)
    return hits_by_the_rules(requests, create_policy(policy, capacity))


def test_the_conversation_trace_is_read_whole() -> None:
    requests = kept("conversation")
    assert len(requests.requests) == 12_031
    assert requests.accesses == 288_500
    assert requests.unique == 182_790


@pytest.mark.parametrize(
    ("percent", "policy", "hits"),
    [
        (1, "lru", 15136),
        (1, "arc", 18747),
        (1, "s3-fifo", 21626),
        (1, "sieve", 16789),
        (5, "lru", 56479),
        (5, "arc", 60615),
        (5, "s3-fifo", 54051),
        (5, "sieve", 36564),
        (10, "lru", 80466),
        (10, "arc", 82007),
        (10, "s3-fifo", 70628),
        (10, "sieve", 56238),
        (25, "lru", 101978),
        (25, "arc", 96784),
        (25, "s3-fifo", 99377),
        (25, "sieve", 97053),
    ],
)
def test_conversation(percent: float, policy: str, hits: int) -> None:
    assert replayed("conversation", percent, policy) == hits


@pytest.mark.parametrize(
    ("percent", "better_than_lru"),
    [
        (1, 3.0),
        pytest.param(5, 1.5, marks=pytest.mark.slow),
        (10, 1.5),
        pytest.param(25, -0.5, marks=pytest.mark.slow),
    ],
)
def test_hit_density_beats_lru_on_the_conversation(percent: float, better_than_lru: float) -> None:
    lru = replayed("conversation", percent, "lru")
    ours = replayed("conversation", percent, "hit-density")
    assert 100 * (ours - lru) / 288_500 >= better_than_lru


@pytest.mark.parametrize(
    ("percent", "policy", "hits"),
    [
        (1, "lru", 452744),
        (1, "arc", 483410),
        (1, "s3-fifo", 490012),
        (1, "sieve", 413179),
        (5, "lru", 699824),
        (5, "arc", 699253),
        (5, "s3-fifo", 633400),
        (5, "sieve", 457060),
    ],
)
def test_chat(percent: float, policy: str, hits: int) -> None:
    assert replayed("chat", percent, policy) == hits


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("percent", "policy", "hits"),
    [
        (1, "lru", 4167563),
        (1, "arc", 4789350),
        (1, "s3-fifo", 4782732),
        (1, "sieve", 1981456),
        (5, "lru", 9801808),
        (5, "arc", 9701380),
        (5, "s3-fifo", 9451887),
        (5, "sieve", 4444344),
    ],
)
def test_agent(percent: float, policy: str, hits: int) -> None:
    assert replayed("agent", percent, policy) == hits


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hit_density_beats_lru_by_far_on_agents_in_a_small_tier() -> None:
    lru = replayed("agent", 1, "lru")
    ours = replayed("agent", 1, "hit-density")
    assert 100 * (ours - lru) / 10_594_294 >= 5.0
