"""What is fetched for a queued request: the keys of the longest prefix that can be loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.queued import QueuedKeys, usable_keys
from tests.patience import until
from tests.store.support import keys_of, small

A, B = keys_of("a", 8), keys_of("b", 8)


def up_to(count: int) -> dict[bytes, None]:
    return dict.fromkeys(A[:count])


def known(there: dict[bytes, None], keys: Sequence[bytes]) -> int:
    return next((n for n, key in enumerate(keys) if key not in there), len(keys))


@pytest.mark.parametrize("count", [0, 3, 8])
def test_of_one_group_it_is_the_known_prefix(count: int) -> None:
    groups = [QueuedKeys(A, 16)]
    assert usable_keys(groups, lambda keys: known(up_to(count), keys)) == A[:count]


def test_of_a_window_it_is_what_the_next_token_needs_at_that_boundary() -> None:
    groups = [QueuedKeys(A, 16), QueuedKeys(B, 16, window_chunks=2)]
    wanted = usable_keys(groups, lambda keys: known(up_to(5), keys))
    assert wanted == [A[0], A[1], A[2], A[3], B[3], A[4], B[4]]


def test_groups_with_chunks_of_different_sizes_end_at_one_boundary() -> None:
    groups = [QueuedKeys(A, 16), QueuedKeys(B[:4], 32, window_chunks=1)]
    assert usable_keys(groups, lambda keys: known(up_to(5), keys)) == [*A[:4], B[1], A[4]]


def test_without_a_group_that_needs_everything_it_is_the_end_of_the_prompt() -> None:
    groups = [QueuedKeys(A, 16, window_chunks=3)]
    assert usable_keys(groups, len) == A[5:]
    assert usable_keys([], len) == []


@pytest.fixture(params=[True, False])
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KVStoreManager]:
    """One that fetches for queued requests, and one that does not."""
    config = small(tmp_path / "cache", rows=16, disk=64, fetch_queued=request.param)
    manager = KVStoreManager(config, steady=True)
    yield manager
    manager.shutdown()


def steps(manager: KVStoreManager) -> None:
    def ended() -> bool:
        manager.on_schedule_end()
        return not manager.has_pending_work() and not manager.stepper.core.in_flight

    until(ended)


def test_a_queued_request_is_fetched_for_without_being_asked_unless_that_is_off(
    manager: KVStoreManager,
) -> None:
    for name, keys in (("a", A), ("c", keys_of("c", 16))):
        out = manager.prepare_store(keys, ReqContext(name))
        assert out is not None
        manager.complete_store(out.keys_to_store, ReqContext(name))
        steps(manager)
    context = ReqContext("r")
    manager.on_new_request(context)
    manager.on_request_queued(context, [QueuedKeys(A, 16)])
    steps(manager)
    on = manager.stats().fetched_queued == 8
    assert on == all(key in manager.stepper.core.chunks for key in A)
    assert manager.lookup_prefix(A, context) == (8 if on else None)
