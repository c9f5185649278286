"""LRU keeps the contract, and its order is that of use."""

from __future__ import annotations

from kvstore.policies import EvictionPolicy
from kvstore.policies.lru import LRU
from kvstore.testing.policy import PolicyContract, keys_of, nobody


class TestLRU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return LRU(capacity)

    def test_the_one_whose_last_use_lies_furthest_back_leaves_first(self) -> None:
        keys = keys_of(4)
        policy = self.holding(keys)
        policy.touch(keys[0])
        policy.touch(keys[2])
        assert policy.evict(4, nobody) == [keys[1], keys[3], keys[0], keys[2]]

    def test_a_newcomer_is_the_last_to_leave(self) -> None:
        keys = keys_of(3)
        policy = self.holding(keys[:2])
        policy.touch(keys[0])
        policy.insert(keys[2])
        assert policy.evict(2, nobody) == [keys[1], keys[0]]

    def test_a_chain_that_comes_tail_first_is_shed_from_its_end(self) -> None:
        chain = keys_of(4)
        policy = self.holding(chain[::-1])
        for key in reversed(chain):
            policy.touch(key)
        assert policy.evict(2, nobody) == [chain[3], chain[2]]

    def test_who_was_found_in_use_counts_as_used_just_now(self) -> None:
        keys = keys_of(4)
        policy = self.holding(keys)
        assert policy.evict(1, {keys[0]}.__contains__) == [keys[1]]
        assert policy.evict(3, nobody) == [keys[2], keys[3], keys[0]]

    def test_the_order_is_coldest_first(self) -> None:
        keys = keys_of(4)
        policy = self.holding(keys)
        policy.touch(keys[1])
        assert list(policy.order()) == [keys[0], keys[2], keys[3], keys[1]]

    def test_what_is_found_at_opening_comes_coldest_first(self) -> None:
        keys = keys_of(4)
        policy = self.create(4)
        policy.restore(keys)
        assert policy.evict(2, nobody) == keys[:2]
