"""A store of a capacity: the oldest go, each tenant keeps its share, whoever sweeps."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.plugins import create_tier
from kvstore.policies.shares import Places, Share, Shares, tenant_keys
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.remote import sweeper
from kvstore.tiers.remote.client import StoreClient, StoreError
from kvstore.tiers.remote.directory import DirectoryClient
from kvstore.tiers.remote.mount import Mount
from kvstore.tiers.remote.object import ObjectTier
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.sweeper import PARTS, Ages
from kvstore.types import TierPlace
from tests.patience import PATIENCE, until_async

CHUNK = 8000
ROOM = 64
CAPACITY = ROOM * (CHUNK + RECORD_BYTES)
LEFT = ROOM - ROOM // PARTS
"""Chunks that a sweep leaves."""

PLACE = TierPlace("place", {"model": "tiny"}, CHUNK)
HALF = Places(Shares({"alice": Share(guaranteed=0.5)}, Share(), 2))


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Any]:
    """Opens tiers over one directory, and closes them at the end."""
    benches: list[TierBench] = []

    def bench(place: TierPlace = PLACE, capacity: int = CAPACITY) -> TierBench:
        tier = ObjectTier(place, url=(tmp_path / "share").as_uri(), capacity_bytes=capacity)
        benches.append(TierBench(tier, ROOM, 8192, CHUNK))
        return benches[-1]

    yield bench
    for one in benches:
        await one.close()


def keys_of(numbers: range) -> list[bytes]:
    return [key_of(number) for number in numbers]


async def store(bench: TierBench, keys: list[bytes]) -> set[str]:
    """Store these keys; return what was told of other faults with that."""
    faults: set[str] = set()
    for at in range(0, len(keys), ROOM):
        some = keys[at : at + ROOM]
        done = await bench.store(some, [0] * len(some))
        assert done.ok == [True] * len(some)
        faults |= {done.error} if done.error else set()
    return faults


async def there(bench: TierBench, keys: list[bytes]) -> list[bool]:
    found: list[bool] = []
    for at in range(0, len(keys), ROOM):
        some = keys[at : at + ROOM]
        found += await bench.fetch(some, [0] * len(some))
    return found


def files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*") if path.is_file() and len(path.name) > 40}


def age(folder: Path, keys: list[bytes], seconds: float) -> None:
    """These were stored so long ago, one after the other."""
    found = files(folder)
    for number, key in enumerate(keys):
        when = time.time() - seconds + number
        os.utime(found[key.hex()], (when, when))


async def sweep(bench: TierBench) -> None:
    assert isinstance(bench.tier, ObjectTier)
    await bench.tier.sweep()


async def test_the_oldest_leave_a_directory_that_holds_too_much(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvstore")
    bench = opened()
    keys = keys_of(range(60))
    await store(bench, keys)
    age(tmp_path, keys, 500)
    await sweep(bench)
    assert await there(bench, keys) == [True] * 60, "there is room for them"
    more = keys_of(range(60, 68))
    await store(bench, more)
    foreign = next(iter(files(tmp_path).values())).with_name("a file of somebody else")
    foreign.write_text("")
    await sweep(bench)
    await sweep(bench)
    assert await there(bench, keys + more) == [False] * 8 + [True] * LEFT
    assert foreign.exists()
    (line,) = [each for each in caplog.records if "oldest chunks" in each.message]
    assert line.__dict__["kvstore.event"] == "store.shrunk"
    assert "the 8 oldest chunks" in line.message


async def test_what_is_read_stays(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = opened()
    # A sweep of its own might come between their ageing and their being read.
    monkeypatch.setattr(bench.tier._sweeper, "stored", lambda count: None)
    keys = keys_of(range(ROOM))
    await store(bench, keys)
    age(tmp_path, keys, 5000)
    assert await there(bench, keys[:8]) == [True] * 8
    await store(bench, keys_of(range(ROOM, ROOM + 4)))
    await sweep(bench)
    assert await there(bench, keys) == [True] * 8 + [False] * 8 + [True] * (ROOM - 16)


@pytest.mark.parametrize("shares", [HALF, None])
async def test_a_flood_of_one_tenant_takes_nothing_that_is_guaranteed_to_another(
    tmp_path: Path, opened: Any, shares: Places | None
) -> None:
    bench = opened(TierPlace("place", {}, CHUNK, None, shares))
    hers = tenant_keys("alice", keys_of(range(LEFT // 2)))
    his = tenant_keys("bob", keys_of(range(200)))
    await store(bench, hers)
    age(tmp_path, hers, 5000)
    await store(bench, his)
    await sweep(bench)
    # Without tenants it takes all.
    left = len(hers) if shares else 0
    assert sum(await there(bench, hers)) == left
    assert sum(await there(bench, his)) == LEFT - left


async def test_several_sweep_at_once_while_others_write(tmp_path: Path, opened: Any) -> None:
    hosts = [opened() for _ in range(3)]
    keys = keys_of(range(240))
    for first in range(0, 240, 60):
        some = keys[first : first + 60]
        await asyncio.gather(
            *(store(host, some[number::3]) for number, host in enumerate(hosts)),
            *map(sweep, hosts),
        )
    await asyncio.gather(*map(sweep, hosts))
    assert len(files(tmp_path)) <= LEFT
    left = [key for key in keys if key.hex() in files(tmp_path)]
    assert await there(hosts[0], left) == [True] * len(left)


async def test_those_who_sweep_at_once_remove_the_same(tmp_path: Path, opened: Any) -> None:
    """Also of values of one second, which are all equally old."""
    writer, *hosts = [opened(capacity=0), *(opened() for _ in range(4))]
    await store(writer, keys_of(range(124)))
    for path in files(tmp_path).values():
        os.utime(path, (1.7e9, 1.7e9))

    async def later(host: TierBench, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await sweep(host)

    await asyncio.gather(*(later(host, 0.02 * number) for number, host in enumerate(hosts)))
    assert len(files(tmp_path)) == LEFT


@pytest.mark.parametrize("odd", ["dot folder", "old folder", "open epoch", "link", "hexadecimal"])
async def test_what_is_odd_in_a_directory_keeps_nothing_else_there(
    tmp_path: Path, opened: Any, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvstore")
    writer, bench = opened(capacity=0), opened()
    await store(writer, keys_of(range(100)))
    within = next(iter(files(tmp_path).values())).parent
    epochs = within.parent.parent
    if odd == "dot folder":
        (within / ".folder").mkdir()
    elif odd == "old folder":
        (within / ".old").mkdir()
        os.utime(within / ".old", (0, 0))
    elif odd == "open epoch":
        (epochs / "abc").mkdir()
        (epochs / "abc").chmod(0o777)
    elif odd == "link":
        (epochs / "link").symlink_to("/nowhere")
    else:
        (within / "abcd").mkdir()
        os.utime(within / "abcd", (0, 0))
    for _ in range(3):
        await sweep(bench)
    assert len(files(tmp_path)) == LEFT
    assert "swept" not in caplog.text
    assert len([each for each in caplog.records if "oldest chunks" in each.message]) == 1


async def test_files_of_others_with_names_like_those_of_values_neither_count_nor_leave(
    tmp_path: Path, opened: Any
) -> None:
    bench = opened()
    await store(bench, keys_of(range(60)))
    within = next(iter(files(tmp_path).values())).parent
    for number in range(40):
        for folder in (within.parent / "snap", within.parent / "snap" / "deep"):
            folder.mkdir(exist_ok=True)
            (folder / f"{number:04x}").write_text("")
            os.utime(folder / f"{number:04x}", (0, 0))
    await sweep(bench)
    assert await there(bench, keys_of(range(60))) == [True] * 60
    assert len([path for path in tmp_path.rglob("snap/**/*") if path.is_file()]) == 80


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("place/0/00ff", b"\0\xff"),
        ("place/12ab/00", b"\0"),
        ("place/0/notes/cafe", b""),
        ("place/old/00", b""),
        ("place/0/0", b""),
        ("place/0/readme", b""),
        ("placex/0/00", b""),
        ("place/0/00/", b""),
    ],
)
def test_only_what_has_the_name_of_a_value_is_one(opened: Any, name: str, key: bytes) -> None:
    sweeper = opened().tier._sweeper
    place = sweeper._place
    assert sweeper._key_of(name.replace("place", place, 1)) == key


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
async def test_a_directory_that_cannot_be_read_does_not_count_as_empty(
    tmp_path: Path, opened: Any, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = opened()
    await bench.tier.clear()
    await store(bench, keys_of(range(1)))
    left = bench.tier._sweeper.epoch
    real = Mount.enter

    def enter(self: Mount, below: str, *, make: bool) -> int:
        if below.endswith(left):
            raise OSError(number, os.strerror(number))
        return real(self, below, make=make)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mount, "enter", enter)
        await bench.tier.clear()
        await sweep(bench)
        # The tier's own sweep may come next: it must meet the fault as well.
        assert "the store cannot be swept" in caplog.text
        assert len(files(tmp_path)) == 1
    await sweep(bench)
    assert not files(tmp_path)


async def test_processes_that_do_not_live_long_sweep_too(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "FIRST_SECONDS", 0.05)
    for life in range(30):
        bench = opened()
        await store(bench, keys_of(range(3 * life, 3 * life + 3)))
        if life == 29:
            await until_async(lambda: len(files(tmp_path)) <= LEFT)
        await bench.close()


async def test_a_sweep_that_fails_is_told_once_and_the_next_one_counts(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = opened()
    real = DirectoryClient.listed
    faults: list[Exception] = [StoreError("EIO"), StoreError("EIO"), ZeroDivisionError("no")]

    def listed(self: DirectoryClient, place: str, but: Any) -> Any:
        if faults:
            raise faults.pop(0)
        return real(self, place, but)

    monkeypatch.setattr(DirectoryClient, "listed", listed)
    counted: set[str] = set()
    for first in range(0, 100 * ROOM, ROOM):
        counted |= await store(bench, keys_of(range(first, first + ROOM)))
        if not faults:
            break
        await asyncio.sleep(0.05)
    await store(bench, keys_of(range(100 * ROOM, 101 * ROOM)))
    await until_async(lambda: len(files(tmp_path)) <= LEFT)
    told = [each for each in caplog.records if "swept" in each.message]
    assert [each.levelname for each in told] == ["WARNING"]
    assert "the store cannot be swept (EIO)" in told[0].message
    assert "a sweep raised" in caplog.text
    assert any(each.startswith("the store cannot be swept (EIO)") for each in counted)


@pytest.mark.parametrize("fault", [StoreError("the connection was closed"), ZeroDivisionError()])
async def test_a_sweep_that_fails_comes_again_though_nothing_more_is_stored(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    real, failed, mended = DirectoryClient.listed, 0, False

    def listed(self: DirectoryClient, place: str, but: Any) -> Any:
        nonlocal failed
        if mended:
            return real(self, place, but)
        failed += 1
        raise fault

    monkeypatch.setattr(DirectoryClient, "listed", listed)
    monkeypatch.setattr(sweeper, "FIRST_SECONDS", 0.02)
    bench = opened()
    monkeypatch.setattr(bench.tier._sweeper, "stored", lambda count: None)
    await store(bench, keys_of(range(ROOM)))
    await until_async(lambda: failed >= 3)
    assert len(files(tmp_path)) == ROOM
    mended = True
    await until_async(lambda: len(files(tmp_path)) == LEFT)


@pytest.mark.parametrize("kept", [1, LEFT])
async def test_a_value_that_cannot_be_removed_keeps_no_other_one(
    kept: int,
    tmp_path: Path,
    opened: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sweeper, "MOST_REMOVED", 4)
    # Who stores nothing sweeps only when asked.
    writer, bench, unlink = opened(capacity=0), opened(), os.unlink
    keys = keys_of(range(2 * LEFT))
    await store(writer, keys)
    age(tmp_path, keys, 1000)
    immutable, tried = {key.hex() for key in keys[:kept]}, []

    def refuses(path: Any, **more: Any) -> None:
        tried.append(path)
        if Path(path).name in immutable:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refuses)
    await sweep(bench)
    gone = (await there(bench, keys)).count(False)
    if kept == 1:
        assert gone == LEFT - 1
    else:
        # A store that refuses everything is not asked for long.
        assert gone == 0
        assert sweeper.MOST_REFUSED <= len(tried) <= 4 * sweeper.MOST_REFUSED
    assert "the store cannot be swept" in caplog.text
    assert "Operation not permitted" in caplog.text


async def test_resets_one_after_the_other_are_swept_together(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = opened()
    listings = 0
    real = DirectoryClient.listed

    async def listed(self: DirectoryClient, place: str, but: Any) -> Any:
        nonlocal listings
        listings += 1
        await asyncio.sleep(0.2)
        async for found in real(self, place, but):
            yield found

    monkeypatch.setattr(DirectoryClient, "listed", listed)
    for number in range(20):
        await bench.tier.clear()
        await store(bench, keys_of(range(number, number + 1)))
    await sweep(bench)
    assert listings < 10
    assert len(files(tmp_path)) == 1


async def test_a_file_of_any_name_keeps_no_directory_from_being_swept(
    tmp_path: Path, opened: Any
) -> None:
    bench = opened()
    await store(bench, keys_of(range(ROOM)))
    for path in files(tmp_path).values():
        (path.parent / os.fsdecode(b"not \xff UTF-8")).touch()
    await store(bench, keys_of(range(ROOM, 2 * ROOM)))
    await sweep(bench)
    assert sum(map(str.isascii, files(tmp_path))) <= ROOM


async def test_a_removal_that_takes_too_long_fails_no_question(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = (bench := opened()).tier, keys_of(range(ROOM))
    await store(bench, keys)
    tier._timeout = PATIENCE
    monkeypatch.setattr(sweeper, "MOST_REFUSED", 1)

    async def remove(self: DirectoryClient, names: Any) -> None:
        # As where its time is up; a question has as much as it needs on a busy machine.
        await asyncio.sleep(0.5)
        raise TimeoutError

    monkeypatch.setattr(DirectoryClient, "remove", remove)
    erasing = [tier.erase(keys[:2]) for _ in range(4)]
    sweeping = asyncio.gather(tier.sweep(), *erasing)
    while not sweeping.done():
        questions = await asyncio.gather(*(tier.holds(keys[:4]) for _ in range(8)))
        assert all(each.error is None for each in questions)


@pytest.mark.parametrize("lists", [False, True])
async def test_a_client_of_ones_own_is_swept_or_its_capacity_is_told_to_do_nothing(
    tmp_path: Path, opened: Any, *, lists: bool
) -> None:
    bench = opened()
    assert isinstance(bench.tier, ObjectTier)
    client = bench.tier.connect()
    # It has no ``complaint``.
    has = ["exists", "put", "get", "remove", "close", *["listed"] * lists]
    own = SimpleNamespace(**{name: getattr(client, name) for name in has})
    bench.tier._client_of = lambda: cast(StoreClient, own)
    await store(bench, keys_of(range(2 * ROOM)))
    await sweep(bench)
    assert len(files(tmp_path)) == (LEFT if lists else 2 * ROOM)
    told = "".join(await store(bench, keys_of(range(1))))
    assert ("cannot list its values" in told) is not lists


async def test_values_that_get_older_meanwhile_do_not_all_go(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody restores a directory from a copy, with the times that files had."""
    writer, bench = opened(capacity=0), opened()
    await store(writer, keys_of(range(80)))
    real = Ages.excess

    def excess(self: Ages, *what: Any) -> Any:
        for path in files(tmp_path).values():
            os.utime(path, (1.7e9, 1.7e9))
        return real(self, *what)

    monkeypatch.setattr(Ages, "excess", excess)
    await sweep(bench)
    assert len(files(tmp_path)) == LEFT


