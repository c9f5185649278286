"""Following the lanes of others: every place of a chunk, cheap looks, nobody held up."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.maintenance.survey import survey
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import DiskTier, PeerLanes, peers, watch
from kvstore.tiers.disk import format as disk_format
from kvstore.tiers.disk.descriptors import SPARE_DESCRIPTORS
from kvstore.tiers.disk.io import IOBackend
from kvstore.tiers.disk.io.base import read_bytes
from kvstore.tiers.disk.lane import lane_folders
from kvstore.tiers.disk.places import Places
from kvstore.tiers.disk.watch import IN_TURN, Watch
from kvstore.types import Changes
from tests.patience import PATIENCE, TOO_LONG, until_async
from tests.tiers.conftest import OpenBench
from tests.tiers.support import ROWS, SEGMENT, SLOTS, disk_of, lane_of, segment_of

KEYS = [key_of(n) for n in range(SLOTS)]
ALL = list(range(SLOTS))


class Follower:
    """What a process knows of the lanes beside that of `bench`, as its core keeps it."""

    def __init__(self, bench: TierBench) -> None:
        self.bench = bench
        assert isinstance(bench.tier, DiskTier)
        self.tier = PeerLanes(bench.tier)
        self.entries = dict(self.tier.open(bench.region).entries)

    async def look(self) -> Changes:
        whole = Changes()
        while news := await self.tier.refresh():
            for key in news.gone:
                del self.entries[key]
            self.entries.update(news.appeared)
            whole = Changes(whole.appeared + news.appeared, whole.gone + news.gone)
        return whole

    async def read(self, *keys: bytes) -> list[bool]:
        """Which of the chunks come, whole."""
        rows = list(range(len(keys)))
        self.bench.smear(rows)
        done = await self.tier.read(keys, [self.entries[key] for key in keys], rows)
        for key, row, ok in zip(keys, rows, done.ok, strict=True):
            assert not ok or self.bench.holds(row, key)
        assert done.error is None
        return done.ok


Follow = Callable[..., Follower]


@pytest.fixture
async def follow(open_bench: OpenBench) -> AsyncIterator[Follow]:
    """Opens a tier and follows the lanes beside its own."""
    followers: list[Follower] = []

    def begin(*arguments: Any, **options: Any) -> Follower:
        followers.append(Follower(open_bench(*arguments, **options)))
        return followers[-1]

    yield begin
    for follower in followers:
        follower.tier.abandon()


async def followed(
    open_bench: OpenBench, follow: Follow, **options: Any
) -> tuple[TierBench, Follower]:
    """A full lane, and who follows it."""
    owner = open_bench(**options)
    await owner.store(KEYS, ALL)
    return owner, follow(**options)


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stamps are taken for exact, so that what rests is left alone at once."""
    monkeypatch.setattr(watch, "SETTLED_NS", -(10**18))


# -- places --------------------------------------------------------------------------------

_CHANGES = st.lists(
    st.tuples(st.sampled_from(KEYS[:3]), st.integers(0, 4), st.booleans()), max_size=40
)


@given(_CHANGES)
def test_places_are_what_came_less_what_went(changes: list[tuple[bytes, int, bool]]) -> None:
    places, model, told = Places(), dict[bytes, set[int]](), dict[bytes, int]()
    for number, (key, place, gone) in enumerate(changes):
        if gone:
            places.change([(key, place)], ())
            model.setdefault(key, set()).discard(place)
        else:
            places.change((), [(key, place)])
            model.setdefault(key, set()).add(place)
        assert set(places.of(key)) == model[key]
        if number % 3 == 0:
            news = places.changes()
            assert all(key in told for key in news.gone)
            for key in news.gone:
                del told[key]
            told.update(news.appeared)
            assert told.keys() == {key for key, held in model.items() if held}
            assert all(place in model[key] for key, place in told.items())


# -- chunks that several lanes keep ----------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("looks", [True, False], ids=["after a look", "before a look"])
async def test_a_chunk_is_served_while_any_lane_keeps_it(
    open_bench: OpenBench, follow: Follow, first: int, looks: bool
) -> None:
    owners = [open_bench(), open_bench()]
    follower = follow()
    for slot, owner in enumerate(owners):
        await owner.store(KEYS[:1], [slot])
        await follower.look()
    assert await follower.read(KEYS[0]) == [True]
    for owner in (owners[first], owners[1 - first]):
        assert await follower.read(KEYS[0]) == [True]
        await owner.store(KEYS[1:2], [owners.index(owner)])
        if looks:
            await follower.look()
    if looks:
        assert KEYS[0] not in follower.entries
    else:
        assert await follower.read(KEYS[0]) == [False]


