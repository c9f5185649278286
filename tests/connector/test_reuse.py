"""Only what is asked for again is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from kvstore.connector.backend import PinnedBackend
from kvstore.connector.contract import (
    ListManager,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
)
from kvstore.connector.mediums import HostLoadStoreSpec, LoadStoreSpec
from kvstore.connector.reuse import FilterReusedOffloadingManager
from kvstore.connector.single_tier import PolicyManager
from kvstore.errors import KVStoreError

A, B, C = b"a", b"b", b"c"


class Lists(OffloadingManager):
    """Somebody's manager that knows the form by lists only; writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.answer: int | None = 0

    def lookup(self, keys: Iterable[bytes]) -> int | None:  # type: ignore[override]
        self.calls.append(("lookup", list(keys)))
        return self.answer

    def prepare_load(self, keys: Collection[bytes]) -> LoadStoreSpec:  # type: ignore[override]
        self.calls.append(("prepare_load", keys))
        return HostLoadStoreSpec([])

    def touch(self, keys: Collection[bytes]) -> None:  # type: ignore[override]
        self.calls.append(("touch", keys))

    def complete_load(self, keys: Collection[bytes]) -> None:  # type: ignore[override]
        self.calls.append(("complete_load", keys))

    def prepare_store(self, keys: Collection[bytes]) -> PrepareStoreOutput:  # type: ignore[override]
        self.calls.append(("prepare_store", keys))
        return PrepareStoreOutput(list(keys), HostLoadStoreSpec(range(len(keys))))

    def complete_store(self, keys: Collection[bytes], success: bool = True) -> None:  # type: ignore[override]
        self.calls.append(("complete_store", keys, success))

    def on_schedule_end(self, *, computes: bool | None = None) -> None:  # type: ignore[override]
        self.calls.append(("on_schedule_end", computes))

    def reset(self) -> None:
        self.calls.append(("reset",))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def stored(manager: OffloadingManager, keys: list[bytes]) -> list[bytes]:
    out = manager.prepare_store(keys)
    assert out is not None
    return out.keys_to_store


def test_a_key_is_offered_once_lookups_have_named_it_often_enough() -> None:
    backing = Lists()
    manager = FilterReusedOffloadingManager(backing, store_threshold=3)
    assert stored(manager, [A, B]) == []
    manager.lookup([A, B])
    manager.lookup([A])
    assert stored(manager, [A, B]) == []
    manager.lookup([A])
    assert stored(manager, [A, B]) == [A]
    assert backing.calls[-1] == ("prepare_store", [A])


def test_every_key_of_a_lookup_counts_also_behind_the_first_that_is_missing() -> None:
    manager = FilterReusedOffloadingManager(Lists())
    manager.lookup([A, B, C])
    manager.lookup([A, B, C])
    assert stored(manager, [A, B, C]) == [A, B, C]


def test_asking_key_by_key_counts_as_well() -> None:
    backend = PinnedBackend(16, 4, 4096)
    manager = FilterReusedOffloadingManager(PolicyManager(backend))
    who = ReqContext("second")
    for context in (ReqContext("first"), who, who):
        assert manager.lookup(A, context) is False
    assert manager.lookup(B, who) is False
    out = manager.prepare_store([A, B], who)
    assert out is not None
    assert out.keys_to_store == [A]
    manager.complete_store([A], who)
    assert manager.lookup(A, who) is True
    manager.prepare_load([A], who)
    manager.complete_load([A], who)
    manager.shutdown()


def test_a_lookup_that_is_to_be_repeated_does_not_count() -> None:
    backing = Lists()
    manager = FilterReusedOffloadingManager(backing)
    backing.answer = None
    for _ in range(5):
        assert manager.lookup([A]) is None
    backing.answer = 0
    manager.lookup([A])
    assert stored(manager, [A]) == []
    manager.lookup([A])
    assert stored(manager, [A]) == [A]


def test_one_key_without_a_request_is_refused() -> None:
    with pytest.raises(KVStoreError, match="needs req_context"):
        FilterReusedOffloadingManager(Lists()).lookup(A)


