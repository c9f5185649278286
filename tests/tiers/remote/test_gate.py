"""Who goes first where only so many calls may be under way; calls that block."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.concurrency import outlast
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.gate import Gate
from kvstore.tiers.remote.loop import in_thread, two_at_once
from kvstore.tiers.remote.slices import Beside
from kvstore.tiers.remote.tier import QUESTIONS_AT_ONCE, StoreTier
from kvstore.types import TierPlace
from tests.patience import PATIENCE, TOO_LONG


class Calls:
    """Calls through a gate, each of which ends when it is told to."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.under_way: list[str] = []

    async def begin(self, name: str, order: int, size: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._call(name, order, size))
        await self.settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _call(self, name: str, order: int, size: int) -> None:
        async with self._gate.turn(order, size):
            self.under_way.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.under_way.remove(name)


async def test_moves_go_one_after_the_other_though_their_calls_come_in_turns() -> None:
    calls = Calls(Gate(2, 16))
    for part in "ab":
        for move in (1, 2):
            await calls.begin(f"{move}{part}", move, 8)
    assert calls.under_way == ["1a", "2a"]
    await calls.begin("1c", 1, 8)
    await calls.end("2a")
    assert calls.under_way == ["1a", "1b"]
    await calls.end("1a")
    assert calls.under_way == ["1b", "1c"]
    await calls.end("1b")
    assert calls.under_way == ["1c", "2b"]


async def test_what_is_under_way_names_no_more_bytes_than_there_is_room_for() -> None:
    calls = Calls(Gate(4, 16))
    await calls.begin("a", 1, 8)
    await calls.begin("b", 2, 9)
    await calls.begin("c", 3, 1)
    assert calls.under_way == ["a"], "a small one does not overtake"
    await calls.end("a")
    assert calls.under_way == ["b", "c"]
    await calls.begin("larger than the room", 4, 100)
    await calls.end("b")
    assert calls.under_way == ["c"]
    await calls.end("c")
    assert calls.under_way == ["larger than the room"]


async def test_whoever_is_cancelled_keeps_no_place() -> None:
    calls = Calls(Gate(1, 8))
    for order, name in enumerate("abc"):
        await calls.begin(name, order, 8)
    calls.tasks["b"].cancel()
    await calls.settle()
    assert calls.under_way == ["a"]
    calls.tasks["a"].cancel()
    await calls.settle()
    assert calls.under_way == ["c"]
    await calls.begin("d", 4, 8)
    await calls.end("c")
    assert calls.under_way == ["d"]


async def test_whoever_is_cancelled_in_the_step_in_which_its_turn_comes_gives_it_up() -> None:
    calls = Calls(Gate(1, 8))
    for order, name in enumerate("abc"):
        await calls.begin(name, order, 8)
    calls._ends["a"].set()
    while not calls.tasks["a"].done():
        await asyncio.sleep(0)
    calls.tasks["b"].cancel()
    await calls.settle()
    assert calls.under_way == ["c"]


async def test_those_that_wait_fail_with_the_call_before_them_and_later_ones_do_not() -> None:
    gate = Gate(1, 8)
    calls = Calls(gate)
    await calls.begin("a", 1, 8)
    await calls.begin("b", 2, 8)
    gate.fail("no answer")
    await calls.begin("c", 3, 8)
    with pytest.raises(StoreError, match="no answer"):
        await calls.tasks["b"]
    assert calls.under_way == ["a"]
    await calls.end("a")
    assert calls.under_way == ["c"]


async def test_calls_that_raise_are_waited_for_as_they_use_memory() -> None:
    goes_on, ended = asyncio.Event(), []

    async def uses_memory() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            await goes_on.wait()
            ended.append("it")
        return ""

    async def fails() -> str:
        raise StoreError("no")

    told: list[str] = []
    moving = asyncio.create_task(two_at_once([fails(), uses_memory()], told.append))
    for _ in range(5):
        await asyncio.sleep(0)
        moving.cancel()
    assert not moving.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert ended == ["it"]


async def test_a_store_that_hangs_fails_the_calls_that_wait_for_it_at_once() -> None:
    class Hanging:
        async def exists(self, names: Sequence[str]) -> list[bool]:
            await asyncio.sleep(TOO_LONG)
            return []

        async def close(self) -> None:
            return

    class HangingTier(StoreTier):
        address = "hanging"

        def connect(self) -> Any:
            return Hanging()

    tier = HangingTier(TierPlace("n", {"model": "m"}, 4096), timeout_s=0.3)
    region = PinnedRegion.private(2, 4096)
    tier.open(region)
    try:
        begun = time.monotonic()
        asked = [tier.holds([b"key-%d" % n]) for n in range(10 * QUESTIONS_AT_ONCE)]
        answers = await asyncio.gather(*asked)
        # One after the other they would take ten times as long.
        assert time.monotonic() - begun < 0.3 * 8
        assert all("no answer within 0.3 s" in (answer.error or "") for answer in answers)
    finally:
        await tier.close([])
        region.close()


async def test_a_client_that_ends_slowly_holds_up_nobody() -> None:
    class Slow:
        def __init__(self) -> None:
            self.listening = asyncio.get_running_loop().create_task(self._listen())

        async def _listen(self) -> None:
            try:
                await asyncio.sleep(TOO_LONG)
            finally:
                await asyncio.sleep(0.5)

        async def exists(self, names: Sequence[str]) -> list[bool]:
            return [False] * len(names)

        async def close(self) -> None:
            return

    class SlowTier(StoreTier):
        address = "slow"

        def connect(self) -> Any:
            return Slow()

    tier = SlowTier(TierPlace("n", {"model": "m"}, 4096), timeout_s=0.3)
    region = PinnedRegion.private(2, 4096)
    tier.open(region)
    assert (await tier.holds([b"key"])).error is None
    beats = 0
    closing = asyncio.create_task(tier.close([]))
    while not closing.done():
        await asyncio.sleep(0.01)
        beats += 1
    region.close()
    assert beats >= 10


async def test_places_for_records_are_used_again() -> None:
    beside = Beside(2)
    payloads = [memoryview(bytearray(64)), memoryview(bytearray(64))]
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            async with beside.lent(payloads) as slices:
                assert len(slices.records) == 2


# -- calls that block, in threads of their own ---------------------------------------------------


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_call_that_gives_way_leaves_everybody_else_where_they_were() -> None:
    before = priority()
    assert await in_thread(priority, before + 3) == before + 3
    assert await outlast(in_thread(priority, before + 3)) == before + 3
    assert await in_thread(priority) == before
    assert priority() == before


async def test_what_a_call_raises_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await in_thread(lambda: 1 / 0)

    def refuses() -> None:
        raise StoreError("as it is")

    with pytest.raises(StoreError, match="^as it is$"):
        await outlast(in_thread(refuses))


async def test_a_call_that_uses_memory_is_awaited_though_it_is_cancelled() -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        goes_on.wait(60)
        ended.set()

    task = asyncio.create_task(outlast(in_thread(work)))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
