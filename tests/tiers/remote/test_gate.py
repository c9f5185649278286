"""Who goes first where only so many calls may be under way."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.gate import Gate

pytestmark = pytest.mark.asyncio


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


async def test_a_call_that_is_cancelled_while_it_waits_gives_nobody_a_turn() -> None:
    calls = Calls(Gate(1, 16))
    for number, name in enumerate("abc"):
        await calls.begin(name, number, 8)
    calls.tasks["b"].cancel()
    await calls.settle()
    assert calls.under_way == ["a"]
    await calls.end("a")
    assert calls.under_way == ["c"]
