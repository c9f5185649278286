"""Shares of tenants: what a policy of several partitions keeps for whom."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.plugins import Choice, build_filters
from kvstore.policies import HELD, LATER, EvictionPolicy, Protected
from kvstore.policies.hitdensity import HitDensity
from kvstore.policies.lru import LRU
from kvstore.policies.migration import TenantMigration, dismantle
from kvstore.policies.shares import Share, Shares, tag_of, tenant_keys
from kvstore.policies.tenants import Tenants, _Partition
from kvstore.testing.policy import PolicyContract, nobody


class Spread(Tenants):
    """Keys of one prompt are of several tenants, and nobody knows who asks for room."""

    def _partition(self, key: bytes) -> _Partition:
        return self.partitions[sum(key) % len(self.partitions)]

    def evict_up_to(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        return super().evict_up_to(count, protected)

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return super().evict(count, protected)


KEYS_20 = [b"key %d" % number for number in range(20)]
SPREAD = Shares({"a": Share(weight=3.0), "b": Share()}, partitions=1)


class TestOneTenantOverLRU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return Tenants(capacity, LRU, Shares(partitions=1))


class TestTenantsOverLRU(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return Spread(capacity, LRU, SPREAD)

    # Who has most gives first, cold or not.
    test_what_is_cooled_is_resident_and_leaves_before_what_was_used_as_often = None  # type: ignore[assignment]


class TestTenantsOverHitDensity(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return Spread(capacity, HitDensity, SPREAD)

    test_what_is_cooled_is_resident_and_leaves_before_what_was_used_as_often = None  # type: ignore[assignment]


class Cache:
    """A tier of `capacity` chunks that evicts as a pool does."""

    def __init__(self, capacity: int, shares: Shares) -> None:
        self.now = 0.0
        self.policy = Tenants(capacity, LRU, shares, lambda: self.now)
        self.count: Counter[str] = Counter()
        self.held: set[bytes] = set()

    def protected(self, key: bytes) -> int:
        return HELD if key in self.held else False

    def keys(self, tenant: str, count: int) -> list[bytes]:
        start = self.count[tenant]
        self.count[tenant] += count
        return [tag_of(tenant) + b"%06d" % number for number in range(start, start + count)]

    def put(self, tenant: str, count: int = 1) -> int:
        """Store so many new chunks; returns how many found room."""
        keys = self.keys(tenant, count)
        short = count - (self.policy.capacity - len(self.policy))
        if short > 0:
            count -= short - len(self.policy.evict_up_to(short, self.protected, keys))
        for key in keys[:count]:
            self.policy.insert(key)
        return count

    def flood(self, tenant: str, times: int = 300, each: int = 1) -> None:
        for _ in range(times):
            self.put(tenant, each)

    def has(self, tenant: str) -> int:
        tag = tag_of(tenant)
        return sum(key.startswith(tag) for key in self.policy.order())


def named(**shares: Share) -> Shares:
    return Shares(shares, partitions=4, idle_s=60.0)


EVEN = named(a=Share(), b=Share())


@pytest.mark.parametrize("each", [1, 7, 30])
def test_who_floods_harms_nobody_that_has_less_than_he(each: int) -> None:
    cache = Cache(100, EVEN)
    cache.put("b", 40)
    cache.flood("a", each=each)
    assert (cache.has("a"), cache.has("b")) == (60, 40)


@pytest.mark.parametrize("each", [1, 7, 30])
def test_who_is_alone_has_everything_until_others_come(each: int) -> None:
    cache = Cache(100, EVEN)
    cache.flood("a")
    assert cache.has("a") == 100
    cache.flood("b", each=each)
    assert cache.has("b") == 50
    cache.flood("a", each=each)
    assert cache.has("a") == 50


def test_at_once_one_gets_no_more_than_bit_by_bit() -> None:
    cache = Cache(100, EVEN)
    cache.put("a", 100)
    assert cache.put("b", 100) == 50


def test_weights_decide_between_those_that_want_more() -> None:
    cache = Cache(100, named(a=Share(weight=3.0), b=Share()))
    for _ in range(300):
        cache.put("a")
        cache.put("b")
    assert abs(cache.has("a") - 75) <= 1


def test_a_guarantee_holds_however_long_it_is_not_used() -> None:
    cache = Cache(100, named(a=Share(), b=Share(guaranteed=0.3)))
    cache.put("b", 80)
    cache.now += 3600.0
    cache.flood("a")
    assert cache.has("b") == 30


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("share", "least"), [(0.2, 20), (0.5, 50), (0.9, 90)])
def test_a_guarantee_holds_while_much_is_taken_and_on_its_way(
    share: float, least: int, idle: bool
) -> None:
    """What is being stored is not there yet; a guarantee is a part of what there was."""
    for each in (100, 7, 1):
        cache = Cache(100, named(b=Share(guaranteed=share, weight=0.01), a=Share()))
        cache.put("b", 100)
        cache.now += 1000.0 * idle
        taken = 0
        for _ in range(100 // each):
            keys = cache.keys("a", each)
            taken += len(cache.policy.evict_up_to(each, nobody, keys))
            cache.now += 0.1
        assert cache.has("b") == 100 - taken >= least
        # Once they are smaller for long, because the tier is, so are guarantees.
        cache.now += 200.0
        cache.put("a", 1)
        assert cache.has("b") <= 100 - taken


def test_what_is_beyond_a_maximum_is_not_counted_as_spare_once_more() -> None:
    cache = Cache(100, named(b=Share(guaranteed=0.5, maximal=0.6), a=Share()))
    cache.put("b", 90)
    cache.put("a", 10)
    cache.now += 1000.0
    cache.put("a", 70)
    assert cache.has("b") == 50


def test_what_is_not_used_and_not_guaranteed_leaves_before_what_is_used() -> None:
    cache = Cache(100, named(a=Share(), b=Share(), c=Share()))
    cache.put("c", 20)
    cache.now += 61.0
    cache.put("b", 60)
    cache.flood("a", 40)
    assert (cache.has("a"), cache.has("b"), cache.has("c")) == (40, 60, 0)


def test_beyond_a_maximum_chunks_leave_though_there_is_room() -> None:
    cache = Cache(100, named(a=Share(maximal=0.2)))
    cache.put("a", 50)
    cache.put("b", 10)
    assert cache.policy.excess == 30
    gone = cache.policy.evict_up_to(30, nobody)
    assert {key[:8] for key in gone} == {tag_of("a")}
    assert cache.policy.excess == 0
    cache.put("b", 70)
    cache.flood("a")
    assert cache.has("a") == 20


def test_rather_than_of_one_that_has_less_nothing_is_evicted() -> None:
    cache = Cache(100, EVEN)
    cache.put("a", 60)
    cache.put("b", 40)
    cache.held.update(key for key in cache.policy.order() if key.startswith(tag_of("a")))
    assert cache.put("a") == 0
    assert cache.policy.evict(1, cache.protected, cache.keys("a", 1)) is None
    assert cache.put("b", 30) == 30, "it may give up its own"
    assert cache.has("b") == 40
    cache.policy.release([key for key in cache.policy.order() if key in cache.held])
    cache.held.clear()
    assert cache.put("b", 5) == 5
    assert cache.has("b") == 45


def test_how_far_a_prompt_reaches_is_what_it_can_get() -> None:
    shares = named(a=Share(guaranteed=0.5), b=Share(), c=Share(maximal=0.1))
    cache = Cache(100, shares)
    assert cache.policy.reach(cache.keys("b", 1)) == 100
    cache.put("a", 90)
    for tenant, most in (("b", 25), ("c", 10), ("a", 100)):
        assert abs(cache.policy.reach(cache.keys(tenant, 1)) - most) <= 1
    reach = cache.policy.reach(cache.keys("b", 1))
    cache.flood("b", each=7)
    assert cache.has("b") == reach
    limit = cache.policy.reach(cache.keys("c", 1))
    for public in (1, limit, limit + 1, 70):
        for own in (1, 200):
            both = [*cache.keys("c", public), *cache.keys("b", own)]
            # What is public has a limit, too; what follows counts against its owner alone.
            expected = limit if public > limit else public + reach
            assert cache.policy.reach(both) == expected
    mixed = [
        key for pair in zip(cache.keys("c", 30), cache.keys("b", 30), strict=True) for key in pair
    ]
    assert cache.policy.reach(mixed) == 2 * min(limit, reach)


@pytest.mark.parametrize("seed", range(20))
def test_as_many_rows_as_were_promised_can_be_had(seed: int) -> None:
    """Who is promised more waits in vain until its deadline."""
    dice, now = random.Random(seed), [0.0]
    capacity = dice.choice([4, 16, 33])
    shares = Shares(
        {
            f"t{n}": Share(
                dice.choice([0, 0.1, 0.3]), dice.choice([0.3, 0.5, 1]), dice.choice([0.5, 2])
            )
            for n in range(dice.randrange(4))
        },
        Share(dice.choice([0, 0.1]), dice.choice([0.5, 1])),
        dice.choice([1, 8]),
        dice.choice([5, 600]),
    )
    policy = Tenants(capacity, LRU, shares, lambda: now[0])
    for step in range(100):
        now[0] += dice.choice([0, 1, 10])
        tenant = dice.choice([*shares.named, *"wxyz"])
        count = dice.randrange(1, capacity // 2 + 2)
        keys = tenant_keys(tenant, [b"%d %d" % (step, n) for n in range(count)])
        keys, free = keys[: policy.reach(keys)], capacity - len(policy)
        short = max(0, len(keys) - free)
        assert len(policy.evict_up_to(short, nobody, keys)) == short
        for key in keys:
            policy.insert(key)
        for key in dice.sample(list(policy.order()), len(policy) // 20):
            policy.remove(key)


def test_in_one_batch_each_pays_for_its_own() -> None:
    cache = Cache(100, EVEN)
    cache.put("a", 50)
    cache.put("b", 50)
    keys = [*cache.keys("b", 1), *cache.keys("a", 9)]
    gone = cache.policy.evict(10, nobody, keys)
    assert gone is not None
    assert Counter(key[:8] for key in gone) == {tag_of("b"): 1, tag_of("a"): 9}


def test_those_that_are_not_named_are_spread_over_partitions() -> None:
    cache = Cache(400, Shares(partitions=16))
    tenants = [f"user-{number}" for number in range(100)]
    for tenant in tenants:
        cache.put(tenant, 2)
    cache.flood("flood", 1000)
    kept = [tenant for tenant in tenants if cache.has(tenant) == 2]
    lost = [tenant for tenant in tenants if not cache.has(tenant)]
    assert len(kept) > 80
    assert {tag_of(one)[0] % 16 for one in lost} <= {tag_of("flood")[0] % 16}


@pytest.mark.parametrize("users", [1, 30])
def test_those_that_are_not_named_have_one_share_together(users: int) -> None:
    """Be they one or many."""
    names = [f"user-{number}" for number in range(users)]

    def of_users(cache: Cache) -> int:
        return sum(map(cache.has, names))

    def used(others: Share) -> Cache:
        cache = Cache(1000, Shares({"a": Share()}, others))
        for name in names:
            cache.put(name, 900 // users)
        return cache

    limited = used(Share(maximal=0.2))
    assert limited.policy.excess == of_users(limited) - 200
    limited.policy.trim(1000, nobody)
    assert of_users(limited) == 200
    assert not limited.policy.excess
    for others, left in ((Share(guaranteed=0.4, weight=1e-9), 400), (Share(), 500)):
        cache = used(others)
        cache.flood("a", 2000)
        assert of_users(cache) == pytest.approx(left, abs=20)
        for name in names:
            cache.flood(name, 2000 // users)
        assert of_users(cache) == pytest.approx(left, abs=20)
        assert of_users(cache) + cache.has("a") == 1000


def test_a_search_that_is_cut_short_takes_nothing_from_others() -> None:
    cache = Cache(10, EVEN)
    cache.put("a", 6)
    cache.put("b", 4)

    def later(key: bytes) -> int:
        return LATER if key.startswith(tag_of("a")) else False

    assert cache.policy.evict(2, later, cache.keys("b", 2)) is None
    assert cache.has("b") == 4


def test_what_is_not_evicted_after_all_is_the_first_to_leave() -> None:
    cache = Cache(10, EVEN)
    cache.put("a", 7)
    cache.put("b", 3)
    before = list(cache.policy.order())
    assert cache.policy.evict(11, nobody) is None
    assert sorted(cache.policy.order()) == sorted(before)
    gone = cache.policy.evict(1, nobody, cache.keys("b", 1))
    assert gone == [tag_of("a") + b"%06d" % 0]


def test_a_policy_that_is_replaced_is_freed_bit_by_bit() -> None:
    cache = Cache(100, EVEN)
    cache.put("a", 50)
    cache.put("b", 50)
    times = 0
    while dismantle(cache.policy, 10):
        times += 1
        assert times < 1000
    assert times >= 10


def test_what_others_ask_for_makes_no_filter_forget_a_tenant() -> None:
    reuse = Choice("reuse", (("threshold", 2), ("table", 500)))
    plain = build_filters([reuse], 40, 1)
    fair = build_filters([reuse, Choice("endurance", (("bytes_per_day", 10**9),))], 40, 1, EVEN)
    assert plain is not None
    assert fair is not None
    keys = tenant_keys("b", [b"%d" % number for number in range(10)])
    for each in (plain, fair):
        each.asked(keys)
        for number in range(100):
            each.asked(tenant_keys("a", [b"%d-%d" % (number, at) for at in range(10)]))
        each.asked(keys)
    assert plain.admit(keys, 0.0) == [False] * 10
    assert fair.admit(keys, 0.0) == [True] * 10
    both = [keys[0], *tenant_keys("a", [b"never asked for"]), keys[1]]
    assert fair.admit(both, 0.0) == [True, False, True]
    fair.clear()
    assert fair.admit(keys, 0.0) == [False] * 10


TENANTS = "abcx"
ACTS = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(["put", "use", "wait"]), st.integers(1, 9)),
    max_size=80,
)
SHARES = st.fixed_dictionaries(
    {},
    optional={
        name: st.builds(
            Share,
            guaranteed=st.sampled_from([0.0, 0.1, 0.3]),
            maximal=st.sampled_from([1.0, 0.4]),
            weight=st.sampled_from([0.5, 1.0, 4.0]),
        )
        for name in "abc"
    },
)


@given(ACTS, SHARES)
def test_nobody_takes_from_one_that_has_less_nor_from_a_guarantee(
    acts: Sequence[tuple[str, str, int]], shares: dict[str, Share]
) -> None:
    cache = Cache(30, Shares(shares, partitions=1, idle_s=5.0))
    policy = cache.policy
    for tenant, act, count in acts:
        if act == "wait":
            cache.now += count
        elif act == "use":
            tag = tag_of(tenant)
            for key in [key for key in policy.order() if key.startswith(tag)][:count]:
                policy.touch(key)
        else:
            before = {part: len(part.policy) for part in policy.partitions}
            since = cache.now - 5.0
            idle = {part for part in policy.partitions if part.used_at < since}
            cache.put(tenant, count)
            asker = policy._partition(tag_of(tenant))
            _check(policy, before, asker, idle)
        assert len(policy) <= 30


def _check(
    policy: Tenants,
    before: dict[_Partition, int],
    asker: _Partition,
    idle: set[_Partition],
) -> None:
    total = sum(before.values())
    # Each of them is of one share here.
    shares = dict(zip(policy.partitions, (share for share, _ in policy.places.shares), strict=True))

    def by_weight(part: _Partition) -> float:
        share = shares[part]
        return (len(part.policy) - int(share.guaranteed * total)) / share.weight

    for part, share in shares.items():
        has = len(part.policy)
        if part is asker or has == before[part] or has >= max(1, int(share.maximal * 30)):
            continue
        if not before[asker] and has == before[part] - 1:
            # Who has nothing gets one chunk in any case.
            continue
        assert has >= int(share.guaranteed * total)
        if part not in idle:
            # One chunk more or less, as chunks are not divided.
            least = by_weight(asker) - 1 / shares[asker].weight
            assert by_weight(part) + 1 / share.weight >= least


def test_more_may_be_evicted_than_two_tenants_have_coming() -> None:
    policy = Tenants(20, LRU, Shares({"a": Share(), "b": Share()}))
    ours, others, more = tenant_keys("a", KEYS_20[:10]), tenant_keys("b", KEYS_20[10:]), b"more"
    for key in (*ours, *others):
        policy.insert(key)
    incoming = [*tenant_keys("a", [more]), *tenant_keys("b", [more])]
    assert len(policy.evict_up_to(6, nobody, incoming)) == 6
    found = policy.evict(6, nobody, incoming)
    assert found is not None
    assert len(found) == 6


def test_guarantees_are_parts_of_what_was_there_while_a_policy_was_replaced_slowly() -> None:
    now = 0.0

    def made() -> Tenants:
        shares = Shares({"a": Share(guaranteed=0.5), "b": Share()}, partitions=1)
        return Tenants(100, LRU, shares, lambda: now)

    old, new = made(), made()
    others = tenant_keys("b", [b"%d" % number for number in range(50)])
    for key in tenant_keys("a", [b"%d" % number for number in range(50)]) + others:
        old.insert(key)
    migration = TenantMigration(old, new)
    for _ in range(140):
        now += 1.0
        migration.evict_up_to(0, nobody)
        migration._total()
    for key in others:
        migration.remove(key)  # What takes their place is on its way.
    while migration.left:
        migration.go_on(10)
    assert (len(new), new._total()) == (50, 100)
