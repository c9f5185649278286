"""Policies and filters of others that fail: a store over them goes on, and says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.plugins import build_policy
from kvstore.policies import (
    AdmissionFilter,
    EvictionPolicy,
    register_filter,
    register_policy,
    registry,
)
from kvstore.policies.base import Protected
from kvstore.policies.guard import GuardedFilter, GuardedPolicy, guarded_policy
from kvstore.policies.lru import LRU
from kvstore.testing.policy import PolicyContract

CHUNK = 4096
ROWS, SLOTS = 16, 60
CALLS = ["insert", "touch", "remove", "evict", "settle", "release", "clear", "order"]
ANSWERS = ["too many", "too few", "twice", "foreign", "protected", "nonsense"]


class Frail(LRU):
    """An LRU that goes wrong once."""

    name = "test-frail"

    def __init__(self, capacity: int, *, fault: str = "", after: int = 40) -> None:
        super().__init__(capacity)
        self._fault, self._left = fault, after

    def _now(self, fault: str) -> bool:
        if fault != self._fault:
            return False
        self._left -= 1
        return self._left == 0

    def _raise(self, fault: str) -> None:
        if self._now(fault):
            raise RuntimeError("once")

    def insert(self, key: bytes) -> None:
        self._raise("insert")
        super().insert(key)

    def touch(self, key: bytes) -> None:
        self._raise("touch")
        super().touch(key)

    def remove(self, key: bytes) -> None:
        self._raise("remove")
        super().remove(key)

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        self._raise("settle")
        super().settle(keys, ends)

    def release(self, keys: Iterable[bytes]) -> None:
        self._raise("release")
        super().release(keys)

    def clear(self) -> None:
        self._raise("clear")
        super().clear()

    def order(self) -> Iterator[bytes]:
        for key in super().order():
            self._raise("order")
            yield key

    def evict(self, count: int, protected: Protected, incoming: Sequence[bytes] = ()) -> Any:
        if self._now("protected"):
            victims = list(self._keys)[-count:]
            for key in victims:
                super().remove(key)
            return victims
        found = super().evict(count, protected, incoming)
        # What it has forgotten by now nobody gets.
        self._raise("evict")
        if found:
            if self._now("too many"):
                return found + list(self._keys)[:1]
            if self._now("too few"):
                return found[1:]
            if self._now("twice"):
                return [found[0], *(found[:-1] or found)]
            if self._now("foreign"):
                return [b"nobody's", *found[1:]]
            if self._now("nonsense"):
                return 7
        return found


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (registry.POLICIES, registry.FILTERS):
        monkeypatch.setattr(kind, "classes", dict(kind.classes))
    register_policy(Frail)
    register_filter(FrailFilter)


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{number:04}".encode() for number in range(count)]


def bytes_of(keys: Sequence[bytes]) -> list[bytes]:
    return [(key * (CHUNK // len(key) + 1))[:CHUNK] for key in keys]


def config(path: Path, **tier: Any) -> dict[str, Any]:
    host = {name: tier.pop(name) for name in list(tier) if name.startswith("host_")}
    return {
        "cpu_bytes_to_use": ROWS * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": {"model": "m"},
        "recompute_s": 0,
        **{name.removeprefix("host_"): value for name, value in host.items()},
        "tiers": [
            {
                "type": "disk",
                "path": str(path),
                "capacity_bytes": "512KiB",
                "segment_bytes": "256KiB",
            }
            | tier
        ],
    }


async def exercise(store: Any) -> None:
    """Store and read more than there is room for; all that is served must be right."""
    for turn in range(30):
        keys = keys_of(f"prompt-{turn}", 6)
        assert await store.put(keys, bytes_of(keys), request=f"r{turn}") == 6
        store.release(f"r{turn}")
        assert await store.flush(20)
        for older in (turn, turn // 2, turn - 1):
            keys = keys_of(f"prompt-{max(older, 0)}", 6)
            async with store.get(keys) as chunks:
                for key, found in zip(keys, chunks, strict=False):
                    assert bytes(found) == bytes_of([key])[0]
        if turn % 7 == 6:
            await store.remove(keys_of(f"prompt-{turn}", 3))


@pytest.mark.parametrize("where", ["eviction_policy", "host_eviction_policy"])
@pytest.mark.parametrize("fault", CALLS + ANSWERS)
async def test_a_store_outlives_a_policy_that_fails(
    tmp_path: Path, where: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    after = 5 if fault in ("insert", "touch") else 1
    policy = {"name": "test-frail", "fault": fault, "after": after}
    caplog.set_level(logging.ERROR)
    async with kvstore.open(config(tmp_path, **{where: policy})) as store:
        await exercise(store)
        before = store.stats()
        for record in caplog.records:
            # Its frames keep views of rows alive.
            record.exc_info = None
        keys = keys_of("last", ROWS)
        assert await store.put(keys, bytes_of(keys)) == ROWS, "all rows are there"
        await store.flush(20)
        assert store.stats().illegal == 0
        await store.reset()
        await exercise(store)
        faults = store.stats().plugin_faults
    told = [
        record
        for record in caplog.records
        if getattr(record, "kvstore.event", "") == "plugin.failed"
    ]
    failed_at_the_end = fault == "order"
    if fault not in ("remove", "release", "settle", "protected", "order"):
        assert faults == 1
    assert len(told) == faults or failed_at_the_end
    others = [record for record in caplog.records if record not in told]
    assert not others, others[0].getMessage()
    assert before.plugin_faults <= faults
    async with kvstore.open(config(tmp_path)) as store:
        assert await store.resolve(keys_of("prompt-29", 3)) >= 0


class FrailFilter(AdmissionFilter):
    name = "test-frail"

    def __init__(self, capacity: int, chunk_bytes: int, *, fault: str = "") -> None:
        super().__init__(capacity, chunk_bytes)
        self._fault = fault

    def asked(self, keys: Sequence[bytes]) -> None:
        if self._fault == "asked":
            raise RuntimeError("always")

    def admit(self, keys: Sequence[bytes], now: float) -> Any:
        if self._fault == "admit":
            raise RuntimeError("always")
        return {"short": [True], "none": None}.get(self._fault, [True] * len(keys))

    def clear(self) -> None:
        if self._fault == "clear":
            raise RuntimeError("always")


@pytest.mark.parametrize("flow", ["write-through", "demote"])
@pytest.mark.parametrize("where", ["admission", "host_admission"])
@pytest.mark.parametrize("fault", ["asked", "admit", "short", "none", "clear"])
async def test_a_store_outlives_a_filter_that_fails(
    tmp_path: Path, where: str, fault: str, flow: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    admission = {where: {"name": "test-frail", "fault": fault}}
    async with kvstore.open(config(tmp_path, flow=flow, **admission)) as store:
        await exercise(store)
        await store.reset()
        assert store.stats().plugin_faults > 0
    told = [getattr(record, "kvstore.event", "") for record in caplog.records]
    assert told == ["plugin.failed"]


class Guarded(GuardedPolicy):
    """A guarded policy, made as the contract makes policies."""

    name = "test-guarded"
    fault, after = "", 0

    def __init__(self, capacity: int) -> None:
        frail = Frail(capacity, fault=self.fault, after=self.after)
        super().__init__(frail, lambda what: None)


class Failing(Guarded):
    fault, after = "insert", 3


class TestGuarded(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return Guarded(capacity)


class TestFailing(PolicyContract):
    def create(self, capacity: int) -> EvictionPolicy:
        return Failing(capacity)


@pytest.mark.parametrize("method", ["evict", "evict_up_to"])
@pytest.mark.parametrize("fault", [*ANSWERS, "evict", "len"])
def test_its_books_are_right_whatever_the_policy_answers(method: str, fault: str) -> None:
    class Forgetful(Frail):
        def __len__(self) -> int:
            return super().__len__() + (fault == "len")

    told: list[str] = []
    guard = GuardedPolicy(Forgetful(16, fault=fault, after=1), told.append)
    keys = keys_of("key", 12)
    guard.restore(keys)
    victims = getattr(guard, method)(4, lambda key: key == keys[-1])
    fewer = fault == "too few" and method == "evict_up_to"
    assert len(set(victims)) == 4 - fewer
    assert keys[-1] not in victims
    assert len(told) == 1
    assert guard.faults == 1
    for key in keys:
        assert (key in guard) == (key not in victims)
        if key in guard:
            guard.touch(key)
            guard.remove(key)
    assert len(guard) == 0


def test_a_use_told_while_the_order_is_read_is_no_fault_of_the_policy() -> None:
    class Busy(Frail):
        def order(self) -> Iterator[bytes]:
            yield from list(self._keys)[:3]
            raise RuntimeError("changed during iteration")

    guard = GuardedPolicy(Busy(8), pytest.fail)
    guard.restore(keys_of("key", 4))
    with pytest.raises(RuntimeError):
        guard.order()


def test_what_an_order_names_beside_its_keys_is_left_out() -> None:
    class Wild(Frail):
        def order(self) -> Any:
            return [b"ghost", *self._keys, *self._keys]

    guard = GuardedPolicy(Wild(8), pytest.fail)
    guard.restore(keys_of("key", 4))
    assert list(guard.order()) == keys_of("key", 4)


def test_a_filter_whose_answers_cannot_be_read_admits_everything() -> None:
    class Lazy(FrailFilter):
        def admit(self, keys: Sequence[bytes], now: float) -> Any:
            return (1 / 0 for _ in keys)

    guard = GuardedFilter(Lazy(8, 1), lambda what: None)
    assert guard.admit([b"a", b"b"], 0.0) == [True, True]
    assert guard.faults == 1


def test_whether_a_method_is_its_own_is_told_of_the_policy_itself() -> None:
    class Plain(EvictionPolicy):
        name = "plain"

        def insert(self, key: bytes) -> None: ...

        def touch(self, key: bytes) -> None: ...

        def remove(self, key: bytes) -> None: ...

        def evict(
            self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
        ) -> list[bytes] | None: ...

        def clear(self) -> None: ...

        def __len__(self) -> int:
            return 0

        def __contains__(self, key: object) -> bool:
            return False

    guard = GuardedPolicy(Plain(4), lambda what: None)
    assert not guard.overrides("release")
    assert not guard.overrides("link")
    guard._fail("failed")
    assert guard.overrides("release")


@pytest.mark.parametrize("effort", [0, "much"])
def test_an_effort_that_is_no_number_above_0_is_refused(effort: Any) -> None:
    register_policy(type("Odd", (Frail,), {"name": "test-odd", "effort": effort}))
    with pytest.raises(ConfigError, match="effort|not supported"):
        build_policy("test-odd", 4)


def test_own_policies_are_not_guarded() -> None:
    policy = LRU(4)
    assert guarded_policy(policy, pytest.fail) is policy
