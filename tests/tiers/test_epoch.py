"""Epochs: what a reset leaves behind is not taken any more, whoever wrote it and whenever."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ForeignFileError, PathUnusableError
from kvstore.testing.bench import key_of
from kvstore.tiers.disk import DiskTier, epoch
from kvstore.tiers.disk.epoch import EPOCH_NAME, MAX_EPOCH, raise_epoch, read_epoch
from kvstore.tiers.disk.lane import LOCK_NAME, PID_BYTES, newest_told
from kvstore.tiers.disk.namespace import FILE_NAME, Namespace, read_namespace
from kvstore.tiers.disk.volume import Volume
from tests.patience import TOO_LONG
from tests.tiers.conftest import OpenBench
from tests.tiers.support import NAMESPACE, SEGMENT, SLOTS, Child, bench_of, disk_of, lane_of

KEYS = [key_of(number) for number in range(8)]


@pytest.fixture
def space(folder: Path) -> Path:
    """A namespace's folder."""
    return NAMESPACE.establish(folder)


def test_a_namespace_is_made_beside_others_that_take_its_files_for_leftovers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is in another container does not see that this process lives."""
    publish, tries = Namespace._publish, 0

    def taken_away(file: Path, told: Mapping[str, Any]) -> None:
        nonlocal tries
        tries += 1
        if tries < 5:
            raise FileNotFoundError(file)
        publish(file, told)

    monkeypatch.setattr(Namespace, "_publish", staticmethod(taken_away))
    assert read_namespace(NAMESPACE.establish(folder))["digest"] == NAMESPACE.digest


def test_a_namespace_without_the_file_is_in_epoch_0(space: Path) -> None:
    assert read_epoch(space) == 0


@pytest.mark.parametrize("looks", range(1, 3))
def test_an_owner_that_writes_its_name_amid_a_look_has_not_told_an_epoch(
    space: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    lock = space / "lane-0" / LOCK_NAME
    lock.parent.mkdir(mode=0o700)
    lock.touch(mode=0o600)
    count = 0

    def looking(real: Callable[..., bytes], *arguments: int) -> bytes:
        nonlocal count
        found = real(*arguments)
        count += 1
        if count == looks:
            lock.write_bytes(b"30229".ljust(PID_BYTES))
        return found

    for call in ("read", "pread"):
        monkeypatch.setattr(os, call, partial(looking, getattr(os, call)))
    assert newest_told(space)[0] == 0


def test_a_short_write_makes_no_other_epoch(space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwritev = os.write, os.pwritev
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:1]))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwritev(fd, [bytes(data[0])[:1]], at))
    assert raise_epoch(space, 12) == 0
    assert read_epoch(space) == 12


def test_an_epoch_only_rises(space: Path) -> None:
    assert raise_epoch(space, 3) == 0, "it is the first"
    assert raise_epoch(space, 2) == 3
    assert raise_epoch(space, 3) == 3
    assert read_epoch(space) == 3
    assert (space / EPOCH_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"four", b"-1\n", b"4\n4\n", b"%d\n" % (MAX_EPOCH + 1), b"9" * 64]
)
def test_a_damaged_file_is_refused_rather_than_guessed_at(
    space: Path, content: bytes, open_bench: OpenBench
) -> None:
    (space / EPOCH_NAME).write_bytes(content)
    with pytest.raises(ForeignFileError, match="holds no epoch"):
        read_epoch(space)
    with pytest.raises(ForeignFileError, match="holds no epoch"):
        open_bench()


def test_what_is_no_plain_file_is_refused(space: Path) -> None:
    (space / EPOCH_NAME).symlink_to("/etc/hostname")
    with pytest.raises(PathUnusableError):
        read_epoch(space)
    (space / EPOCH_NAME).unlink()
    os.mkfifo(space / EPOCH_NAME)
    with pytest.raises(PathUnusableError):
        read_epoch(space)


def test_an_epoch_that_another_process_is_moving_is_waited_for_but_not_for_ever(
    space: Path,
    child: Callable[..., Child],
    open_bench: OpenBench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that starts waits longer: its drive may be slow."""
    monkeypatch.setattr("kvstore.tiers.disk.epoch.LOCK_SECONDS", 0.05)
    assert raise_epoch(space, 1) == 0
    holder = child(
        """
        import fcntl
        fd = os.open(sys.argv[1], os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        say("held")
        sys.stdin.readline()
        """,
        space / "namespace.json",
    )
    assert holder.line() == "held"
    with pytest.raises(OSError, match="does not let go"):
        raise_epoch(space, 2)
    assert read_epoch(space) == 1
    later = threading.Timer(0.3, holder.kill)
    later.start()
    assert disk_of(open_bench()).epoch == 1
    later.join()
    assert raise_epoch(space, 2) == 1


