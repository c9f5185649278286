"""Taking chunks out one by one; what random interleavings do to it is in `test_simulation`."""

from __future__ import annotations

import pytest

from kvstore.core.residency.remote_answers import Answers
from kvstore.types import NO_MOVE, Changes, Completion, Op
from tests.core.rig import Rig, chain

KEYS = chain("a", 3)


def test_what_is_removed_is_a_miss_at_once_and_its_places_are_free_when_it_is_erased() -> None:
    rig = Rig(rows=8, on=[KEYS])
    rig.put(KEYS)
    removal = rig.core.remove([*KEYS[1:], KEYS[1], b"nobody"])
    assert (removal.found, removal.done) == (2, False)
    assert rig.ask(KEYS) == 1
    rig.step()
    (erasure,) = rig.under_way(Op.ERASE)
    assert {*erasure.keys} == {*KEYS[1:], b"nobody"}
    assert rig.core._pool.free == 7
    rig.finish(erasure)
    assert removal.done
    assert not removal.unerased
    assert not rig.core.hidden


def test_a_hit_of_this_step_can_be_loaded_and_its_row_stays_until_it_was() -> None:
    rig = Rig(rows=8)
    rig.put(KEYS)
    assert rig.ask(KEYS, "r") == 3
    removal = rig.core.remove(KEYS)
    rig.flush()
    rows = rig.core.prepare_load(KEYS, "r")
    rig.step()
    assert rig.ask(KEYS, "other") == 0
    rig.settle()
    assert removal.done
    assert not {*rows} & {*rig.core._pool._free}
    rig.core.complete_load(KEYS, "r")
    rig.settle()
    assert rig.core._pool.free == 8
    assert not rig.core.hidden


def test_a_store_of_a_hidden_key_passes_it_over() -> None:
    rig = Rig(rows=8)
    rig.put(KEYS)
    assert rig.ask(KEYS[1:2], "r") == 1
    rig.core.prepare_load(KEYS[1:2], "r")
    rig.core.remove(KEYS[1:2])
    rig.step()
    grant = rig.granted(chain("a", 4), "w")
    assert grant.keys == chain("a", 4)[3:]


def test_what_the_policy_has_set_aside_is_forgotten_with_its_chunk() -> None:
    rig = Rig(rows=8, on=[[]])
    rig.put(KEYS)
    victims = rig.core._victims
    (key, chunk), *_ = rig.core._pool.chunks.items()
    rig.core._pool.queue([chunk], 0)
    # The policy meets a chunk that waits for its copy.
    assert victims.protection(shed_unsaved=False, bounded=False)(key)
    assert key in victims._parked
    rig.core.remove([key])
    rig.step()
    assert key not in rig.core._pool.chunks
    assert key not in victims._parked
    # Its row is another's now, which must not be taken for it.
    assert not chunk.aside


def test_an_erasure_that_fails_is_told_to_whoever_asked_and_asks_before_it_is_over() -> None:
    rig = Rig(rows=8, on=[KEYS, KEYS])
    first = rig.core.remove(KEYS)
    rig.step()
    one, other = rig.under_way(Op.ERASE, 0) + rig.under_way(Op.ERASE, 1)
    rig.finish(one, failed=[KEYS[1]])
    second = rig.core.remove(KEYS)
    assert second.found == 0
    rig.finish(other)
    for removal in (first, second):
        assert removal.done
        assert removal.unerased == [KEYS[1]]


def test_chunks_whose_keys_are_forgotten_leave_some_at_a_time_and_then_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.core.step.MOST_FORGOTTEN", 2)
    alice, bob = chain("alice", 5), chain("bob", 3)
    rig = Rig(rows=16)
    rig.put(alice)
    rig.store(bob)
    told: list[int] = []
    changes = Changes(
        forgotten=[b"alice"], on_taken=lambda: told.append(sum(rig.core.contains(alice)))
    )
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=changes, tier=0)])
    assert sum(rig.core.contains(alice)) == 3
    # What is stored meanwhile leaves, too.
    more = [b"alice more"]
    grant = rig.granted(more, "w")
    rig.core.complete_store(set(grant.keys), "w")
    rig.core.on_request_finished("w")
    for _ in range(8):
        rig.step()
    assert told == [0]
    assert changes.taken
    rig.settle()
    assert rig.core.contains([*alice, *more, *bob]) == [False] * 6 + [True] * 3
    assert not set(alice) & set(rig.owned().entries)
    assert sum("chunks leave host memory" in line for line in rig.log) == 2
    assert not rig.core.behind


def test_what_is_forgotten_leaves_host_memory_also_while_the_tier_is_cleared() -> None:
    rig = Rig(rows=16)
    rig.core.reset()
    moves = rig.flush()
    assert [move.op for move in moves] == [Op.CLEAR]
    alice = chain("alice", 3)
    grant = rig.granted(alice, "w")
    rig.core.complete_store(set(grant.keys), "w")
    rig.core.on_request_finished("w")
    changes = Changes(forgotten=[b"alice"])
    rig.core.poll(rig.now, [Completion(NO_MOVE, [], changes=changes, tier=0)])
    for _ in range(4):
        rig.step()
    assert rig.core.contains(alice) == [False] * 3
    assert changes.taken
    rig.settle()
    assert not rig.owned().entries


def test_an_erasure_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.removal.MOST_ERASED", 3)
    keys = chain("a", 8)
    rig = Rig(rows=8, on=[keys])
    removal = rig.core.remove(keys)
    erased: list[int] = []
    while not removal.done:
        erased += [len(move.keys) for move in rig.step() if move.op is Op.ERASE]
        rig.end_all()
    assert erased == [3, 3, 2]


@pytest.mark.parametrize("closes", [True, False])
def test_records_that_others_still_find_after_a_reset_are_not_told_as_erased(closes: bool) -> None:
    keys = chain("secret", 3)
    rig = Rig(rows=8, on=(keys,) if closes else (), store=None if closes else Answers())
    removal = rig.core.remove(keys)
    rig.core.reset(close_tiers=closes)
    assert removal.done
    assert sorted(removal.unerased) == sorted(keys)


def test_what_a_store_could_not_erase_is_told_also_where_a_reset_clears_the_disk() -> None:
    keys = chain("secret", 2)
    rig = Rig(rows=8, on=(keys,), store=Answers())
    removal = rig.core.remove(keys)
    rig.step()
    (move,) = (one for one in rig.moves if one.tier == 1)
    rig.finish(move, failed=keys)
    assert not removal.done
    rig.core.reset()
    assert sorted(removal.unerased) == sorted(keys)


@pytest.mark.parametrize("overdue", [False, True])
def test_an_answer_from_before_a_removal_does_not_bring_a_chunk_back(overdue: bool) -> None:
    (key,) = keys = chain("a", 1)
    rig = Rig(rows=8, on=(), store=Answers())
    rig.ask(keys)
    rig.step()
    removal = rig.core.remove(keys)
    rig.step()
    assert not rig.under_way(Op.ERASE)
    (question,) = rig.under_way(Op.ASK)
    if overdue:
        # Nobody waits for the answer any more.
        rig.step(60.0)
        rig.step()
        assert rig.under_way(Op.ERASE)
    rig.end(question)
    rig.settle()
    assert removal.done
    assert not removal.unerased
    assert rig.core.contains(keys) == [False]
    assert not rig.core.places(key)