async def test_a_chunk_whose_file_is_removed_is_served_from_another_lane(
    folder: Path, open_bench: OpenBench, follow: Follow
) -> None:
    owners = [open_bench(), open_bench()]
    for owner in owners:
        await owner.store(KEYS, ALL)
    follower = follow()
    for number in range(2):
        assert await follower.read(*KEYS) == [True] * SLOTS
        segment_of(folder).unlink() if not number else (
            lane_of(folder, 1) / "segment-0.safetensors"
        ).unlink()
        news = await follower.look()
    assert sorted(news.gone) == sorted(KEYS)


async def test_what_cannot_be_read_in_passing_is_told_apart_from_what_is_gone(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, follower = await followed(open_bench, follow)
    await owner.store([key_of(100)], [0])
    backend = follower.bench.tier.backend  # type: ignore[attr-defined]
    slots = [follower.entries[key] for key in KEYS]
    assert (await follower.tier.read(KEYS, slots, ALL)).unread == []
    fails = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(IOBackend, "move_one", lambda *_, **__: fails)
    for name in ("begin", "move_all"):
        monkeypatch.setattr(backend, name, partial(getattr(IOBackend, name), backend))
    done = await follower.tier.read(KEYS, slots, ALL)
    assert done.ok == [False] * SLOTS
    assert done.unread == ALL


async def test_a_chunk_that_comes_back_to_the_slot_that_it_had_is_told(
    open_bench: OpenBench, follow: Follow
) -> None:
    owner, follower = await followed(open_bench, follow)
    await owner.store([key_of(100)], [0])
    assert await follower.read(KEYS[0]) == [False]
    del follower.entries[KEYS[0]]
    # Nobody has looked in between.
    await owner.store(KEYS[:1], [0])
    await asyncio.sleep(0.01)
    news = await follower.look()
    assert [key for key, _ in news.appeared] == KEYS[:1]
    assert await follower.read(*KEYS) == [True] * SLOTS


async def test_what_a_look_finds_while_a_read_fails_stays_known(
    open_bench: OpenBench, follow: Follow
) -> None:
    owner, follower = await followed(open_bench, follow)
    slot = follower.entries[KEYS[0]]
    await owner.store([key_of(100)], [0])
    await asyncio.sleep(0.01)
    await follower.look()
    # The core had asked for it before.
    follower.bench.smear([0])
    assert (await follower.tier.read(KEYS[:1], [slot], [0])).ok == [False]
    assert not (await follower.look()).gone
    assert await follower.read(key_of(100)) == [True]


async def test_the_same_chunk_that_a_look_finds_while_a_read_fails_stays_known(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, follower = await followed(open_bench, follow)
    slot = follower.entries[KEYS[0]]
    disk_of(owner).volumes[0].segments[0].index.erase(0, 1)
    assert (await follower.tier.read(KEYS[:1], [slot], [0])).ok == [False]
    await owner.store(KEYS[:1], [0])
    with monkeypatch.context() as patched:
        # The look had begun before.
        patched.setattr(Watch, "_forget_wrong", lambda self: None)
        await follower.look()
    assert not (await follower.look()).gone
    assert await follower.read(KEYS[0]) == [True]


async def test_an_error_is_told_beside_a_slot_that_its_owner_rewrote(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, follower = await followed(open_bench, follow, io="buffered")
    segment = disk_of(owner).volumes[0].segments[0]
    segment.index.erase(0, 1)
    read, bad = os.preadv, segment.offset_of(1)

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    slots = [follower.entries[key] for key in KEYS[:3]]
    done = await follower.tier.read(KEYS[:3], slots, [0, 1, 2])
    assert (done.ok, done.unread) == ([False, False, True], [1])
    assert done.error is not None


async def test_a_segment_whose_name_is_used_again_between_two_looks_is_followed(
    open_bench: OpenBench, follow: Follow
) -> None:
    owner, follower = await followed(open_bench, follow)
    assert await owner.tier.remove_segment(0) is None
    assert (await owner.tier.grow())[0] == 0
    more = [key_of(100 + n) for n in range(3)]
    await owner.store(more, [0, 1, 2])
    await follower.look()
    assert set(follower.entries) == set(more)
    assert await follower.read(*more) == [True] * 3


@pytest.mark.parametrize("fault", [errno.ESTALE, errno.EIO])
async def test_a_lane_that_cannot_be_looked_at_costs_no_other_one(
    fault: int,
    folder: Path,
    open_bench: OpenBench,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = [open_bench(), open_bench()]
    await owners[0].store(KEYS[:2], [0, 1])
    await owners[1].store(KEYS[2:4], [0, 1])
    follower = follow()
    real = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        if self.name == "lane-1":
            raise OSError(fault, os.strerror(fault), str(self))
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "lstat", lstat)
        assert not await follower.look()
        assert await follower.read(*KEYS[:4]) == [True] * 4
        # Nor does it keep a process from starting, or from a reset.
        assert isinstance(await open_bench(lane=7).tier.clear(), list)
        (found,) = survey(folder)
        assert any("lane-1" in each.path for each in found.faults)

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(watch, "lane_folders", fails)
        assert not await follower.look()
    assert await follower.read(*KEYS[:4]) == [True] * 4


@pytest.mark.usefixtures("prompt")
async def test_a_segment_that_cannot_be_read_in_passing_is_followed_later(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow()
    owner = open_bench()
    await owner.store(KEYS[:4], range(4))

    def fails(fd: int, size: int, offset: int) -> Any:
        if not offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(fd, size, offset)

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.tiers.disk.segment.read_bytes", fails)
        for _ in range(3):
            await follower.look()
        assert not follower.entries
    await follower.look()
    assert await follower.read(*KEYS[:4]) == [True] * 4


# -- what a look costs -----------------------------------------------------------------------


async def many_segments(open_bench: OpenBench, count: int) -> TierBench:
    owner = open_bench(capacity_bytes=count * SEGMENT)
    for _ in range(count - 1):
        assert (await owner.tier.grow())[0] is not None
    return owner


@pytest.mark.parametrize("fate", ["moved", "removed"])
async def test_lanes_of_a_cache_that_was_made_in_the_place_of_its_own_are_not_followed(
    folder: Path, open_bench: OpenBench, follow: Follow, fate: str
) -> None:
    _, follower = await followed(open_bench, follow)
    if fate == "moved":
        folder.rename(folder.with_name("elsewhere"))
    else:
        shutil.rmtree(folder)
    for _ in range(3):
        await open_bench().store(KEYS, ALL)
    await follower.look()
    assert not follower.entries


async def test_a_cache_that_changes_places_amid_a_look_is_not_followed(
    folder: Path, open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, follower = await followed(open_bench, follow)
    real, away = lane_folders, folder.with_name("elsewhere")

    def moved(*arguments: Any) -> Any:
        folder.rename(away)
        shutil.copytree(away, folder)
        return real(*arguments)

    monkeypatch.setattr(watch, "lane_folders", moved)
    assert not (await follower.tier.refresh()).appeared


async def test_opening_counts_the_open_files_once_for_each_lane(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def count(more: int, what: str, *, tells: bool) -> int:
        counted.append(more)
        return more

    monkeypatch.setattr(watch, "allow_descriptors", count)
    await many_segments(open_bench, 10)
    await many_segments(open_bench, 5)
    follow(segments=4)
    # For each segment two, besides those that the own lane may still take.
    assert [more // 2 for more in counted] == [10 + 64 + 3, 5 + 64 + 3]


FOLLOWER = """
import asyncio, logging, os, resource, sys
from pathlib import Path
from tests.tiers.support import bench_of
from kvstore.tiers.disk import PeerLanes

logging.basicConfig(format="%(message)s")
bench = bench_of(Path(sys.argv[1]), segments=1)
limit = max(map(int, os.listdir("/proc/self/fd"))) + 128 + 60
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
peers = PeerLanes(bench.tier)
found = peers.open(bench.region).entries

async def look():
    while await peers.refresh():
        pass

for number in range(3):
    asyncio.run(look())
    Path(sys.argv[1], sys.argv[2], f"segment-{100 + number}.safetensors").touch()
asyncio.run(look())
print(len(found), limit - len(os.listdir("/proc/self/fd")))
"""


async def test_following_leaves_descriptors_for_the_process_and_says_so_once(
    folder: Path, open_bench: OpenBench
) -> None:
    owner = await many_segments(open_bench, 60)
    for number in range(60):
        await owner.store([key_of(number)], [number * SLOTS])
    arguments = [str(folder), str(lane_of(folder).relative_to(folder))]
    told = subprocess.run(
        [sys.executable, "-c", FOLLOWER, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    found, left = map(int, told.stdout.split())
    assert 10 < found < 60
    assert left >= SPARE_DESCRIPTORS
    assert told.stderr.count("following other lanes") == 1


async def test_an_idle_look_costs_the_same_however_many_segments_there_are(
    open_bench: OpenBench, follow: Follow, prompt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await many_segments(open_bench, 3 * IN_TURN)
    follower = follow()
    calls: list[Any] = []
    works = os.stat

    def counting(*arguments: Any, **more: Any) -> os.stat_result:
        calls.append(arguments)
        return works(*arguments, **more)

    monkeypatch.setattr(os, "stat", counting)
    for _ in range(8):
        calls.clear()
        await follower.look()
        assert len(calls) <= IN_TURN + 8
    # And yet every change is seen by the next look.
    for slot in (0, 2 * IN_TURN * SLOTS, (3 * IN_TURN - 1) * SLOTS):
        key = key_of(slot)
        await owner.store([key], [slot])
        await follower.look()
        assert await follower.read(key) == [True]


async def test_an_owner_that_touches_nothing_is_seen_in_turn(
    folder: Path, open_bench: OpenBench, follow: Follow, prompt: None
) -> None:
    owner = await many_segments(open_bench, 2 * IN_TURN)
    follower = follow()
    await follower.look()
    lock = lane_of(folder) / "lock"
    touched = lock.stat().st_mtime_ns
    await owner.store(KEYS[:1], [IN_TURN * SLOTS])
    os.utime(lock, ns=(touched, touched))
    looks = 0
    while KEYS[0] not in follower.entries:
        await follower.look()
        looks += 1
        assert looks <= 4
    assert looks > 1


@pytest.mark.parametrize("change", ["write", "grow", "relocate", "give back", "clear", "close"])
async def test_every_change_of_a_lane_is_seen_by_the_next_look(
    open_bench: OpenBench, follow: Follow, prompt: None, change: str
) -> None:
    owner = await many_segments(open_bench, 2)
    await owner.store(KEYS[:4], ALL[:4])
    follower = follow()
    await follower.look()
    if change == "write":
        await owner.store(KEYS[4:5], [0])
        expected = {*KEYS[1:5]}
    elif change == "grow":
        owner.abandon()
        owner = open_bench(capacity_bytes=3 * SEGMENT, lane=0)
        assert (await owner.tier.grow())[0] == 2
        await owner.store(KEYS[4:5], [2 * SLOTS])
        expected = {*KEYS[:5]}
    elif change == "relocate":
        await owner.tier.relocate(KEYS[:1], [0], [SLOTS])
        expected = {*KEYS[:4]}
    elif change == "give back":
        assert await owner.tier.remove_segment(0) is None
        expected = set()
    elif change == "clear":
        # Whoever has not been reset goes on with what the owner has not overwritten yet.
        assert await owner.tier.clear() == [0, 1]
        await owner.store(KEYS[4:5], [0])
        expected = {*KEYS[1:4]}
    else:
        await owner.close([(key, slot) for slot, key in enumerate(KEYS[:4])])
        expected = {*KEYS[:4]}
    await follower.look()
    assert follower.entries.keys() == expected
    assert await follower.read(*expected) == [True] * len(expected)
    if change == "relocate":
        assert len(follower.tier._known.places.of(KEYS[0])) == 2


async def test_a_large_lane_is_told_in_portions_and_none_of_them_is_put_together_on_the_loop(
    folder: Path, open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PORTION", SLOTS)
    monkeypatch.setattr(watch, "CHANGES_SLOTS", SLOTS // 2)
    follower = follow(io_threads=1)
    owner = await many_segments(open_bench, 20)
    keys = [key_of(n) for n in range(20 * SLOTS)]
    for start in range(0, len(keys), SLOTS):
        await owner.store(keys[start : start + SLOTS], list(range(start, start + SLOTS)))
    threads: set[str] = set()
    works = Places.changes

    def changes(places: Places) -> Changes:
        threads.add(threading.current_thread().name)
        return works(places)

    monkeypatch.setattr(Places, "changes", changes)
    portions: list[int] = []
    while news := await follower.tier.refresh():
        portions.append(len(news.appeared))
    assert sum(portions) == len(keys)
    assert max(portions) < 2 * SLOTS
    owner.abandon()
    shutil.rmtree(lane_of(folder, 1))
    portions.clear()
    while news := await follower.tier.refresh():
        portions.append(len(news.gone))
    assert sum(portions) == len(keys)
    assert max(portions) < 2 * SLOTS
    assert threading.current_thread().name not in threads


async def test_records_of_another_epoch_cost_no_checksum(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    _owner, follower = await followed(open_bench, follow)
    assert isinstance(await follower.bench.tier.clear(), list)
    summed: list[tuple[Any, ...]] = []
    works: Callable[..., int] = vars(disk_format)["crc32c"]

    def counting(*arguments: Any) -> int:
        summed.append(arguments)
        return works(*arguments)

    monkeypatch.setattr(disk_format, "crc32c", counting)
    await follower.tier.clear()
    seeds = len(summed)
    assert await follower.look() == Changes()
    assert not [args for args in summed[seeds:] if len(args[0]) > 16]


# -- nobody is held up -----------------------------------------------------------------------


async def test_lanes_are_read_by_the_threads_of_their_own_path(
    tmp_path: Path, open_bench: OpenBench, follow: Follow
) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    owner = open_bench(paths, segments=2)
    slots = list(range(2 * SLOTS))
    keys = [key_of(n) for n in slots]
    await owner.store(keys, slots)
    follower = follow(paths, segments=2, io_threads=1)
    one, other = follower.bench.tier.volumes  # type: ignore[attr-defined]
    assert await follower.read(*keys[:ROWS]) == [True] * ROWS
    gate = threading.Event()
    begun = threading.Event()

    def hold() -> bool:
        begun.set()
        return gate.wait(TOO_LONG)

    held = asyncio.ensure_future(one.threads.run(hold))
    # A read that came before it had begun would go first.
    await until_async(begun.is_set)
    # What lies on the other path does not wait.
    async with asyncio.timeout(PATIENCE):
        assert await follower.read(*keys[SLOTS:]) == [True] * SLOTS
    reading = asyncio.ensure_future(follower.read(*keys[:SLOTS]))
    await asyncio.sleep(0.05)
    assert not reading.done()
    gate.set()
    assert await reading == [True] * SLOTS
    await held
    assert other.backend is not one.backend


async def test_closing_does_not_wait_for_a_look_that_hangs(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    _owner, follower = await followed(open_bench, follow)
    begun, gate = threading.Event(), threading.Event()

    def hangs(*arguments: Any) -> list[tuple[int, Path]]:
        begun.set()
        assert gate.wait(TOO_LONG)
        return []

    monkeypatch.setattr(watch, "lane_folders", hangs)
    looking = asyncio.ensure_future(follower.tier.refresh())
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    follower.bench.tier.detach()
    async with asyncio.timeout(PATIENCE):
        assert (await looking).appeared == []
        await follower.tier.close([])
    gate.set()


async def test_what_was_seen_before_a_reset_is_no_news_after_it(
    open_bench: OpenBench, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow()
    owner = open_bench()
    await owner.store(KEYS, ALL)
    begun, gate = threading.Event(), threading.Event()
    changes = Places.changes

    def slow(self: Places) -> Changes:
        found = changes(self)
        begun.set()
        assert gate.wait(TOO_LONG)
        return found

    monkeypatch.setattr(Places, "changes", slow)
    looking = asyncio.ensure_future(follower.tier.refresh())
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    monkeypatch.setattr(Places, "changes", changes)
    # Its own lane moves to another epoch first, in which the neighbour has nothing.
    assert isinstance(await follower.bench.tier.clear(), list)
    assert await follower.tier.clear() == []
    gate.set()
    assert (await looking).appeared == []
    assert (await follower.look()).appeared == []
