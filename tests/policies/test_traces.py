"""The traces made from a trace."""

from __future__ import annotations

import pytest

from benchmarks.interleave import merged, sessions, shuffled, thinned
from kvstore.simulation import Trace


def conversation() -> Trace:
    """Three sessions of two requests under one common first chunk, and a stranger."""
    found = [(40.0, [99])]
    for session in range(3):
        ids = [0, 10 + session]
        found += [(100.0 * session, ids), (100.0 * session + 30, [*ids, 20 + session])]
    return Trace.of("conversation", sorted(found))


def test_requests_that_continue_one_another_are_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.interleave.COMMON", 2)
    groups = sessions(conversation())
    # The first to share the common block is taken for a continuation, later ones are not.
    assert [[seconds for seconds, _ in group] for group in groups] == [
        [0, 30, 100, 130],
        [40],
        [200, 230],
    ]


def test_shuffling_keeps_every_request_and_every_pause() -> None:
    before = conversation()
    after = shuffled(before, 1)
    assert sorted(map(len, after.requests)) == sorted(map(len, before.requests))
    assert after.unique == before.unique
    assert after.times == sorted(after.times)
    assert shuffled(before, 1) == after


def test_thinning_keeps_whole_sessions() -> None:
    before = conversation()
    whole = thinned(before, 1.0, 1)
    assert (whole.times, whole.requests) == (before.times, before.requests)
    assert thinned(before, 0.0, 1).requests == []


def test_merged_traces_share_no_chunk() -> None:
    one, other = conversation(), conversation()
    both = merged(one, other)
    assert len(both.requests) == 14
    assert both.unique == 2 * one.unique
    assert both.times == sorted(both.times)
