"""Taking chunks out one by one; what random interleavings do to it is in `test_simulation`."""

from __future__ import annotations

from kvstore.types import Op
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
    rig.end(erasure)
    rig.step()
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
    grant = rig.core.prepare_store(chain("a", 4), "w")
    assert grant is not None
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
    rig.end(one, failed=[KEYS[1]])
    rig.step()
    second = rig.core.remove(KEYS)
    assert second.found == 0
    rig.end(other)
    rig.step()
    for removal in (first, second):
        assert removal.done
        assert removal.unerased == [KEYS[1]]
