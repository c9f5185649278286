"""Policies against figures that two independent simulators agreed on, hit for hit."""

from __future__ import annotations

import functools

import pytest

from benchmarks.traces import TRACES, keyed, read_trace, replay, unique
from kvstore.policies import create_policy

FILES = {
    "conversation": "mooncake_conversation.jsonl.xz",
    "agent": "agent_sessions.packed.xz",
    "chat": "chat_generated.packed.xz",
}


@functools.lru_cache(maxsize=1)
def trace(name: str) -> tuple[list[list[bytes]], int]:
    """The keys of each request, and how many different ones there are."""
    requests = keyed(read_trace(TRACES / FILES[name]))
    return requests, unique(requests)


def replayed(name: str, percent: float, policy: str) -> tuple[int, int]:
    requests, different = trace(name)
    told = replay(create_policy(policy, int(different * percent / 100)), requests)
    return told.hits, told.inserts


def test_the_conversation_trace_is_read_whole() -> None:
    requests, different = trace("conversation")
    assert len(requests) == 12_031
    assert sum(map(len, requests)) == 288_500
    assert different == 182_790


@pytest.mark.parametrize(
    ("percent", "policy", "hits", "inserts"),
    [
        (1, "lru", 15136, 273364),
        (1, "arc", 18747, 269753),
        (1, "s3-fifo", 21626, 266878),
        (1, "sieve", 16789, 271711),
        (5, "lru", 56479, 232021),
        (5, "arc", 60615, 227885),
        (5, "s3-fifo", 54051, 234380),
        (5, "sieve", 36564, 251936),
        (10, "lru", 80466, 208034),
        (10, "arc", 82007, 206493),
        (10, "s3-fifo", 70628, 217543),
        (10, "sieve", 56238, 232262),
        (25, "lru", 101978, 186522),
        (25, "arc", 96784, 191716),
        (25, "s3-fifo", 99377, 188679),
        (25, "sieve", 97053, 191447),
    ],
)
def test_conversation(percent: float, policy: str, hits: int, inserts: int) -> None:
    assert replayed("conversation", percent, policy) == (hits, inserts)


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
    lru, _ = replayed("conversation", percent, "lru")
    ours, _ = replayed("conversation", percent, "hit-density")
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
    assert replayed("chat", percent, policy)[0] == hits


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
    assert replayed("agent", percent, policy)[0] == hits


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hit_density_beats_lru_by_far_on_agents_in_a_small_tier() -> None:
    lru, _ = replayed("agent", 1, "lru")
    ours, _ = replayed("agent", 1, "hit-density")
    assert 100 * (ours - lru) / 10_594_294 >= 5.0
