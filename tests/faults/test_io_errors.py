"""I/O that fails, is cut short, takes seconds or never ends, on a real mount."""

from __future__ import annotations

import asyncio
import errno
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.core.residency.slots import FEW_ASIDE
from kvstore.tiers.disk.format import RECORD_BYTES
from tests.faults.conftest import EIO, FaultyDisk, Rule
from tests.faults.support import (
    CEILING,
    CHUNK,
    DEADLINE,
    DRAIN,
    GEOMETRY,
    SLOTS,
    calling,
    running_loop,
    slot_offset,
    warned,
)
from tests.patience import PATIENCE, until_async

ALL = range(SLOTS)
BLOCKS = {"path": "segment-", "first": GEOMETRY.blocks_offset}
INDEX = {"path": "segment-", "first": GEOMETRY.index_offset, "end": GEOMETRY.blocks_offset}


def at(first: int, end: int) -> Rule:
    """Applies to the payloads of the slots from `first` to before `end`."""
    return {"path": "segment-", "first": slot_offset(first), "end": slot_offset(end)}


def record_of(slot: int) -> Rule:
    """Applies to the record of a slot of the first segment."""
    first = GEOMETRY.index_offset + slot * RECORD_BYTES
    return {"path": "segment-0", "first": first, "end": first + RECORD_BYTES}


# -- reading -------------------------------------------------------------------------------


async def test_payloads_that_cannot_be_read_are_misses_and_their_neighbours_are_served(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **at(5, 7), **EIO})
        # All in one call first, so that those which fail have neighbours.
        await caller.get(ALL)
        served = await caller.each(ALL)
        assert len(served) == SLOTS - 2
        assert caller.disk.failed_reads == 4, "both were tried again"
        assert warned(caplog.records, "read of", "Input/output error")
        faulty.obey()
        lost = set(ALL) - served
        assert await caller.save(lost) == lost, "they can be stored again"
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.get(ALL) == SLOTS


async def test_a_disk_that_reads_nothing_at_all_is_a_miss_of_everything(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **EIO})
        assert await caller.get(ALL) == 0
        assert caller.disk.failed_reads == SLOTS
        assert warned(caplog.records, "Input/output error")
        faulty.obey()
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.get(ALL) == SLOTS, "the disk reads again, and all is still there"


async def test_chunks_outlive_reads_that_fail_in_passing(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, **EIO})
        assert await caller.each(ALL) == set()
        faulty.obey()
        assert await caller.get(ALL) == SLOTS
        told = [r for r in caplog.records if "Input/output error" in r.getMessage()]
        assert len(told) == 1, "one line for all of them"


async def test_records_that_cannot_be_read_are_misses(faulty: FaultyDisk) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **INDEX, **EIO})
        assert await caller.get(ALL) == 0
        faulty.obey()
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.get(ALL) == SLOTS


@pytest.mark.parametrize("most", [4096, 12288, CHUNK - 4096])
async def test_reads_that_are_cut_short_go_on_until_all_is_there(
    faulty: FaultyDisk, most: int
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, "short": most})
        assert await caller.get(ALL) == SLOTS
        assert caller.disk.failed_reads == 0


async def test_reads_that_end_early_are_misses_of_what_did_not_come(faulty: FaultyDisk) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **at(10, SLOTS), "short": 0})
        assert len(await caller.each(ALL)) == 10
        assert caller.disk.failed_reads == SLOTS - 10


# -- writing -------------------------------------------------------------------------------


