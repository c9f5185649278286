"""The scheduler's half, call by call."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.connector.backend import PinnedBackend
from kvstore.connector.reuse import FilterReusedOffloadingManager
from kvstore.connector.server import Block, KVBlocks
from kvstore.connector.single_tier import PolicyManager
from kvstore.connector.tracked_request import key_of
from kvstore.errors import KVStoreError
from tests.connector.scheduling import TOKENS, Request, Server, blocks_of, open_scheduler
from tests.connector.scripted import scheduler_over

PROMPT = list(range(24))


# -- what a request finds --------------------------------------------------------------------


@pytest.mark.parametrize("other", [10, 16, 20])
def test_of_several_groups_the_end_of_the_prompt_leaves_first_in_each(other: int) -> None:
    server = Server(open_scheduler(None, None, rows=40))
    prompt = list(range(20 * TOKENS))
    server.store(prompt, range(1, 21), range(31, 51), name="a")
    half = other // 2
    server.store([200 + n for n in range(half * TOKENS)], range(1, 1 + half), range(31, 31 + half))
    assert server.find(Request("y", prompt)) == (20 - half) * TOKENS


def test_of_several_groups_the_head_of_the_prompt_is_stored_in_each() -> None:
    server = Server(open_scheduler(None, None, rows=24))
    prompt = list(range(20 * TOKENS))
    server.store(prompt, range(1, 21), range(31, 51))
    assert server.find(Request("y", prompt)) == 12 * TOKENS


@pytest.mark.parametrize("params", [["x"], "abc", 5])
def test_parameters_of_a_request_that_are_no_table_do_no_harm(params: Any) -> None:
    server = Server(open_scheduler())
    assert server.find(Request("r", PROMPT, kv_transfer_params=params)) == 0


# -- loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", range(0, 24, TOKENS))
def test_a_load_that_finds_no_room_for_more_ends_with_a_chunk(
    computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk with a window no more may have been stored than its last tokens."""
    server = Server(open_scheduler(None, 4, blocks_per_chunk=2))
    server.store(PROMPT * 2, range(1, 13), range(21, 33))
    monkeypatch.setattr(server.scheduler.manager, "most_tokens", lambda *_: 16)
    found = server.find(Request("r", [*PROMPT * 2, 0]), computed) or 0
    assert found == 16 - computed % 8


def test_a_load_into_too_few_blocks_is_refused_and_holds_nothing() -> None:
    server = Server(open_scheduler())
    server.store(PROMPT, range(1, 7))
    request = Request("r", PROMPT)
    assert server.find(request) == 24
    with pytest.raises(KVStoreError, match="r has 5 blocks .* too few to load 24 tokens"):
        server.load(request, 24, range(10, 15))
    assert not server.step().load_jobs
    assert not server.scheduler.has_pending_work()


def test_who_was_never_looked_up_cannot_load() -> None:
    server = Server(open_scheduler())
    with pytest.raises(KVStoreError, match="r has nothing to load"):
        server.load(Request("r", PROMPT), 24, range(1, 7))


def test_what_was_loaded_is_not_stored_again() -> None:
    server = Server(open_scheduler())
    server.store(PROMPT[:16], range(1, 5))
    request = Request("r", PROMPT)
    assert server.find(request) == 16
    server.load(request, 16, range(10, 14))
    server.end(server.step().load_jobs)
    request.num_computed_tokens = 16
    server.scheduler.reset()
    # A reset makes everything worth storing anew.
    (job,) = server.step({request: 8}, new={request: [range(10, 16)]}).store_jobs.values()
    assert blocks_of(job) == ([[10, 11, 12, 13, 14, 15]], [0])


# -- managers of others, as they are published ------------------------------------------------


class Touched(PolicyManager):
    """One whose recency comes from `touch` alone, as published managers have it."""

    loads_are_uses = False

    def prepare_load(self, keys: Any, req_context: Any = None) -> Any:
        keys = list(keys)
        touch, self.touch = self.touch, lambda *_: None  # type: ignore[method-assign]
        try:
            return super().prepare_load(keys, req_context)
        finally:
            self.touch = touch  # type: ignore[method-assign]


