"""What policies and filters are told: chains before uses, prompts at their end, keys once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import Core, HostPool, usage
from kvstore.policies import AdmissionFilter, create_policy
from kvstore.policies.lru import LRU
from tests.core.rig import Rig, chain


class Listener(LRU):
    """Remembers what it was told, in order."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.told: list[Any] = []

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        self.told.append(("link", list(keys), after))

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        self.told.append(("settle", list(keys)))
        super().settle(keys)

    def insert(self, key: bytes) -> None:
        self.told.append(("insert", key))
        super().insert(key)

    def touch(self, key: bytes) -> None:
        self.told.append(("touch", key))
        super().touch(key)


class Gate(AdmissionFilter):
    """Admits what it was asked for `least` times; remembers what it was asked."""

    name = "gate"

    def __init__(self, least: int = 1) -> None:
        super().__init__(8, 1)
        self.least = least
        self.heard: list[bytes] = []

    def asked(self, keys: Sequence[bytes]) -> None:
        self.heard += keys

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [self.heard.count(key) >= self.least for key in keys]

    def clear(self) -> None:
        self.heard.clear()


def told(rig: Rig, *kinds: str) -> list[Any]:
    policy = rig.core._pool.policy
    assert isinstance(policy, Listener)
    found, policy.told = policy.told, []
    return [each for each in found if not kinds or each[0] in kinds]


def test_a_chain_is_told_before_its_keys_enter_tail_first() -> None:
    rig, keys = Rig(policy=Listener(8), on=()), chain("a", 2)
    rig.put(keys)
    assert told(rig) == [("link", keys, None), ("insert", keys[1]), ("insert", keys[0])]


def test_portions_follow_one_another() -> None:
    rig, keys = Rig(policy=Listener(8), on=()), chain("a", 6)
    rig.put(keys[:2])
    rig.put(keys[2:5])
    rig.put(keys[4:])
    rig.core.on_request_finished("writer")
    assert told(rig, "link", "settle") == [
        ("link", keys[:2], None),
        ("link", keys[2:5], keys[1]),
        ("link", keys[5:], keys[4]),
        ("settle", keys),
    ]


def test_a_head_that_is_stored_after_a_load_of_the_middle_is_put_in_front() -> None:
    rig, keys = Rig(policy=Listener(8), on=()), chain("a", 6)
    rig.put(keys[2:4], "earlier")
    rig.core.on_request_finished("earlier")
    told(rig)
    assert rig.ask(keys[2:4]) == 2
    rig.load(keys[2:4])
    rig.step()
    rig.put(keys, "r")
    rig.core.on_request_finished("r")
    assert told(rig, "link", "settle") == [
        ("link", keys[2:4], None),
        ("link", keys[:3], None),
        ("link", keys[4:], keys[3]),
        ("settle", keys),
    ]


def test_every_group_has_a_chain_of_its_own() -> None:
    rig = Rig(policy=Listener(8), on=())
    full = [b"f%d\0\0\0\0" % depth for depth in range(3)]
    sliding = [b"s%d\0\0\0\1" % depth for depth in range(2)]
    rig.put([full[0], sliding[0], full[1], full[2], sliding[1]])
    rig.core.on_request_finished("writer")
    assert told(rig, "link", "settle") == [
        ("link", full, None),
        ("link", sliding, None),
        ("settle", full),
        ("settle", sliding),
    ]


def test_a_slower_tier_hears_of_the_end_once_the_chunks_are_there() -> None:
    below, keys = Listener(64), chain("a", 3)
    rig = Rig(on=((),), tier_policy=below)
    rig.granted(keys, "writer")
    rig.core.on_request_finished("writer")
    rig.step()
    rig.core.complete_store(keys, "writer")
    rig.step()
    assert [each for each in below.told if each[0] != "link"] == []
    rig.settle()
    assert [each for each in below.told if each[0] != "link"] == [
        ("insert", keys[2]),
        ("insert", keys[1]),
        ("insert", keys[0]),
        ("settle", keys),
    ]


