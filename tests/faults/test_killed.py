"""SIGKILL at every point where something is half done, and at random ones.

A process is patched to kill itself at one of its calls. Whatever it had
reported stored before must be served by the next one, byte by byte; what it
was doing may be there or not, but never wrong.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvstore.maintenance.offline import compact, purge
from kvstore.maintenance.survey import Fault, survey, verify
from tests.faults.neighbour import Neighbour, strike
from tests.faults.support import (
    CAPACITY,
    SEGMENTS,
    SLOTS,
    Caller,
    calling,
    lane_bytes,
    lane_of,
)
from tests.patience import PATIENCE

Start = Callable[..., Neighbour]

INDEX = "kvstore.tiers.disk.index:IndexFile"
PAYLOAD = (
    "kvstore.tiers.disk.io.aio:AioIO.begin?load=False "
    "kvstore.tiers.disk.io.buffered:DirectIO.write kvstore.tiers.disk.io.buffered:BufferedIO.write"
)
WRITTEN = PAYLOAD.replace("AioIO.begin", "_UnderWay.end")
RELOCATION = "kvstore.tiers.disk.tier:relocate"
VOLUME = "kvstore.tiers.disk.volume:Volume"
DISK = "kvstore.tiers.disk.tier:DiskTier"


@dataclass(frozen=True)
class Point:
    """Where a process kills itself: at the `count`-th call of `target`."""

    name: str
    target: str
    when: str
    count: int = 1

    def strike(self) -> None:
        strike(self.target, self.when, self.count, signal.SIGKILL)


def ids(points: list[Point]) -> list[str]:
    return [point.name for point in points]


WRITE = [
    Point("before the old records are erased", f"{INDEX}.erase", "before"),
    Point("amid erasing the old records", f"{INDEX}.write", "half"),
    Point("after the old records are erased", f"{INDEX}.erase", "after"),
    Point("amid the payload", PAYLOAD, "half", 1),
    Point("after the payload", WRITTEN, "after", 1),
    Point("amid the records", f"{INDEX}.write", "half", 2),
    Point("after the records, not reported yet", f"{INDEX}.write", "after", 2),
    Point("after the digests", "kvstore.tiers.disk.extents:encode_records", "before"),
]

GROWTH = [
    Point("before the space is allocated", "kvstore.tiers.disk.segment:_allocate", "before"),
    Point("after the space is allocated", "kvstore.tiers.disk.segment:_allocate", "after"),
    Point("before the segment gets its name", "os:rename", "before"),
    Point("after the segment got its name", "os:rename", "after"),
    Point("before the folder is synced", "kvstore.tiers.disk.segment:sync_folder", "before"),
    Point("after the folder is synced", "kvstore.tiers.disk.segment:sync_folder", "after"),
]

CLOSING = [
    Point("before recency is saved", "kvstore.tiers.disk.volume:Volume.save_recency", "before"),
    Point("amid the records of the first segment", f"{INDEX}.write", "half", 1),
    Point("between two segments", f"{INDEX}.write", "after", 1),
    Point("amid the records of the second segment", f"{INDEX}.write", "half", 2),
    Point("after recency is saved", "kvstore.tiers.disk.volume:Volume.save_recency", "after"),
]

COMPACTING = [
    Point("before payloads are moved", PAYLOAD, "before", 3),
    Point("amid payloads", PAYLOAD, "half", 3),
    Point("after payloads, before their records", f"{INDEX}.place", "before", 5),
    Point("between two new records", f"{INDEX}.place", "after", 5),
    Point("amid a record", f"{INDEX}.write", "half", 5),
    Point("after new records, before the old slots are free", RELOCATION, "after"),
    Point("before copies are synced", "kvstore.tiers.disk.segment:Segment.sync", "before"),
    Point("before an empty segment is removed", f"{VOLUME}.remove", "before"),
    Point("between two segments that are removed", f"{VOLUME}.remove", "after"),
    Point("before displaced records are erased", f"{DISK}.erase_displaced", "before"),
    Point("amid displaced records", f"{INDEX}.erase_slots", "after", 2),
]

FIRST_OPENING = [
    Point("before the namespace is published", "os:link", "before"),
    Point("after the namespace is published", "os:link", "after"),
    Point("before the lane is locked", "kvstore.tiers.disk.lane:_lock", "before"),
    Point("after the lane is locked", "kvstore.tiers.disk.lane:_lock", "after"),
    Point("before the backend is probed", PAYLOAD, "before"),
    Point(
        "before the first segment is allocated", "kvstore.tiers.disk.segment:_allocate", "before"
    ),
    Point("before the first segment gets its name", "os:rename", "before"),
]


def store_until_killed(
    connection: Connection, path: Path, first: int, count: int, point: Point | None
) -> None:
    """Store wave after wave, saying what has come to the disk and what has left it.

    With a `point`, the first wave is stored in peace.
    """

    async def main() -> None:
        async with calling(path) as caller:
            for start in range(first, first + count, SLOTS // 2):
                await caller.put(range(start, start + SLOTS // 2))
                await caller.store.flush(PATIENCE)
                before = caller.on_disk.copy()
                caller.look()
                connection.send((caller.on_disk - before, before - caller.on_disk))
                if point is not None and start == first:
                    point.strike()
            connection.send("closing")

    asyncio.run(main())


def open_and_be_killed(connection: Connection, path: Path, point: Point) -> None:
    async def main() -> None:
        point.strike()
        async with calling(path):
            connection.send("open")

    asyncio.run(main())


def work_and_be_killed(
    connection: Connection, work: Callable[..., Any], path: Path, point: Point | None
) -> None:
    if point is not None:
        point.strike()
    connection.send("ready")
    work(path)
    connection.send("done")


def reported(neighbour: Neighbour) -> set[bytes]:
    """What a process that was killed had reported stored."""
    kept: set[bytes] = set()
    for said in neighbour.heard():
        if isinstance(said, tuple):
            new, gone = said
            kept = (kept | new) - gone
    return kept


async def all_served(caller: Caller, keys: set[bytes]) -> bool:
    """Whether every one of `keys` is served, and right."""
    numbers = {int(key[6:12]) for key in keys}
    return await caller.each(sorted(numbers), times=2) == numbers


def faults_in(path: Path) -> list[Fault]:
    return [found for found in verify(path) if isinstance(found, Fault)]


async def sound(path: Path, kept: set[bytes]) -> None:
    """The cache keeps all its promises to the next process, and is of use to it."""
    if (lane_of(path).parent / "namespace.json").exists():
        assert faults_in(path) == []
    async with calling(path) as caller:
        assert await all_served(caller, kept)
        await caller.each([int(key[6:12]) for key in caller.on_disk - kept])
        for start in range(8000, 8000 + 2 * SLOTS, SLOTS):
            assert await caller.save(range(start, start + SLOTS))
    assert not list(path.rglob(".*")), "something was left behind"
    assert lane_bytes(lane_of(path)) <= CAPACITY


@pytest.mark.parametrize("point", WRITE, ids=ids(WRITE))
async def test_a_kill_amid_a_store_loses_nothing_that_was_reported(
    folder: Path, neighbour: Start, point: Point
) -> None:
    one = neighbour(store_until_killed, folder, 0, SLOTS, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    kept = reported(one)
    assert len(kept) == SLOTS // 2
    await sound(folder, kept)


@pytest.mark.parametrize("point", WRITE, ids=ids(WRITE))
async def test_a_kill_amid_a_rewrite_loses_at_most_what_was_being_replaced(
    folder: Path, neighbour: Start, point: Point
) -> None:
    full = SEGMENTS * SLOTS
    async with calling(folder) as caller:
        for start in range(0, full, SLOTS):
            await caller.save(range(start, start + SLOTS))
        old = set(caller.on_disk)
    one = neighbour(store_until_killed, folder, 1000, SLOTS, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    kept = reported(one)
    assert len(kept) == SLOTS // 2
    assert faults_in(folder) == []
    async with calling(folder) as caller:
        assert await all_served(caller, kept)
        # Each wave displaced as many as it has chunks; the second was not reported.
        still = await caller.each([int(key[6:12]) for key in old])
        assert len(still) >= len(old) - SLOTS


@pytest.mark.parametrize("point", GROWTH, ids=ids(GROWTH))
async def test_a_kill_amid_growth_leaves_a_whole_segment_or_none(
    folder: Path, neighbour: Start, point: Point
) -> None:
    one = neighbour(store_until_killed, folder, 0, 10 * SLOTS, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    kept = reported(one)
    assert kept
    await sound(folder, kept)


@pytest.mark.parametrize("point", CLOSING, ids=ids(CLOSING))
async def test_a_kill_amid_closing_loses_recency_at_most(
    folder: Path, neighbour: Start, point: Point
) -> None:
    async with calling(folder) as caller:
        for start in range(0, 2 * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        kept = set(caller.on_disk)
    one = neighbour(close_and_be_killed, folder, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    assert faults_in(folder) == [] or point.when == "half"
    async with calling(folder) as caller:
        assert await all_served(caller, kept)


def close_and_be_killed(connection: Connection, path: Path, point: Point) -> None:
    async def main() -> None:
        async with calling(path) as caller:
            await caller.get(range(SLOTS // 2))
            point.strike()

    asyncio.run(main())


@pytest.mark.parametrize("point", FIRST_OPENING, ids=ids(FIRST_OPENING))
async def test_a_kill_amid_the_first_opening_leaves_a_folder_that_can_be_opened(
    folder: Path, neighbour: Start, point: Point
) -> None:
    one = neighbour(open_and_be_killed, folder, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    await sound(folder, set())


async def sparse(folder: Path) -> set[bytes]:
    """A cache of four segments, a third full, out of order."""
    chance = random.Random(3)
    async with calling(folder) as caller:
        for start in range(0, SEGMENTS * SLOTS, SLOTS):
            await caller.save(range(start, start + SLOTS))
        keys = sorted(caller.on_disk)
    gone = chance.sample(keys, 2 * len(keys) // 3)
    purge(folder, key=gone)
    return set(keys) - set(gone)


@pytest.mark.parametrize("point", COMPACTING, ids=ids(COMPACTING))
async def test_a_kill_amid_compaction_loses_nothing(
    folder: Path, neighbour: Start, point: Point
) -> None:
    kept = await sparse(folder)
    one = neighbour(work_and_be_killed, compact, folder, point)
    assert await asyncio.to_thread(one.until_dead) == signal.SIGKILL
    assert faults_in(folder) == [] or point.when == "half"
    assert lane_bytes(lane_of(folder)) <= CAPACITY
    (done,) = compact(folder)
    assert done.result is not None
    assert done.result.dropped == 0
    assert done.result.after.segments == 2
    async with calling(folder) as caller:
        assert await all_served(caller, kept)
        assert caller.on_disk == kept


async def test_kills_of_compaction_at_random_moments_lose_nothing(
    folder: Path, neighbour: Start
) -> None:
    kept = await sparse(folder)
    chance = random.Random(17)
    for _ in range(10):
        one = neighbour(work_and_be_killed, compact, folder, None)
        assert await asyncio.to_thread(one.hear) == "ready"
        time.sleep(chance.uniform(0, 0.006))
        one.kill()
        assert len(survey(folder)) == 1
        assert lane_bytes(lane_of(folder)) <= CAPACITY
    compact(folder)
    async with calling(folder) as caller:
        assert await all_served(caller, kept)
        assert caller.on_disk == kept


async def test_kills_at_random_moments_amid_evictions_and_growth_lose_nothing_reported(
    folder: Path, neighbour: Start
) -> None:
    chance = random.Random(29)
    stored = 0
    for life in range(6):
        one = neighbour(store_until_killed, folder, 1000 * life, 500, None)
        await asyncio.to_thread(one.hear)
        await asyncio.sleep(chance.uniform(0, 0.1))
        one._process.kill()
        await asyncio.to_thread(one.until_dead)
        assert lane_bytes(lane_of(folder)) <= CAPACITY
        kept = reported(one)
        stored += len(kept)
        # By the wave that was not reported, as many may have been displaced: of the two waves
        # that are oldest, where free slots have put eviction out of step with waves.
        asked = sorted(kept)[SLOTS:] if len(kept) > (SEGMENTS - 1) * SLOTS else sorted(kept)
        async with calling(folder) as caller:
            assert await all_served(caller, set(asked))
    assert stored > 3 * SLOTS
