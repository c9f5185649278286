"""The contract of a store (`kvstore.tiers.base`) as a test suite.

A store's own tests inherit it, and define how a tier is built and how to break its server:

    class TestMyStore(StoreContract):
        def new_tier(self, place):
            return MyTier(place, url=...)

The suite needs pytest and pytest-asyncio. It moves real bytes to a real server and back.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

import pytest

from kvstore.testing.bench import Benches, TierBench, key_of
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.remote.client import ListingClient
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import MAX_KEY_BYTES, TierPlace

__all__ = ["StoreContract"]


def _flipped(value: bytes, place: int) -> bytes:
    changed = bytearray(value)
    changed[place] ^= 1
    return bytes(changed)


DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda value: b"",
    "torn": lambda value: value[:-7],
    "longer": lambda value: value + b"\0",
    "in its first bytes": lambda value: _flipped(value, 40),
    "in its last bytes": lambda value: _flipped(value, -50),
}
"""Ways to damage a value; the flipped bits are in the record and in the payload."""


class StoreContract(Benches, ABC):
    """Tests that every store must pass. Inherit it and implement the abstract methods."""

    rows = 16
    row_bytes = 8192
    chunk_bytes = 8000
    """Less than a row: a payload need not fill it."""

    tail_bytes = 0
    """Bytes behind each row of host memory: see `Tier.tail_bytes`."""

    seconds = 20.0
    """Longest time that a call may take if the server does not answer."""

    pytestmark = pytest.mark.asyncio

    @abstractmethod
    def new_tier(self, place: TierPlace) -> Tier:
        """Create a tier over the server of these tests, without opening it."""

    @abstractmethod
    def values(self) -> Mapping[str, bytes]:
        """Return all values that the server has, by name; none when a test begins."""

    @abstractmethod
    def put(self, name: str, value: bytes) -> None:
        """Set the value of a name, replacing any earlier one."""

    @abstractmethod
    def stop(self) -> None:
        """Kill the server."""

    @abstractmethod
    def start(self) -> None:
        """Start the server again at its address, ready to store. It may have lost its values."""

    @abstractmethod
    def freeze(self) -> None:
        """Let the server accept calls without answering them, until `start`."""

    @pytest.fixture
    def place(self) -> TierPlace:
        """The place of this test's tier, a namespace that is still empty."""
        return TierPlace("contract", {"test": uuid4().hex}, self.chunk_bytes)

    def open(self, place: TierPlace, benches: list[TierBench]) -> TierBench:
        """Open a tier, as a process that uses the store would."""
        bench = TierBench(
            self.new_tier(place), self.rows, self.row_bytes, place.chunk_bytes, self.tail_bytes
        )
        benches.append(bench)
        return bench

    @pytest.fixture
    def bench(self, place: TierPlace, benches: list[TierBench]) -> TierBench:
        """A tier over this test's place."""
        return self.open(place, benches)

    def named(self, key: bytes) -> str:
        """Return the name of the value that was stored under `key`."""
        (name,) = (name for name in self.values() if name.endswith(f"/{key.hex()}"))
        return name

    # -- what it is ------------------------------------------------------------------------

    async def test_it_is_opened_empty_and_says_what_it_is(self, bench: TierBench) -> None:
        assert bench.tier.is_store
        assert not bench.opening.entries
        assert not bench.opening.segments
        assert bench.opening.medium == "remote"
        assert bench.opening.name
        assert bench.tier.description.strip()
        assert "\n" not in bench.tier.description

    # -- right bytes -------------------------------------------------------------------------

    async def test_what_was_written_is_held_and_read_byte_for_byte(self, bench: TierBench) -> None:
        keys = [key_of(n) for n in range(8)]
        assert (await bench.tier.holds(keys)).ok == [False] * 8
        assert (await _store(bench, keys)).ok == [True] * 8
        told = await bench.tier.holds(keys)
        assert (told.ok, told.error, list(told.unread)) == ([True] * 8, None, [])
        assert await _fetch(bench, keys) == [True] * 8

    async def test_another_process_finds_it(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        keys = [key_of(n) for n in range(4)]
        await _store(self.open(place, benches), keys)
        other = self.open(place, benches)
        assert (await other.tier.holds(keys)).ok == [True] * 4
        assert await _fetch(other, keys) == [True] * 4

    async def test_keys_of_any_allowed_length_work_and_are_told_apart(
        self, bench: TierBench
    ) -> None:
        keys = [b"k", b"\0", b"k" * MAX_KEY_BYTES, b"\0" * MAX_KEY_BYTES, b"ends in zeros\0\0\0\0"]
        await _store(bench, keys)
        others = [b"k\0", b"\0\0", b"x", keys[2][1:], keys[3][1:], keys[4][:-1]]
        assert (await bench.tier.holds([*keys, *others])).ok == [True] * 5 + [False] * 6
        assert await _fetch(bench, keys) == [True] * 5

    async def test_a_chunk_that_it_does_not_have_is_a_miss_of_that_chunk_alone(
        self, bench: TierBench
    ) -> None:
        keys = [key_of(n) for n in range(6)]
        await _store(bench, [keys[0], keys[1], keys[4]])
        expected = [True, True, False, False, True, False]
        assert (await bench.tier.holds(keys)).ok == expected
        assert (await bench.tier.holds(keys[::-1])).ok == expected[::-1]
        assert await _fetch(bench, keys) == expected
        done = await bench.tier.read([keys[2]], [0], [0])
        assert done.error
        assert list(done.unread) == [], "it is lost, not unreadable"

    async def test_what_another_namespace_has_stored_is_not_there(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        keys = [key_of(n) for n in range(2)]
        await _store(self.open(place, benches), keys)
        for other in (
            replace(place, identity={**place.identity, "dtype": "fp8"}),
            replace(place, namespace="another"),
        ):
            stranger = self.open(other, benches)
            assert (await stranger.tier.holds(keys)).ok == [False] * 2
            assert await _fetch(stranger, keys) == [False] * 2

    async def test_a_call_may_name_nothing(self, bench: TierBench) -> None:
        assert (await bench.tier.holds([])).ok == []
        assert (await bench.tier.read([], [], [])).ok == []
        assert (await bench.tier.write([], [], [])).ok == []

    async def test_what_is_there_already_stays_as_it_is(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        bench = self.open(place, benches)
        await _store(bench, [key_of(1)])
        before = self.values()[self.named(key_of(1))]
        again = self.open(place, benches)
        assert (await _store(again, [key_of(1), key_of(2)])).ok == [True, True]
        assert self.values()[self.named(key_of(1))] == before

    async def test_many_calls_at_once_each_get_their_own(self, bench: TierBench) -> None:
        keys = [key_of(n) for n in range(16)]
        await _store(bench, keys)
        reads = [bench.tier.read([key], [0], [row]) for row, key in enumerate(keys)]
        asks = [bench.tier.holds([key, key_of(99)]) for key in keys]
        done = await asyncio.gather(*reads, *asks)
        assert [told.ok for told in done[:16]] == [[True]] * 16
        assert [told.ok for told in done[16:]] == [[True, False]] * 16
        assert all(bench.holds(row, key) for row, key in enumerate(keys))

    # -- what others have made of it ---------------------------------------------------------

    async def test_a_value_that_was_found_bad_is_a_miss_of_that_chunk_alone_until_the_next_write(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        bench = self.open(place, benches)
        keys = [key_of(n) for n in range(2 * len(DAMAGES) + 1)]
        rows, whole = list(range(len(keys))), [True] * len(keys)
        await _store(bench, keys)
        # A damaged value between two that are whole.
        good = [number % 2 == 0 for number in rows]
        values = self.values()
        damages = dict(zip((key.hex() for key in keys[1::2]), DAMAGES.values(), strict=True))
        damaged = {name for name in values if name.rpartition("/")[2] in damages}
        for name in damaged:
            self.put(name, damages[name.rpartition("/")[2]](values[name]))
        bench.smear(rows)
        done = await bench.tier.read(keys, [0] * len(keys), rows)
        assert done.ok == good
        assert list(done.unread) == []
        assert done.error
        assert all(bench.holds(row, keys[row]) for row in rows[::2])
        assert (await bench.tier.holds(keys)).ok == good, "a bad one is good for nothing"
        assert (await _store(bench, keys)).ok == whole
        after = self.values()
        # What is encrypted is never the same twice.
        assert place.keys is not None or all(after[name] == values[name] for name in damaged)
        assert (await bench.tier.holds(keys)).ok == whole
        for reader in (bench, self.open(place, benches)):
            assert await _fetch(reader, keys) == whole

    async def test_the_value_of_another_chunk_is_a_miss(self, bench: TierBench) -> None:
        keys = [key_of(1), key_of(2)]
        await _store(bench, keys)
        self.put(self.named(keys[0]), self.values()[self.named(keys[1])])
        assert await _fetch(bench, keys) == [False, True]

    async def test_the_value_of_another_namespace_is_a_miss(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        theirs = self.open(replace(place, namespace="another"), benches)
        await _store(theirs, [key_of(1)])
        value = self.values()[self.named(key_of(1))]
        before = set(self.values())
        bench = self.open(place, benches)
        await _store(bench, [key_of(1)])
        (name,) = set(self.values()) - before
        self.put(name, value)
        assert await _fetch(bench, [key_of(1)]) == [False]

    # -- forgetting --------------------------------------------------------------------------

    async def test_after_it_was_cleared_nothing_is_there_and_nobody_else_is_bothered(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        bench, other = self.open(place, benches), self.open(place, benches)
        await _store(bench, [key_of(1)])
        assert await bench.tier.clear() == []
        assert (await bench.tier.holds([key_of(1)])).ok == [False]
        assert await _fetch(other, [key_of(1)]) == [True]
        # It shares nothing that it stores from now on.
        assert (await _store(bench, [key_of(2)])).ok == [True]
        assert await _fetch(bench, [key_of(2)]) == [True]
        assert (await other.tier.holds([key_of(2)])).ok == [False]
        await other.tier.clear()
        assert (await other.tier.holds([key_of(2)])).ok == [False]

    async def test_what_it_stored_before_it_was_cleared_again_is_removed_if_the_client_can_list_it(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        bench, other = self.open(place, benches), self.open(place, benches)
        await _store(bench, [key_of(1)])
        shared = set(self.values())
        for clearing in (bench, other):
            await clearing.tier.clear()
            await _store(clearing, [key_of(2), key_of(3)])
        theirs = set(self.values()) - shared
        await bench.tier.clear()
        await _store(bench, [key_of(4)])
        if not isinstance(bench.tier, StoreTier) or not isinstance(
            bench.tier.connect(), ListingClient
        ):
            return
        # This waits for the sweep that `clear` has begun.
        await bench.tier.sweep()
        left = set(self.values())
        assert shared < left
        assert len(theirs & left) == 2
        assert await _fetch(other, [key_of(2), key_of(3)]) == [True] * 2
        assert await _fetch(bench, [key_of(2), key_of(4)]) == [False, True]

    async def test_what_is_erased_is_gone_for_all(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        bench, other = self.open(place, benches), self.open(place, benches)
        await _store(bench, [key_of(1), key_of(2)])
        assert await bench.tier.erase([key_of(1), key_of(3)]) is None
        assert (await other.tier.holds([key_of(1), key_of(2)])).ok == [False, True]

    # -- an engine that is not there ---------------------------------------------------------

    async def test_it_opens_while_its_engine_is_away_and_serves_when_it_comes(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        self.stop()
        try:
            bench = self.open(place, benches)
            await self._is_away(bench)
        finally:
            self.start()
        await self._is_back(bench)
        assert (await _store(bench, [key_of(1)])).ok == [True]
        assert await _fetch(bench, [key_of(1)]) == [True]

    @pytest.mark.parametrize("how", ["stop", "freeze"])
    async def test_calls_fail_while_its_engine_does_not_answer_and_go_well_afterwards(
        self, bench: TierBench, how: str
    ) -> None:
        await _store(bench, [key_of(1)])
        {"stop": self.stop, "freeze": self.freeze}[how]()
        try:
            await self._is_away(bench)
        finally:
            self.start()
        await self._is_back(bench)
        assert (await _store(bench, [key_of(2)])).ok == [True]
        assert await _fetch(bench, [key_of(2)]) == [True]

    async def test_it_can_be_closed_while_a_call_waits(self, bench: TierBench) -> None:
        await _store(bench, [key_of(1)])
        self.freeze()
        try:
            call = asyncio.create_task(bench.tier.read([key_of(1)], [0], [0]))
            await asyncio.sleep(0.05)
            bench.tier.detach()
            async with asyncio.timeout(self.seconds):
                assert (await call).ok == [False]
        finally:
            self.start()
        await bench.close()

    async def _is_back(self, bench: TierBench) -> None:
        async with asyncio.timeout(self.seconds):
            # The first call on a broken connection may still fail.
            while True:
                told = await bench.tier.holds([key_of(7)])
                if told.error is None:
                    return
                await asyncio.sleep(0.05)

    async def _is_away(self, bench: TierBench) -> None:
        keys = [key_of(1), key_of(2)]
        began = time.monotonic()
        for call in (
            bench.tier.holds(keys),
            bench.tier.read(keys, [0, 0], [0, 1]),
            _store(bench, keys),
        ):
            told = await call
            assert told.ok == [False, False]
            assert told.error
            assert list(told.unread) == [0, 1]
        assert await bench.tier.erase(keys)
        assert time.monotonic() - began < self.seconds
        assert await bench.tier.clear() == [], "it needs nobody for that"


async def _store(bench: TierBench, keys: Sequence[bytes]) -> Transfer:
    return await bench.store(keys, [0] * len(keys))


async def _fetch(bench: TierBench, keys: Sequence[bytes]) -> list[bool]:
    return await bench.fetch(keys, [0] * len(keys))
