"""How chunks of the device enter host memory, and what happens to calls that match nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvstore.policies import create_policy, policy_names
from tests.core.rig import Rig, chain


def test_a_store_is_granted_in_prefix_order_with_a_row_for_each_key() -> None:
    rig = Rig(rows=8)
    keys = chain("a", 5)
    grant = rig.granted(keys, "w")
    assert grant.keys == keys
    assert len(set(grant.rows)) == 5
    assert grant.evicted == []


def test_a_store_that_is_offered_again_and_again_counts_as_one_deferred_store() -> None:
    rig = Rig(rows=4)
    rig.granted(chain("a", 4), "fills")
    for _ in range(5):
        assert rig.core.prepare_store(chain("b", 2), "waits") is None
        rig.step(0.01)
    assert rig.stats.stores_deferred == 1
    rig.core.complete_store(chain("a", 4), "fills")
    rig.settle()
    rig.granted(chain("b", 2), "waits")
    assert rig.stats.stores_deferred == 1


def test_a_store_evicts_and_says_whom() -> None:
    rig = Rig(rows=4, on=())
    old, new = chain("a", 4), chain("b", 2)
    rig.put(old)
    rig.step()
    grant = rig.granted(new, "w")
    assert grant.evicted == [old[3], old[2]], "a chain is shed from its end"


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_of_host_memory_keeps_new_chunks_from_the_disk(policy: str) -> None:
    rig = Rig(rows=32, policy=create_policy(policy, 32), segment_slots=2048)
    hot = chain("hot", 24)
    rig.put(hot)
    # Chunks that come again each time, beside others that never do.
    for number in range(60):
        rig.settle()
        request = f"r{number}"
        assert rig.resolve(hot, request) == 24
        rig.use(hot, request)
        rig.core.on_request_finished(request)
        rig.settle()
        new = chain(f"new{number}", 24)
        rig.store(new, f"w{number}")
        assert [key for key in new if key in rig.owned().entries] == new


@pytest.mark.parametrize("alone", [False, True], ids=["over a disk that fails", "alone"])
@pytest.mark.parametrize("policy", policy_names())
def test_a_prompt_that_outgrows_host_memory_keeps_its_head(policy: str, alone: bool) -> None:
    more = {"whole_stores": True} if alone else {}
    if alone and policy != "hit-density":
        pytest.skip("it gives up the head of a prompt for its end where it may")
    for rows, start, portion in itertools.product((8, 16), (-4, -1, 0), (1, 2, 3, 5)):
        made = create_policy(policy, rows, **more)
        rig = Rig(rows=rows, policy=made, on=() if alone else ((),), segment_slots=256)

        def settle(rig: Rig = rig) -> None:
            for move in rig.step(0.01):
                rig.end(move, failed=move.keys)
            rig.settle()

        length = rows + start
        rig.put(chain("a", length))
        settle()
        while length < rows + 12:
            before, length = length, length + portion
            keys, request = chain("a", length), f"r{length}"
            found = rig.ask(keys, request)
            assert found == min(before, rows)
            rig.use(keys[:found], request)
            settle()
            grant = rig.core.prepare_store(keys, request)
            if grant is None:
                settle()
                grant = rig.core.prepare_store(keys, request)
            if grant is not None:
                rig.core.complete_store(grant.keys, request)
            rig.core.on_request_finished(request)
            settle()


def test_a_store_does_not_evict_the_chunks_of_its_own_chain() -> None:
    rig = Rig(rows=4, on=())
    keys, others = chain("a", 6), chain("b", 1)
    rig.put(keys[:3])
    rig.put(others)
    rig.step()
    grant = rig.granted(keys, "w")
    assert grant.keys == keys[3:4]
    assert grant.evicted == others


@pytest.mark.parametrize("stores", ["w", "r"], ids=["another", "the one that loads"])
def test_a_store_is_deferred_once_while_room_is_on_its_way_then_gets_what_fits(stores: str) -> None:
    rig = Rig(rows=4, on=())
    busy, keys = chain("busy", 2), chain("a", 4)
    rig.put(busy)
    rig.load(busy, "r")
    assert rig.core.prepare_store(keys, stores) is None
    rig.step()
    grant = rig.granted(keys, stores)
    assert grant.keys == keys[:2]
    assert rig.stats.stores_deferred == 1


def test_a_store_that_was_deferred_gets_everything_once_the_room_is_there() -> None:
    rig = Rig(rows=4, on=())
    busy, keys = chain("busy", 2), chain("a", 4)
    rig.put(busy)
    rig.load(busy)
    assert rig.core.prepare_store(keys, "w") is None
    rig.core.complete_load(busy, "r")
    rig.step()
    grant = rig.granted(keys, "w")
    assert grant.keys == keys
    assert rig.core._requests["w"].store_deferred is False


def test_a_store_offered_again_leaves_what_its_request_waits_for_meanwhile() -> None:
    # Else each would give up what the other has got, and copies be written without end.
    busy, here, keys = chain("busy", 3), chain("a", 2), chain("b", 2)
    rig = Rig(rows=4, on=(here,))
    rig.put(busy)
    rig.load(busy)
    assert rig.core.prepare_store(keys, "both") is None
    rig.begin(here, "both")
    assert rig.core._requests["both"].leases
    rig.core.prepare_store(keys, "both")
    assert rig.core._requests["both"].leases, "the wait goes on"
    rig.core.complete_load(busy, "r")
    assert rig.resolve(here, "both") == 2


@pytest.mark.parametrize("decided", [False, True])
def test_what_was_looked_up_while_a_store_waited_is_over_when_it_is_granted(decided: bool) -> None:
    busy, here, keys = chain("busy", 4), chain("a", 2), chain("b", 2)
    rig = Rig(rows=4, on=(here,))
    rig.store(busy)
    rig.load(busy)
    assert rig.core.prepare_store(keys, "both") is None
    rig.step()
    rig.begin(here, "both")
    if decided:
        rig.core.on_request_decided("both", loads=False)
    else:
        rig.wait(3.0)
        assert rig.ask(here, "both") == 0, "the deadline"
    rig.core.complete_load(busy, "r")
    rig.step()
    grant = rig.granted(keys, "both")
    rig.core.complete_store(grant.keys, "both")
    rig.settle()
    assert rig.resolve(here, "both") == 2


def test_a_store_does_not_wait_for_what_its_request_looked_up_and_does_not_load() -> None:
    here, keys = chain("a", 4), chain("b", 4)
    rig = Rig(rows=4, on=(here,), lease=10.0)
    busy = chain("busy", 4)
    rig.store(busy)
    rig.load(busy)
    assert rig.core.prepare_store(keys, "both") is None
    rig.core.complete_load(busy, "r")
    rig.step()
    assert rig.ask(here, "both") is None
    rig.settle()
    rig.settle()
    assert rig.core._requests["both"].leases
    assert rig.core.prepare_store(keys, "both") is None, "it may be about to load"
    rig.wait(0.5)
    grant = rig.granted(keys, "both")
    assert len(grant.keys) > 0


def test_each_request_is_deferred_on_its_own_account() -> None:
    rig = Rig(rows=4, on=())
    busy = chain("busy", 2)
    rig.put(busy)
    rig.load(busy)
    assert rig.core.prepare_store(chain("a", 4), "w0") is None
    assert rig.core.prepare_store(chain("b", 4), "w1") is None


def test_a_request_that_was_deferred_and_finishes_is_forgotten() -> None:
    rig = Rig(rows=4, on=())
    busy = chain("busy", 2)
    rig.put(busy)
    rig.load(busy)
    assert rig.core.prepare_store(chain("a", 4), "w") is None
    rig.core.on_request_finished("w")
    assert "w" not in rig.core._requests


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_store_is_never_refused_while_every_row_is_busy(length: int) -> None:
    rig = Rig(rows=4, on=())
    busy, keys = chain("busy", 4), chain("a", length)
    rig.put(busy)
    rig.load(busy)
    for _ in range(5):
        assert rig.core.prepare_store(keys, "w") is None
        rig.step(1.0)
    rig.core.complete_load(busy, "r")
    rig.step()
    grant = rig.granted(keys, "w")
    assert grant.keys == keys[:4]
    assert rig.stats.chunks_refused == max(0, length - 4)


def test_a_chunk_being_stored_belongs_to_the_store_until_it_is_complete() -> None:
    rig = Rig(rows=2, on=())
    keys = chain("a", 2)
    rig.granted(keys, "w")
    rig.core.on_request_finished("w")
    rig.wait(60, each=1.0)
    assert rig.core.prepare_store(chain("b", 1), "other") is None
    rig.core.complete_store(keys, "w")
    rig.step()
    assert rig.ask(keys) == 2


def test_the_end_of_a_store_that_nobody_began_is_counted_and_harmless() -> None:
    rig = Rig(rows=4)
    keys = chain("a", 2)
    rig.core.complete_store(keys, "w")
    rig.granted(keys, "w")
    rig.core.complete_store(keys, "another")
    assert rig.ask(keys) is None, "it is still being written"
    rig.core.complete_store(keys, "w")
    rig.core.complete_store(keys, "w")
    rig.core.complete_store(keys, "w", ok=False)
    assert rig.stats.stray == 8
    rig.settle()
    assert rig.ask(keys) == 2


def test_the_end_of_a_load_that_nobody_began_is_counted_and_harmless() -> None:
    rig = Rig(rows=4)
    keys = chain("a", 2)
    rig.put(keys)
    rig.load(keys, "r")
    rig.core.complete_load(keys, "another")
    rig.core.complete_load([b"unknown"], "r")
    assert rig.stats.stray == 3
    assert all(rig.core._pool.chunks[key].pins for key in keys)
    rig.core.complete_load(keys, "r")
    rig.core.complete_load(keys, "r")
    assert rig.stats.stray == 5
    rig.settle()
    assert rig.core._pool.busy == 0


def test_the_end_of_a_move_that_nobody_began_is_counted_and_harmless() -> None:
    from kvstore.types import Completion

    rig = Rig(rows=4)
    rig.core.poll(rig.now, [Completion(12345, [True])])
    assert rig.stats.stray == 1


def test_a_load_goes_on_after_its_request_has_finished() -> None:
    rig = Rig(rows=2, on=())
    keys = chain("a", 2)
    rig.put(keys)
    rig.load(keys)
    rig.core.on_request_finished("r")
    assert rig.core.prepare_store(chain("b", 2), "w") is None, "its rows are being read"
    rig.core.complete_load(keys, "r")
    assert not any(chunk.pins for chunk in rig.core._pool.chunks.values())
    assert "r" not in rig.core._requests


def test_two_loads_of_one_request_each_hold_their_pins() -> None:
    rig = Rig(rows=2, on=())
    keys = chain("a", 2)
    rig.put(keys)
    rig.load(keys)
    rig.use(keys)
    assert rig.core._pool.busy == 2
    rig.core.complete_load(keys, "r")
    assert rig.core._pool.busy == 0
    rig.core.complete_load(keys, "r")
    assert rig.stats.stray == 2


def test_a_load_may_name_a_key_twice_and_end_with_a_set() -> None:
    rig = Rig(rows=2, on=())
    keys = chain("a", 2)
    rig.put(keys)
    rows = rig.load([keys[0], keys[1], keys[0]])
    assert rows[0] == rows[2] != rows[1]
    rig.core.complete_load(set(keys), "r")
    assert rig.core._pool.busy == 0
    assert rig.stats.stray == 0


@pytest.mark.parametrize(
    "use",
    [lambda rig, keys: rig.core.touch(keys), Rig.use, Rig.put],
    ids=["touched", "loaded", "offered again"],
)
def test_what_is_used_stays_longer(use: Callable[[Rig, list[bytes]], None]) -> None:
    rig = Rig(rows=4, on=())
    old, young = chain("a", 2), chain("b", 2)
    rig.put(old)
    rig.put(young)
    rig.step()
    use(rig, old)
    rig.step()
    rig.put(chain("c", 2))
    assert [rig.in_host(key) for key in old + young] == [True, True, False, False]


def test_touching_what_is_nowhere_is_harmless() -> None:
    rig = Rig(rows=4, on=[chain("t", 2)])
    rig.core.touch([*chain("unknown", 2), *chain("t", 2)])
    assert list(rig.core.tiers[0].index.policy.order()) == [chain("t", 2)[1], chain("t", 2)[0]]


def test_a_store_that_can_never_fit_whole_is_not_deferred() -> None:
    rig = Rig(rows=4, on=())
    busy, keys = chain("busy", 2), chain("a", 9)
    rig.put(busy)
    rig.load(busy)
    grant = rig.granted(keys, "w")
    assert grant.keys == keys[:2]


def test_a_store_is_deferred_once_while_chunks_wait_for_their_copies() -> None:
    rig = Rig(rows=4, in_flight=1)
    rig.put(chain("a", 3))
    grants = [rig.core.prepare_store(chain("b", 2), "w") for _ in range(2)]
    assert grants[0] is None
    assert grants[1] is not None
    assert grants[1].keys == chain("b", 1)


def test_everything_is_counted() -> None:
    cold = chain("cold", 3)
    rig = Rig(rows=8, on=[cold])
    rig.store(chain("a", 2))
    assert rig.ask([*chain("a", 2), b"unknown"], "r0") == 2
    rig.load(chain("a", 2), "r0")
    rig.begin(cold)
    rig.arrive(failed=cold[2:])
    assert rig.ask(cold) == 2
    rig.load(cold[:2])
    rig.put(chain("b", 2))
    (move,) = rig.step()
    rig.finish(move, failed=chain("b", 1))
    stats = rig.stats
    assert (stats.misses, stats.loaded, stats.stored) == (2, 4, 4)
    assert stats.loaded_from == {"host": 2, "disk": 2}
    assert (stats.rows, stats.free_rows, stats.busy_rows, stats.chunks) == (8, 2, 4, 6)
    tier = stats.tiers[0]
    assert (tier.promoted, tier.failed_reads) == (2, 1)
    assert (tier.written, tier.failed_writes) == (3, 1)
    assert (tier.errors, tier.chunks, tier.queued) == (2, 5, 0)
