""" "Ask again" always ends: by data, by a partial prefix, or by the deadline."""

from __future__ import annotations

from kvstore.core.host import HostPool
from kvstore.core.reports import Spans
from kvstore.core.request import Request, Requests
from kvstore.core.wait_queue import WaitQueue
from kvstore.policies import create_policy
from tests.core.rig import Rig, chain


def many(count: int, length: int) -> tuple[dict[str, list[bytes]], list[bytes]]:
    prompts = {f"r{index}": chain(f"p{index}", length) for index in range(count)}
    return prompts, [key for keys in prompts.values() for key in keys]


def test_a_tier_that_never_answers_costs_each_request_one_deadline() -> None:
    prompts, held = many(5, 4)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    for request, keys in prompts.items():
        assert rig.ask(keys, request) is None
    rig.wait(0.9)
    assert [rig.ask(keys, request) for request, keys in prompts.items()] == [None] * 5
    rig.wait(0.2)
    assert [rig.ask(keys, request) for request, keys in prompts.items()] == [0] * 5
    assert rig.stats.timeouts == 5


def test_a_request_that_was_answered_does_not_wait_a_second_time() -> None:
    prompts, held = many(2, 4)
    rig = Rig(rows=8, on=[held], deadline=1.0)
    keys = prompts["r0"]
    assert rig.ask(keys[:2], "r0") is None
    rig.wait(1.1)
    assert rig.ask(keys[:2], "r0") == 0
    assert rig.ask(prompts["r1"], "r0") == 0, "its time is used up, also for other keys"
    assert rig.stats.misses == 2


def test_keys_that_were_not_asked_before_may_be_waited_for_within_the_deadline() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys], deadline=1.0)
    assert rig.resolve(keys[:2]) == 2
    assert rig.ask(keys) is None
    assert rig.resolve(keys) == 4


def test_the_deadline_runs_from_the_first_wait_however_many_keys_are_asked_for() -> None:
    keys = chain("a", 12)
    rig = Rig(rows=16, on=[keys], deadline=1.0)
    for count in range(1, 4):
        assert rig.ask(keys[:count]) is None
        rig.step(0.2)
        rig.end(rig.promotion)
        rig.step(0.2)
        assert rig.ask(keys[:count]) == count
        rig.step()
    assert rig.ask(keys) == 3


def test_a_request_that_has_begun_to_load_may_wait_anew() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys], deadline=1.0)
    rig.resolve(keys[:2])
    rig.load(keys[:2])
    rig.wait(5.0)
    assert rig.ask(keys) is None
    rig.settle()
    assert rig.ask(keys) == 4


def test_later_requests_do_not_wait_for_a_stalled_tier() -> None:
    prompts, held = many(3, 4)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    assert rig.ask(prompts["r0"], "r0") is None
    rig.wait(2.2)
    assert rig.stats.tiers[0].stalled
    assert rig.ask(prompts["r1"], "r1") == 0
    assert rig.ask(prompts["r0"], "late") == 0, "nor for chunks that are stuck on their way"
    assert rig.stats.misses == 2


def test_a_stalled_tier_is_told_once_and_recovers_with_its_first_answer() -> None:
    prompts, held = many(2, 4)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    assert rig.ask(prompts["r0"], "r0") is None
    rig.wait(5.0)
    assert len(rig.log) == 1
    assert "has not answered" in rig.log[0]
    rig.arrive()
    assert not rig.stats.tiers[0].stalled
    assert rig.log[1:] == ["tier tier0 answers again"]
    assert rig.resolve(prompts["r1"], "r1") == 4
    assert rig.ask(prompts["r0"], "late") == 4, "what came late is used"


def test_a_tier_that_has_answered_before_may_stall_all_the_same() -> None:
    prompts, held = many(2, 4)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    assert rig.resolve(prompts["r0"], "r0") == 4
    rig.wait(1.0)
    assert rig.ask(prompts["r1"], "r1") is None
    rig.wait(2.2)
    assert rig.stats.tiers[0].stalled


def test_nothing_is_copied_to_a_stalled_tier() -> None:
    prompts, held = many(1, 2)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    rig.put(chain("early", 2))
    assert rig.ask(prompts["r0"], "r0") is None
    rig.wait(2.2)
    rig.put(chain("late", 2))
    assert rig.core._pool.chunks[chain("late", 1)[0]].unsaved == 0
    assert rig.stats.tiers[0].refused == 2
    rig.put(chain("more", 6))


