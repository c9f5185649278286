"""Lanes that nobody uses any more give way to those in use; no other lane or file does."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import ForeignFileError
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import unowned
from kvstore.tiers.disk.epoch import EPOCH_NAME
from kvstore.tiers.disk.lane import Owner, lane_owner, newest_told
from kvstore.tiers.disk.namespace import Namespace
from tests.tiers.conftest import OpenBench
from tests.tiers.support import NAMESPACE, SEGMENT, SLOTS, Child, disk_of

StartChild = Callable[..., Child]

KEYS = [key_of(number) for number in range(3 * SLOTS)]
OLD, NEWER, NEW = (Namespace.of(f"v{n}", {"model": "m", "version": n}) for n in range(3))
SEGMENTS = 3


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane counts as soon as it is free, and each write looks for such lanes."""
    monkeypatch.setattr(unowned, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(unowned, "LOOK_SECONDS", 0.0)


async def fill(bench: TierBench, segments: int = SEGMENTS) -> None:
    """Grow to so many segments and store a chunk in every slot."""
    for number in range(segments):
        if number >= len(bench.opening.segments):
            assert (await bench.tier.grow())[0] == number
        slots = range(number * SLOTS, (number + 1) * SLOTS)
        assert all((await bench.store([KEYS[slot] for slot in slots], slots)).ok)


def age(path: Path, seconds: float) -> None:
    """Make every file of a namespace that old."""
    then = time.time() - seconds
    for file in sorted(path.rglob("segment-*"), key=lambda one: one.name):
        os.utime(file, (then, then))
        then += 1


def segments(path: Path, namespace: Namespace = NAMESPACE, lane: int = 0) -> list[int]:
    """Numbers of the segments of a lane."""
    files = (path / namespace.name / f"lane-{lane}").glob("segment-*.safetensors")
    return sorted(int(file.name[8:].split(".")[0]) for file in files)


async def leave(
    open_bench: OpenBench, path: Path, namespace: Namespace, seconds: float, count: int = SEGMENTS
) -> None:
    """Leave a full lane behind that was used `seconds` ago."""
    bench = open_bench(namespace=namespace)
    await fill(bench, count)
    await bench.close()
    age(path / namespace.name, seconds)


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("segment-*"))


async def test_a_lane_without_a_lock_hides_no_other(folder: Path, open_bench: OpenBench) -> None:
    first, second = open_bench(), open_bench()
    await fill(second)
    for bench in (first, second):
        await bench.close()
    # Its owner was killed before it had one, or a copy came without.
    (folder / NAMESPACE.name / "lane-0" / "lock").unlink()
    bench = open_bench()
    assert disk_of(bench).volumes[0].lane.folder.name == "lane-1"
    await bench.close()


# -- what goes -----------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
async def test_three_versions_of_a_model_take_one_capacity(
    folder: Path, open_bench: OpenBench, caplog: pytest.LogCaptureFixture
) -> None:
    for namespace in (OLD, NEWER, NEW):
        bench = open_bench(namespace=namespace)
        await fill(bench)
        assert disk_bytes(folder) <= SEGMENTS * SEGMENT
        assert all(await bench.fetch(KEYS[:SLOTS], range(SLOTS)))
        await bench.close()
    assert segments(folder, NEW) == [0, 1, 2]
    told = [record for record in caplog.records if "removed as room is needed" in record.message]
    assert len(told) == 2, "a line for each lane"


@pytest.mark.usefixtures("at_once")
async def test_only_what_growth_needs_is_removed_the_oldest_lanes_and_segments_first(
    folder: Path, open_bench: OpenBench
) -> None:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(unowned, "FREE_SECONDS", 3600.0)
        await leave(open_bench, folder, NAMESPACE, 9000, 1)
        await leave(open_bench, folder, NEWER, 5000, 2)
        await leave(open_bench, folder, OLD, 7000, 2)
    bench = open_bench(namespace=NAMESPACE, lane=1, segments=6)
    kept = []
    for number in range(6):
        kept.append(
            (segments(folder, OLD), segments(folder, NEWER), segments(folder, NAMESPACE, 0))
        )
        if number < 5:
            assert (await bench.tier.grow())[0] == number + 1
    assert kept == [
        ([0, 1], [0, 1], [0]),
        ([1], [0, 1], [0]),
        ([], [0, 1], [0]),
        ([], [1], [0]),
        ([], [], [0]),
        ([], [], []),
    ]