def test_a_promotion_for_a_load_is_one_use() -> None:
    keys = chain("a", 2)
    rig = Rig(policy=Listener(8), on=(keys,))
    assert rig.resolve(keys) == 2
    rig.load(keys)
    assert told(rig, "insert", "touch") == [("insert", keys[1]), ("insert", keys[0])]
    rig.core.complete_load(keys, "r")
    assert rig.resolve(keys, "later") == 2
    rig.load(keys, "later")
    rig.core.on_request_finished("later")
    assert told(rig, "insert", "touch") == [("touch", keys[1]), ("touch", keys[0])]


def test_a_load_and_the_store_behind_it_are_used_as_one_prompt() -> None:
    rig, keys = Rig(policy=Listener(8), on=()), chain("a", 4)
    rig.put(keys[:2], "first")
    rig.put(keys[3:], "first")
    rig.core.on_request_finished("first")
    assert rig.ask(keys) == 2
    rig.use(keys[:2])
    rig.step()
    told(rig)
    rig.put(keys[2:], "r")
    assert told(rig, "insert", "touch") == [
        ("touch", keys[3]), ("touch", keys[1]), ("touch", keys[0]), ("insert", keys[2])
    ]  # fmt: skip


def test_requests_that_never_end_are_taken_for_ended_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "MAX_KEYS", 10)
    rig = Rig(rows=64, policy=Listener(64), on=())
    prompts = [chain(name, 4) for name in "abcde"]
    for number, keys in enumerate(prompts):
        rig.put(keys, f"request {number}")
    assert told(rig, "settle") == [("settle", keys) for keys in prompts[:3]]
    assert rig.core._chains._keys <= 10


def test_a_reset_forgets_the_chains() -> None:
    rig = Rig(policy=Listener(8), on=())
    rig.put(chain("a", 3))
    rig.core.reset()
    told(rig)
    rig.core.on_request_finished("writer")
    assert told(rig) == []


def test_whoever_records_is_told_every_group() -> None:
    rig, keys = Rig(on=()), chain("a", 3)
    ended: list[Any] = []
    rig.core._chains.listen(ended.append)
    rig.put(keys)
    rig.core.on_request_finished("writer")
    rig.core.on_request_finished("nobody")
    assert ended == [[keys]]


# -- filters ------------------------------------------------------------------------------------


def gated(gate: Gate, rows: int = 8) -> Rig:
    rig = Rig(rows=rows, on=())
    pool = HostPool(rows, create_policy("lru", rows), gate)
    rig.core = Core(pool, (), deadline=1.0, max_wait=10.0, lease=3.0)
    rig.core.poll(rig.now)
    return rig


def test_a_key_counts_once_for_a_request_also_behind_the_first_miss() -> None:
    gate, keys = Gate(), chain("a", 4)
    rig = gated(gate)
    for _ in range(3):
        assert rig.ask(keys) == 0
        rig.step()
    assert gate.heard == keys[:1]
    rig.put(keys[:2], "r")
    rig.put(keys, "r")
    assert rig.ask(keys) == 4
    rig.load(keys)
    rig.core.on_request_finished("r")
    assert gate.heard == keys


def test_lookups_alone_count() -> None:
    gate, keys = Gate(least=2), chain("a", 1)
    rig = gated(gate)
    for name in ("one", "two"):
        assert rig.ask(keys, name) == 0
        rig.core.on_request_finished(name)
    grant = rig.granted(keys, "two")
    assert grant.keys == keys


def test_a_hit_counts_too() -> None:
    gate, keys = Gate(), chain("a", 2)
    rig = gated(gate)
    rig.put(keys)
    rig.core.on_request_finished("writer")
    assert rig.ask(keys, "reader") == 2
    rig.core.on_request_finished("reader")
    assert gate.heard == [*keys, *keys]


def test_what_is_not_admitted_takes_no_row() -> None:
    gate = Gate(least=2)
    rig = gated(gate, rows=2)
    known, new = chain("known", 2), chain("new", 9)
    gate.asked(known)
    rig.put(known)
    rig.step()
    grant = rig.granted(new, "r")
    assert (grant.keys, grant.rows, grant.evicted) == ([], [], [])
    assert grant.declined == new
    assert all(rig.in_host(key) for key in known)
    assert rig.stats.declined == len(new)


def test_the_rest_of_a_store_is_taken() -> None:
    gate, keys = Gate(least=2), chain("a", 5)
    rig = gated(gate)
    gate.asked([keys[0], keys[3]])
    grant = rig.granted(keys, "r")
    assert grant.keys == [keys[0], keys[3]]
    assert len(set(grant.rows)) == 2
    rig.core.complete_store(grant.keys, "r")
    assert rig.ask(keys, "later") == 1


