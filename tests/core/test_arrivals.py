"""Chunks are fetched for requests that the server has queued, before it asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core import Flow, arrivals
from kvstore.core.residency.base import TierView
from kvstore.core.residency.health import FIRST_PAUSE
from kvstore.core.residency.remote_answers import Answers
from kvstore.policies.lru import LRU
from kvstore.types import Op
from tests.core.rig import Rig, chain
from tests.core.test_flow import demoting, store

A, B, C = chain("a", 4), chain("b", 4), chain("c", 4)


def queue(rig: Rig, name: str, keys: list[bytes]) -> bool:
    rig.core.on_new_request(name)
    return rig.core.on_request_queued(name, keys)


def fetched(rig: Rig) -> list[str]:
    """First letters of what is in host memory or on its way there, in order."""
    return [chr(key[0]) for key in rig.core.chunks]


def test_a_queued_request_finds_its_chunks_when_its_turn_comes() -> None:
    rig = Rig(rows=64, on=[A])
    assert queue(rig, "r", A)
    rig.settle()
    assert rig.ask(A, "r") == 4
    rig.use(A, "r")
    rig.core.on_request_finished("r")
    assert (rig.stats.fetched_queued, rig.stats.deferrals, rig.stats.busy_rows) == (4, 0, 0)


def test_requests_are_served_in_the_order_of_their_arrival() -> None:
    rig = Rig(rows=64, on=[[*A, *B, *C]])
    for name, keys in (("c", C), ("a", A), ("b", B)):
        assert queue(rig, name, keys)
    rig.settle()
    assert fetched(rig) == [*"cccc", *"aaaa", *"bbbb"]


def test_only_the_leading_keys_that_are_somewhere_are_fetched() -> None:
    rig = Rig(rows=64, on=[[A[0], A[1], A[3], *B]])
    queue(rig, "a", A)
    queue(rig, "b", B)
    rig.settle()
    assert fetched(rig) == [*"aa", *"bbbb"]


def test_what_is_in_host_memory_already_is_kept_for_a_queued_request() -> None:
    rig = Rig(rows=8, on=[[]])
    rig.store(A)
    queue(rig, "a", A)
    rig.settle()
    for name in "xyz":
        rig.store(chain(name, 4))
    assert all(rig.in_host(key) for key in A)
    assert rig.ask(A, "a") == 4


def test_a_request_that_is_asked_for_is_served_first() -> None:
    rig = Rig(rows=64, on=[[*A, *B]])
    queue(rig, "a", A)
    assert rig.ask(B, "b") is None
    assert [move.keys for move in rig.step()] == [B, A]
    rig.settle()
    assert fetched(rig) == [*"bbbb", *"aaaa"]


def test_the_last_of_the_queued_requests_give_way_to_one_that_is_asked_for() -> None:
    long = chain("l", 12)
    rig = Rig(rows=16, on=[[*A, *B, *long]])
    queue(rig, "a", A)
    queue(rig, "b", B)
    rig.settle()
    assert rig.resolve(long, "l") == 12
    assert rig.stats.gave_way == 1
    assert rig.stats.timeouts == rig.stats.truncations == 0
    assert all(rig.in_host(key) for key in A)
    # It is served again once there is room.
    rig.use(long, "l")
    rig.core.on_request_finished("l")
    rig.step()
    rig.settle()
    assert rig.ask(B, "b") == 4


def test_an_abort_ends_the_leases_and_the_fetch() -> None:
    rig = Rig(rows=16, on=[[*A, *B]])
    queue(rig, "a", A)
    queue(rig, "b", B)
    rig.step()
    rig.core.on_request_finished("a")
    rig.core.on_request_finished("b")
    rig.settle()
    assert rig.stats.busy_rows == 0
    assert "b" not in fetched(rig)


def test_a_request_that_asks_amid_its_fetch_waits_for_the_rest_of_it() -> None:
    rig = Rig(rows=64, on=[A])
    queue(rig, "a", A)
    (move,) = rig.step()
    assert rig.ask(A, "a") is None
    assert rig.step() == [], "what is on its way is not fetched again"
    rig.finish(move)
    assert rig.ask(A, "a") == 4


def test_no_deadline_passes_while_a_request_is_queued() -> None:
    rig = Rig(rows=64, on=[A], deadline=1.0, max_wait=10.0, lease=3.0)
    queue(rig, "a", A)
    rig.settle()
    rig.wait(60.0, each=1.0)
    assert rig.ask(A, "a") == 4
    assert rig.stats.timeouts == rig.stats.lapses == 0


def test_a_tier_that_is_outpaced_is_not_read_for_queued_requests() -> None:
    rig = Rig(rows=64, on=[A], recompute=1e-6)
    tier: TierView = rig.core.tiers[0]
    tier.health.pace.replace(100, 100.0)
    rig.step()
    assert tier.health.recompute.outpaced
    queue(rig, "a", A)
    assert rig.wait(1.0) == []


def test_a_store_is_asked_about_the_keys_of_a_queued_request() -> None:
    rig = Rig(rows=64, on=[], store=Answers())
    queue(rig, "a", A)
    (question,) = rig.step()
    assert (question.op, question.keys) == (Op.ASK, A)
    assert rig.step() == []
    rig.finish(question, failed=A[3:])
    (move,) = rig.step()
    assert (move.op, move.keys) == (Op.PROMOTE, A[:3])


def test_a_request_that_has_asked_is_not_queued_any_more() -> None:
    rig = Rig(rows=64, on=[A])
    assert rig.ask(A, "a") is None
    assert not rig.core.on_request_queued("a", A)


def test_a_removal_takes_chunks_from_queued_requests() -> None:
    rig = Rig(rows=64, on=[A])
    queue(rig, "a", A)
    rig.settle()
    rig.core.remove(A)
    rig.settle()
    assert fetched(rig) == []
    assert rig.ask(A, "a") == 0


def test_a_request_whose_turn_comes_without_a_lookup_keeps_its_chunks_only_for_a_while() -> None:
    rig = Rig(rows=16, on=[A], lease=3.0)
    queue(rig, "a", A)
    rig.settle()
    rig.core.on_request_turn("a")
    rig.step()
    assert rig.stats.busy_rows == 4
    rig.wait(3.2)
    assert rig.stats.busy_rows == 0


def test_stores_get_rows_of_queued_requests_where_all_others_are_pinned() -> None:
    rig = Rig(rows=16, on=[[*A, *B]])
    pinned = chain("p", 8)
    rig.store(pinned)
    rig.core.pin(pinned, rig.now + 1000)
    for name, keys in (("a", A), ("b", B)):
        queue(rig, name, keys)
    rig.settle()
    assert rig.stats.busy_rows == 16
    grant = rig.granted(chain("s", 8), "writer")
    assert len(grant.keys) == 8


def test_a_tier_that_is_not_read_for_a_while_costs_no_place_in_the_queue() -> None:
    rig = Rig(rows=64, on=[[*A, *B]])
    health = rig.core.tiers[0].health
    health.failed(Op.ASK, rig.now, "no route")
    queue(rig, "a", A)
    queue(rig, "b", B)
    rig.flush()
    assert fetched(rig) == []
    assert health.calls.probe(rig.now + FIRST_PAUSE)
    health.went_well(Op.ASK)
    rig.step()
    rig.settle()
    assert fetched(rig) == [*"aaaa", *"bbbb"]


def test_a_tier_that_does_not_answer_holds_up_no_other() -> None:
    rig = Rig(rows=64, on=[A, B], deadline=1.0)
    queue(rig, "a", A)
    rig.step()
    silent = rig.promotion
    queue(rig, "b", B)
    for _ in range(40):
        for move in list(rig.moves):
            if move is not silent:
                rig.end(move)
        rig.step(0.1)
    assert all(rig.in_host(key) for key in B)
    rig.finish(silent)
    rig.settle()
    assert rig.ask(A, "a") == 4


def test_room_for_one_that_is_asked_for_is_made_at_once() -> None:
    small = [chain(f"s{number:02}", 1) for number in range(32)]
    long = chain("l", 60)
    rig = Rig(rows=64, on=[[*long, *(key for keys in small for key in keys)]], segment_slots=128)
    for number, keys in enumerate(small):
        queue(rig, f"s{number}", keys)
    rig.settle()
    assert rig.stats.busy_rows == 32
    steps = 0
    while rig.ask(long, "l") is None:
        steps += 1
        rig.step(0.01)
        rig.end_all()
    assert steps <= 6
    assert rig.stats.truncations == 0


def test_stores_are_asked_about_one_queued_request_at_a_time() -> None:
    rig = Rig(rows=64, on=[], store=Answers())
    for name, keys in (("a", A), ("b", B)):
        queue(rig, name, keys)
    (question,) = rig.step()
    assert question.keys == A
    assert rig.step() == []
    rig.finish(question, failed=A)
    (question,) = rig.step()
    assert question.keys == B
    assert rig.stats.tiers[0].unawaited == 0


def test_a_store_is_asked_again_when_its_answer_is_out_of_date() -> None:
    rig = Rig(rows=16, on=[], store=Answers(lasts=5.0))
    queue(rig, "a", chain("long", 8))
    queue(rig, "b", B)
    rig.settle()
    # Half of host memory is full, so the second one has to wait.
    rig.wait(20.0, each=1.0)
    rig.core.on_request_finished("a")
    (question,) = rig.step()
    assert (question.op, question.keys) == (Op.ASK, B)
    rig.finish(question)
    rig.settle()
    assert rig.ask(B, "b") == 4


def test_keys_that_are_named_twice_are_one_chunk() -> None:
    rig = Rig(rows=64, on=[A])
    queue(rig, "a", [*A, *A])
    rig.settle()
    assert rig.ask(A, "a") == 4
    rig.core.on_request_finished("a")
    rig.settle()
    assert (rig.stats.busy_rows, rig.stats.chunks + rig.stats.free_rows) == (0, 64)


def test_a_name_that_is_used_again_in_the_step_of_its_predecessor_is_fetched_when_asked() -> None:
    rig = Rig(rows=64, on=[A])
    assert rig.ask(B, "a") == 0
    rig.core.on_request_finished("a")
    queue(rig, "a", A)
    rig.settle()
    assert rig.resolve(A, "a") == 4
    rig.core.on_request_finished("a")
    rig.settle()
    assert not rig.core._arrivals


class Links(LRU):
    """Remembers which keys it was told to follow one another."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.told: list[list[bytes]] = []

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        self.told.append(list(keys))