@pytest.mark.usefixtures("at_once")
async def test_a_full_lane_that_stays_in_use_frees_the_path_as_it_writes(
    folder: Path, open_bench: OpenBench
) -> None:
    other = open_bench(namespace=OLD)
    await fill(other)
    bench = open_bench()
    await fill(bench)
    await other.close()
    for _ in range(3):
        await bench.store(KEYS[:1], [0])
    assert segments(folder, OLD) == []
    assert segments(folder) == [0, 1, 2]


# -- what stays ----------------------------------------------------------------------------


async def test_processes_that_start_one_after_the_other_find_what_they_had(
    folder: Path, open_bench: OpenBench
) -> None:
    for namespace in (OLD, NEW, NAMESPACE):
        await leave(open_bench, folder, namespace, 90_000)
    for namespace in (OLD, NEW, NAMESPACE):
        bench = open_bench(namespace=namespace)
        assert len(bench.opening.entries) == SEGMENTS * SLOTS
        await bench.store(KEYS[:1], [0])


async def test_a_lane_counts_an_hour_after_it_was_seen_free_and_after_its_last_write(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    begun = time.time()
    await fill(open_bench())
    lock = folder / OLD.name / "lane-0" / "lock"
    assert lock.read_bytes().startswith(b"free ")
    assert segments(folder, OLD) == [0, 1, 2]
    monkeypatch.setattr(time, "time", lambda: begun + 3500)
    open_bench()
    assert segments(folder, OLD) == [0, 1, 2]
    age(folder / OLD.name, -100)
    monkeypatch.setattr(time, "time", lambda: begun + 3700)
    open_bench()
    assert segments(folder, OLD) == [0, 1, 2], "written to a moment ago"
    age(folder / OLD.name, 90_000)
    await fill(open_bench(lane=3))
    assert segments(folder, OLD) == []


async def test_what_was_written_in_the_future_goes_an_hour_after_it_was_seen_free(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was wrong, of which there is no end for years."""
    await leave(open_bench, folder, OLD, -(10**8))
    unfinished = folder / OLD.name / "lane-0" / ".segment-3.0a.tmp"
    unfinished.write_bytes(b"")
    begun = time.time()
    await fill(open_bench())
    assert segments(folder, OLD) == [0, 1, 2]
    assert unfinished.exists()
    monkeypatch.setattr(time, "time", lambda: begun + 3700)
    await fill(open_bench(lane=3))
    assert segments(folder, OLD) == []
    assert not unfinished.exists(), "left by a process that was killed"


async def test_that_a_lane_is_free_does_not_make_its_epoch_forgotten(
    folder: Path, open_bench: OpenBench
) -> None:
    """By the lanes it is noticed that the file of the epoch was lost."""
    bench = open_bench(namespace=OLD)
    await fill(bench)
    await bench.tier.clear()
    await bench.close()
    await fill(open_bench())
    lock = folder / OLD.name / "lane-0" / "lock"
    assert lock.read_bytes().startswith(b"free ")
    assert newest_told(folder / OLD.name) == (1, lock.parent)
    (folder / OLD.name / EPOCH_NAME).unlink()
    with pytest.raises(ForeignFileError, match=f"{EPOCH_NAME} was lost"):
        open_bench(namespace=OLD)


async def test_a_copy_of_a_cache_is_not_as_old_as_its_files_say(
    folder: Path, open_bench: OpenBench
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    lock = folder / OLD.name / "lane-0" / "lock"
    lock.write_bytes(b"free 1000000000")
    os.utime(lock, (10**9, 10**9))
    await fill(open_bench())
    assert segments(folder, OLD) == [0, 1, 2]


async def test_a_lane_that_was_taken_again_is_no_longer_marked_as_free(
    folder: Path, open_bench: OpenBench
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    open_bench()
    lock = folder / OLD.name / "lane-0" / "lock"
    assert lock.read_bytes().startswith(b"free ")
    bench = open_bench(namespace=OLD)
    assert lane_owner(lock.parent) == Owner(os.getpid(), 0)
    assert b"free" not in lock.read_bytes()
    await bench.close()


@pytest.mark.usefixtures("at_once")
async def test_a_lane_that_a_process_owns_is_never_touched(
    folder: Path, open_bench: OpenBench, child: StartChild
) -> None:
    owner = child(
        """
        async def own():
            opened = bench(sys.argv[1])
            keys = [key_of(n) for n in range(8)]
            await opened.store(keys, range(8))
            say("stored")
            sys.stdin.readline()
            say(sum(await opened.fetch(keys, range(8))))
        asyncio.run(own())
        """,
        folder,
    )
    assert owner.line() == "stored"
    age(folder, 10**6)
    for namespace in (NAMESPACE, NEW):
        await fill(open_bench(namespace=namespace))
    assert segments(folder) == [0]
    owner.answer()
    assert owner.line() == str(SLOTS)
    owner.kill()
    await open_bench(namespace=NEW, lane=1).store(KEYS[:1], [0])


async def test_a_tier_that_keeps_what_there_is_removes_nothing(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    await leave(open_bench, folder, NAMESPACE, 90_000)
    monkeypatch.setattr(unowned, "FREE_SECONDS", 0.0)
    bench = open_bench(capacity_bytes=None)
    await bench.store(KEYS[:1], [0])
    assert segments(folder, OLD) == [0, 1, 2]


def _other_name(folder: Path) -> None:
    for file in folder.glob("lane-0/segment-*"):
        os.link(file, folder / f"backup-{file.name}")


def _link(folder: Path) -> None:
    shutil.move(folder, folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")


def _linked_lane(folder: Path) -> None:
    shutil.move(folder / "lane-0", folder.parent.parent / "lane")
    (folder / "lane-0").symlink_to(folder.parent.parent / "lane")


def _strangers(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    for file in folder.glob("lane-0/segment-*"):
        os.chown(file, 65534, 65534)


def _strangers_lane(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    os.chown(folder / "lane-0", 65534, 65534)


def _anybodys(folder: Path) -> None:
    folder.chmod(0o777)


def _no_namespace(folder: Path) -> None:
    (folder / "namespace.json").unlink()


def _another_namespace(folder: Path) -> None:
    shutil.copy(folder.parent / NEW.name / "namespace.json", folder / "namespace.json")


def _no_lock(folder: Path) -> None:
    (folder / "lane-0" / "lock").unlink()


def _linked_lock(folder: Path) -> None:
    os.link(folder / "lane-0" / "lock", folder / "lock")


def _no_segments(folder: Path) -> None:
    for file in folder.glob("lane-0/segment-*"):
        file.write_bytes(b"x" * SEGMENT)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "change",
    [
        _other_name,
        _link,
        _linked_lane,
        _strangers,
        _strangers_lane,
        _anybodys,
        _no_namespace,
        _another_namespace,
        _no_lock,
        _linked_lock,
        _no_segments,
    ],
)
async def test_what_is_not_surely_a_lane_of_ones_own_is_left_alone(
    folder: Path, open_bench: OpenBench, change: Callable[[Path], None]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unowned, "FREE_SECONDS", 3600.0)
        await leave(open_bench, folder, NEW, 90_000, 1)
        await leave(open_bench, folder, OLD, 90_000)
    other = folder / OLD.name
    change(other)
    before = {file: file.read_bytes() for file in sorted(other.glob("**/segment-*"))}
    bench = open_bench()
    await fill(bench)
    await bench.store(KEYS[:1], [0])
    assert {file: file.read_bytes() for file in sorted(other.glob("**/segment-*"))} == before
    assert segments(folder, OLD) == [0, 1, 2]


@pytest.mark.usefixtures("at_once")
async def test_other_files_beside_lanes_and_segments_stay(
    folder: Path, open_bench: OpenBench
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    notes = [folder / "notes", folder / OLD.name / "notes", folder / OLD.name / "lane-0" / "notes"]
    for note in notes:
        note.write_text("mine")
    await fill(open_bench())
    assert segments(folder, OLD) == []
    assert [note.read_text() for note in notes] == ["mine"] * 3
    assert (folder / OLD.name / "namespace.json").exists()


# -- at any moment -------------------------------------------------------------------------

REMOVING = """
from kvstore.tiers.disk import unowned, segment
unowned.FREE_SECONDS = 0.0
real = unowned.remove_file
def slowly(path, fd):
    say(path.name)
    sys.stdin.readline()
    real(path, fd)
    say("removed")
    sys.stdin.readline()
unowned.remove_file = slowly
async def grow():
    opened = bench(sys.argv[1])
    while (await opened.tier.grow())[0] is not None:
        pass
asyncio.run(grow())
"""


@pytest.mark.parametrize("steps", range(6))
async def test_a_process_killed_while_it_removes_leaves_whole_segments(
    folder: Path, open_bench: OpenBench, child: StartChild, steps: int
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    removing = child(REMOVING, folder)
    for _ in range(steps):
        if removing.line():
            removing.answer()
    removing.line()
    removing.kill()
    held = segments(folder, OLD)
    bench = open_bench(namespace=OLD)
    entries = dict(bench.opening.entries)
    assert len(entries) == len(held) * SLOTS
    keys = list(entries)[: SLOTS * 2]
    if keys:
        assert all(await bench.fetch(keys, [entries[key] for key in keys]))


async def test_a_process_that_comes_back_meanwhile_keeps_what_is_left(
    folder: Path, open_bench: OpenBench, child: StartChild
) -> None:
    await leave(open_bench, folder, OLD, 90_000)
    removing = child(
        """
        from kvstore.tiers.disk import unowned
        unowned.FREE_SECONDS = 0.0
        async def grow():
            opened = bench(sys.argv[1])
            say("open")
            sys.stdin.readline()
            say((await opened.tier.grow())[0])
        asyncio.run(grow())
        """,
        folder,
    )
    assert removing.line() == "open"
    bench = open_bench(namespace=OLD)
    assert len(bench.opening.entries) == 2 * SLOTS
    removing.answer()
    assert removing.line() == "1"
    assert segments(folder, OLD) == [1, 2]


async def test_a_lane_that_was_used_since_it_was_looked_at_keeps_its_segments(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unowned, "FREE_SECONDS", 0.0)
    await leave(open_bench, folder, OLD, 1000)
    own = open_bench(segments=4 * SEGMENTS)
    lanes = disk_of(own).volumes[0].unowned
    assert segments(folder, OLD) == [0, 1, 2]
    # Somebody takes it and lets go of it, and an hour has not gone by.
    monkeypatch.setattr(unowned, "FREE_SECONDS", 3600.0)
    lanes.make_room(0)
    assert segments(folder, OLD) == [0, 1, 2]


@pytest.mark.parametrize("looked", [False, True])
async def test_a_cache_that_was_made_in_the_place_of_its_own_is_left_alone(
    folder: Path, open_bench: OpenBench, at_once: None, looked: bool
) -> None:
    await leave(open_bench, folder, OLD, 1000)
    own = open_bench(segments=4 * SEGMENTS)
    lanes = disk_of(own).volumes[0].unowned
    if looked:
        assert lanes.make_room(1000 * SEGMENT)
    folder.rename(folder.with_name("elsewhere"))
    await leave(open_bench, folder, OLD, 1000)
    if looked:
        lanes._look_at = float("inf")
    with contextlib.nullcontext() if looked else pytest.raises(OSError, match="lane-0"):
        lanes.make_room(0)
    assert segments(folder, OLD) == [0, 1, 2]


async def test_what_strangers_left_in_ones_own_lane_counts_when_others_give_way(
    folder: Path, open_bench: OpenBench, at_once: None
) -> None:
    own = open_bench(segments=4 * SEGMENTS)
    own.abandon()
    (folder / NAMESPACE.name / "lane-0" / "core.123").write_bytes(bytes(2 * SEGMENT))
    await leave(open_bench, folder, OLD, 1000)
    again = open_bench(segments=SEGMENTS + 1)
    await fill(again, 1)
    assert segments(folder, OLD) == [2], "two of four segments are a stranger's, and one is ours"


async def test_what_cannot_be_removed_counts_and_is_told_once(
    folder: Path,
    open_bench: OpenBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unowned, "FREE_SECONDS", 0.0)
    await leave(open_bench, folder, OLD, 9999)

    def refused(path: Path, fd: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(unowned, "remove_file", refused)
        bench = open_bench()
        for _ in range(3):
            segment, told = await bench.tier.grow()
            assert segment is None
            assert told is not None
            assert "cannot be removed" in told
    assert segments(folder) == [0]
    told_of = [one.message for one in caplog.records if "takes of the capacity" in one.message]
    assert len(told_of) == 1
    assert "Operation not permitted" in told_of[0]
    assert (await bench.tier.grow())[0] == 1, "they can be removed by now"
