"""Compaction while serving: what is copied, what is given back, and when it stops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.residency.compactor import TRIES, Compactor
from kvstore.types import Completion, Move, Op
from tests.core.rig import Rig, chain

SLOTS = 8


def sparse(rate: float = 1000.0, segments: int = 4, live: int = 2, **options: Any) -> Rig:
    """A tier of `segments`, of which each holds `live` chunks."""
    rig = Rig(rows=8, segment_slots=SLOTS, segments=segments, relocation_chunks=4, **options)
    tier = rig.owned()
    tier.compactor.set_rate(rate)
    for segment in range(segments):
        first = segment * SLOTS
        tier.slots._stripe_of(first).withdraw(segment)
        for n, key in enumerate(chain(f"s{segment}", live)):
            tier.entries[key] = first + n
            tier.index.policy.insert(key)
        tier.slots._stripe_of(first).give(range(first + live, first + SLOTS))
    return rig


def compact(
    rig: Rig, steps: int = 200, failed: Any = (), rotten: Any = (), unlisted: Any = ()
) -> list[Move]:
    """Let time pass; every move of compaction ends at once. Returns those moves.

    Chunks that are `failed` cannot be copied, those that are `rotten` are not what they were, and
    the records of those that are `unlisted` are damaged.
    """
    moves: list[Move] = []
    tier = rig.owned()
    for _ in range(steps):
        for move in rig.step(0.1):
            if move.op is Op.GROW:
                rig.end(move)
                continue
            moves.append(move)
            rig.moves.remove(move)
            found = [(key, slot) for key, slot in tier.entries.items()]
            its = [(k, s) for k, s in found if s // SLOTS == move.segment and k not in unlisted]
            ok = [key not in failed and key not in rotten for key in move.keys]
            error = None if all(ok) else "injected"
            listed = its if move.op is Op.LIST else []
            unread = [place for place, key in enumerate(move.keys) if key in failed]
            rig.ended.append(Completion(move.id, ok, error=error, found=listed, unread=unread))
    return moves


def test_sparse_segments_are_emptied_and_given_back() -> None:
    rig = sparse()
    before = dict(rig.core.tiers[0].entries)
    moves = compact(rig)
    tier = rig.owned()
    assert [m.op for m in moves if m.op is not Op.RELOCATE] == [Op.LIST, Op.SHRINK] * 2
    assert tier.slots.segments == 2
    assert rig.stats.tiers[0].removed_segments == 2
    assert rig.stats.tiers[0].relocated == 4
    assert set(tier.entries) == set(before), "nothing was lost"
    assert len(set(tier.entries.values())) == len(before)
    gone = {move.segment for move in moves if move.op is Op.SHRINK}
    assert not any(slot // SLOTS in gone for slot in tier.entries.values())
    assert tier.slots.free == 2 * SLOTS - len(before)


def test_a_chunk_that_cannot_be_copied_keeps_no_other_segment_from_being_emptied() -> None:
    rig = sparse(segments=6)
    before = dict(rig.owned().entries)
    (bad,) = chain("s0", 1)
    compact(rig, steps=3000, failed={bad})
    tier = rig.owned()
    assert tier.slots.segments == 3
    assert tier.entries[bad] == before[bad], "it is tried again, after others"
    assert set(tier.entries) == set(before)


def test_a_damaged_chunk_leaves_with_its_segment() -> None:
    """Its tier does not list it."""
    rig = sparse(segments=4)
    before = set(rig.owned().entries)
    (bad,) = chain("s0", 1)
    compact(rig, unlisted={bad})
    tier = rig.owned()
    assert tier.slots.segments == 2
    assert set(tier.entries) == before - {bad}
    assert rig.stats.tiers[0].corrupt == 1


def test_slots_that_are_set_aside_do_not_keep_a_segment() -> None:
    rig = sparse()
    tier = rig.owned()
    aside = [slot for segment in range(4) for slot in tier.slots._stripe_of(0).withdraw(segment)]
    bad = {segment * SLOTS + SLOTS - 1 for segment in range(4)}
    tier.slots.give(sorted(set(aside) - bad))
    tier.slots.set_aside(sorted(bad), rig.now)
    compact(rig)
    assert tier.slots.segments == 3
    assert rig.stats.tiers[0].set_aside == 3
    assert tier.slots.free + 3 + len(tier.entries) == tier.slots.segments * SLOTS


def test_what_is_copied_is_free_of_charge_for_the_policy() -> None:
    rig = sparse()
    order = list(rig.core.tiers[0].index.policy.order())
    compact(rig)
    assert list(rig.core.tiers[0].index.policy.order()) == order


def test_without_a_rate_nothing_is_moved() -> None:
    assert compact(sparse(rate=0.0)) == []


def test_full_segments_stay() -> None:
    assert compact(sparse(live=SLOTS - 1)) == []


def test_the_rate_is_kept() -> None:
    rig = sparse(rate=1.0, segments=6, live=1)
    start = rig.now
    moves = compact(rig, steps=30)
    copied = sum(len(move.keys) for move in moves)
    assert 1 <= copied <= (rig.now - start) * 1.0 + 1


def test_nothing_is_copied_while_anything_else_moves() -> None:
    rig = sparse()
    wanted = chain("s1", 2)
    assert rig.ask(wanted) is None
    moves = rig.step(0.1) + rig.wait(0.5)
    assert {move.op for move in moves} == {Op.PROMOTE}


def test_one_move_is_under_way_at_most() -> None:
    rig = sparse()
    moves = rig.wait(3.0)
    assert len(moves) == 1


def test_a_chunk_is_served_while_it_is_copied_and_afterwards() -> None:
    rig = sparse()
    (listing,) = rig.step(0.1) or rig.step(0.1)
    tier = rig.owned()
    its = [(k, s) for k, s in tier.entries.items() if s // SLOTS == listing.segment]
    rig.moves.remove(listing)
    rig.ended.append(Completion(listing.id, [], found=its))
    rig.step(0.1)
    (copy,) = rig.step(0.1)
    assert copy.op is Op.RELOCATE
    keys = [key for key, _ in its]
    assert rig.resolve(keys, "reader") == len(keys), "the copy held up a reader"
    # Its slots are not given to others under the reader: they are copied once more.
    assert [tier.entries[key] for key in keys] == [slot for _, slot in its]
    compact(rig)
    assert all(tier.entries[key] // SLOTS != listing.segment for key in keys)


def test_a_failed_copy_ends_it_for_a_while_and_loses_nothing() -> None:
    rig = sparse()
    tier = rig.owned()
    before = dict(tier.entries)
    moves = compact(rig, steps=20, failed=set(before))
    assert [move.op for move in moves] == [Op.LIST, Op.RELOCATE]
    assert dict(tier.entries) == before
    assert tier.slots.aside == 2, "nobody knows whether they can be written"
    assert tier.slots.free + tier.slots.aside + len(before) == tier.slots.segments * SLOTS
    assert compact(rig, steps=700)[0].op is Op.LIST, "it is tried again later"


def laid_out(rig: Rig, order: Sequence[bytes], failed: Any = (), rotten: Any = ()) -> Compactor:
    """Lay the first tier of the rig out anew, beside the core; moves end at once."""
    tier = rig.owned()
    compactor = Compactor(0, tier.index, tier.slots, 3, tier.count)
    compactor.set_rate(3)
    compactor.lay_out(order)
    now = 0.0
    while not compactor.laid_out:
        now += 1.0
        assert now < 10_000, "it never ends"
        move = compactor.due(now, idle=True)
        if move is None:
            continue
        found = [(k, s) for k, s in tier.entries.items() if s // SLOTS == move.segment]
        ok = [key not in failed and key not in rotten for key in move.keys]
        unread = [place for place, key in enumerate(move.keys) if key in failed]
        listed = found if move.op is Op.LIST else []
        compactor.ended(move, Completion(move.id, ok, found=listed, unread=unread), now)
        assert len(set(tier.entries.values())) == len(tier.entries), "two chunks in one slot"
    return compactor


@settings(deadline=None)
@given(
    chance=st.randoms(use_true_random=False),
    segments=st.integers(1, 5),
    live=st.integers(0, SLOTS),
    bad=st.integers(0, 3),
    mixed=st.floats(0, 1),
    down=st.booleans(),
    gone=st.integers(0, SLOTS),
)
def test_chunks_are_laid_out_in_order_and_what_is_empty_is_given_back(
    chance: random.Random,
    segments: int,
    live: int,
    bad: int,
    mixed: float,
    down: bool,
    gone: int,
) -> None:
    rig = sparse(segments=segments, live=live)
    tier = rig.owned()
    order = sorted(tier.entries, key=tier.entries.__getitem__, reverse=down)
    for key in chance.sample(order, min(gone, len(order))):
        tier.forget((key,))
        order.remove(key)
    # Only the first part is out of order.
    first = order[: int(mixed * len(order))]
    order[: len(first)] = chance.sample(first, len(first))
    rotten = set(order[:bad])
    roomy = tier.slots.free >= SLOTS
    compactor = laid_out(rig, order, rotten=rotten)
    assert set(order) - rotten <= set(tier.entries) <= set(order)
    assert tier.slots.free + len(tier.entries) == tier.slots.segments * SLOTS
    assert tier.slots.segments + compactor.removed_segments == segments
    assert not tier.slots._retired_free
    if not roomy:
        return
    assert tier.slots.segments == len({slot // SLOTS for slot in tier.entries.values()})
    assert tier.slots.segments <= -(-len(order) // SLOTS)
    slots = [tier.entries[key] for key in order if key in tier.entries]
    beside = [abs(b - a) == 1 and b // SLOTS == a // SLOTS for a, b in pairwise(slots)]
    assert bad or not slots or beside.count(False) < tier.slots.segments


@pytest.mark.parametrize("down", [False, True])
def test_what_lies_in_order_is_not_copied(down: bool) -> None:
    """The engine fills segments from their ends."""
    rig = sparse(segments=6, live=SLOTS)
    tier = rig.owned()
    order = sorted(tier.entries, key=tier.entries.__getitem__, reverse=down)
    # Of one segment all have left, of the next three of eight.
    for key in order[: SLOTS + 3]:
        tier.forget((key,))
    compactor = laid_out(rig, order[SLOTS + 3 :])
    assert (compactor.relocated, compactor.removed_segments) == (0, 1)


@pytest.mark.parametrize("op", [Op.LIST, Op.RELOCATE, Op.SHRINK])
def test_a_reset_in_its_midst_leaves_every_slot_free(op: Op) -> None:
    rig = sparse()
    tier = rig.owned()
    for _ in range(100):
        moves = rig.step(0.1)
        if moves and moves[0].op is op:
            break
        for move in moves:
            rig.moves.remove(move)
            its = [(k, s) for k, s in tier.entries.items() if s // SLOTS == move.segment]
            rig.ended.append(Completion(move.id, [True] * len(move.keys), found=its))
    (move,) = rig.moves
    rig.core.reset()
    tier.compactor.set_rate(0.0)
    rig.end(move)
    for _ in range(10):
        for move in rig.step(0.1):
            assert move.op is Op.CLEAR
            rig.moves.remove(move)
            rig.ended.append(Completion(move.id, [], sorted(tier.slots._segments)))
    assert not tier.entries
    assert tier.slots.free == tier.slots.segments * SLOTS
    assert tier.slots.segments == (3 if op is Op.SHRINK else 4)
    assert not tier.index.reading


def test_a_chunk_that_left_and_came_back_during_its_move_stays_where_it_is() -> None:
    rig = sparse()
    tier = rig.owned()
    for _ in range(20):
        rig.step(0.1)
        for move in rig.under_way(Op.LIST):
            rig.moves.remove(move)
            its = [(k, s) for k, s in tier.entries.items() if s // SLOTS == move.segment]
            rig.ended.append(Completion(move.id, [], found=its))
    (move,) = rig.under_way(Op.RELOCATE)
    key, held = move.keys[0], len(tier.entries)
    tier.forget((key,))
    (slot,) = tier.slots.take(1)
    tier.index.begin_writes([key], [slot])
    tier.index.written([key])
    free = tier.slots.free
    rig.finish(move)
    assert tier.entries[key] == slot
    assert len(tier.entries) == held
    assert len(set(tier.entries.values())) == held, "no slot has two chunks"
    assert tier.slots.free == free + 1, "the slot that was meant for its copy is free again"


def rewrite(rig: Rig, segments: Sequence[int], steps: int = 400, **more: Any) -> list[Move]:
    """Have segments rewritten; what the tier needs meanwhile for itself is done."""
    rig.owned().compactor.rewrite(segments)
    moves: list[Move] = []
    for _ in range(steps):
        moves += compact(rig, 1, **more)
    return moves


def moved_out(moves: Sequence[Move]) -> set[int]:
    """The segments that chunks were copied out of."""
    return {slot // SLOTS for move in moves if move.op is Op.RELOCATE for slot in move.slots}


def test_what_is_to_be_rewritten_is_copied_and_its_files_go() -> None:
    rig = sparse(rate=0.0, live=5)
    tier = rig.owned()
    before = dict(tier.entries)
    moves = rewrite(rig, [1, 3])
    assert moved_out(moves) == {1, 3}
    assert {move.segment for move in moves if move.op is Op.SHRINK} == {1, 3}
    assert set(tier.entries) == set(before)
    kept = {key for key, slot in before.items() if slot // SLOTS in (0, 2)}
    assert all(tier.entries[key] == before[key] for key in kept)
    assert all(tier.entries[key] != before[key] for key in set(before) - kept)
    assert rig.core.changing == 0
    assert tier.slots.free == tier.slots.segments * SLOTS - len(before)


def test_of_a_full_tier_the_coldest_chunks_make_room_for_the_first_copies() -> None:
    rig = sparse(rate=0.0, live=SLOTS, max_segments=4)
    tier = rig.owned()
    assert tier.slots.free == 0
    moves = rewrite(rig, range(4))
    assert rig.core.changing == 0
    assert {move.segment for move in moves if move.op is Op.SHRINK} == set(range(4))
    # No more than a segment's worth of them.
    assert 3 * SLOTS <= len(tier.entries) < 4 * SLOTS


def test_a_full_tier_is_rewritten_however_soon_steps_follow_one_another() -> None:
    rig = sparse(rate=0.0, live=SLOTS, max_segments=4)
    rig.owned().compactor.rewrite(range(4))
    for _ in range(20_000):
        for move in rig.step(0.001):
            if move.op is Op.LIST:
                held = rig.owned().entries.items()
                its = [(key, slot) for key, slot in held if slot // SLOTS == move.segment]
                rig.moves.remove(move)
                rig.ended.append(Completion(move.id, [], found=its))
            else:
                rig.end(move)
        if not rig.core.changing:
            break
    assert (rig.core.changing, rig.core.unrewritten) == (0, 0)
    assert rig.now < 100.0 + 10.0


def test_a_tier_that_can_grow_evicts_nothing_for_copies() -> None:
    rig = sparse(rate=0.0, live=SLOTS, max_segments=6)
    tier = rig.owned()
    rewrite(rig, range(4))
    assert rig.core.changing == 0
    assert len(tier.entries) == 4 * SLOTS


@pytest.mark.parametrize("live", [1, 3, 5])
@pytest.mark.parametrize("more", [0, 1])
def test_chunks_are_not_copied_to_segments_that_are_to_be_rewritten(live: int, more: int) -> None:
    rig = sparse(rate=0.0, live=live, max_segments=4 + more)
    moves = rewrite(rig, range(4))
    assert rig.core.changing == 0
    assert len(rig.owned().entries) == 4 * live
    copies = sum(len(move.keys) for move in moves if move.op is Op.RELOCATE)
    # Where no segment can be added before one is gone, those of the first one have to.
    assert copies <= 4 * live + (0 if more else live)


def test_a_segment_with_nothing_but_pins_that_find_no_room_is_left_as_it_is() -> None:
    rig = sparse(rate=0.0, segments=1, live=SLOTS, max_segments=1, pinned_share=1.0)
    tier = rig.owned()
    pinned = list(tier.entries)[:2]
    assert rig.core.pin(pinned, float("inf")) == 2
    rewrite(rig, [0], steps=3000)
    assert (rig.core.rewrites, rig.core.unrewritten, rig.core.changing) == (0, 1, 0)
    # The others made room for them, and their slots are free.
    assert list(tier.entries) == pinned
    assert tier.slots.free == SLOTS - 2


def test_a_copy_that_fails_is_made_later() -> None:
    rig = sparse(rate=0.0, live=5)
    tier = rig.owned()
    before = dict(tier.entries)
    (victim,) = {key for key, slot in before.items() if slot == SLOTS}
    rewrite(rig, [1], failed={victim})
    assert tier.entries[victim] == before[victim]
    assert rig.core.changing == 1
    rewrite(rig, [1], steps=2000)
    assert tier.entries[victim] != before[victim]
    assert rig.core.changing == 0


def test_what_cannot_be_copied_does_not_hold_up_other_segments() -> None:
    rig = sparse(rate=0.0, live=5)
    before = dict(rig.owned().entries)
    (victim,) = {key for key, slot in before.items() if slot == SLOTS}
    moves = rewrite(rig, [1, 3], steps=900, failed={victim})
    assert 3 in {move.segment for move in moves if move.op is Op.SHRINK}
    assert (rig.core.rewrites, rig.core.changing) == (1, 1)
    assert rig.owned().entries[victim] == SLOTS


def test_what_can_never_be_copied_is_left_as_it_is_and_told() -> None:
    rig = sparse(rate=0.0, live=5)
    before = dict(rig.owned().entries)
    (victim,) = {key for key, slot in before.items() if slot == SLOTS}
    moves = rewrite(rig, [1, 3], steps=3000, failed={victim})
    tries = [move for move in moves if move.op is Op.LIST and move.segment == 1]
    assert len(tries) == TRIES
    assert (rig.core.rewrites, rig.core.unrewritten, rig.core.changing) == (0, 1, 0)
    assert rig.owned().entries[victim] == SLOTS
    # Another time it may go well.
    rewrite(rig, [1], steps=3000)
    assert (rig.core.unrewritten, rig.owned().entries[victim] == SLOTS) == (0, False)


def test_a_reset_leaves_nothing_that_could_not_be_copied() -> None:
    rig = sparse(rate=0.0, live=5)
    victims = {key for key, slot in rig.owned().entries.items() if slot == SLOTS}
    rewrite(rig, [1], steps=3000, failed=victims)
    assert rig.core.unrewritten == 1
    rig.core.reset()
    assert rig.core.unrewritten == 0


def test_what_a_closed_tier_was_to_rewrite_is_not_rewritten() -> None:
    rig = sparse(rate=0.0, live=5)
    rig.owned().compactor.rewrite([1, 2])
    rig.step(0.1)
    rig.core.reset(close_tiers=True)
    assert (rig.core.rewrites, rig.core.unrewritten) == (0, 2)


def test_a_segment_that_is_gone_is_not_rewritten_and_a_reset_ends_it() -> None:
    rig = sparse(rate=0.0)
    assert rewrite(rig, [17]) == []
    assert rig.core.changing == 0
    rig.owned().compactor.rewrite([0, 1])
    rig.step(0.1)
    rig.core.reset()
    assert rig.owned().compactor.rewrites == 0


def test_what_is_not_to_be_rewritten_any_more_stays() -> None:
    rig = sparse(rate=0.0, live=5)
    tier = rig.owned()
    tier.compactor.rewrite([0, 1, 2, 3])
    compact(rig, 3)
    tier.compactor.rewrite([])
    compact(rig)
    assert rig.core.changing == 0
    # The one that was begun may have been finished.
    assert tier.slots.segments >= 3
    assert len(tier.entries) == 4 * 5