def test_a_prompt_that_is_asked_for_again_and_again_stays_where_recency_comes_from_touch() -> None:
    hot, rows = PROMPT[:8], 8
    manager = Touched(PinnedBackend(TOKENS, rows, 4096))
    server = Server(scheduler_over(manager, TOKENS, [(TOKENS, None)]))
    found = 0
    for number in range(30):
        request = Request(f"hot {number}", hot)
        tokens = server.find(request)
        assert tokens is not None
        if tokens:
            found += 1
            server.load(request, tokens, [1, 2])
            server.end(server.step().load_jobs)
        meta = server.step({request: len(hot) - tokens}, new={request: [[1, 2]]})
        server.end(meta.store_jobs, server.step(finished=[request]).store_jobs)
        server.scheduler.request_finished(request)
        server.store([100 + number] * 8, [11, 12], name=f"cold {number}")
    assert found == 29


def test_a_prompt_that_two_requests_have_asked_for_is_found_whole_by_the_third() -> None:
    tokens = [token % 250 for token in range(64 * TOKENS)]
    manager = FilterReusedOffloadingManager(PolicyManager(PinnedBackend(TOKENS, 64, 4096)))
    server = Server(scheduler_over(manager, TOKENS, [(TOKENS, None)]))
    for number in range(2):
        request = Request(f"r{number}", tokens)
        assert server.find(request) == 0
        server.store(tokens, range(1, 65), name=f"s{number}") if number else None
        server.scheduler.request_finished(request)
        server.step(finished=[request])
    assert server.find(Request("third", tokens)) == len(tokens)


# -- blocks of the device -----------------------------------------------------------------------


def test_a_load_beside_blocks_that_the_device_has_itself_lets_their_store_go_on() -> None:
    server = Server(open_scheduler())
    manager = server.scheduler.manager
    rest = [key_of(one, 0) for one in Request("any", PROMPT).block_hashes[2:]]
    manager.prepare_store(rest)
    manager.complete_store(rest)
    first, second = Request("a", PROMPT[:8]), Request("b", PROMPT)
    server.find(first)
    assert server.step({first: 8}, new={first: [[11, 12]]}).store_jobs
    assert server.find(second, 8) == 16
    known = [Block(11, block_hash="x"), Block(12, block_hash="y"), *map(Block, range(30, 34))]
    server.scheduler.update_state_after_alloc(second, KVBlocks([known]), 16)
    assert not server.step().jobs_to_flush


def test_a_block_that_is_none_is_never_stored() -> None:
    """A group of states, whose blocks of before stand for nothing."""
    server = Server(open_scheduler(None, None))
    request = Request("r", PROMPT)
    server.find(request)
    meta = server.step({request: 24}, new={request: [range(1, 7), [0, 0, 0, 0, 15, 16]]})
    (job,) = meta.store_jobs.values()
    assert blocks_of(job) == ([[1, 2, 3, 4, 5, 6], [15, 16]], [0, 4])
    server.end(meta.store_jobs)
    assert server.find(Request("s", PROMPT)) == 0


# -- the end -----------------------------------------------------------------------------------


def test_a_transfer_that_nobody_has_begun_is_counted_and_changes_nothing() -> None:
    server = Server(open_scheduler())
    server.store(PROMPT, range(1, 7))
    assert server.end(77).loaded == []
    assert server.scheduler.stats.unknown_jobs == 1
    assert server.find(Request("r", PROMPT)) == 24


def test_a_store_that_is_under_way_at_a_reset_is_forgotten() -> None:
    server = Server(open_scheduler())
    request = Request("a", PROMPT)
    server.find(request)
    meta = server.step({request: 24}, new={request: [range(1, 7)]})
    server.scheduler.reset()
    server.end(meta.store_jobs)
    assert server.find(Request("b", PROMPT)) == 0
    assert not server.scheduler.has_pending_work()