def test_a_stalled_tier_is_not_asked_to_grow() -> None:
    held = chain("a", 4)
    rig = Rig(rows=8, on=[held], segment_slots=8, max_segments=2, deadline=1.0)
    assert rig.ask(held) is None
    rig.wait(2.2)
    rig.owned().take_slots(4)
    assert rig.owned().slots.wants_growth(rig.now)
    assert rig.step() == []


def test_chunks_that_waited_for_a_tier_that_stalls_are_let_go() -> None:
    rig = Rig(rows=8, in_flight=2, deadline=1.0)
    rig.put(chain("a", 8))
    rig.wait(2.2)
    assert rig.stats.tiers[0].stalled
    assert rig.core.unsaved == 2, "those that are on their way"
    rig.put(chain("b", 6))


def test_reads_that_are_queued_behind_others_are_waited_for_while_those_end() -> None:
    prompts, held = many(6, 2)
    rig = Rig(rows=16, on=[held], deadline=1.0)
    for request, keys in prompts.items():
        assert rig.ask(keys, request) is None
    for move in rig.step():
        rig.wait(0.9)
        rig.finish(move)
        assert not rig.stats.tiers[0].stalled
    assert [rig.ask(keys, request) for request, keys in prompts.items()] == [2] * 6
    assert rig.stats.timeouts == 0
    assert rig.log == []


def test_reads_that_overtake_do_not_extend_a_wait() -> None:
    prompts, held = many(6, 2)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    for request, keys in prompts.items():
        assert rig.ask(keys, request) is None
    rig.step()
    stuck, *others = rig.moves
    for move in others[:3]:
        rig.wait(0.4)
        rig.finish(move)
    assert rig.ask(prompts["r0"], "r0") == 0, f"{stuck} never came"
    assert rig.ask(prompts["r5"], "r5") is None, "reads before it came"


def test_waiting_for_rows_does_not_count_while_the_queue_moves() -> None:
    prompts, held = many(4, 8)
    rig = Rig(rows=8, on=[held], deadline=1.0)
    for request, keys in prompts.items():
        rig.begin(keys, request)
    for request, keys in prompts.items():
        while (answer := rig.ask(keys, request)) is None:
            rig.wait(0.9)
            rig.arrive()
        assert answer == 8
        rig.core.on_request_finished(request)
        rig.step()
        rig.step()
    assert rig.now > 103.0
    assert rig.stats.timeouts == 0


def test_a_load_that_ends_is_movement_for_those_in_the_queue() -> None:
    busy, keys = chain("busy", 8), chain("a", 8)
    rig = Rig(rows=8, on=[keys], deadline=1.0)
    rig.store(busy)
    loads = [f"load{index}" for index in range(5)]
    for load in loads:
        rig.load(busy, load)
    assert rig.ask(keys) is None
    for load in loads:
        rig.wait(0.9)
        rig.core.complete_load(busy, load)
    assert rig.ask(keys) is None, "4.5 s after its first question"
    rig.settle()
    assert rig.ask(keys) == 8


def test_the_end_of_a_load_that_nobody_began_is_no_movement() -> None:
    busy, keys = chain("busy", 8), chain("a", 8)
    rig = Rig(rows=8, on=[keys], deadline=1.0)
    rig.store(busy)
    rig.load(busy, "load")
    assert rig.ask(keys) is None
    for _ in range(3):
        rig.wait(0.5)
        rig.core.complete_load(busy, "stray")
    assert rig.ask(keys) == 0


def test_the_longest_wait_ends_in_a_queue_that_moves() -> None:
    mine, others = chain("mine", 8), [chain(f"o{index}", 8) for index in range(12)]
    rig = Rig(
        rows=8,
        on=[[*mine, *(key for keys in others for key in keys)]],
        max_wait=4.0,
        segment_slots=256,
    )
    for index, keys in enumerate(others[:11]):
        assert rig.ask(keys, f"o{index}") is None
    assert rig.ask(mine) is None
    waited = 0.0
    for index in range(11):
        rig.step(0.5)
        waited += 0.5
        if rig.ask(mine) is not None:
            break
        rig.arrive()
        rig.core.on_request_finished(f"o{index}")
        rig.step()
    assert waited == 4.0
    assert rig.ask(mine) == 0


