"""One step does no more than its pace allows, and nothing is lost, refused or starved for it."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from itertools import pairwise

import pytest

from kvstore.core import Pace
from kvstore.core.step import DEFAULT_PACE
from kvstore.core.step_budget import LEAST_SHARE, NEWS_PER_CHUNK, STORED
from kvstore.policies import Protected, create_policy, policy_names
from kvstore.types import NO_MOVE, Changes, Completion, Move, Op
from tests.core.rig import Rig, chain

FEW = Pace(asked=8, told=4, granted=4, absorbed=6, copied=4, questions=4)


def promoted(moves: Collection[Move]) -> int:
    return sum(len(move.keys) for move in moves if move.op is Op.PROMOTE)


def test_a_step_grants_a_bounded_number_of_chunks_in_queue_order_and_the_rest_follows() -> None:
    first, second = chain("a", 10), chain("b", 10)
    rig = Rig(rows=40, on=[[*first, *second]], pace=FEW)
    assert rig.ask(first, "a") is None
    assert rig.ask(second, "b") is None
    keys: list[bytes] = []
    for _ in range(12):
        moves = [move for move in rig.step() if move.op is Op.PROMOTE]
        assert promoted(moves) <= FEW.granted
        keys += [key for move in moves for key in move.keys]
        rig.ask(second, "b")
    assert keys == [*first, *second]
    assert not rig.core.behind


def test_flushing_again_in_the_same_step_grants_no_more() -> None:
    rig = Rig(rows=40, on=[chain("a", 20)], pace=FEW)
    assert rig.ask(chain("a", 20)) is None
    moves = [move for _ in range(5) for move in rig.flush()]
    assert promoted(moves) == FEW.granted
    assert rig.core.behind


def test_a_step_takes_in_a_bounded_number_of_completions_and_the_rest_follows() -> None:
    keys = chain("a", 40)
    rig = Rig(rows=64, on=[keys], pace=Pace(granted=4, absorbed=6))
    assert rig.ask(keys) is None
    for _ in range(10):
        rig.step()
    assert len(rig.moves) == 10
    rig.end_all()
    there = 0
    for _ in range(10):
        rig.step()
        now_there = sum(rig.in_host(key) for key in keys)
        # Whole moves of four: one is begun while there is anything left to take in.
        assert now_there - there <= 8
        there = now_there
    assert there == len(keys)
    assert rig.core.in_flight == 0
    assert rig.ask(keys) == len(keys)


def test_nobody_times_out_while_what_has_arrived_is_taken_in() -> None:
    keys = chain("a", 24)
    rig = Rig(rows=64, on=[keys], pace=Pace(granted=40, absorbed=1), in_flight=4)
    assert rig.ask(keys) is None
    rig.flush()
    rig.end_all()
    for _ in range(5):
        # A server so slow that each of its steps lasts longer than the deadline.
        rig.step(1.5)
    rig.step()
    assert rig.stats.timeouts == 0
    assert rig.ask(keys) == len(keys)


def test_what_others_have_done_is_taken_in_bit_by_bit() -> None:
    rig = Rig(rows=8, pace=FEW)
    heard: list[Changes] = []

    def complete(completion: Completion, now: float) -> bool:
        assert completion.changes is not None
        heard.append(completion.changes)
        return True

    rig.core._transfers.complete = complete  # type: ignore[method-assign]
    appeared, gone = [(key, slot) for slot, key in enumerate(chain("n", 200))], chain("gone", 100)
    lost = [(key, slot) for slot, key in enumerate(chain("lost", 100))]
    changes = Changes(appeared, gone, lost)
    assert len(changes) == 400
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=changes, tier=0)])
    most = FEW.absorbed * NEWS_PER_CHUNK
    steps = 1
    while rig.core.behind:
        assert sum(map(len, heard)) <= steps * most
        rig.core.poll(rig.now)
        steps += 1
    assert [key for part in heard for key in part.gone] == gone, "in order, and before the others"
    assert [pair for part in heard for pair in part.appeared] == appeared
    assert [pair for part in heard for pair in part.lost] == lost
    assert not any(part.gone and before.appeared for before, part in pairwise(heard))
    assert steps > 1


def test_nobody_waits_for_what_others_have_done() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys], pace=FEW)
    assert rig.ask(keys) is None
    rig.flush()
    news = Changes([(key, slot) for slot, key in enumerate(chain("n", 20_000))])
    rig.core._transfers._tiers[0].learn = lambda changes: None  # type: ignore[method-assign]
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=news, tier=0)])
    rig.end_all()
    rig.step()
    rig.step()
    assert rig.core.behind, "much is still to be taken in"
    assert rig.ask(keys) == len(keys)


def test_a_step_begins_a_bounded_number_of_copies_and_all_are_made() -> None:
    keys = chain("a", 30)
    rig = Rig(rows=40, pace=FEW)
    rig.put(keys)
    copied: list[bytes] = []
    for _ in range(12):
        moves = [move for move in rig.step() if move.op is Op.CASCADE]
        assert sum(len(move.keys) for move in moves) <= FEW.copied
        copied += [key for move in moves for key in move.keys]
    assert copied == keys


def test_who_asks_after_many_others_asks_again_and_is_not_forgotten() -> None:
    here = [chain(name, 6) for name in "abcd"]
    rig = Rig(rows=40, pace=FEW)
    for keys in here:
        rig.put(keys)
    rig.settle()
    assert [rig.ask(keys, f"r{n}") for n, keys in enumerate(here)] == [6, 6, None, None]
    assert rig.core.is_waiting("r2")
    assert not rig.core.is_waiting("r0")
    rig.step()
    assert [rig.ask(keys, f"r{n}") for n, keys in enumerate(here[2:], 2)] == [6, 6]


def test_who_has_finished_holds_nobody_up_in_the_line() -> None:
    """However many asked before it, the next one has its turn in the next step."""
    many = [f"m{number}" for number in range(6)]
    rig = Rig(rows=64, pace=FEW)
    rig.store(chain("hot", 8), "w")
    rig.ask(chain("hot", 8), "first")
    assert [rig.ask(chain("hot", 2), name) for name in [*many, "last"]] == [None] * 7
    for name in many:
        rig.core.on_request_finished(name)
    rig.step()
    rig.ask(chain("hot", 8), "first")
    assert rig.ask(chain("hot", 2), "last") == 2


def test_who_has_nothing_to_load_hears_so_however_many_have_asked() -> None:
    rig = Rig(rows=40, on=[chain("disk", 4)], pace=FEW)
    rig.put(chain("a", 9))
    assert rig.ask(chain("a", 9), "first") == 9
    assert rig.ask(chain("unknown", 5), "new") == 0
    assert rig.ask(chain("disk", 4), "old") is None


def test_who_asks_for_much_alone_is_answered_at_once() -> None:
    rig = Rig(rows=40, pace=FEW)
    rig.put(chain("a", 30))
    assert rig.ask(chain("a", 30)) == 30


@pytest.mark.parametrize("name", policy_names())
def test_a_pool_full_of_leases_costs_few_questions_and_refuses_nothing(name: str) -> None:
    """Nearly all rows are leased to requests that wait for device memory; others want rows."""
    rows = 2000
    held, more = chain("held", rows - 40), chain("more", 400)
    rig = Rig(rows=rows, on=[more], segment_slots=8192, policy=create_policy(name, rows))
    core = rig.core
    rig.store(held, "writer")
    core.on_request_finished("writer")
    for start in range(0, len(held), 196):
        rig.load(held[start : start + 196], f"r{start}")
    rig.settle()
    asked = 0
    evict = core._pool.policy.evict

    def counting(
        count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        def counted(key: bytes) -> int:
            nonlocal asked
            asked += 1
            return protected(key)

        return evict(count, counted, incoming)

    core._pool.policy.evict = counting  # type: ignore[method-assign]
    for start in range(0, 400, 20):
        part = more[start : start + 20]
        name_of = f"more{start}"
        assert rig.resolve(part, name_of) == 20
        rig.load(part, name_of)
        core.complete_load(part, name_of)
        core.on_request_finished(name_of)
        rig.step()
    assert asked <= rows + 8 * 400, "those in use are met once, not for each who comes"
    for start in range(0, len(held), 196):
        core.complete_load(held[start : start + 196], f"r{start}")
    rig.settle()
    assert core._pool.busy == 0
    # Whoever was met may leave again.
    core.poll(rig.now)
    assert core._room.make(rows // 2, rig.now, shed_unsaved=False) == rows // 2


def test_a_search_for_victims_that_is_broken_off_goes_on_in_the_next_step() -> None:
    rig = Rig(rows=60, on=[chain("disk", 10)], segment_slots=256, pace=Pace(questions=3))
    rig.store(chain("held", 50))
    rig.load(chain("held", 50), "holder")
    rig.settle()
    rig.store(chain("free", 10))
    assert rig.ask(chain("disk", 10)) is None
    assert not rig.flush(), "so many questions are not asked in one step"
    assert rig.core.behind
    assert rig.resolve(chain("disk", 10)) == 10
    assert rig.stats.truncations == 0


@pytest.mark.parametrize("policy", policy_names())
def test_a_search_goes_on_beyond_the_rest_of_a_prompt_that_is_kept_for_it(policy: str) -> None:
    prompt = chain("prompt", 50)
    rig = Rig(
        rows=60,
        on=[prompt[:5]],
        segment_slots=256,
        policy=create_policy(policy, 60),
        pace=Pace(granted=5, questions=3),
    )
    rig.store(prompt[5:])
    rig.store(chain("free", 15))
    rig.use(chain("free", 15), "user")
    began = rig.now
    assert rig.resolve(prompt) == 50
    assert rig.now - began < 1.0, "it waits until it may wait no more"


@pytest.mark.parametrize("demotes", [True, False])
def test_a_store_waits_for_a_search_that_was_broken_off_and_is_not_cut(demotes: bool) -> None:
    rig = Rig(rows=60, pace=Pace(questions=3))
    if demotes:
        rig.core._room.demotes = True
    rig.store(chain("held", 50))
    rig.load(chain("held", 50), "holder")
    rig.settle()
    rig.store(chain("free", 10))
    new = chain("new", 10)
    offers = 0
    grant = None
    while grant is None:
        offers += 1
        assert offers < 40
        grant = rig.core.prepare_store(new, "writer")
        rig.step()
    assert offers > 1
    assert grant.keys == new


def test_the_more_callers_want_of_a_step_the_less_else_is_done_in_it() -> None:
    here, there = chain("here", 40), chain("there", 60)
    pace = Pace(asked=100, granted=20, whole=60, own=20)
    granted: list[int] = []
    for lookups in (0, 10, 30, 40):
        rig = Rig(rows=200, on=[there], segment_slots=256, pace=pace)
        rig.store(here)
        assert rig.ask(there[:20]) is None
        assert rig.ask(here[:lookups], "other") == lookups
        granted.append(promoted(rig.flush()))
    # 20 keys of its own, and those of the other: what is left of 60, in parts of 20.
    assert granted == [20, 20, 10, int(LEAST_SHARE * 20)]


def test_a_store_counts_in_the_step_that_follows() -> None:
    there = chain("there", 20)
    rig = Rig(rows=200, on=[there], pace=Pace(granted=20, whole=50, own=20))
    rig.step()
    rig.granted(chain("new", 8), "writer")
    rig.now += 0.1
    rig.core.poll(rig.now)
    assert rig.ask(there) is None
    wanted = len(there) + STORED * 8
    assert promoted(rig.flush()) == int(20 * (50 - wanted) / 20)
    rig.step()
    assert promoted(rig.flush()) == 20 - int(50 - wanted), "and then no more"


def test_a_policy_that_takes_longer_has_fewer_chunks_moved_in_a_step() -> None:
    keys = chain("a", 40)
    for name in policy_names():
        rig = Rig(rows=100, on=[keys], policy=create_policy(name, 100), pace=Pace(granted=20))
        assert rig.ask(keys) is None
        effort = rig.core._pool.policy.effort
        assert effort >= 1
        assert promoted(rig.flush()) == int(20 / effort)


def test_the_pace_of_a_step_lets_as_much_be_taken_in_as_is_begun() -> None:
    assert DEFAULT_PACE.absorbed >= DEFAULT_PACE.granted + DEFAULT_PACE.copied


def test_a_prefix_that_is_granted_in_parts_does_not_give_up_its_own_end() -> None:
    keys = chain("a", 10)
    rig = Rig(rows=16, on=[keys[:6]], pace=FEW)
    # Its end is the coldest of all, and room has to be made for the second part only.
    rig.put(keys[6:])
    rig.store(chain("later", 8))
    promoted_before = rig.stats.tiers[0].promoted
    assert rig.resolve(keys) == 10
    assert rig.stats.tiers[0].promoted - promoted_before == 6


def test_where_a_prefix_cannot_be_whole_its_end_gives_way_to_its_beginning() -> None:
    keys, others = chain("a", 10), chain("other", 6)
    rig = Rig(rows=12, on=[keys[:6]], pace=FEW)
    rig.put(keys[6:])
    rig.store(others)
    assert rig.ask(others, "other") == 6
    rig.load(others, "other")
    assert rig.resolve(keys) == 6


def test_the_rest_of_a_prefix_is_not_given_up_for_the_part_that_is_under_way() -> None:
    keys = chain("a", 10)
    rig = Rig(rows=16, on=[keys], pace=FEW, max_wait=10.0)
    # Four on their way are more than is worth beginning to wait for.
    rig.core.tiers[0].health.pace.replace(1, 3.0)
    rig.begin(keys)
    assert rig.core.tiers[0].health.congested
    assert rig.ask(chain("a", 6)[4:], "late") == 0
    rig.step()
    assert rig.resolve(keys) == 10


def test_who_waits_for_nothing_is_told_at_once_that_a_tier_has_too_much_to_do() -> None:
    first, second = chain("a", 4), chain("b", 4)
    rig = Rig(rows=16, on=[[*first, *second]], pace=FEW, max_wait=10.0)
    rig.core.tiers[0].health.pace.replace(1, 3.0)
    assert rig.ask(first, "a") is None
    rig.begin(second, "b")
    assert rig.core.tiers[0].health.congested
    rig.step()
    assert rig.ask(second, "b") == 0


def test_a_chunk_on_its_way_through_host_memory_is_nothing_new_for_the_garbage_collector() -> None:
    keys = chain("a", 500)
    rig = Rig(rows=600, on=[keys], segment_slots=512, in_flight=512, events=False)
    gc.collect()
    before = len(gc.get_objects())
    most = 0
    assert rig.ask(keys) is None
    for _ in range(10):
        rig.end_all()
        rig.step()
        most = max(most, len(gc.get_objects()) - before)
    assert rig.ask(keys) == len(keys)
    rig.core.prepare_load(keys, "r")
    most = max(most, len(gc.get_objects()) - before)
    assert most < 100, f"{most} objects for {len(keys)} chunks"
