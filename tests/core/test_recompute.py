"""What takes longer to read than to compute again is a miss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.core import Pace
from kvstore.core.residency.recompute import (
    AGAIN,
    FIRST_PAUSE,
    LAST_PAUSE,
    LEAST_PATIENCE,
    WINDOW,
    Average,
)
from kvstore.types import Op
from tests.core.rig import Rig, chain

LONG = 40


def prompts(count: int, length: int = LONG) -> list[list[bytes]]:
    return [chain(f"prompt{number}", length) for number in range(count)]


def rig(held: list[list[bytes]], rows: int = 400, **more: Any) -> Rig:
    """A core over a disk that holds these prompts, with deadlines that play no part."""
    keys = [key for prompt in held for key in prompt]
    patient = {"deadline": 50.0, "max_wait": 500.0, "lease": 500.0}
    return Rig(rows, [keys], segment_slots=max(len(keys), 1), in_flight=10, **{**patient, **more})


def read(bench: Rig, prompt: list[bytes], each: float, name: str = "r") -> int | None:
    """Ask for a prompt whose chunks take `each` seconds to come; the answer, None if it waits."""
    while (found := bench.core.lookup_prefix(prompt, name)) is None:
        bench.step()
        end_reads(bench, each)
    bench.core.on_request_finished(name)
    return found


def end_reads(bench: Rig, each: float) -> None:
    """One after the other."""
    for move in bench.under_way(Op.PROMOTE):
        bench.step(each * len(move.keys))
        bench.end(move, ended=bench.now)
    bench.step()


def load(bench: Rig, prompt: list[bytes]) -> None:
    """Load a prompt that host memory holds to the device."""
    assert bench.core.lookup_prefix(prompt, "load") == len(prompt)
    bench.core.prepare_load(prompt, "load")
    bench.core.complete_load(prompt, "load")
    bench.core.on_request_finished("load")


def outpaced(bench: Rig) -> bool:
    return bench.stats.tiers[0].outpaced


def test_a_tier_that_is_slower_than_computing_is_a_miss_from_the_next_request_on() -> None:
    one, two = prompts(2)
    bench = rig([one, two])
    assert read(bench, one, 0.02) == LONG, "nobody knows how long computing takes"
    bench.core.computed(100, 1.0)
    bench.step()
    assert outpaced(bench)
    assert bench.core.lookup_prefix(two, "two") == 0
    assert bench.core.contains_prefix(two) == 0
    assert bench.stats.outpaced == 1
    assert bench.core.lookup_prefix(one, "one") == LONG, "host memory is no slower for it"
    assert "10.0 ms" in bench.log[-1]
    assert "20.0 ms" in bench.log[-1]


def test_a_tier_that_is_sooner_than_computing_is_waited_for() -> None:
    one, two = prompts(2)
    bench = rig([one, two])
    bench.core.computed(100, 1.0)
    assert read(bench, one, 0.009) == LONG
    assert read(bench, two, 0.009) == LONG
    assert bench.stats.outpaced == 0
    assert bench.stats.tiers[0].read_pace == pytest.approx(0.009, rel=0.2)
    assert bench.stats.compute_pace == pytest.approx(0.01)


def test_while_nobody_tells_how_long_computing_takes_any_tier_is_waited_for() -> None:
    held = prompts(3)
    bench = rig(held)
    assert [read(bench, prompt, 1.0) for prompt in held] == [LONG] * 3


def test_a_server_may_say_that_nobody_shall_ask() -> None:
    one, two = prompts(2)
    bench = rig([one, two], recompute=0.0)
    bench.core.computed(100, 1.0)
    assert read(bench, one, 1.0) == LONG
    assert read(bench, two, 1.0) == LONG


def test_a_pace_that_is_configured_counts_and_not_what_is_told() -> None:
    one, two = prompts(2)
    bench = rig([one, two], recompute=0.01)
    bench.core.computed(100, 100.0)
    bench.step()
    assert read(bench, one, 0.02) is not None
    assert read(bench, two, 0.02) == 0


def test_who_waits_is_answered_once_computing_would_have_been_sooner() -> None:
    (one,) = prompts(1)
    bench = rig([one])
    bench.core.computed(100, 1.0)
    bench.begin(one, "r")
    moves = bench.under_way(Op.PROMOTE)
    bench.end(moves[0])
    bench.step(0.05)
    assert bench.core.is_waiting("r")
    bench.step(LONG * 0.01)
    bench.step()
    assert bench.core.lookup_prefix(one, "r") == len(moves[0].keys), "what has come is a hit"
    assert outpaced(bench)


def test_reads_are_not_held_against_a_tier_for_the_length_of_a_step() -> None:
    (one,) = prompts(1, 1)
    bench = rig([one])
    bench.core.computed(1000, 1.0)
    assert bench.core.lookup_prefix(one, "r") is None
    bench.step(LEAST_PATIENCE * 0.9)
    bench.step()
    assert not outpaced(bench)
    assert bench.core.is_waiting("r")
    bench.step(LEAST_PATIENCE)
    bench.step()
    assert bench.core.lookup_prefix(one, "r") == 0


def test_a_request_that_asks_for_what_is_still_being_read_in_vain_is_not_deferred() -> None:
    (one,) = prompts(1)
    bench = rig([one])
    bench.core.computed(100, 1.0)
    assert bench.core.lookup_prefix(one, "first") is None
    bench.step(1.0)
    bench.step()
    assert bench.under_way(Op.PROMOTE)
    assert bench.core.lookup_prefix(one, "second") == 0


def test_a_chunk_that_is_being_read_in_vain_is_whole_once_it_has_come() -> None:
    (one,) = prompts(1)
    bench = rig([one])
    bench.core.computed(100, 1.0)
    assert bench.core.lookup_prefix(one, "first") is None
    bench.step(1.0)
    bench.settle()
    assert bench.core.lookup_prefix(one, "second") == LONG


def slow(count: int) -> tuple[Rig, list[list[bytes]]]:
    """A bench whose disk is outpaced, and prompts that only it has."""
    first, *rest = prompts(count + 1)
    bench = rig([first, *rest], rows=1000)
    bench.core.computed(1000, 10.0)
    read(bench, first, 0.02)
    bench.step()
    assert outpaced(bench)
    return bench, rest


def test_after_a_pause_one_request_tries_the_tier_and_finds_it_well() -> None:
    bench, (one, two) = slow(2)
    bench.step(FIRST_PAUSE - 1)
    bench.step()
    assert bench.core.lookup_prefix(one, "r") == 0
    bench.step(2.0)
    bench.step()
    assert read(bench, one, 0.001) == LONG
    assert not outpaced(bench)
    assert "faster" in bench.log[-1]
    assert read(bench, two, 0.001) == LONG


def test_a_try_that_fails_costs_no_more_than_computing_and_the_next_comes_later() -> None:
    bench, held = slow(8)
    pause = FIRST_PAUSE
    for one in held[:6]:
        bench.step(pause - 2.0)
        bench.step()
        assert bench.core.lookup_prefix(one, "early") == 0
        bench.step(2.1)
        bench.step()
        begun = bench.now
        assert bench.core.lookup_prefix(one, "try") is None
        while bench.core.lookup_prefix(one, "try") is None:
            bench.step(0.01)
        assert bench.now - begun <= LONG * 0.01 + 0.05
        bench.core.on_request_finished("try")
        end_reads(bench, 0.02)
        assert outpaced(bench)
        pause = min(2 * pause, LAST_PAUSE)
    assert pause == LAST_PAUSE


def test_while_one_request_tries_others_do_not_begin_to_wait() -> None:
    bench, (one, two) = slow(2)
    bench.step(FIRST_PAUSE + 0.1)
    bench.step()
    bench.begin(one, "try")
    bench.step()
    assert bench.under_way(Op.PROMOTE)
    assert bench.core.lookup_prefix(two, "r") == 0
    assert bench.core.is_waiting("try")


def test_a_tier_that_is_hardly_sooner_stays_outpaced() -> None:
    bench, (one,) = slow(1)
    bench.step(FIRST_PAUSE + 0.1)
    bench.step()
    assert read(bench, one, 0.01 * (AGAIN + 0.1)) == LONG
    assert outpaced(bench)


def test_computing_that_becomes_slower_makes_the_tier_worth_waiting_for() -> None:
    bench, (one,) = slow(1)
    bench.core.computed(100 * WINDOW, 3.0 * WINDOW)
    bench.step()
    assert not outpaced(bench)
    assert read(bench, one, 0.02) == LONG


def test_what_is_prefetched_comes_from_a_tier_that_is_outpaced() -> None:
    bench, (one,) = slow(1)
    assert bench.core._prefetches.begin(one) == LONG
    bench.settle()
    assert bench.core.lookup_prefix(one, "r") == LONG


def test_copies_to_a_tier_that_is_outpaced_go_on() -> None:
    bench, _ = slow(1)
    bench.put(chain("new", 4))
    bench.step()
    assert bench.under_way(Op.CASCADE)


def test_a_second_tier_that_is_sooner_than_computing_is_still_waited_for() -> None:
    one, two = prompts(2)
    bench = Rig(400, [one, two], deadline=50.0, max_wait=500.0, lease=500.0)
    read(bench, one, 0.02)
    bench.core.computed(1000, 10.0)
    bench.step()
    assert [tier.outpaced for tier in bench.stats.tiers] == [True, False]
    assert bench.core.lookup_prefix(two, "r") is None


def test_who_waits_for_another_tier_goes_on_waiting_when_one_is_outpaced() -> None:
    one, two = prompts(2)
    bench = Rig(400, [one, two], deadline=50.0, max_wait=500.0, lease=500.0)
    bench.core.computed(100, 1.0)
    bench.begin(one, "one")
    # The second tier is asked much later, when the first has taken too long already.
    bench.step(LONG * 0.01 - 0.02)
    bench.begin(two, "two")
    bench.step(0.05)
    bench.step()
    assert [tier.outpaced for tier in bench.stats.tiers] == [True, False]
    assert not bench.core.is_waiting("one")
    assert bench.core.is_waiting("two")


def test_reads_that_ended_long_before_they_were_heard_of_count_by_their_end() -> None:
    (one,) = prompts(1, 10)
    bench = rig([one])
    bench.begin(one, "r")
    for move in bench.under_way(Op.PROMOTE):
        bench.end(move, ended=bench.now + 0.05)
    bench.step(3.0)
    assert bench.stats.tiers[0].read_pace == pytest.approx(0.005)


def test_reads_that_have_ended_and_are_still_to_be_taken_in_are_not_late() -> None:
    one, two = prompts(2)
    bench = rig([one, two], pace=replace(Pace(), absorbed=1))
    bench.core.computed(1000, 10.0)
    bench.begin(one, "r")
    for number, move in enumerate(bench.under_way(Op.PROMOTE), 1):
        bench.end(move, ended=bench.now + 0.01 * number)
    # A long step of the server; then one move is taken in with each.
    bench.step(3.0)
    for _ in range(5):
        bench.step(0.5)
        assert not outpaced(bench)
    assert bench.core.lookup_prefix(one, "r") == LONG


def test_the_average_is_of_the_last_few_hundred_chunks_whatever_the_batches() -> None:
    average = Average()
    assert average.per_chunk == 0
    for _ in range(50):
        average.add(100, 1.0)
    assert average.per_chunk == pytest.approx(0.01)
    for _ in range(20):
        average.add(100, 4.0)
    assert average.per_chunk == pytest.approx(0.04, rel=0.05)
    for _ in range(20):
        average.add(1, 1.0)
    assert average.per_chunk < 0.1, "a few single chunks do not say how long many take"


def test_saved_seconds_are_what_loads_would_have_taken_to_compute() -> None:
    one, two = prompts(2)
    bench = rig([one, two])
    assert read(bench, one, 0.001) == LONG
    load(bench, one)
    tier = bench.stats.tiers[0]
    assert (tier.loaded, tier.saved, bench.stats.saved) == (LONG, 0.0, 0.0)
    bench.core.computed(100, 1.0)
    assert bench.stats.tiers[0].saved == pytest.approx(LONG * 0.01), "priced once it is known"
    for _ in range(20):
        bench.core.computed(100, 2.0)
    assert bench.stats.tiers[0].saved == pytest.approx(LONG * 0.01), "what was saved stays"
    pace = bench.stats.compute_pace
    load(bench, one)
    assert bench.stats.saved == pytest.approx(LONG * pace)
    assert bench.stats.tiers[0].saved == pytest.approx(LONG * 0.01)


def test_that_nothing_is_there_says_nothing_about_how_fast_a_tier_is() -> None:
    prompts = [chain(f"p{number}", 32) for number in range(4)]
    keys = [key for prompt in prompts for key in prompt]
    rig = Rig(rows=64, on=(keys,), segment_slots=512, recompute=0.01)
    tier = rig.core.tiers[0]

    def read(number: int, seconds: float, *, gone: bool = False) -> None:
        rig.ask(prompts[number], f"r{number}")
        rig.step(0.001)
        for move in rig.under_way(Op.PROMOTE):
            rig.end(move, failed=move.keys if gone else (), ended=rig.now + seconds - 0.0001)
        rig.step(seconds)
        rig.step(0.01)
        rig.core.on_request_finished(f"r{number}")

    read(0, 0.3)
    read(1, 0.9)
    assert tier.health.recompute.outpaced
    rig.wait(6)
    slow = tier.health.pace.per_chunk
    read(2, 0.001, gone=True)
    assert tier.health.recompute.outpaced
    assert tier.health.pace.per_chunk == slow