def test_what_has_arrived_by_the_deadline_is_the_answer() -> None:
    keys = chain("a", 6)
    rig = Rig(on=[keys[:3], keys], deadline=1.0)
    assert rig.ask(keys) is None
    near, far = rig.step()
    rig.end(near)
    rig.wait(1.2)
    assert rig.ask(keys) == 3
    rig.finish(far)
    assert rig.core._pool.busy == 3, "what came too late is not kept for anybody"
    assert len(rig.load(keys[:3])) == 3


def test_a_caller_that_slept_does_not_take_its_own_sleep_for_a_stalled_tier() -> None:
    prompts, held = many(1, 4)
    rig = Rig(rows=12, on=[held], deadline=1.0)
    rig.put(chain("w", 2))
    rig.begin(prompts["r0"], "r0")
    rig.step(60.0)
    assert not rig.stats.tiers[0].stalled
    rig.end_all()
    rig.step()
    assert rig.log == []
    assert rig.ask(prompts["r0"], "r0") == 4, "and what it waited for is there"


def test_a_wait_longer_than_the_longest_is_refused_at_once() -> None:
    prompts, held = many(3, 10)
    rig = Rig(rows=40, on=[held], max_wait=10.0)
    assert rig.ask(prompts["r0"], "r0") is None
    rig.wait(0.9)
    move = rig.promotion
    rig.finish(move)
    pace = rig.core.tiers[0].health.pace.per_chunk
    assert 0.08 < pace < 0.1, "ten chunks took 0.9 s"
    rig.core.tiers[0].health.pace.replace(1, 5.0)
    rig.begin(prompts["r1"], "r1")
    rig.step()
    assert rig.stats.tiers[0].congested
    assert rig.ask(prompts["r2"], "r2") == 0
    rig.arrive()
    assert not rig.stats.tiers[0].congested, "nothing is being read"


def test_the_pace_is_that_of_all_chunks_that_came_in_one_step() -> None:
    prompts, held = many(4, 2)
    rig = Rig(rows=40, on=[held])
    for request, keys in prompts.items():
        assert rig.ask(keys, request) is None
    rig.wait(0.8)
    rig.end_all()
    rig.step()
    assert abs(rig.core.tiers[0].health.pace.per_chunk - 0.1) < 0.02


def test_the_pace_is_not_measured_across_a_sleep_of_the_caller() -> None:
    prompts, held = many(2, 2)
    rig = Rig(rows=40, on=[held])
    rig.begin(prompts["r0"], "r0")
    rig.end(rig.promotion)
    rig.step(300.0)
    assert rig.core.tiers[0].health.pace.per_chunk < 1.0


def test_the_pace_follows_what_the_tier_does_now() -> None:
    prompts, held = many(30, 2)
    rig = Rig(rows=80, on=[held])
    for index, (request, keys) in enumerate(prompts.items()):
        assert rig.ask(keys, request) is None
        rig.wait(0.8 if index < 2 else 0.2)
        rig.arrive()
        rig.wait(2.0, each=0.5)
    assert abs(rig.core.tiers[0].health.pace.per_chunk - 0.1) < 0.02


def test_each_tier_has_its_own_pace() -> None:
    near, far = chain("near", 2), chain("far", 2)
    rig = Rig(rows=40, on=[near, far])
    assert rig.ask(near, "r0") is None
    assert rig.ask(far, "r1") is None
    fast, slow = rig.step()
    rig.wait(0.1)
    rig.end(fast)
    rig.wait(0.7)
    rig.finish(slow)
    paces = [tier.health.pace.per_chunk for tier in rig.core.tiers]
    assert 0.04 < paces[0] < 0.11
    assert 0.35 < paces[1] < 0.46


def test_a_deadline_that_others_put_off_ends_when_all_is_granted() -> None:
    """What moves for others counts for who lacks rows, not for who only waits for its chunks."""
    pool = HostPool(4, create_policy("lru", 4))
    queue = WaitQueue(pool, Requests(), Spans(), deadline=1.0, max_wait=9.0, lease=5.0)
    request = Request("r")
    request.name_keys(chain("a", 2))
    queue.join(request, 0.0)
    for step in range(1, 11):
        queue.rows_moved(request.keys, step / 10 - 0.01)
        queue.expire(step / 10)
    request.grant(2, needs_rows=None, short_of_rows=False)
    queue.expect(request, pool.reserve(request.keys, 0, None))
    queue.answer_if_complete(request, 1.01)
    assert queue.waiting
    queue.expire(1.02)
    assert not queue.waiting
