"""A store's directory on a file system that is unmounted and mounted again."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.remote.mount import MARK, Mount
from kvstore.tiers.remote.object import ObjectTier
from kvstore.types import TierPlace
from tests.tiers.support import give_away, link_to, open_to_all

PLACE = TierPlace("place", {"model": "tiny"}, 8000)

Mounting = Callable[..., Path]


def bench_on(folder: Path) -> TierBench:
    return TierBench(ObjectTier(PLACE, url=folder.as_uri()), 16, 8192, 8000)


def tmpfs(mount: Mounting) -> Path:
    return mount("-t", "tmpfs", "-o", "size=16m", "none")


async def stores(bench: TierBench, number: int) -> bool:
    (ok,) = (await bench.store([key_of(number)], [0])).ok
    return ok


async def finds(bench: TierBench, number: int) -> bool:
    (found,) = await bench.fetch([key_of(number)], [0])
    return found


@pytest.mark.parametrize("below", ["", "kv", "my cache/kv"])
async def test_nothing_goes_below_a_mount_point_once_its_file_system_is_gone(
    mount: Mounting, below: str
) -> None:
    share = tmpfs(mount)
    bench = bench_on(share / below)
    assert await stores(bench, 1)
    subprocess.run(["umount", "-l", share], check=True)
    (share / below).mkdir(parents=True, exist_ok=True)
    done = await bench.store([key_of(2)], [0])
    assert done.ok == [False]
    assert list(done.unread) == [0], "the store is away, as one whose server does not answer"
    assert MARK in (done.error or "")
    assert (await bench.tier.holds([key_of(1)])).error
    assert await bench.tier.erase([key_of(1)]), "it would be there again with the share"
    assert not [path for path in share.rglob("*") if path.is_file()]
    await bench.close()


@pytest.mark.parametrize("stored", [False, True])
async def test_a_share_that_is_unmounted_amid_a_call_is_away(
    mount: Mounting, monkeypatch: pytest.MonkeyPatch, *, stored: bool
) -> None:
    share = tmpfs(mount)
    bench = bench_on(share)
    assert await stores(bench, 1)
    enter = Mount.enter

    def unmounted(self: Mount, below: str, *, make: bool) -> int:
        if share.is_mount():
            subprocess.run(["umount", "-l", share], check=True)
        return enter(self, below, make=make)

    monkeypatch.setattr(Mount, "enter", unmounted)
    if stored:
        assert not await stores(bench, 2)
    else:
        assert await bench.tier.erase([key_of(1)]), "it would be there again with the share"
    assert not list(share.iterdir())
    await bench.close()


async def test_a_share_that_is_mounted_again_serves_again(mount: Mounting) -> None:
    """A network's file system has another device number then; so has this copy of it."""
    share = tmpfs(mount)
    bench = bench_on(share / "kv")
    assert await stores(bench, 1)
    copy = tmpfs(mount)
    shutil.copytree(share, copy, dirs_exist_ok=True)
    subprocess.run(["umount", "-l", share], check=True)
    assert not await stores(bench, 2)
    subprocess.run(["mount", "--move", copy, share], check=True)
    assert await finds(bench, 1)
    assert await stores(bench, 2)
    await bench.close()


async def test_a_mark_of_before_the_share_was_mounted_marks_nothing(mount: Mounting) -> None:
    """A server began before the mount once, and left one in the folder below."""
    share = tmpfs(mount)
    bench = bench_on(share)
    assert await stores(bench, 1)
    await bench.close()
    copy = tmpfs(mount)
    shutil.copytree(share, copy, dirs_exist_ok=True)
    subprocess.run(["umount", "-l", share], check=True)
    await bench_on(share).close()
    assert (share / MARK).is_file()
    subprocess.run(["mount", "--move", copy, share], check=True)
    bench = bench_on(share)
    assert await finds(bench, 1)
    subprocess.run(["umount", "-l", share], check=True)
    assert not await stores(bench, 2)
    assert not await finds(bench, 1)
    await bench.close()


async def test_whoever_empties_the_share_may_take_everything(mount: Mounting) -> None:
    share = tmpfs(mount)
    bench = bench_on(share / "kv")
    assert await stores(bench, 1)
    shutil.rmtree(share / "kv")
    assert not await finds(bench, 1)
    assert await stores(bench, 1)
    assert await finds(bench, 1)
    await bench.close()


async def test_a_share_that_may_only_be_read_is_read(mount: Mounting) -> None:
    share = tmpfs(mount)
    bench = bench_on(share)
    assert await stores(bench, 1)
    await bench.close()
    (share / MARK).unlink()
    subprocess.run(["mount", "-o", "remount,ro", share], check=True)
    bench = bench_on(share)
    assert await finds(bench, 1)
    assert not await stores(bench, 2)
    await bench.close()


async def test_a_share_that_others_may_write_to_is_used_no_more(tmp_path: Path) -> None:
    share = tmp_path / "share"
    bench = bench_on(share)
    assert await stores(bench, 1)
    share.chmod(0o777)
    done = await bench.tier.read([key_of(1)], [0], [0])
    assert done.ok == [False]
    assert list(done.unread) == [0], "the store is away"
    assert f"{share} may be written by every user" in (done.error or "")
    assert not await stores(bench, 2)
    share.chmod(0o700)
    assert await finds(bench, 1)
    assert await stores(bench, 2)
    await bench.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
@pytest.mark.parametrize("plant", [give_away, open_to_all, link_to])
async def test_a_value_that_others_could_have_written_is_not_served_and_is_replaced(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    bench = bench_on(tmp_path / "share")
    keys = [key_of(number) for number in range(4)]
    await bench.store(keys, [0] * 4)
    (path,) = (tmp_path / "share").rglob(keys[1].hex())
    plant(path)
    assert (await bench.tier.holds(keys)).ok == [True, False, True, True]
    done = await bench.tier.read(keys, [0] * 4, [0, 1, 2, 3])
    assert done.ok == [True, False, True, True]
    assert list(done.unread) == [], "it is lost"
    assert str(path) in (done.error or "")
    await bench.store(keys, [0] * 4)
    assert await bench.fetch(keys, [0] * 4) == [True] * 4
    assert path.lstat().st_uid == os.geteuid()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    await bench.close()
