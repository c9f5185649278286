"""The contract of `policies.EvictionPolicy` as a test suite.

A policy's own tests inherit it and define how a policy is built:

    class TestMyPolicy(PolicyContract):
        def create(self, capacity):
            return MyPolicy(capacity)

The suite needs pytest and hypothesis.

This module is long because a contract is one class, which its users inherit.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.policies import HELD, LATER, EvictionPolicy

__all__ = ["PolicyContract", "keys_of"]


def keys_of(count: int, start: int = 0) -> list[bytes]:
    """Return keys as servers build them: a hash, then the index of a KV cache group."""
    return [b"block-%06d" % number + b"\0\0\0\0" for number in range(start, start + count)]


def nobody(key: bytes) -> bool:
    return False


def _everybody(key: bytes) -> bool:
    return True


class PolicyContract(ABC):
    """Tests that every eviction policy must pass. Inherit it in a class named ``Test...``."""

    @abstractmethod
    def create(self, capacity: int) -> EvictionPolicy:
        """Create a policy for a tier of `capacity` chunks."""

    def holding(self, keys: Sequence[bytes]) -> EvictionPolicy:
        """Create a policy with `keys` resident."""
        policy = self.create(max(1, len(keys)))
        for key in keys:
            policy.insert(key)
        return policy

    def holding_back(self, keys: Sequence[bytes]) -> EvictionPolicy:
        """Create a policy with `keys` resident that sets held keys aside; skip if it does not."""
        policy = self.holding(keys)
        if type(policy).release is EvictionPolicy.release:
            pytest.skip("this policy treats a held key like one in use")
        return policy

    def residents(self, policy: EvictionPolicy, known: Sequence[bytes]) -> set[bytes]:
        """Return those of `known` that are resident; assert that no others are."""
        there = {key for key in known if key in policy}
        assert len(policy) == len(there)
        return there

    # -- residence ---------------------------------------------------------------------

    def test_it_has_a_name(self) -> None:
        assert isinstance(self.create(1).name, str)
        assert self.create(1).name

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_a_tier_without_room_is_refused(self, capacity: int) -> None:
        with pytest.raises(ValueError, match=str(capacity)):
            self.create(capacity)

    def test_it_begins_empty(self) -> None:
        policy = self.create(4)
        assert len(policy) == 0
        assert b"key" not in policy
        assert policy.evict(1, nobody) is None

    def test_more_keys_than_its_capacity_may_be_resident(self) -> None:
        policy = self.create(4)
        keys = keys_of(12)
        policy.restore(keys[:6])
        for key in keys[6:]:
            policy.insert(key)
        for key in keys:
            policy.touch(key)
        assert self.residents(policy, keys) == set(keys)
        victims = policy.evict_up_to(12, nobody)
        assert len(set(victims)) == len(victims)
        assert self.residents(policy, keys) == set(keys) - set(victims)

    def test_what_was_inserted_is_resident(self) -> None:
        keys = keys_of(5)
        assert self.residents(self.holding(keys), keys_of(8)) == set(keys)

    def test_what_is_not_a_key_is_not_resident(self) -> None:
        policy = self.holding(keys_of(2))
        assert None not in policy
        assert "block-000000" not in policy

    def test_use_changes_nobodys_residence(self) -> None:
        keys = keys_of(5)
        policy = self.holding(keys)
        for key in [*keys[::2], *keys]:
            policy.touch(key)
        assert self.residents(policy, keys) == set(keys)

    def test_what_was_removed_is_not_resident_and_is_not_evicted(self) -> None:
        keys = keys_of(5)
        policy = self.holding(keys)
        policy.remove(keys[1])
        policy.remove(keys[3])
        assert self.residents(policy, keys) == {keys[0], keys[2], keys[4]}
        assert set(policy.evict(3, nobody) or ()) == {keys[0], keys[2], keys[4]}

    def test_what_left_may_come_back(self) -> None:
        keys = keys_of(3)
        policy = self.holding(keys)
        policy.remove(keys[0])
        assert policy.evict(2, nobody) is not None
        for key in keys:
            policy.insert(key)
        assert self.residents(policy, keys) == set(keys)

    # -- eviction ----------------------------------------------------------------------

    @pytest.mark.parametrize("count", [0, 1, 3, 8])
    def test_exactly_as_many_are_evicted_as_were_asked_for(self, count: int) -> None:
        keys = keys_of(8)
        policy = self.holding(keys)
        victims = policy.evict(count, nobody)
        assert victims is not None
        assert len(victims) == len(set(victims)) == count
        assert self.residents(policy, keys) == set(keys) - set(victims)

    def test_more_than_are_resident_cannot_be_evicted(self) -> None:
        keys = keys_of(4)
        policy = self.holding(keys)
        assert policy.evict(5, nobody) is None
        assert self.residents(policy, keys) == set(keys)

    def test_the_protected_stay(self) -> None:
        keys = keys_of(10)
        policy = self.holding(keys)
        safe = set(keys[::2])
        victims = policy.evict(5, safe.__contains__)
        assert victims is not None
        assert set(victims) == set(keys) - safe
        assert self.residents(policy, keys) == safe

    def test_when_too_few_may_leave_nobody_does(self) -> None:
        keys = keys_of(10)
        policy = self.holding(keys)
        safe = set(keys[:7])
        assert policy.evict(4, safe.__contains__) is None
        assert self.residents(policy, keys) == set(keys)
        assert policy.evict(1, _everybody) is None
        assert self.residents(policy, keys) == set(keys)
        assert set(policy.evict(3, safe.__contains__) or ()) == set(keys[7:])

    def test_who_spares_the_latest_lets_them_leave_only_after_all_others(self) -> None:
        rng = random.Random(0)
        for size in range(4, 40):
            policy = self.holding(old := keys_of(size))
            if not policy.spares_latest:
                return
            rng.shuffle(old)
            for key in rng.choices(old, k=size):
                policy.touch(key)
            protected, used = set(old[: size // 3]), set(old[size // 3 : size // 2])
            for key in used:
                policy.touch(key)
            for key in keys_of(size - size // 2, start=1000):
                victims = policy.evict(1, protected.__contains__, (key,))
                assert victims is not None
                assert victims[0] in set(old) - used
                policy.insert(key)

    def test_protection_lasts_as_long_as_it_is_said(self) -> None:
        keys = keys_of(6)
        policy = self.holding(keys)
        assert policy.evict(6, _everybody) is None
        assert set(policy.evict(6, nobody) or ()) == set(keys)

    def test_only_residents_are_asked_about(self) -> None:
        keys = keys_of(8)
        policy = self.holding(keys)
        policy.remove(keys[0])
        gone = {keys[0], *(policy.evict(2, nobody) or ())}
        asked: list[bytes] = []

        def protected(key: bytes) -> bool:
            asked.append(key)
            return False

        assert policy.evict(5, protected) is not None
        assert not gone & set(asked)

    def test_keys_in_use_are_not_asked_about_again_and_again(self) -> None:
        """Eviction stays O(1) amortised while a fixed part of the keys is in use."""
        self._asked_little(4, turns=4000, used=False)

    def test_keys_in_use_that_were_used_before_cost_no_more(self) -> None:
        """Also if the policy keeps used keys apart from the others."""
        self._asked_little(20, turns=2000, used=True)

    def _asked_little(self, most: int, *, turns: int, used: bool) -> None:
        """While half of the keys are in use, each turn and each key costs `most` questions."""
        keys = keys_of(1000)
        policy = self.holding(keys)
        in_use = set(keys[:500])
        for key in keys[:500] if used else ():
            policy.touch(key)
        asked = 0

        def protected(key: bytes) -> bool:
            nonlocal asked
            asked += 1
            return key in in_use

        for turn in range(turns):
            victims = policy.evict(1, protected)
            assert victims is not None
            assert not in_use & set(victims)
            policy.insert(b"new-%06d" % turn)
        assert asked <= most * (turns + 1000), f"{asked / turns:.0f} keys for each one evicted"

    # -- keys that are held ------------------------------------------------------------------

    def test_held_keys_stay_resident_and_leave_when_they_are_released(self) -> None:
        keys = keys_of(12)
        policy = self.holding(keys)
        held = set(keys[::2])

        def protected(key: bytes) -> int:
            return HELD if key in held else False

        assert policy.evict(7, protected) is None
        for key in keys[::3]:
            policy.touch(key)
        assert self.residents(policy, keys) == set(keys)
        assert set(policy.evict(6, protected) or ()) == set(keys) - held
        assert self.residents(policy, keys) == held
        gone = keys[4]
        policy.remove(gone)
        held.discard(gone)
        free = [keys[2], keys[8]]
        held -= set(free)
        policy.release(free)
        policy.release(free)
        assert set(policy.evict(2, protected) or ()) == set(free)
        rest = [key for key in keys if key in held]
        held.clear()
        policy.release(rest)
        assert set(policy.evict(len(rest), protected) or ()) == set(rest)
        assert self.residents(policy, keys) == set()

    @pytest.mark.parametrize("part", [0.5, 0.99])
    def test_held_keys_are_asked_about_once_until_they_are_released(self, part: float) -> None:
        """Eviction stays O(1) amortised while nearly all keys are in use and the set changes."""
        size, turns, batch = 2000, 2000, 8
        rng = random.Random(7)
        keys = keys_of(size)
        policy = self.holding_back(keys)
        held = set(keys[: int(size * part)])
        resident = list(held)
        asked = released = 0

        def protected(key: bytes) -> int:
            nonlocal asked
            asked += 1
            return HELD if key in held else False

        for turn in range(0, turns, batch):
            victims = policy.evict(batch, protected)
            assert victims is not None
            assert not held & set(victims)
            for number in range(turn, turn + batch):
                policy.insert(b"new-%06d" % number)
            # Release some keys and hold others.
            for _ in range(2):
                place = rng.randrange(len(resident))
                free = resident[place]
                resident[place] = b"new-%06d" % (turn + rng.randrange(batch))
                if resident[place] in held or resident[place] not in policy:
                    resident[place] = free
                    continue
                held.discard(free)
                held.add(resident[place])
                policy.release([free])
                released += 1
        bound = 8 * (turns + released) + 2 * size
        assert asked <= bound, f"{asked / turns:.0f} keys for each one evicted"

    def test_who_is_told_to_ask_later_asks_no_more_and_goes_on_from_there(self) -> None:
        size, patience = 400, 20
        keys = keys_of(size)
        policy = self.holding_back(keys)
        held = set(keys[:-10])
        asked = calls = late = 0

        def protected(key: bytes) -> int:
            nonlocal asked, late
            if asked >= patience:
                late += 1
                return LATER
            asked += 1
            return HELD if key in held else False

        victims = None
        while victims is None:
            asked = 0
            victims = policy.evict(4, protected)
            calls += 1
            assert self.residents(policy, keys) == set(keys) - set(victims or ())
            assert calls <= 2 * size // patience, "the search starts over each time"
        assert late <= calls
        assert not held & set(victims)

    # -- advice -------------------------------------------------------------------------

    def test_advice_changes_nobodys_residence(self) -> None:
        keys = keys_of(8)
        policy = self.holding(keys[:4])
        policy.link(keys)
        policy.link(keys[5:], after=keys[4])
        policy.link([])
        policy.settle(keys)
        policy.settle(keys[6:])
        policy.settle([])
        policy.settle(keys, [keys[2], keys[7]])
        policy.settle(keys, [])
        assert self.residents(policy, keys) == set(keys[:4])

    def test_what_is_cooled_is_resident_and_leaves_before_what_was_used_as_often(self) -> None:
        """In any order of arrival, tail first. A policy may ignore this advice."""
        keys = keys_of(24)
        cold = [keys[20], keys[7], keys[11]]
        policy = self.holding(keys)
        if type(policy).cool is EvictionPolicy.cool:
            pytest.skip("this policy ignores this advice")
        policy.cool(iter(cold))
        assert self.residents(policy, keys) == set(keys)
        assert {*[*policy.order()][: len(cold)]} in (set(), {*cold})
        left: list[bytes] = []
        for number in range(len(cold)):
            left += policy.evict(1, nobody, keys_of(1, 100 + number)) or []
            policy.insert(keys_of(1, 100 + number)[0])
        assert left == cold

    def test_what_is_used_after_it_was_cooled_is_like_any_other(self) -> None:
        keys = keys_of(12)
        used = keys[:2]
        for cold in ([], used):
            policy = self.holding(keys)
            policy.cool(cold)
            for key in used * 2:
                policy.touch(key)
            left = policy.evict(4, nobody)
            assert left is not None
            if not cold and {*used} & {*left}:
                pytest.skip("this policy counts no uses")
            assert not {*used} & {*left}

    def test_held_keys_may_be_cooled_and_still_leave_when_they_are_released(self) -> None:
        keys = keys_of(10)
        policy = self.holding_back(keys)
        held = set(keys[:4])

        def protected(key: bytes) -> int:
            return HELD if key in held else False

        assert policy.evict(7, protected) is None
        policy.cool(keys[2:6])
        assert self.residents(policy, keys) == set(keys)
        assert set(policy.evict(6, protected) or ()) == set(keys[4:])
        held.clear()
        policy.release(keys[:4])
        policy.cool(keys[:4])
        assert set(policy.evict(4, protected) or ()) == set(keys[:4])

    def test_wrong_advice_breaks_nothing(self) -> None:
        keys = keys_of(8)
        policy = self.holding(keys)
        policy.link(keys[::-1])
        policy.link(keys)
        policy.link([keys[3], keys[3]], after=keys[3])
        policy.settle([b"never heard of"])
        policy.settle(keys, [b"never heard of"])
        assert len(policy.evict(3, nobody, keys_of(2, 100)) or ()) == 3
        assert len(policy.evict(5, nobody, keys_of(9, 200)) or ()) == 5
        assert self.residents(policy, keys) == set()

    def test_what_was_said_to_come_need_not_come(self) -> None:
        keys = keys_of(12)
        policy = self.holding(keys[:6])
        gone = policy.evict(2, nobody, keys[6:8])
        assert gone is not None
        for _ in range(3):
            again = policy.evict(1, nobody, [gone[0], keys[9]])
            assert again is not None
        policy.insert(keys[10])
        assert len(self.residents(policy, keys)) == 2

    def test_nobody_in_the_middle_of_a_chain_is_needed_to_make_room(self) -> None:
        """While the end of a chain is in use, the keys before it can be evicted."""
        chain = keys_of(6)
        policy = self.create(6)
        policy.link(chain)
        for key in reversed(chain):
            policy.insert(key)
        policy.settle(chain)
        end = chain[-1]
        assert set(policy.evict(5, end.__eq__) or ()) == set(chain[:-1])
        assert policy.evict(1, end.__eq__) is None
        assert policy.evict(1, nobody) == [end]

    # -- the whole -----------------------------------------------------------------------

    def test_clear_leaves_it_as_new(self) -> None:
        keys = keys_of(6)
        policy = self.holding(keys)
        policy.evict(2, nobody)
        policy.clear()
        assert self.residents(policy, keys) == set()
        assert list(policy.order()) == []
        fresh = self.create(6)
        for each in (policy, fresh):
            for key in keys:
                each.insert(key)
            each.touch(keys[0])
        assert policy.evict(3, nobody) == fresh.evict(3, nobody)

    def test_keys_found_at_opening_are_resident(self) -> None:
        keys = keys_of(6)
        policy = self.create(6)
        policy.restore(iter(keys))
        assert self.residents(policy, keys) == set(keys)

    def test_the_order_names_residents_once_and_changes_nothing(self) -> None:
        keys = keys_of(6)
        policy = self.holding(keys)
        policy.touch(keys[2])
        order = list(policy.order())
        assert len(set(order)) == len(order)
        assert not order or set(order) == set(keys)
        assert list(policy.order()) == order

    def test_an_order_is_kept_across_a_restart(self) -> None:
        keys = keys_of(6)
        policy = self.holding(keys)
        for key in (keys[3], keys[1]):
            policy.touch(key)
        order = list(policy.order())
        if not order:
            pytest.skip("this policy has no order")
        after = self.create(6)
        after.restore(order)
        assert list(after.order()) == order

    # Several classes inherit this function, so they must not share a database of examples.
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(seed=st.integers(0, 2**32), capacity=st.integers(1, 12))
    def test_it_agrees_with_a_set(self, seed: int, capacity: int) -> None:
        """Compare the policy with a set over random sequences of allowed calls."""
        rng = random.Random(seed)
        policy = self.create(capacity)
        known = keys_of(2 * capacity)
        resident: set[bytes] = set()
        for _ in range(120):
            roll = rng.random()
            there = sorted(resident)
            if roll < 0.45 and len(resident) < capacity:
                key = rng.choice([key for key in known if key not in resident])
                policy.insert(key)
                resident.add(key)
            elif roll < 0.65 and there:
                policy.touch(rng.choice(there))
            elif roll < 0.75 and there:
                key = rng.choice(there)
                policy.remove(key)
                resident.discard(key)
            elif roll < 0.80:
                advice = rng.sample(known, rng.randrange(len(known)))
                if rng.random() < 0.5:
                    policy.link(advice, rng.choice([None, *known]))
                else:
                    policy.settle(advice)
                policy.cool(rng.sample(there, rng.randrange(len(there) + 1)))
            elif roll < 0.98:
                safe = {key for key in there if rng.random() < rng.choice((0.1, 0.9))}
                count = rng.randrange(capacity + 2)
                coming = [key for key in known if key not in resident and rng.random() < 0.3]
                victims = policy.evict(count, safe.__contains__, coming)
                if victims is not None:
                    assert len(victims) == len(set(victims)) == count
                    assert set(victims) <= resident - safe
                    resident -= set(victims)
                else:
                    assert count > len(resident - safe), "enough keys could have been evicted"
            else:
                policy.clear()
                resident.clear()
            assert self.residents(policy, known) == resident