async def test_what_others_have_for_themselves_counts(tmp_path: Path, opened: Any) -> None:
    bench, other = opened(), opened()
    await other.tier.clear()
    keys = keys_of(range(40))
    await store(other, keys)
    age(tmp_path, keys, 500)
    more = keys_of(range(40, 80))
    await store(bench, more)
    await sweep(bench)
    assert await there(other, keys) == [False] * (80 - LEFT) + [True] * (LEFT - 40)
    assert await there(bench, more) == [True] * 40


async def test_a_share_that_is_away_is_swept_later(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = opened()
    await store(bench, keys_of(range(ROOM)))
    (tmp_path / "share" / "place").rename(tmp_path / "away")
    await sweep(bench)
    (tmp_path / "away").rename(tmp_path / "share" / "place")
    monkeypatch.setattr(sweeper, "SWEEP_SECONDS", 0.01)
    assert len(files(tmp_path)) == ROOM
    await store(bench, keys_of(range(ROOM, ROOM + ROOM // PARTS)))
    await until_async(lambda: len(files(tmp_path)) == LEFT)


def test_a_capacity_of_a_few_chunks_is_refused(opened: Any) -> None:
    for capacity in (100_000, -1):
        with pytest.raises(ValueError, match=f"capacity_bytes = {capacity}: must be 0, or 130048 "):
            opened(capacity=capacity)


def test_a_size_that_is_none_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity_bytes = 'much': allowed are bytes or text"):
        create_tier("object", PLACE, {"url": tmp_path.as_uri(), "capacity_bytes": "much"})
    create_tier("object", PLACE, {"url": tmp_path.as_uri(), "capacity_bytes": "1PiB"})


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400)), max_size=300),
    st.integers(0, 200), st.integers(2, 80),
)  # fmt: skip
def test_of_each_partition_the_oldest_go(
    values: list[tuple[int, int]], capacity: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeper, "MOST_AGES", most)
        places = Places(Shares({"a": Share(0.3), "b": Share(maximal=0.5)}, Share(), 1))
        ages = Ages()
        for partition, since in values:
            ages.add(partition, since)
        excess = ages.excess(capacity, capacity, places)
        width = excess.seconds
    left: list[tuple[int, int]] = []
    gone: list[tuple[int, int]] = []
    for partition, since in values:
        (gone if excess.takes(partition, since) else left).append((partition, since))
    counts = Counter(partition for partition, _ in values)
    kept = places.kept(counts, capacity)
    for place, count in counts.items():
        assert sum(partition == place for partition, _ in left) == min(count, kept[place])
        staying = [since // width for partition, since in left if partition == place]
        going = [since // width for partition, since in gone if partition == place]
        assert not staying or not going or max(going) <= min(staying)


async def test_a_removal_without_an_answer_is_given_up(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = (bench := opened()).tier, keys_of(range(ROOM))
    await store(bench, keys)
    tier._timeout = 0.2
    monkeypatch.setattr(sweeper, "MOST_REFUSED", 1)

    async def remove(self: DirectoryClient, names: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(DirectoryClient, "remove", remove)
    assert await asyncio.wait_for(tier.erase(keys[:1]), PATIENCE) == "no answer within 0.2 s"
    await asyncio.wait_for(tier.sweep(), PATIENCE)