async def test_payloads_that_cannot_be_written_are_not_stored_and_their_neighbours_are(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        faulty.obey({"op": "write", **at(5, 7), **EIO})
        kept = await caller.save(ALL)
        assert len(kept) == SLOTS - 2
        assert caller.disk.failed_writes == 2
        assert warned(caplog.records, "are set aside", "Input/output error")
        caller.forget_host()
        assert await caller.each(ALL, times=3) == kept
        faulty.obey()
        lost = set(ALL) - kept
        assert await caller.save(lost) == lost
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.get(ALL) == SLOTS


@pytest.mark.parametrize("at_once", [1, 8])
async def test_a_few_slots_that_cannot_be_written_do_not_keep_the_others_from_it(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        faulty.obey({"op": "write", **at(5, 7), "path": "segment-0", **EIO})
        stored: set[int] = set()
        for first in range(0, 3 * SLOTS, at_once):
            numbers = range(first, first + at_once)
            stored |= await caller.save(numbers)
            if at_once == 1 and 6 in numbers:
                await asyncio.sleep(0.35)
        assert len(stored) == 3 * SLOTS - 2
        assert caller.disk.failed_writes == 2, "they are not tried again"
        assert caller.disk.set_aside == 2
        told = "are set aside" if at_once > 1 else "stores again"
        assert warned(caplog.records, told)
        caller.forget_host()
        assert await caller.each(stored, times=3) == stored
        for first in range(100, 100 + 8 * SLOTS, at_once):
            stored |= await caller.save(range(first, first + at_once))
        assert len(stored) == 11 * SLOTS - 2, "those of a full disk are displaced, all but these"
        assert caller.disk.failed_writes == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
async def test_a_disk_that_writes_nothing_is_left_alone_and_host_memory_serves(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(range(4)) == set(range(4))
        faulty.obey({"op": "write", "path": "segment-", "error": number})
        # No more than there are free slots: what makes room for a copy leaves before it is known
        # whether the copy succeeds.
        assert await caller.save(range(10, 18)) == set()
        assert await caller.get(range(10, 18)) == 8, "host memory has them"
        await caller.save(range(100, 104))
        assert caller.disk.refused > 0, "for a while nobody even tries"
        caller.forget_host()
        assert await caller.get(range(4)) == 4, "what was on disk is served"
        faulty.obey()
        await asyncio.sleep(0.35)
        kept = await caller.save(ALL)
        assert caller.disk.set_aside <= FEW_ASIDE
        assert len(kept) >= SLOTS - caller.disk.set_aside
        assert warned(caplog.records, "stores again")


async def test_records_that_cannot_be_written_are_not_reported_stored(faulty: FaultyDisk) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        faulty.obey({"op": "write", **INDEX, **EIO})
        assert await caller.save(ALL) == set()
        caller.forget_host()
        assert await caller.get(ALL) == 0
    faulty.obey()
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert caller.on_disk == set()


async def test_a_record_that_cannot_be_written_holds_up_neither_a_reset_nor_the_next_opening(
    faulty: FaultyDisk,
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        faulty.obey({"op": "write", **record_of(5), **EIO})
        await caller.store.reset(PATIENCE)
        caller.on_disk.clear()
        caller.look()
        assert await caller.each(ALL) == set()
        assert len(await caller.save(range(100, 100 + SLOTS))) >= SLOTS - 1
        kept = set(caller.on_disk)
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert caller.on_disk == kept, "what is from before the reset is not found again"
        assert await caller.each(range(100, 100 + SLOTS), times=3) == {
            int(key[6:12]) for key in kept
        }
        assert await caller.each(ALL) == set()
        assert len(await caller.save(range(200, 204))) >= 3


@pytest.mark.parametrize("most", [4096, 12288, CHUNK - 4096])
async def test_writes_that_are_cut_short_go_on_until_all_is_there(
    faulty: FaultyDisk, most: int
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        faulty.obey({"op": "write", **BLOCKS, "short": most})
        assert await caller.save(ALL) == set(ALL)
        faulty.obey()
        caller.forget_host()
        assert await caller.get(ALL) == SLOTS


async def test_a_disk_that_writes_no_byte_and_names_no_error_does_not_hang_its_caller(
    faulty: FaultyDisk,
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind, shutdown_timeout_s=0.5) as caller:
        faulty.obey({"op": "write", **BLOCKS, "short": 0})
        async with running_loop():
            await caller.put(ALL)
            await caller.store.flush(1.0)
            assert await caller.get(ALL) == SLOTS, "host memory has them"
        faulty.obey()
        assert await caller.store.flush(PATIENCE), "the disk writes again"


@pytest.mark.parametrize("op", ["create", "fallocate", "fsync", "rename"])
async def test_a_segment_that_cannot_be_made_leaves_nothing_behind_and_is_tried_again(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture, op: str
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        faulty.obey({"op": op, "path": "segment-|lane-0$", **EIO})
        for start in range(0, 3 * SLOTS, SLOTS):
            assert await caller.save(range(start, start + SLOTS))
        await until_async(lambda: warned(caplog.records, "cannot allocate a segment"))
        assert caller.disk.segments == 1
        assert not list(faulty.behind.rglob("*.tmp"))
        faulty.obey()
        await asyncio.sleep(0.35)
        for start in range(100, 100 + 3 * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        await until_async(lambda: caller.disk.segments > 1)


# -- slow and hanging ----------------------------------------------------------------------


async def test_a_disk_that_takes_seconds_makes_misses_at_the_deadline_and_hits_later(
    faulty: FaultyDisk,
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, "delay": 3 * DEADLINE})
        clock = asyncio.get_running_loop().time
        async with running_loop():
            begun = clock()
            assert await caller.get([0]) == 0
            assert clock() - begun < CEILING
            assert caller.stats.timeouts == 1
            await until_async(lambda: caller.asked().promoted)
            assert await caller.get([0]) == 1, "what came late is kept"


async def test_a_disk_that_reads_slower_than_the_server_computes_is_not_waited_for(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    pace = 0.02
    async with calling(faulty.path, seen_at=faulty.behind, recompute_s=pace) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, "delay": 0.8 * DEADLINE})
        clock = asyncio.get_running_loop().time
        begun = clock()
        assert await caller.get([0, 1]) == 0
        assert clock() - begun < 0.5 * DEADLINE, "computing would have taken 0.04 s"
        assert caller.stats.timeouts == 0
        begun = clock()
        assert await caller.get([2, 3]) == 0
        assert clock() - begun < pace
        assert caller.stats.outpaced == 1
        assert caller.disk.outpaced
        assert warned(caplog.records, "is outpaced")
        await until_async(lambda: caller.asked().promoted)
        assert await caller.get([0, 1]) == 2, "what came late is kept"


async def test_slow_writes_hold_nobody_up_and_are_complete_in_the_end(faulty: FaultyDisk) -> None:
    taken: set[int] = set()
    async with calling(faulty.path, seen_at=faulty.behind, shutdown_timeout_s=8.0) as caller:
        faulty.obey({"op": "write", **BLOCKS, "delay": 0.1})
        async with running_loop():
            for start in range(0, 2 * SLOTS, 4):
                # Host memory holds less than all: what the disk has not taken by then is shed.
                count = await caller.put(range(start, start + 4))
                assert await caller.get(range(start, start + count)) == count
                taken |= set(range(start, start + count))
        faulty.obey()
    assert len(taken) > SLOTS
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.each(taken, times=3) == taken


async def test_a_disk_that_grows_slowly_keeps_what_it_has_and_says_so(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    # It grows until it is asked, however long that takes.
    patient = {"shutdown_timeout_s": 8.0, "max_wait_s": PATIENCE}
    async with calling(faulty.path, seen_at=faulty.behind, **patient) as caller:
        assert await caller.save(range(SLOTS // 2)) == set(range(SLOTS // 2))
        faulty.obey(
            {"op": "write", **BLOCKS, "delay": 0.05},
            {"op": "create", "path": "segment-", "hang": True},
        )
        async with running_loop():
            for start in range(100, 100 + 4 * SLOTS, 4):
                await caller.put(range(start, start + 4))
                await asyncio.sleep(0.05)
            await until_async(lambda: caller.asked().slow)
        assert caller.disk.evicted == 0
        assert caller.disk.segments < caller.disk.max_segments
        assert caller.disk.refused > 0
        assert caller.disk.slow
        assert warned(caplog.records, "is slow")
        faulty.obey()
        await until_async(lambda: caller.asked().segments > 1)
        assert await caller.save(range(4)) == set(range(4)), "it grows, and takes more"
        assert caller.disk.evicted == 0


async def test_reads_that_never_end_are_misses_at_once_and_the_disk_is_used_when_it_answers(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        clock = asyncio.get_running_loop().time
        with faulty.hanging("read", **BLOCKS):
            async with running_loop():
                assert await caller.get(ALL) == 0
                await until_async(lambda: caller.asked().stalled)
                begun = clock()
                assert await caller.get(ALL) == 0
                assert clock() - begun < DEADLINE, "a stalled tier is not waited for"
                assert await caller.put(range(100, 104)) == 4
                assert await caller.get(range(100, 104)) == 4
            assert warned(caplog.records, "has not answered for")
        await until_async(lambda: not caller.asked().stalled)
        assert warned(caplog.records, "answers again")
        assert await caller.get(ALL) == SLOTS


async def test_writes_that_never_end_cost_no_more_than_their_rows(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        kept = await caller.save(range(4))
        with faulty.hanging("write", **BLOCKS):
            async with running_loop():
                await caller.put(range(100, 104))
                await until_async(lambda: caller.asked().stalled)
                for start in range(200, 260, 4):
                    assert await caller.put(range(start, start + 4)) == 4
                    assert await caller.get(range(start, start + 4)) == 4
            assert caller.disk.refused > 0
            assert warned(caplog.records, "has not answered for")
        await until_async(lambda: not caller.asked().stalled)
        caller.forget_host()
        assert await caller.each(range(4), times=3) == kept
        assert await caller.save(range(300, 304)) == set(range(300, 304))


@pytest.mark.parametrize("op", ["create", "fallocate", "fsync"])
async def test_growth_that_never_ends_makes_new_chunks_take_the_place_of_old(
    faulty: FaultyDisk, op: str
) -> None:
    wait = CEILING / 2
    async with calling(faulty.path, seen_at=faulty.behind, max_wait_s=wait) as caller:
        with faulty.hanging(op, path="segment-"):
            async with running_loop():
                for start in range(0, 4 * SLOTS, SLOTS):
                    await caller.put(range(start, start + SLOTS))
                    await asyncio.sleep(wait / 2)
                await until_async(lambda: caller.asked() and caller.store._core.unsaved == 0)
                caller.forget_host()
                assert await caller.each(range(3 * SLOTS, 4 * SLOTS))
        await until_async(lambda: caller.asked().segments > 1)


CLOSING = """
import asyncio, sys
from pathlib import Path
from tests.faults.support import calling

async def main():
    async with calling(Path(sys.argv[1])) as caller:
        await caller.save(range(16))
        caller.forget_host()
        print("stored", flush=True)
        sys.stdin.readline()
        await caller.put(range(100, 104))
        await caller.get(range(16))
        print("closing", flush=True)

asyncio.run(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize("op", ["read", "write"])
async def test_a_program_ends_although_its_disk_does_not_answer(
    faulty: FaultyDisk, op: str
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", CLOSING, faulty.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "stored\n"
        with faulty.hanging(op, **BLOCKS):
            print(file=program.stdin, flush=True)
            assert program.stdout.readline() == "closing\n"
            ready, _, _ = select.select([program.stdout], [], [], 3 * DRAIN + 1)
            assert ready, "asyncio.run does not return"
            assert program.stdout.readline() == "ended\n"
    finally:
        program.kill()
        program.wait(PATIENCE)
        program.stdin.close()
        program.stdout.close()


# -- the lanes of others ---------------------------------------------------------------------


async def test_a_neighbours_lane_that_cannot_be_read_is_a_miss_and_ones_own_is_served(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as owner:
        assert await owner.save(ALL) == set(ALL)
    async with calling(faulty.path, seen_at=faulty.behind, lane=1) as caller:
        assert await caller.save(range(100, 104)) == set(range(100, 104))
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, "path": "lane-0/segment-", **EIO})
        assert await caller.get(ALL) == 0
        assert await caller.get(range(100, 104)) == 4
        assert warned(caplog.records, "lane-0", "Input/output error")
        assert caller.stats.tiers[1].errors > 0
        assert caller.disk.errors == 0


async def test_a_neighbours_lane_that_does_not_answer_does_not_keep_ones_own_from_being_served(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as owner:
        assert await owner.save(ALL) == set(ALL)
    async with calling(faulty.path, seen_at=faulty.behind, lane=1) as caller:
        assert await caller.save(range(100, 104)) == set(range(100, 104))
        caller.forget_host()
        with faulty.hanging("read", path="lane-0/segment-"):
            async with running_loop():
                assert await caller.get(ALL) == 0
                assert await caller.get(range(100, 104)) == 4
                await until_async(lambda: caller.asked() and caller.stats.tiers[1].stalled)
                assert await caller.save(range(200, 204)) == set(range(200, 204))
            assert warned(caplog.records, "others has not answered for")
        await until_async(lambda: caller.asked() and not caller.stats.tiers[1].stalled)
        assert await caller.get(ALL) == SLOTS


# -- gone ----------------------------------------------------------------------------------


async def test_a_disk_whose_server_dies_is_a_miss_and_no_exception(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
        caller.forget_host()
        faulty.obey({"op": "read", **BLOCKS, "hang": True})
        asking = asyncio.ensure_future(caller.get(ALL))
        await asyncio.sleep(0.1)
        faulty.die()
        assert await asking == 0
        assert await caller.save(range(100, 104)) == set()
        assert await caller.get(range(100, 104)) == 4, "host memory has them"
        assert re.search("not connected|aborted", caplog.text)
        assert caller.disk.errors > 0


async def test_a_segment_that_cannot_be_opened_is_left_alone_and_found_again_later(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.save(ALL) == set(ALL)
    faulty.obey({"op": "open", "path": "segment-0", **EIO})
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert caller.on_disk == set()
        assert warned(caplog.records, "segment-0", "Input/output error")
        assert await caller.save(range(100, 104)) == set(range(100, 104)), "another segment is made"
    faulty.obey()
    async with calling(faulty.path, seen_at=faulty.behind) as caller:
        assert await caller.get(ALL) == SLOTS
