"""The optimum and the curve of LRU, against slow and plain ways to the same figures."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvstore.errors import TraceError
from kvstore.plugins import Choice
from kvstore.policies import policy_names
from kvstore.simulation import LRUCurve, Setup, Trace, optimum, read_trace, replay, sizes_between
from tests.simulation.traces import conversations

CONVERSATION = (
    Path(__file__).parents[2] / "benchmarks" / "traces" / "mooncake_conversation.jsonl.xz"
)


def test_the_conversation_trace_has_the_published_optimum() -> None:
    trace = read_trace(CONVERSATION)
    bound = optimum(trace, 1827)
    assert (bound.hits, bound.inserts) == (71_078, 48_376)
    assert optimum(trace, 9139).hits == 105_710


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_surpasses_the_optimum(seed: int) -> None:
    trace = conversations(seed)
    for capacity in (10, 40, 120):
        best = optimum(trace, capacity).hits
        for policy in policy_names():
            assert replay(trace, Setup(capacity, host_policy=Choice(policy))).hits <= best


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_could_be_kept_brings_more_hits(seed: int) -> None:
    trace = conversations(seed, sessions=3, turns=5)
    capacity = 2 + seed % 3
    assert optimum(trace, capacity).hits == most_hits(trace, capacity)


def test_of_ids_that_are_no_hashes_of_prefixes_there_is_no_bound() -> None:
    trace = Trace.of("loose", [(0.0, [7, 5]), (1.0, [0, 7, 6]), (2.0, [7, 0, 3])])
    with pytest.raises(TraceError, match="its ids are not hashes of prefixes"):
        optimum(trace, 2)


def most_hits(trace: Trace, capacity: int) -> int:
    """By trying everything: after each request any prefix-closed choice may be kept."""
    parents: dict[int, int] = {}
    for chunks in trace.requests:
        parents.update(itertools.pairwise(reversed(chunks)))
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chunks in trace.requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            found = len(list(itertools.takewhile(kept.__contains__, chunks)))
            for choice in closed_sets(kept | set(chunks), capacity, parents):
                after[choice] = max(after.get(choice, 0), hits + found)
        best = after
    return max(best.values())


def closed_sets(
    chunks: frozenset[int], capacity: int, parents: dict[int, int]
) -> set[frozenset[int]]:
    """Every set of up to `capacity` chunks that has the parent of each of its own."""
    found = {frozenset[int]()}
    for _ in range(capacity):
        found |= {
            kept | {chunk}
            for kept in found
            for chunk in chunks - kept
            if parents.get(chunk) is None or parents[chunk] in kept
        }
    return found


def test_the_curve_is_that_of_replays() -> None:
    for seed in range(4):
        trace = conversations(seed)
        curve = LRUCurve(trace)
        for capacity in (1, 5, 20, 60, 150, trace.unique):
            assert curve.hits(capacity) == replay(trace, Setup(capacity)).hits
        assert curve.hits(0) == 0
        assert curve.hits(10 * trace.unique) == curve.hits(trace.unique)


def test_a_trace_that_is_not_chained_has_no_curve() -> None:
    with pytest.raises(TraceError, match="request 2 has a chunk that follows another chunk"):
        LRUCurve(Trace.of("t", [(0.0, [1, 2]), (1.0, [3, 2])]))


def test_sizes_grow_by_a_factor() -> None:
    assert list(sizes_between(1, 1000, 4)) == [1, 10, 100, 1000]
    assert list(sizes_between(5, 5, 4)) == [5]
