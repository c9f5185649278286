"""What a lookup without a name fetched is kept until it is got, and in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.api.store import Store
from kvstore.engine import loop_steps, unnamed_requests
from tests.patience import PATIENCE, TOO_LONG, answered_async, until_async
from tests.store.support import (
    CHUNK,
    Open,
    busy,
    cancel,
    contents,
    hold,
    hurry,
    keys_of,
    on_disk,
    payloads,
)

PROMPT = keys_of("a", 6)


async def polled(store: Store, keys: list[bytes], request: str | None = None) -> int:
    return await answered_async(lambda: store.lookup_prefix(keys, request))


@pytest.mark.parametrize("request_name", [None, "mine"])
@pytest.mark.parametrize("ask", ["resolve", "poll"])
@pytest.mark.parametrize("part", [6, 4, 1])
async def test_what_is_got_in_part_leaves_nothing_leased(
    open_store: Open, ask: str, part: int, request_name: str | None
) -> None:
    await on_disk(open_store, PROMPT)
    async with open_store(rows=8, disk=256) as store:
        found = await (store.resolve if ask == "resolve" else lambda *a: polled(store, *a))(
            PROMPT, request_name
        )
        assert found == 6
        async with store.get(PROMPT[:part], request_name) as chunks:
            assert [bytes(chunk) for chunk in chunks] == payloads(PROMPT[:part])
        assert busy(store) == 0


async def test_a_get_of_more_than_was_asked_for_leaves_nothing_leased(open_store: Open) -> None:
    await on_disk(open_store, PROMPT)
    async with open_store(rows=8, disk=256) as store:
        assert await store.resolve(PROMPT[:4]) == 4
        assert await contents(store, PROMPT) == payloads(PROMPT)
        assert busy(store) == 0


@pytest.mark.parametrize("rest", [False, True])
async def test_a_put_after_a_lookup_leaves_nothing_leased(open_store: Open, rest: bool) -> None:
    await on_disk(open_store, PROMPT[:4])
    async with open_store(rows=8, disk=256) as store:
        found = await store.resolve(PROMPT)
        keys = PROMPT[found:] if rest else PROMPT
        if rest:
            assert await contents(store, PROMPT[:found]) == payloads(PROMPT[:found])
        assert await store.put(keys, payloads(keys)) == len(keys)
        assert await store.flush(PATIENCE)
        assert busy(store) == 0


async def test_lookups_of_one_prompt_do_not_take_anothers_chunks_away(open_store: Open) -> None:
    one, other = keys_of("a", 4), [*keys_of("a", 2), *keys_of("b", 4, 2)]
    await on_disk(open_store, one, other)
    async with open_store(rows=8, disk=256) as store:
        assert await store.resolve(one) == 4
        assert await store.resolve(other) == 4
        assert await contents(store, one) == payloads(one)
        # Two that are the other's own, and two that both have.
        assert busy(store) == 4
        assert store.lookup_prefix(other) == 4
        assert await contents(store, other) == payloads(other)
        assert busy(store) == 0


@pytest.mark.parametrize("call", [contents, lambda store, keys: store.put(keys, payloads(keys))])
async def test_a_lookup_that_is_not_repeated_is_in_nobodys_way(
    open_store: Open, call: Callable[[Store, list[bytes]], Coroutine[Any, Any, object]]
) -> None:
    forgotten, wanted = keys_of("forgotten", 8), keys_of("wanted", 8)
    await on_disk(open_store, forgotten, *[wanted] * (call is contents))
    async with open_store(rows=8, disk=256, lease_s=TOO_LONG) as store:
        assert await store.resolve(forgotten) == 8
        assert await asyncio.wait_for(call(store, wanted), PATIENCE) in (payloads(wanted), 8)
        assert store.stats().lapses == 1


@pytest.mark.parametrize(
    ("call", "answered"),
    [
        *(
            (call, answered)
            for call in ("get", "get_into", "resolve")
            for answered in (True, False)
        ),
        # Who polls for its answer, and is slow, gets what is there by then.
        ("lookup", True),
    ],
)
async def test_what_others_displaced_before_it_was_got_is_fetched_anew(
    open_store: Open, call: str, answered: bool
) -> None:
    forgotten, wanted = keys_of("forgotten", 4), keys_of("wanted", 8)
    await on_disk(open_store, forgotten, wanted)
    async with open_store(rows=8, disk=256, lease_s=TOO_LONG) as store:
        if answered:
            assert await store.resolve(forgotten) == 4
        else:
            assert store.lookup_prefix(forgotten) is None
        assert await contents(store, wanted) == payloads(wanted)
        assert store.stats().lapses == 1
        match call:
            case "get":
                assert await contents(store, forgotten) == payloads(forgotten)
            case "get_into":
                assert await store.get_into(forgotten, np.empty((4, CHUNK), np.uint8)) == 4
            case "resolve":
                assert await store.resolve(forgotten) == 4
            case _:
                assert await polled(store, forgotten) == 4
        assert await contents(store, forgotten) == payloads(forgotten)


async def test_who_waits_gets_what_fits_however_long_that_took(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_requests, "ANEW_SECONDS", 0.0)
    await on_disk(open_store, PROMPT)
    async with open_store(rows=4, disk=256) as store:
        assert await asyncio.wait_for(store.resolve(PROMPT), PATIENCE) == 4


async def test_many_lookups_whose_answers_nobody_awaits_are_in_nobodys_way(
    open_store: Open,
) -> None:
    prompts_of_8 = [keys_of(f"forgotten-{n}", 8) for n in range(8)]
    wanted = keys_of("wanted", 8)
    await on_disk(open_store, *prompts_of_8, wanted)
    async with open_store(rows=8, disk=256, lease_s=TOO_LONG) as store:
        for keys in prompts_of_8:
            assert store.lookup_prefix(keys) is None
        assert await asyncio.wait_for(contents(store, wanted), PATIENCE) == payloads(wanted)


async def test_who_asks_seldom_gets_its_answer_although_others_wait(open_store: Open) -> None:
    seldom, others = keys_of("seldom", 8), [keys_of(f"other-{n}", 8) for n in range(4)]
    await on_disk(open_store, seldom, *others)
    async with open_store(rows=8, disk=256, lease_s=TOO_LONG) as store:
        asking = [asyncio.create_task(contents(store, keys)) for keys in others]
        pause = 2 * unnamed_requests.UNNAMED_SECONDS
        await answered_async(lambda: store.lookup_prefix(seldom), pause=pause)
        assert await asyncio.gather(*asking) == [payloads(keys) for keys in others]


async def test_a_name_keeps_chunks_while_others_wait(open_store: Open) -> None:
    named, wanted = keys_of("named", 8), keys_of("wanted", 8)
    await on_disk(open_store, named, wanted)
    async with open_store(rows=8, disk=256, lease_s=TOO_LONG) as store:
        assert await store.resolve(named, "mine") == 8
        hurry(store, 0.5)
        assert await contents(store, wanted) == []
        assert busy(store) == 8
        store.release("mine")
        assert busy(store) == 0


async def test_a_prompt_whose_lease_ended_is_answered_from_what_is_there(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_requests, "UNNAMED_SECONDS", 0.0)
    one, other = keys_of("one", 8), keys_of("other", 8)
    await on_disk(open_store, one, other)
    async with open_store(rows=8, disk=256, deadline_s=3.0) as store:

        async def poll(keys: list[bytes]) -> int:
            # Slower than anybody keeps chunks for it.
            return await answered_async(lambda: store.lookup_prefix(keys), pause=0.05)

        found = await asyncio.gather(poll(one), poll(other))
        assert max(found) == 8


@pytest.mark.parametrize("call", ["resolve", "get"])
async def test_who_waits_longer_than_leases_last_keeps_what_was_fetched(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    await on_disk(open_store, PROMPT)
    async with open_store(rows=8, disk=256, lease_s=0.2) as store:
        gate = hold(monkeypatch, "read")
        waits = store.resolve(PROMPT) if call == "resolve" else contents(store, PROMPT)
        waiting = asyncio.ensure_future(waits)
        await asyncio.sleep(0.5)
        gate.set()
        assert await waiting in (6, payloads(PROMPT))
        assert store.stats().lapses == 0


async def test_one_of_two_that_wait_for_the_same_can_be_cancelled(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_disk(open_store, PROMPT)
    async with open_store(rows=8, disk=256) as store:
        gate = hold(monkeypatch, "read")
        one = asyncio.create_task(store.resolve(PROMPT))
        other = asyncio.create_task(store.resolve(PROMPT))
        await until_async(lambda: store.stats().waiting == 1)
        await cancel(one)
        assert store.stats().waiting == 1
        gate.set()
        assert await other == 6
        assert await contents(store, PROMPT) == payloads(PROMPT)
        assert busy(store) == 0


async def test_all_who_get_and_resolve_the_same_are_served(open_store: Open) -> None:
    await on_disk(open_store, PROMPT)
    async with open_store(rows=8, disk=256) as store:

        async def both() -> list[bytes]:
            return await contents(store, PROMPT[: await store.resolve(PROMPT)])

        got = await asyncio.gather(
            *(both() for _ in range(4)), *(contents(store, PROMPT) for _ in range(4))
        )
        assert got == [payloads(PROMPT)] * 8
        assert busy(store) == 0


async def test_a_list_that_its_owner_changes_afterwards_does_no_harm(open_store: Open) -> None:
    async with open_store(rows=8) as store:
        keys = PROMPT[:3]
        assert await store.put(keys, payloads(keys)) == 3
        assert store.lookup_prefix(keys) == 3
        keys.append(PROMPT[3])
        assert store.lookup_prefix(keys) == 3
        async with store.get(keys) as chunks:
            keys.clear()
            assert len(chunks) == 3
        assert busy(store) == 0
    assert not store._prompts._open
    assert not store._prompts._asked
    assert not store._prompts._heads
    assert not store._prompts._rests
    assert not store._prompts._leasing
    assert store._prompts._keys == 0


async def test_what_is_remembered_of_requests_is_bounded(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_requests, "MOST_OPEN", 16)
    async with open_store(rows=8, admission=["doorkeeper"]) as store:
        for number in range(500):
            keys = keys_of(str(number), 3)
            assert store.lookup_prefix(keys) == 0
            async with store.get(keys[:1]):
                pass
            await store.put(keys, payloads(keys))
        assert len(store._prompts._open) <= 17
        assert len(store._core._requests) <= 17


async def test_who_is_silent_for_long_is_taken_for_ended(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with open_store(rows=8) as store:
        await store.put(PROMPT, payloads(PROMPT), "named")
        assert store.lookup_prefix(PROMPT) == 6
        assert len(store._prompts._open) == 2
        monkeypatch.setattr(store._prompts, "_linger", 0.02)
        await asyncio.sleep(0.05)
        assert store.lookup_prefix([b"other"]) == 0
        assert len(store._prompts._open) == 1


@pytest.mark.parametrize("call", ["resolve", "get"])
async def test_many_questions_about_what_is_in_host_memory_wait_for_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(loop_steps, "RECHECK_SECONDS", 60.0)
    async with open_store(rows=8, holds=PROMPT) as store:

        async def ask() -> None:
            for _ in range(1000):
                if call == "resolve":
                    assert await store.resolve(PROMPT) == 6
                else:
                    async with store.get(PROMPT) as chunks:
                        assert len(chunks) == 6

        await asyncio.wait_for(ask(), PATIENCE)