def test_the_order_of_a_prompt_is_kept() -> None:
    manager = FilterReusedOffloadingManager(Lists())
    for keys in ([C], [A], [B], [A], [C]):
        manager.lookup(keys)
    assert stored(manager, [A, B, C]) == [A, C]


def test_the_keys_that_were_looked_up_longest_ago_are_forgotten() -> None:
    manager = FilterReusedOffloadingManager(Lists(), max_tracker_size=2)
    manager.lookup([A, B])
    manager.lookup([A])
    manager.lookup([C])
    manager.lookup([B])
    assert stored(manager, [A, B, C]) == [], "B was forgotten for C, then A for B"
    manager.lookup([C])
    assert stored(manager, [A, B, C]) == [C]


def test_what_is_skipped_evicts_nothing() -> None:
    backend = PinnedBackend(16, 2, 4096)
    manager = FilterReusedOffloadingManager(PolicyManager(backend))
    for _ in range(2):
        manager.lookup([A, B])
    assert stored(manager, [A, B]) == [A, B]
    manager.complete_store([A, B])
    manager.lookup([C])
    assert stored(manager, [C]) == []
    assert manager.lookup([A, B]) == 2
    manager.shutdown()


def test_everything_else_is_handed_on_and_requests_only_where_they_are_named() -> None:
    backing = Lists()
    manager = FilterReusedOffloadingManager(backing)
    manager.prepare_load([A])
    manager.touch([A])
    manager.complete_load([A])
    manager.complete_store([A], False)
    manager.complete_store([B])
    manager.reset()
    manager.shutdown()
    assert backing.calls == [
        ("prepare_load", [A]),
        ("touch", [A]),
        ("complete_load", [A]),
        ("complete_store", [A], False),
        ("complete_store", [B], True),
        ("reset",),
        ("shutdown",),
    ]


def test_after_a_reset_counting_begins_anew() -> None:
    manager = FilterReusedOffloadingManager(Lists())
    manager.lookup([A])
    manager.reset()
    manager.lookup([A])
    assert stored(manager, [A]) == []


@pytest.mark.parametrize(
    ("wrong", "least"),
    [({"store_threshold": number}, 2) for number in (1, 0, -3)]
    + [({"max_tracker_size": number}, 1) for number in (0, -1)],
)
def test_what_counts_nothing_is_refused(wrong: dict[str, int], least: int) -> None:
    ((name, number),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} = {number}: must be at least {least}"):
        FilterReusedOffloadingManager(Lists(), **wrong)


def test_a_request_counts_once_although_a_part_of_its_prefix_is_fetched_first() -> None:
    class Fetches(Lists):
        def lookup_prefix(self, keys: Iterable[bytes], req_context: object) -> int | None:
            return self.answer

    backing = Fetches()
    manager = FilterReusedOffloadingManager(backing, store_threshold=2)
    for backing.answer in (None, None, 1):
        assert manager.lookup_prefix([A, B, C], ReqContext("one")) == backing.answer
    assert stored(manager, [A, B, C]) == []
    assert manager.lookup_prefix([A, B, C], ReqContext("two")) == 1
    assert stored(manager, [A, B, C]) == [A, B, C], "it has named all of them"


def test_a_failed_store_stays_failed_whichever_form_the_backing_manager_takes() -> None:
    told: list[tuple[object, object]] = []

    class Named(Lists):
        def complete_store(  # type: ignore[override]
            self, keys: Iterable[bytes], req_context: object = None, success: bool = True
        ) -> None:
            told.append((req_context, success))

    manager, who = FilterReusedOffloadingManager(Named()), ReqContext("r")
    manager.complete_store([A], False)
    manager.complete_store([A], None, False)
    manager.complete_store([A], who, False)
    assert told == [(None, False), (None, False), (who, False)]


def test_the_end_of_a_step_is_told_as_the_contract_says() -> None:
    inner = Lists()
    FilterReusedOffloadingManager(ListManager(inner)).on_schedule_end(computes=True)
    assert inner.calls == [("on_schedule_end", True)]
