"""Processes that stand still for a while, or die, while others use the same cache."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.maintenance.survey import survey
from tests.faults.neighbour import Neighbour, serve
from tests.faults.support import (
    DEADLINE,
    SEGMENTS,
    SLOTS,
    Caller,
    calling,
    lane_bytes,
    lane_of,
    running_loop,
)
from tests.patience import until_async

Start = Callable[..., Neighbour]

READ = (
    "kvstore.tiers.disk.io.aio:AioIO.begin?load=True "
    "kvstore.tiers.disk.io.buffered:DirectIO.read kvstore.tiers.disk.io.buffered:BufferedIO.read"
)
WRITE = (
    "kvstore.tiers.disk.io.aio:AioIO.begin?load=False "
    "kvstore.tiers.disk.io.buffered:DirectIO.write kvstore.tiers.disk.io.buffered:BufferedIO.write"
)
WRITTEN = WRITE.replace("AioIO.begin", "_UnderWay.end")
RECORDS = "kvstore.tiers.disk.index:IndexFile.write"
ALL = range(SLOTS)


async def ask(one: Neighbour, *question: Any) -> Any:
    return await asyncio.to_thread(one.ask, *question)


async def opened(start: Start, folder: Path, **changes: Any) -> Neighbour:
    one = start(serve, folder, changes)
    assert await asyncio.to_thread(one.hear) == "ready"
    return one


async def rewrite(caller: Caller, first: int) -> None:
    """Store so much that every slot of the lane is written anew."""
    for start in range(first, first + (SEGMENTS + 1) * SLOTS, SLOTS):
        await caller.save(range(start, start + SLOTS))


async def seen(caller: Caller, count: int) -> None:
    """Wait until the caller sees so many chunks in the lanes of others."""
    await until_async(lambda: caller.asked() and caller.stats.tiers[1].chunks >= count)


@pytest.mark.parametrize("when", ["before", "half", "after"])
async def test_a_follower_that_is_stopped_amid_a_read_while_the_owner_rewrites_gets_no_wrong_bytes(
    folder: Path, neighbour: Start, when: str
) -> None:
    async with calling(folder) as owner:
        assert await owner.save(ALL) == set(ALL)
        follower = await opened(neighbour, folder)
        assert (await ask(follower, "tier", 1)).chunks == SLOTS
        await ask(follower, "strike", READ, when, 1, signal.SIGSTOP)
        follower.connection.send(("each", ALL))
        await asyncio.to_thread(follower.until_stopped)
        await rewrite(owner, 1000)
        follower.go_on()
        served = await asyncio.to_thread(follower.hear)
        assert isinstance(served, set), served
        assert len(served) < SLOTS, "nothing was rewritten under the reader"
        told = await ask(follower, "tier", 1)
        assert told.failed_reads == 0, "an owner's rewrite is nobody's fault"


async def test_a_follower_that_is_stopped_at_random_moments_gets_right_bytes_or_misses(
    folder: Path, neighbour: Start
) -> None:
    chance = random.Random(5)
    async with calling(folder) as owner:
        await rewrite(owner, 0)
        follower = await opened(neighbour, folder)
        hits = 0
        for turn in range(8):
            numbers = [int(key[6:12]) for key in sorted(owner.on_disk)][:SLOTS]
            await ask(follower, "forget")
            follower.connection.send(("each", numbers))
            await asyncio.sleep(chance.uniform(0, 0.01))
            await asyncio.to_thread(follower.stop)
            await rewrite(owner, 1000 * (turn + 1))
            follower.go_on()
            served = await asyncio.to_thread(follower.hear)
            assert isinstance(served, set), served
            hits += len(served)
        await asyncio.sleep(0.6)
        newest = [int(key[6:12]) for key in owner.on_disk][:SLOTS]
        assert len(await ask(follower, "each", newest)) == SLOTS, "it follows as before"
        assert hits > 0


@pytest.mark.parametrize(
    ("target", "when", "count"),
    [
        (RECORDS, "before", 1),
        (RECORDS, "half", 1),
        (WRITE, "before", 1),
        (WRITE, "half", 1),
        (WRITTEN, "after", 1),
        (RECORDS, "half", 2),
        (RECORDS, "after", 2),
    ],
    ids=[
        "before the old records are erased",
        "amid erasing the old records",
        "before the payload",
        "amid the payload",
        "after the payload",
        "amid the records",
        "after the records",
    ],
)
async def test_an_owner_that_is_stopped_amid_a_store_holds_no_follower_up(
    folder: Path, neighbour: Start, target: str, when: str, count: int
) -> None:
    owner = await opened(neighbour, folder)
    for start in range(0, SEGMENTS * SLOTS, SLOTS):
        await ask(owner, "save", range(start, start + SLOTS))
    async with calling(folder) as follower:
        assert follower.lane == 1
        assert follower.stats.tiers[1].chunks >= (SEGMENTS - 1) * SLOTS
        await ask(owner, "strike", target, when, count, signal.SIGSTOP)
        owner.connection.send(("save", range(1000, 1000 + SLOTS)))
        await asyncio.to_thread(owner.until_stopped)
        async with running_loop():
            # `each` fails if something wrong is served.
            old = await follower.each(range(SEGMENTS * SLOTS))
            assert len(old) >= (SEGMENTS - 2) * SLOTS
            await follower.each(range(1000, 1000 + SLOTS))
            assert await follower.save(range(2000, 2004)) == set(range(2000, 2004))
        owner.go_on()
        assert await asyncio.to_thread(owner.hear) == set(range(1000, 1000 + SLOTS))
        await asyncio.sleep(0.6)
        follower.forget_host()
        there = set(await follower.each(range(1000, 1000 + SLOTS)))
        if len(there) < SLOTS:
            # On a busy disk a read may miss its deadline, which is a miss and no loss.
            await asyncio.sleep(0.6)
            there |= set(await follower.each(range(1000, 1000 + SLOTS)))
        assert len(there) == SLOTS


async def test_an_owner_that_is_stopped_keeps_its_lane_and_others_take_the_next(
    folder: Path, neighbour: Start
) -> None:
    owner = await opened(neighbour, folder)
    assert await ask(owner, "save", ALL) == set(ALL)
    await asyncio.to_thread(owner.stop)
    async with calling(folder) as other:
        assert other.lane == 1
        assert await other.get(ALL) == SLOTS
        assert await other.save(range(100, 104)) == set(range(100, 104))
        (namespace,) = survey(folder)
        assert namespace.lanes[0].owner == owner.pid
    owner.go_on()
    assert await ask(owner, "save", range(200, 204)) == set(range(200, 204))


async def test_a_store_that_is_stopped_for_longer_than_every_deadline_goes_on(
    folder: Path, neighbour: Start
) -> None:
    one = await opened(neighbour, folder)
    assert await ask(one, "save", ALL) == set(ALL)
    for _ in range(2):
        await ask(one, "forget")
        one.connection.send(("get", ALL))
        await asyncio.to_thread(one.stop)
        await asyncio.sleep(3 * DEADLINE)
        one.go_on()
        assert await asyncio.to_thread(one.hear) in range(SLOTS + 1)
        assert await ask(one, "get", ALL) == SLOTS
    assert not (await ask(one, "tier", 0)).stalled


async def test_a_process_that_dies_is_followed_on_and_its_lane_is_taken_over(
    folder: Path, neighbour: Start
) -> None:
    owner = await opened(neighbour, folder)
    assert await ask(owner, "save", ALL) == set(ALL)
    async with calling(folder, lane=1) as follower:
        await seen(follower, SLOTS)
        await asyncio.to_thread(owner.kill)
        assert await follower.get(ALL) == SLOTS, "what the dead have left is served"
        heir = await opened(neighbour, folder)
        assert await ask(heir, "get", ALL) == SLOTS
        for start in range(1000, 1000 + (SEGMENTS + 1) * SLOTS, SLOTS):
            await ask(heir, "save", range(start, start + SLOTS))
            follower.forget_host()
            await follower.each(ALL)
        await asyncio.sleep(0.6)
        newest = range(start, start + SLOTS)
        assert len(await follower.each(newest)) == SLOTS
        assert lane_bytes(lane_of(folder)) <= follower.capacity


async def test_a_follower_that_is_killed_disturbs_nobody(folder: Path, neighbour: Start) -> None:
    async with calling(folder) as owner:
        assert await owner.save(ALL) == set(ALL)
        for _ in range(5):
            follower = await opened(neighbour, folder)
            follower.connection.send(("each", ALL))
            await asyncio.to_thread(follower.kill)
            owner.forget_host()
            assert await owner.get(ALL) == SLOTS
        await rewrite(owner, 1000)
    async with calling(folder) as again:
        assert again.on_disk == owner.on_disk
