"""What a lookup answers, how long the answer holds, and what asking costs."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.residency.remote_answers import Answers
from kvstore.core.step_budget import Pace
from kvstore.types import Op
from tests.core.rig import CountingLRU, Rig, chain


class CountingDict(dict[Any, Any]):
    """Counts the keys that anybody looks for."""

    reads = 0

    def get(self, key: Any, default: Any = None) -> Any:
        CountingDict.reads += 1
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        CountingDict.reads += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        CountingDict.reads += 1
        return super().__contains__(key)


def test_a_key_that_nobody_stored_is_a_miss_at_once() -> None:
    rig = Rig()
    assert rig.core.lookup(b"unknown", "r") is False
    assert rig.stats.misses == 1


def test_a_prefix_ends_at_its_first_miss() -> None:
    rig = Rig()
    keys = chain("a", 4)
    rig.put([keys[0], keys[1], keys[3]])
    assert rig.ask(keys) == 2


def test_an_empty_prefix_is_an_answer_and_leaves_no_trace() -> None:
    rig = Rig()
    assert rig.ask([]) == 0
    assert not rig.core._requests


def test_a_lookup_that_was_answered_at_once_leaves_no_trace_after_its_step() -> None:
    rig = Rig()
    keys = chain("a", 2)
    rig.put(keys)
    assert rig.ask([*keys, b"unknown"]) == 2
    rig.step()
    assert "r" not in rig.core._requests
    assert not rig.core._lookups._asked


def test_asking_for_a_long_time_costs_no_more_memory_than_asking_once() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys])
    rig.resolve(keys)
    for _ in range(50):
        assert rig.ask(keys) == 4
        rig.step(0.1)
    assert len(rig.core._requests["r"].keys) <= 4
    assert len(rig.core._lookups._asked) <= 1


def test_a_hit_of_an_earlier_step_may_leave() -> None:
    rig = Rig(rows=2, on=())
    keys, others = chain("a", 2), chain("b", 2)
    rig.put(keys)
    assert rig.ask(keys) == 2
    rig.step()
    rig.put(others)
    assert rig.ask(keys) == 0


def test_a_deferred_request_is_told_to_ask_again_whatever_the_key() -> None:
    keys = chain("a", 3)
    rig = Rig(on=[keys])
    rig.put(chain("hot", 1))
    rig.begin(keys)
    assert rig.core.is_waiting("r")
    assert rig.core.lookup(b"unknown", "r") is None
    assert rig.core.lookup(chain("hot", 1)[0], "r") is None
    assert rig.core.lookup(chain("hot", 1)[0], "another") is True


def test_a_deferred_request_costs_no_key_however_many_it_asked_for() -> None:
    keys = chain("a", 10_000)
    rig = Rig(rows=64, on=[keys], segment_slots=10_000)
    core = rig.core
    core._pool.chunks = CountingDict(core._pool.chunks)  # type: ignore[assignment]
    core._lookups._chunk_of = core._pool.chunks.get
    core.tiers[0].entries = CountingDict(core.tiers[0].entries)  # type: ignore[assignment]
    CountingDict.reads = 0
    assert rig.ask(keys) is None
    assert CountingDict.reads >= 10_000, "the first time every key is looked at"
    for _ in range(4):
        # As much is granted as there are rows, in portions.
        rig.step()
    CountingDict.reads = 0
    for _ in range(3):
        rig.begin(keys)
    assert CountingDict.reads <= 3, "one look for each time that it asks"


def test_the_first_in_the_queue_costs_no_key_while_there_is_no_row_for_it() -> None:
    keys, busy = chain("a", 5000), chain("busy", 5000)
    rig = Rig(rows=5000, on=[keys], segment_slots=10_000)
    core = rig.core
    rig.put(busy)
    rig.load(busy, "other")
    core.tiers[0].entries = CountingDict(core.tiers[0].entries)  # type: ignore[assignment]
    core._pool.chunks = CountingDict(core._pool.chunks)  # type: ignore[assignment]
    core._lookups._chunk_of = core._pool.chunks.get
    assert rig.ask(keys) is None
    for _ in range(20):
        # The policies hear of the load, some keys in each step.
        rig.step()
    CountingDict.reads = 0
    for _ in range(10):
        rig.begin(keys)
    assert CountingDict.reads <= 100


def test_a_deferral_is_counted_once_for_each_wait() -> None:
    keys = chain("a", 2)
    rig = Rig(on=[keys])
    for _ in range(5):
        rig.begin(keys)
    assert rig.stats.deferrals == 1
    assert rig.stats.waiting == 1
    rig.settle()
    assert rig.ask(keys) == 2
    assert rig.stats.waiting == 0


def test_keys_asked_one_by_one_are_fetched_together() -> None:
    keys = chain("a", 4)
    rig = Rig(on=[keys])
    assert [rig.core.lookup(key, "r") for key in keys] == [None] * 4
    rig.step()
    assert rig.promotion.keys == keys


def test_a_key_may_be_asked_twice() -> None:
    keys = chain("a", 2)
    rig = Rig(on=[keys])
    rig.begin([keys[0], keys[0], keys[1]])
    assert rig.promotion.keys == keys
    rig.settle()
    assert rig.ask([keys[0], keys[0], keys[1]]) == 3


def test_a_hit_tells_from_which_medium_it_came_until_it_was_loaded() -> None:
    keys = chain("a", 1)
    rig = Rig(on=[keys])
    rig.put(chain("hot", 1))
    assert rig.core.load_source(chain("hot", 1)[0]) == "host"
    rig.resolve(keys)
    assert rig.core.load_source(keys[0]) == "disk"
    rig.use(keys)
    assert rig.core.load_source(keys[0]) == "host"
    assert rig.stats.loaded_from == {"disk": 1}


def test_a_core_without_tiers_answers_from_host_memory_alone() -> None:
    rig = Rig(on=())
    keys = chain("a", 3)
    rig.put(keys[:2])
    assert rig.ask(keys) == 2
    assert rig.step() == []


def test_a_pool_full_of_chunks_that_wait_for_their_copy_is_not_searched_at_each_step() -> None:
    policy = CountingLRU(1000)
    rig = Rig(rows=1000, segment_slots=2000, policy=policy)
    rig.put(chain("unsaved", 1000))
    for _ in range(50):
        assert rig.core.prepare_store(chain("more", 4), "w") is None
        rig.now += 0.01
        rig.core.poll(rig.now)
    assert policy.asked == 0


@pytest.mark.parametrize("leaving", [False, True])
def test_whoever_goes_on_asking_is_looked_up_although_others_ask_before_it_in_every_step(
    leaving: bool,
) -> None:
    rig = Rig(rows=64, pace=Pace(asked=8))
    prompts = {f"r{n}": chain(f"p{n}", 8) for n in range(6)}
    for name, keys in prompts.items():
        rig.put(keys, f"w-{name}")
    rig.step()
    answered: set[str] = set()
    for step in range(2 * len(prompts)):
        for name, keys in prompts.items():
            if leaving and name == "r2" and step > 1:
                continue
            if rig.ask(keys, name) is not None:
                answered.add(name)
        rig.step()
    assert answered >= prompts.keys() - ({"r2"} if leaving else set())


@pytest.mark.parametrize("loads", [False, True])
def test_what_a_server_that_has_decided_was_not_told_yet_is_not_fetched_for_it(loads: bool) -> None:
    here, below = chain("a", 2), chain("b", 2)
    rig = Rig(rows=8, on=[below])
    rig.put(here)
    rig.step()
    assert rig.ask(here, "reader") == 2
    assert rig.ask(below, "reader") is None
    rig.core.on_request_decided("reader", loads=loads)
    rig.settle()
    assert not any(map(rig.in_host, below))
    assert rig.stats.busy_rows == 0


def test_a_request_that_waits_and_is_computed_instead_gives_up_its_leases() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=[keys])
    assert rig.ask(keys, "reader") is None
    rig.settle()
    rig.core.on_request_decided("reader", loads=True)
    assert rig.stats.busy_rows == 4, "it is about to load them"
    rig.core.on_request_decided("reader", loads=False)
    assert rig.stats.busy_rows == 0
    assert rig.ask(keys, "reader") == 4


@pytest.mark.parametrize("loads", [True, False])
def test_a_request_that_takes_what_it_has_found_waits_for_nothing(loads: bool) -> None:
    """It has deferred lookups in this step, and its wait ends before it begins."""
    keys = chain("p", 6)
    rig = Rig(8, on=[keys[2:4]])
    rig.put(keys[:2])
    rig.step()
    rig.core.on_new_request("r", position=keys.index, one_group=True)
    if not loads:
        assert rig.core.on_request_queued("r", keys[:2])
        rig.step()
    assert [rig.core.lookup(key, "r") for key in keys[:3]] == [True, True, None]
    if loads:
        rig.load(keys[:2])
    else:
        rig.granted(keys[4:], "r")
    rig.step()


def test_a_prefix_that_is_asked_for_again_before_its_step_ends_is_one() -> None:
    """Nothing behind what its store lacks is read."""
    keys = chain("p", 6)
    rig = Rig(16, on=[()], store=Answers())
    for _ in range(3):
        assert rig.ask(keys) is None
        rig.core.poll(rig.now)
    rig.flush()
    (ask,) = rig.under_way(Op.ASK, 1)
    rig.end(ask, failed=[keys[1]])
    rig.step()
    rig.step()
    assert [move.keys for move in rig.under_way(Op.PROMOTE, 1)] == [keys[:1]]