def test_a_child_that_is_forked_amid_it_keeps_no_lock(
    space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, children = epoch._write, list[int]()

    def write(folder: Path, number: int) -> None:
        child = os.fork()
        if not child:
            time.sleep(TOO_LONG)
            os._exit(0)
        children.append(child)
        real(folder, number)

    monkeypatch.setattr(epoch, "_write", write)
    try:
        assert raise_epoch(space, 1) == 0
        monkeypatch.setattr(epoch, "LOCK_SECONDS", 0.0)
        assert raise_epoch(space, 2) == 1
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_process_that_is_killed_while_it_moves_the_epoch_leaves_the_old_one_or_the_new(
    space: Path, child: Callable[..., Child]
) -> None:
    rng = random.Random(5)
    reached = 0
    for _ in range(8):
        mover = child(
            """
            from kvstore.tiers.disk.epoch import raise_epoch, read_epoch
            folder = Path(sys.argv[1])
            epoch = read_epoch(folder)
            say("go", epoch)
            while True:
                epoch += 1
                raise_epoch(folder, epoch)
            """,
            space,
        )
        assert mover.line() == f"go {reached}"
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(mover.pid, signal.SIGKILL)
        mover.kill()
        now = read_epoch(space)
        assert now >= reached
        reached = now
    assert raise_epoch(space, reached + 1) == reached
    assert sorted(file.name for file in space.iterdir()) == [EPOCH_NAME, "namespace.json"]


def test_many_processes_that_move_the_epoch_at_once_never_move_it_back(
    space: Path, child: Callable[..., Child]
) -> None:
    code = """
        from kvstore.tiers.disk import epoch
        from kvstore.tiers.disk.epoch import raise_epoch, read_epoch
        epoch.LOCK_SECONDS = 30
        folder, seen = Path(sys.argv[1]), 0
        for _ in range(30):
            raise_epoch(folder, read_epoch(folder) + 1)
            now = read_epoch(folder)
            assert now > seen
            seen = now
        say("last", seen)
        """
    movers = [child(code, space) for _ in range(3)]
    last = [int(mover.line().split()[1]) for mover in movers]
    assert read_epoch(space) == max(last)


async def test_records_carry_the_epoch_and_only_those_of_it_are_found(
    open_bench: OpenBench, folder: Path
) -> None:
    bench = open_bench()
    await bench.store(KEYS[:4], range(4))
    await bench.tier.close([])
    # As of a cache from before there were epochs.
    assert not (folder / NAMESPACE.name / EPOCH_NAME).exists()
    bench = open_bench()
    assert {key for key, _ in bench.opening.entries} == set(KEYS[:4])
    assert await bench.tier.clear() == [0]
    assert read_epoch(folder / NAMESPACE.name) == 1
    await bench.store(KEYS[4:6], range(2))
    await bench.tier.close([])
    # Somebody else has moved on since: the lane's chunks are from before.
    again = open_bench()
    assert {key for key, _ in again.opening.entries} == set(KEYS[4:6])
    await again.tier.close([])
    raise_epoch(folder / NAMESPACE.name, 2)
    last = open_bench()
    assert list(last.opening.entries) == []


async def test_a_lane_that_is_newer_is_refused_before_a_smaller_capacity_costs_it_anything(
    open_bench: OpenBench, folder: Path, space: Path
) -> None:
    bench = open_bench()
    for _ in range(2):
        assert (await bench.tier.grow())[0] is not None
    assert isinstance(await bench.tier.clear(), list)
    await bench.store(KEYS[:1], [2 * SLOTS])
    raise_epoch(space, 2)
    await bench.tier.close([])
    (space / EPOCH_NAME).unlink()
    (lane_of(folder) / LOCK_NAME).unlink()
    files = sorted(lane_of(folder).glob("segment-*"))
    assert len(files) > 1
    with pytest.raises(ForeignFileError, match="was lost, so nobody can tell"):
        open_bench(capacity_bytes=SEGMENT)
    assert sorted(lane_of(folder).glob("segment-*")) == files


async def test_a_lost_epoch_is_noticed_by_a_lane_that_holds_no_newer_chunks(
    open_bench: OpenBench, folder: Path
) -> None:
    bench, peer = open_bench(), open_bench()
    await bench.store(KEYS[:4], range(4))
    await bench.tier.close([])
    # Only the peer has been in epoch 1, and has told so.
    assert isinstance(await peer.tier.clear(), list)
    await peer.tier.close([])
    (folder / NAMESPACE.name / EPOCH_NAME).unlink()
    for _ in range(2):
        with pytest.raises(ForeignFileError, match="lane-1: has been in epoch 1, and .* was lost"):
            open_bench()
    raise_epoch(folder / NAMESPACE.name, 1)
    assert list(open_bench().opening.entries) == []


@pytest.mark.parametrize("share", [True, False])
async def test_a_reset_whose_epoch_was_lost_reaches_none_that_somebody_has_been_in(
    open_bench: OpenBench, folder: Path, share: bool
) -> None:
    bench = open_bench(share_after_reset=share)
    peer = open_bench(share_after_reset=share)
    for _ in range(3):
        assert isinstance(await bench.tier.clear(), list)
    (folder / NAMESPACE.name / EPOCH_NAME).unlink()
    # The peer has been in epoch 0 alone. It joins those who were reset, or goes beyond them.
    assert isinstance(await peer.tier.clear(), list)
    assert disk_of(peer).epoch == (3 if share else 4)
    assert read_epoch(folder / NAMESPACE.name) == disk_of(peer).epoch
    (folder / NAMESPACE.name / EPOCH_NAME).unlink()
    assert isinstance(await bench.tier.clear(), list)
    assert disk_of(bench).epoch == disk_of(peer).epoch + 1


async def test_an_epoch_that_cannot_be_raised_in_a_folder_is_not_told_there(
    tmp_path: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        await open_bench(path).tier.close([])
    raise_epoch(two / NAMESPACE.name, 3)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.disk.volume.raise_epoch", _full)
        with pytest.raises(PathUnusableError, match="the epoch cannot be moved"):
            open_bench([one, two])
    # Nothing was lost there.
    assert disk_of(open_bench(one)).epoch == 0


def _full(folder: Path, epoch: int, seconds: float | None = None) -> int:
    raise OSError(errno.ENOSPC, "no space")


async def test_after_the_last_epoch_there_is_none(open_bench: OpenBench, folder: Path) -> None:
    bench = open_bench()
    raise_epoch(folder / NAMESPACE.name, MAX_EPOCH)
    assert isinstance(await bench.tier.clear(), str)
    assert read_epoch(folder / NAMESPACE.name) == MAX_EPOCH


async def test_a_reset_writes_no_record_and_a_kill_after_it_brings_nothing_back(
    open_bench: OpenBench, folder: Path
) -> None:
    bench = open_bench()
    await bench.store(KEYS[:4], range(4))
    (segment,) = lane_of(folder).glob("segment-*")
    before = segment.read_bytes()
    assert await bench.tier.clear() == [0]
    assert segment.read_bytes() == before
    bench.abandon()
    assert list(open_bench().opening.entries) == []


async def test_a_reset_where_the_namespace_file_was_removed_writes_it_anew(
    open_bench: OpenBench, folder: Path
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(8))
    space = lane_of(folder).parent
    before = (space / FILE_NAME).read_text()
    (space / FILE_NAME).unlink()
    assert isinstance(await bench.tier.clear(), list)
    assert (space / FILE_NAME).read_text() == before
    assert read_epoch(space) == 1
    space.rename(space.with_name("away"))
    assert isinstance(await bench.tier.clear(), str)
    assert not space.exists()


async def test_many_that_reset_at_once_are_each_alone(open_bench: OpenBench) -> None:
    benches = [open_bench() for _ in range(4)]
    for _ in range(5):
        await asyncio.gather(*(bench.tier.clear() for bench in benches))
        assert len({disk_of(bench).epoch for bench in benches}) == 4


async def test_a_reset_that_is_tried_again_joins_what_it_had_moved_to(
    open_bench: OpenBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    bench = open_bench(paths, share_after_reset=True)

    def refuse(self: Volume, epoch: int, **named: Any) -> int | str:
        return "refused" if self is disk_of(bench).volumes[1] else raises(self, epoch, **named)

    raises = Volume.raise_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Volume, "raise_epoch", refuse)
        for _ in range(3):
            assert isinstance(await bench.tier.clear(), str)
    assert await bench.tier.clear() == [0, 1]
    assert [read_epoch(path / NAMESPACE.name) for path in paths] == [1, 1]


async def test_a_path_whose_epoch_cannot_be_moved_is_not_cleared(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench()

    def refuse(folder: Path, epoch: int, seconds: float | None = None) -> int:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.disk.volume.raise_epoch", refuse)
        assert "the epoch cannot be moved: Read-only file system" in str(await bench.tier.clear())
    # Who tries again says so, once a minute: see `Complaints`.
    assert caplog.records == []
    assert await bench.tier.clear() == [0]


async def test_who_starts_beside_a_reset_takes_the_lane_that_it_left(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_bench()
    standing = DiskTier._standing_epoch
    looks: list[int] = []

    def slowly(self: DiskTier) -> int:
        epoch = standing(self)
        if not looks:
            # All of it between two calls of the one that starts.
            first.abandon()
            looks.append(epoch)
            other = bench_of(self._paths[0])
            asyncio.run(other.tier.clear())
            asyncio.run(other.store([key_of(1)], [0]))
            asyncio.run(other.close([(key_of(1), 0)]))
        looks.append(epoch)
        return epoch

    monkeypatch.setattr(DiskTier, "_standing_epoch", slowly)
    second = await asyncio.to_thread(open_bench)
    assert disk_of(second).epoch == 1
    assert [key for key, _ in second.opening.entries] == [key_of(1)]


async def test_of_several_paths_that_disagree_the_highest_epoch_counts(
    tmp_path: Path, open_bench: OpenBench
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    bench = open_bench(paths)
    await bench.store(KEYS[:2], [0, 8])
    await bench.tier.close([])
    # Killed after the first path had been told.
    raise_epoch(lane_of(paths[0]).parent, 7)
    again = open_bench(paths)
    assert list(again.opening.entries) == []
    assert [read_epoch(lane_of(path).parent) for path in paths] == [7, 7]
    assert disk_of(again).epoch == 7
    assert await again.tier.clear() == [0, 1]
    assert [read_epoch(lane_of(path).parent) for path in paths] == [8, 8]


async def test_who_resets_after_others_did_is_alone_unless_told_to_join_them(
    open_bench: OpenBench, folder: Path
) -> None:
    alone, bench = open_bench(), open_bench(share_after_reset=True)
    raise_epoch(folder / NAMESPACE.name, 4)
    await alone.tier.clear()
    assert disk_of(alone).epoch == 5
    await bench.tier.clear()
    assert disk_of(bench).epoch == 5
    await bench.tier.clear()
    assert disk_of(bench).epoch == 6


async def test_what_is_listed_and_what_grows_is_of_the_epoch_that_is_entered(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    assert all((await bench.store(KEYS, range(8))).ok)
    assert await bench.tier.list_segment(0)
    assert isinstance(await bench.tier.clear(), list)
    assert await bench.tier.list_segment(0) == [], "compaction moves nothing that was forgotten"
    number, _ = await bench.tier.grow()
    assert number == 1
    assert all((await bench.store(KEYS[:2], [8, 9])).ok)
    bench.abandon()
    again = open_bench()
    assert sorted(key for key, _ in again.opening.entries) == sorted(KEYS[:2])
