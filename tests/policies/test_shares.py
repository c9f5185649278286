"""How many chunks each partition of tenants keeps of what a store holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policies.lru import LRU
from kvstore.policies.shares import Places, Share, Shares, tenant_keys
from kvstore.policies.tenants import Tenants

SHARES = st.builds(
    Share,
    guaranteed=st.sampled_from([0.0, 0.1, 0.25]),
    maximal=st.sampled_from([0.3, 0.5, 1.0]),
    weight=st.sampled_from([0.5, 1.0, 2.0, 7.0]),
)


@given(
    st.lists(SHARES, max_size=3), SHARES, st.integers(1, 3), st.lists(st.integers(0, 2000)),
    st.integers(0, 1000),
)  # fmt: skip
def test_what_is_guaranteed_is_kept_and_nothing_is_wasted(
    named: list[Share], others: Share, partitions: int, counts: list[int], capacity: int
) -> None:
    shares = Shares({str(n): share for n, share in enumerate(named)}, others, partitions)
    places = Places(shares)
    there = dict(zip(range(len(places.shares)), counts, strict=False))
    kept = places.kept(there, capacity)
    assert sum(kept) <= capacity
    most = []
    # The others have one share together.
    groups = [[place] for place in range(len(named))]
    for group in (*groups, range(len(named), len(kept))):
        share, _ = places.shares[group[0]]
        most.append(min(sum(there.get(p, 0) for p in group), int(share.maximal * capacity)))
        least = min(most[-1], int(share.guaranteed * capacity))
        assert least <= sum(kept[place] for place in group) <= most[-1]
        assert all(kept[place] <= there.get(place, 0) for place in group)
    # Chunks are not divided.
    assert sum(kept) >= min(sum(most), capacity - len(kept))


def test_the_rest_is_shared_by_weight_and_what_one_leaves_is_the_others() -> None:
    shares = {"a": Share(guaranteed=0.2), "b": Share(weight=2), "c": Share(weight=1)}
    places = Places(Shares(shares, Share(), 1))
    assert places.kept({0: 1000, 1: 1000, 2: 1000}, 1000) == [400, 400, 200, 0]
    assert places.kept({0: 1000, 1: 100, 2: 1000}, 1000) == [550, 100, 350, 0]
    assert places.kept({0: 50, 1: 0, 2: 5000}, 1000) == [50, 0, 950, 0]
    much = Places(Shares({"a": Share(weight=1e17)}, Share(), 1))
    assert much.kept({0: 1000, 1: 1000}, 100) == [100, 0]
    assert much.kept({0: 10, 1: 1000}, 100) == [10, 90]


def test_what_is_removed_beyond_the_capacity_costs_no_guarantee() -> None:
    places = Places(Shares({"a": Share(guaranteed=0.5), "b": Share(weight=100)}))
    assert places.kept({0: 80, 1: 500}, 160, 150)[:2] == [80, 70]


@pytest.mark.parametrize("part", [0.29, 0.57, 0.58])
def test_a_part_of_a_hundred_is_as_many_chunks(part: float) -> None:
    places = Places(Shares({"a": Share(guaranteed=part)}, Share(), 1))
    assert places.kept({0: 100, 1: 100}, 100)[0] >= round(100 * part)
    policy = Tenants(100, LRU, Shares({"a": Share(guaranteed=part), "b": Share(weight=1e6)}))
    hers = tenant_keys("a", [b"%d" % n for n in range(round(100 * part))])
    for key in hers + tenant_keys("b", [b"%d" % n for n in range(100 - len(hers))]):
        policy.insert(key)
    evicted = policy.evict(5, lambda key: False, tenant_keys("b", [b"x%d" % n for n in range(5)]))
    assert evicted is not None
    assert not set(evicted) & set(hers)