def test_the_policy_hears_of_each_group_by_itself() -> None:
    groups = [
        [f"g{place}".encode() + bytes([0, 0, 0, group]) for place in range(3)] for group in (0, 1)
    ]
    prompt = [key for pair in zip(*groups, strict=True) for key in pair]
    policy = Links(64)
    rig = Rig(rows=64, on=[prompt], policy=policy)
    queue(rig, "a", prompt)
    rig.settle()
    assert policy.told == groups


def test_keys_that_are_nowhere_do_not_count_for_what_may_be_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals, "MOST_KEYS", 100)
    rig = Rig(rows=64, on=[A])
    for name in "mnop":
        assert queue(rig, name, [*A, *chain(name, 40)])
        rig.settle()


def test_host_memory_shrinks_although_queued_requests_lease_it() -> None:
    rig = Rig(rows=16, on=[[*A, *B]])
    queue(rig, "a", A)
    queue(rig, "b", B)
    rig.settle()
    rig.core.limit_rows(2)
    for _ in range(10):
        rig.settle()
        rig.step(1.0)
    assert (rig.stats.rows, rig.core.changing) == (2, 0)


def test_a_store_takes_nothing_from_a_queued_request_where_others_may_leave() -> None:
    """Also where they are copied before they leave."""
    for flow in (Flow.WRITE_THROUGH, Flow.DEMOTE):
        rig = demoting(flow, rows=16, slots=64)
        store(rig, A)
        for name in "uvwxyz":
            store(rig, chain(name, 4))
            rig.settle()
        queue(rig, "r", A)
        rig.settle()
        for name in "cdefghij":
            store(rig, chain(name, 2))
            rig.settle()
        assert rig.stats.gave_way == 0, flow


def test_of_many_queued_requests_a_store_looks_at_those_that_have_rows() -> None:
    """Stores of a busy server come by the dozen in a step, and requests wait by the thousand."""
    rig = Rig(rows=8, on=[chain("a", 2)])
    assert rig.core.on_request_queued("first", chain("a", 2))
    rig.settle()
    rig.put(chain("b", 6))
    for number in range(100):
        assert rig.core.on_request_queued(f"{number}", chain("a", 2))
    rig.step()
    assert [*rig.core._arrivals._holders] == ["first", "0"]
    rig.core._arrivals.give_way(8, [])
    assert not rig.core._arrivals._holders