# -- servers that ask in another order ---------------------------------------------------------


@pytest.mark.parametrize("one_group", [True, False])
def test_what_was_asked_from_its_end_is_fetched_and_told_from_its_head(one_group: bool) -> None:
    keys = chain("a", 6)
    rig = Rig(rows=8, on=[keys], policy=Listener(8))
    rig.core.on_new_request("r", keys.index, one_group=one_group)
    for key in reversed(keys):
        assert rig.core.lookup(key, "r") is None
    rig.step()
    assert rig.promotion.keys == keys
    assert told(rig, "link") == [("link", keys, None)]


def test_hits_among_what_was_asked_from_its_end_stay_for_their_step() -> None:
    here, below = chain("a", 3), chain("a", 6)[3:]
    rig = Rig(rows=6, on=[below])
    rig.store(here)
    rig.core.on_new_request("r", [*here, *below].index)
    for key in reversed([*here, *below]):
        rig.core.lookup(key, "r")
    rig.flush()
    assert set(here) <= set(rig.core._pool.chunks), "a hit has left in its step"


def test_a_prompt_that_was_used_in_another_order_is_told_in_its_own() -> None:
    keys = chain("a", 4)
    rig = Rig(rows=8, on=(), policy=Listener(8))
    rig.core.on_new_request("writer", keys.index)
    rig.put(keys[2:])
    rig.put(keys[:2])
    rig.core.on_request_finished("writer")
    assert told(rig, "settle") == [("settle", keys)]


def two_groups(count: int) -> tuple[list[bytes], list[bytes]]:
    """The keys of a prompt in two groups, as servers name them: one group after the other."""
    heads = [b"hash-%05d" % number for number in range(count)]
    full = [head + b"\0\0\0\0" for head in heads]
    return full, [head + b"\0\0\0\1" for head in heads]


def test_groups_are_stored_shed_and_loaded_together_where_positions_are_told() -> None:
    full, sliding = two_groups(6)
    place = {key: number for keys in (full, sliding) for number, key in enumerate(keys)}
    rig = Rig(rows=8)
    rig.core.on_new_request("writer", place.__getitem__)
    grant = rig.granted([*full, *sliding], "writer")
    assert grant.keys == [*full[:4], *sliding[:4]], "the head of both, as the server names them"
    rig.core.complete_store(grant.keys, "writer")
    row_of = dict(zip(grant.keys, grant.rows, strict=True))
    rig.step()
    rig.core.on_new_request("reader", place.__getitem__)
    assert rig.ask([*full[:4], *sliding[:4]], "reader") == 8
    assert rig.core.prepare_load(grant.keys, "reader") == [row_of[key] for key in grant.keys]
    rig.core.complete_load(grant.keys, "reader")
    rig.core.on_request_finished("reader")
    rig.settle()
    rig.put(chain("other", 4), "other")
    assert {key for key in grant.keys if rig.in_host(key)} == {*full[:2], *sliding[:2]}


def test_what_is_known_of_requests_that_never_end_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.core.step.MOST_REQUESTS", 10)
    rig = Rig(rows=8)
    for number in range(100):
        rig.core.on_new_request(f"r{number}", lambda key: 0)
    rig.step()
    assert [*rig.core._requests] == [f"r{number}" for number in range(90, 100)]
    rig.core.on_request_finished("r99")
    assert len(rig.core._requests) == 9


def test_what_a_store_brings_to_a_tier_is_not_used_there_by_that_store() -> None:
    tier_policy = Listener(16)
    rig = Rig(rows=8, tier_policy=tier_policy)
    keys = chain("a", 6)
    rig.store(keys[:4])
    assert [each[0] for each in tier_policy.told if each[0] in ("insert", "touch")] == [
        "insert"
    ] * 4
    tier_policy.told.clear()
    # The head is there already: for it, and for it alone, this is a use.
    rig.store(keys, "other")
    touched = [each[1] for each in tier_policy.told if each[0] == "touch"]
    assert touched == keys[:4][::-1]
    assert tier_policy.told.index(("touch", keys[0])) < tier_policy.told.index(("insert", keys[5]))
