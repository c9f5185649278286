"""What is fetched for a queued request: the keys of the longest prefix that can be loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.queued import QueuedKeys, tokens_that_fit, usable_keys
from tests.connector.scheduling import TOKENS, Request, Server
from tests.connector.scripted import scheduler_over
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


def test_no_more_is_fetched_than_can_be_loaded_at_once() -> None:
    groups = [QueuedKeys(A, 16), QueuedKeys(B, 16, window_chunks=1)]
    assert usable_keys(groups, len, 2 * 16 + 15) == [A[0], A[1], B[1]]


@given(
    st.lists(
        st.tuples(st.sampled_from([16, 32, 64]), st.none() | st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
)
def test_as_many_tokens_fit_as_need_no_more_rows(
    sizes: list[tuple[int, int | None]], rows: int
) -> None:
    unit = max(size for size, _ in sizes)

    def needed(tokens: int) -> int:
        return sum(
            min(-(-tokens // size), sys.maxsize if window is None else window)
            for size, window in sizes
        )

    fits = tokens_that_fit(tuple(sizes), rows)
    if fits == sys.maxsize:
        assert needed(1000 * unit) <= rows
    else:
        assert fits % unit == 0
        assert needed(fits) <= rows < needed(fits + unit)


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


def test_a_prompt_of_several_groups_is_loaded_up_to_where_all_of_them_fit(tmp_path: Path) -> None:
    """A boundary needs the chunks of one group up to it, and two chunks of the other."""

    def server(rows: int) -> tuple[KVStoreManager, Server]:
        config = small(tmp_path / "cache", rows=rows, disk=64)
        manager = KVStoreManager(config, one_group=False, steady=True)
        return manager, Server(scheduler_over(manager, TOKENS, [(TOKENS, None), (TOKENS, TOKENS)]))

    prompt = list(range(6 * TOKENS))
    manager, wide = server(64)
    wide.store(prompt, range(1, 7), range(11, 17))
    steps(manager)
    manager.shutdown()
    for rows, chunks in ((8, 6), (7, 5), (4, 2), (2, 1)):
        manager, narrow = server(rows)
        request = Request("r", [*prompt, 0])
        narrow.scheduler.on_new_request(request)
        found: list[int | None] = []

        def answered(
            narrow: Server = narrow,
            request: Request = request,
            found: list[int | None] = found,
        ) -> bool:
            found.append(narrow.find(request))
            narrow.step()
            return found[-1] is not None

        until(answered)
        assert (rows, found[-1]) == (rows, chunks * TOKENS)
        assert manager.stats().timeouts == 0
        narrow.step(finished=[request])
        manager.shutdown()
