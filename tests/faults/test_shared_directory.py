"""A store's directory on a file system that is unmounted and mounted again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.types import TierPlace

pytest.importorskip("obstore")

from tiers.store.mount import MARK
from tiers.store.object import ObjectTier

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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_whoever_empties_the_share_may_take_everything(mount: Mounting) -> None:
    share = tmpfs(mount)
    bench = bench_on(share / "kv")
    assert await stores(bench, 1)
    shutil.rmtree(share / "kv")
    assert not await finds(bench, 1)
    assert await stores(bench, 1)
    assert await finds(bench, 1)
    await bench.close()


@pytest.mark.asyncio
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
