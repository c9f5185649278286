"""The contract of `kvstore.tiers.base.Tier` as a test suite.

A tier's own tests inherit it and define how a tier is built:

    class TestMyTier(TierContract):
        def new_tier(self, folder):
            return MyTier(folder, chunk_bytes=self.chunk_bytes)

The suite needs pytest and pytest-asyncio. It moves real bytes through the real
tier, in a folder of its own for each test.

This module is long because a contract is one class, which its users inherit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import Benches, TierBench, key_of
from kvstore.tiers.base import Tier, Transfer
from kvstore.types import MAX_KEY_BYTES

__all__ = ["TierContract"]


class TierContract(Benches, ABC):
    """Tests that every tier must pass. Inherit it and implement `new_tier`."""

    rows = 16
    row_bytes = 8192
    chunk_bytes = 8000
    """Less than a row: a payload need not fill its slot."""

    pytestmark = pytest.mark.asyncio

    @abstractmethod
    def new_tier(self, folder: Path) -> Tier:
        """Create a tier for chunks of `chunk_bytes`, without opening it.

        It has room for at least two segments of eight slots or more. A second tier
        for the same folder finds what the first has stored.
        """

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Folder of this test's tier."""
        return tmp_path / "tier"

    def open(self, folder: Path, benches: list[TierBench]) -> TierBench:
        """Open the tier of `folder`, for the first time or again."""
        bench = TierBench(self.new_tier(folder), self.rows, self.row_bytes, self.chunk_bytes)
        benches.append(bench)
        return bench

    @pytest.fixture
    def bench(self, folder: Path, benches: list[TierBench]) -> TierBench:
        """The tier of this test's folder, opened for the first time."""
        return self.open(folder, benches)

    # -- a new tier --------------------------------------------------------------------

    async def test_a_new_tier_is_empty_has_a_segment_ready_and_says_what_it_is_in_one_line(
        self, bench: TierBench
    ) -> None:
        opening, description = bench.opening, bench.tier.description
        assert list(opening.entries) == []
        assert len(opening.segments) >= 1
        assert opening.segment_slots >= 1
        assert opening.max_segments >= len(opening.segments)
        assert opening.name
        assert opening.medium in ("disk", "remote")
        assert description.strip()
        assert "\n" not in description

    # -- read and write ----------------------------------------------------------------

    async def test_keys_of_any_allowed_length_work_and_are_told_apart(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        keys = [b"key\0\1", b"\0", b"k" * MAX_KEY_BYTES, b"\0" * MAX_KEY_BYTES, b"key", b"zero\0\0"]
        others = [b"key\0\2", b"\0\0", keys[2][1:], keys[3][1:], b"key\0", b"zero\0"]
        slots = bench.slots[:6]
        assert (await bench.store(keys, slots)).ok == [True] * 6
        assert await bench.fetch(keys, slots) == [True] * 6
        bench.abandon()
        again = self.open(folder, benches)
        assert list(again.opening.entries) == list(zip(keys, slots, strict=True))
        # Last: a chunk that is not what was asked for may be erased.
        assert await again.fetch(others, slots) == [False] * 6

    async def test_slots_in_any_order_get_their_own_bytes(self, bench: TierBench) -> None:
        slots = [bench.slots[at] for at in (5, 0, 1, 7, 2, 4)]
        keys = [key_of(n) for n in range(6)]
        assert (await bench.store(keys, slots)).ok == [True] * 6
        order = [3, 5, 0, 4, 1, 2]
        picked, places = [keys[at] for at in order], [slots[at] for at in order]
        assert await bench.fetch(picked, places) == [True] * 6

    async def test_one_call_may_span_segments(self, bench: TierBench) -> None:
        second, _ = await bench.tier.grow()
        assert second is not None
        per_segment = bench.opening.segment_slots
        first = bench.opening.segments[0] * per_segment
        slots = [first + per_segment - 1, second * per_segment, first, second * per_segment + 1]
        keys = [key_of(n) for n in range(4)]
        assert (await bench.store(keys, slots)).ok == [True] * 4
        assert await bench.fetch(keys, slots) == [True] * 4

    async def test_a_call_for_nothing_returns_nothing(self, bench: TierBench) -> None:
        async with asyncio.timeout(60):
            assert (await bench.tier.read([], [], [])).ok == []
            assert (await bench.tier.write([], [], [])).ok == []

    async def test_a_block_under_another_key_is_a_miss_of_that_block_alone(
        self, bench: TierBench
    ) -> None:
        keys = [key_of(n) for n in range(5)]
        await bench.store(keys, bench.slots[:5])
        asked = [*keys[:2], key_of(99), *keys[3:]]
        assert await bench.fetch(asked, bench.slots[:5]) == [True, True, False, True, True]
        # Its neighbours can still be read.
        left = [0, 1, 3, 4]
        again = await bench.fetch([keys[n] for n in left], [bench.slots[n] for n in left])
        assert again == [True] * 4

    async def test_a_slot_that_was_never_written_is_a_miss_that_says_why_and_fails_alone(
        self, bench: TierBench
    ) -> None:
        keys = [key_of(n) for n in range(3)]
        await bench.store([keys[0], keys[2]], [bench.slots[0], bench.slots[2]])
        assert await bench.fetch(keys, bench.slots[:3]) == [True, False, True]
        done = await bench.tier.read(keys[1:2], bench.slots[1:2], [0])
        assert done.error

    async def test_only_the_rows_that_were_named_are_written_to(self, bench: TierBench) -> None:
        keys = [key_of(n) for n in range(4)]
        await bench.store(keys, bench.slots[:4])
        bench.smear(range(self.rows))
        done = await bench.tier.read(keys, bench.slots[:4], [9, 3, 12, 6])
        assert done.ok == [True] * 4
        assert [bench.holds(row, key) for row, key in zip([9, 3, 12, 6], keys, strict=True)]
        others = set(range(self.rows)) - {9, 3, 12, 6}
        assert all(bench.is_smeared(row) for row in others)

    async def test_a_rewritten_slot_holds_the_new_chunk_and_not_the_old(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        await bench.store([key_of(1), key_of(2)], bench.slots[:2])
        assert (await bench.store([key_of(3)], bench.slots[:1])).ok == [True]
        assert await bench.fetch([key_of(3), key_of(2)], bench.slots[:2]) == [True, True]
        bench.abandon()
        again = self.open(folder, benches)
        assert dict(again.opening.entries) == {
            key_of(3): bench.slots[0],
            key_of(2): bench.slots[1],
        }
        assert await again.fetch([key_of(3), key_of(2)], bench.slots[:2]) == [True, True]
        assert await again.fetch([key_of(1)], bench.slots[:1]) == [False]

    # -- in parallel -------------------------------------------------------------------

    async def test_reads_of_the_same_slots_may_run_at_once(self, bench: TierBench) -> None:
        keys = [key_of(n) for n in range(4)]
        await bench.store(keys, bench.slots[:4])
        bench.smear(range(self.rows))
        reads = [
            bench.tier.read(keys, bench.slots[:4], range(first, first + 4))
            for first in range(0, self.rows, 4)
        ]
        for done in await asyncio.gather(*reads):
            assert done.ok == [True] * 4
        assert all(bench.holds(row, keys[row % 4]) for row in range(self.rows))

    async def test_reads_and_writes_of_different_slots_may_run_at_once(
        self, bench: TierBench
    ) -> None:
        old, new = [key_of(n) for n in range(4)], [key_of(n) for n in range(4, 8)]
        await bench.store(old, bench.slots[:4])
        bench.fill(new, first_row=4)
        bench.smear(range(4))
        read, written = await asyncio.gather(
            bench.tier.read(old, bench.slots[:4], range(4)),
            bench.tier.write(new, bench.slots[4:8], range(4, 8)),
        )
        assert read.ok == written.ok == [True] * 4
        assert all(bench.holds(row, key) for row, key in enumerate(old))
        assert await bench.fetch(new, bench.slots[4:8]) == [True] * 4

    async def test_a_cancelled_read_lets_go_of_its_rows_before_it_returns(
        self, bench: TierBench
    ) -> None:
        keys = [key_of(n) for n in range(8)]
        await bench.store(keys, bench.slots[:8])
        for _ in range(20):
            await self._cancel(bench.tier.read(keys, bench.slots[:8], range(8)))
            # The caller owns the rows again: nothing may be written to them any more.
            bench.smear(range(8))
            done = await bench.tier.read(keys[:1], bench.slots[:1], [self.rows - 1])
            assert done.ok == [True]
            assert all(bench.is_smeared(row) for row in range(8))

    async def test_a_cancelled_write_leaves_the_whole_chunk_or_a_miss(
        self, bench: TierBench
    ) -> None:
        for round_ in range(20):
            keys = [key_of(100 * round_ + n) for n in range(8)]
            rows = bench.fill(keys)
            await self._cancel(bench.tier.write(keys, bench.slots[:8], rows))
            bench.smear(rows)
            # `fetch` fails if a smeared payload is served.
            await bench.fetch(keys, bench.slots[:8])

    # -- growing -----------------------------------------------------------------------

    async def test_a_new_segment_can_be_used_at_once_and_is_there_after_opening_again(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        segment, error = await bench.tier.grow()
        assert segment is not None
        assert error is None
        assert segment not in bench.opening.segments
        slot = segment * bench.opening.segment_slots
        assert (await bench.store([key_of(1)], [slot])).ok == [True]
        bench.abandon()
        again = self.open(folder, benches)
        assert segment in again.opening.segments
        assert list(again.opening.entries) == [(key_of(1), slot)]

    async def test_growing_ends_at_the_capacity_also_many_times_at_once(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        grown = await asyncio.gather(
            *(bench.tier.grow() for _ in range(bench.opening.max_segments + 2))
        )
        segments = [segment for segment, _ in grown if segment is not None]
        assert len(set(segments)) == len(segments)
        assert len(bench.opening.segments) + len(segments) == bench.opening.max_segments
        assert (await bench.tier.grow())[0] is None
        bench.abandon()
        again = self.open(folder, benches).opening
        assert set(again.segments) == {*bench.opening.segments, *segments}

    # -- forgetting --------------------------------------------------------------------

    async def test_clear_empties_every_segment_durably_and_what_is_written_then_is_found(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        second, _ = await bench.tier.grow()
        assert second is not None
        keys = [key_of(n) for n in range(3)]
        slots = [*bench.slots[:2], second * bench.opening.segment_slots]
        await bench.store(keys, slots)
        emptied = await bench.tier.clear()
        assert emptied is not None
        assert set(emptied) == {*bench.opening.segments, second}
        assert await bench.fetch(keys, slots) == [False] * 3
        assert (await bench.store(keys[:1], slots[1:2])).ok == [True]
        assert await bench.fetch(keys[:1], slots[1:2]) == [True]
        bench.abandon()
        again = self.open(folder, benches)
        assert list(again.opening.entries) == [(keys[0], slots[1])]
        assert await again.fetch(keys, slots) == [False] * 3

    # -- erasing -----------------------------------------------------------------------

    async def test_what_was_erased_is_not_reported_wherever_it_lay(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        gone, kept = [key_of(n) for n in range(3)], [key_of(n) for n in range(3, 6)]
        await bench.store([*gone, *kept], bench.slots[:6])
        # A displaced copy, and an unknown key.
        await bench.store(gone[:1], bench.slots[6:7])
        told = await bench.tier.erase([*gone, key_of(99)])
        if told is not None:
            pytest.skip(f"it erases nothing: {told}")
        bench.abandon()
        again = self.open(folder, benches)
        assert dict(again.opening.entries) == dict(zip(kept, bench.slots[3:6], strict=True))
        assert await again.fetch(kept, bench.slots[3:6]) == [True] * 3

    async def test_erasing_costs_no_chunk_that_is_written_meanwhile(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        slots = bench.slots[:8]
        for turn in range(10):
            old = [key_of(100 * turn + n) for n in range(len(slots))]
            new = [key_of(100 * turn + 50 + n) for n in range(len(slots))]
            await bench.store(old, slots)
            told, stored = await asyncio.gather(bench.tier.erase(old), bench.store(new, slots))
            if told is not None:
                pytest.skip(f"it erases nothing: {told}")
            assert all(stored.ok)
        bench.abandon()
        again = self.open(folder, benches)
        assert dict(again.opening.entries) == dict(zip(new, slots, strict=True))

    # -- opening again -----------------------------------------------------------------

    async def test_opening_again_reports_the_recency_that_close_was_told(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        keys = [key_of(n) for n in range(5)]
        await bench.store(keys, bench.slots[:5])
        coldest_first = [(keys[n], bench.slots[n]) for n in (2, 0, 4, 1, 3)]
        await bench.close(coldest_first)
        again = self.open(folder, benches)
        assert list(again.opening.entries) == coldest_first
        assert await again.fetch(keys, bench.slots[:5]) == [True] * 5

    async def test_what_is_written_after_opening_again_is_warmer_than_what_was_found(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        await bench.store([key_of(1), key_of(2)], bench.slots[:2])
        found = [(key_of(2), bench.slots[1]), (key_of(1), bench.slots[0])]
        await bench.close(found)
        again = self.open(folder, benches)
        await again.store([key_of(3)], bench.slots[2:3])
        again.abandon()
        expected = [*found, (key_of(3), bench.slots[2])]
        assert list(self.open(folder, benches).opening.entries) == expected

    async def test_of_two_places_of_one_key_the_later_one_is_reported(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        """Without a clean stop recency is the order of writing, not that of slots."""
        bench = self.open(folder, benches)
        for key, slot in ((1, 3), (2, 5), (1, 6), (3, 0), (1, 1)):
            assert (await bench.store([key_of(key)], [bench.slots[slot]])).ok == [True]
        bench.abandon()
        again = self.open(folder, benches)
        # The later place counts for recency, too.
        assert list(again.opening.entries) == [
            (key_of(2), bench.slots[5]),
            (key_of(3), bench.slots[0]),
            (key_of(1), bench.slots[1]),
        ]
        assert await again.fetch([key_of(1)], [bench.slots[1]]) == [True]

    async def test_what_was_written_survives_the_kill_of_the_process(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_write_and_die, args=(self, folder))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        bench = self.open(folder, benches)
        found = dict(bench.opening.entries)
        keys = [key_of(n) for n in range(8)]
        assert found.keys() == set(keys)
        assert await bench.fetch(keys, [found[key] for key in keys]) == [True] * 8

    # -- closing -----------------------------------------------------------------------

    async def test_close_lets_running_writes_end_and_they_are_found_again(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        bench = self.open(folder, benches)
        keys = [key_of(n) for n in range(8)]
        await bench.store(keys[:2], bench.slots[:2])
        rows = bench.fill(keys)
        writing = asyncio.ensure_future(bench.tier.write(keys[2:], bench.slots[2:8], rows[2:]))
        await asyncio.sleep(0)
        told = [(keys[1], bench.slots[1]), (keys[0], bench.slots[0])]
        await bench.close(told)
        written = (await writing).ok
        again = self.open(folder, benches)
        found = dict(again.opening.entries)
        claimed = [*keys[:2], *(key for key, ok in zip(keys[2:], written, strict=True) if ok)]
        assert found.keys() >= set(claimed)
        assert await again.fetch(claimed, [found[key] for key in claimed]) == [True] * len(claimed)

    async def test_a_closed_tier_can_be_opened_by_another_at_once(
        self, folder: Path, benches: list[TierBench]
    ) -> None:
        for n in range(3):
            bench = self.open(folder, benches)
            assert len(bench.opening.entries) == n
            await bench.store([key_of(n)], bench.slots[n : n + 1])
            await bench.close([(key_of(at), bench.slots[at]) for at in range(n + 1)])

    # -- inside ------------------------------------------------------------------------

    @staticmethod
    async def _cancel(call: Coroutine[Any, Any, Transfer]) -> None:
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _write_and_die(contract: TierContract, folder: Path) -> None:
    bench = TierBench(
        contract.new_tier(folder), contract.rows, contract.row_bytes, contract.chunk_bytes
    )
    keys = [key_of(n) for n in range(8)]
    done = asyncio.run(bench.store(keys, bench.slots[:8]))
    if done.ok == [True] * 8:
        os.kill(os.getpid(), signal.SIGKILL)
