"""stat, compact and purge over real lanes."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.maintenance.offline import PurgedLane, compact, purge
from kvstore.maintenance.survey import Progress, survey, verify
from kvstore.tools.cli import main
from tests.patience import until_async
from tests.tools import test_command
from tests.tools.support import answering, error_of, in_a_process, json_of, run
from tests.tools.test_command import CHUNK

CAPACITY = 10 * 2**20
KEYS = [b"key-%04d" % index + b"\0\0\0\0" for index in range(120)]


def config(path: Path) -> dict[str, Any]:
    return test_command.config(path, "16MiB", CAPACITY)


def payload(key: bytes) -> bytes:
    return random.Random(key).randbytes(64) * (CHUNK // 64)


async def fill(path: Path, keys: list[bytes]) -> None:
    async with kvstore.open(config(path)) as store:
        assert await store.put(keys, [payload(key) for key in keys]) == len(keys)


async def survivors(path: Path) -> set[bytes]:
    """Keys that can be had, each checked to have its bytes."""
    found = set()
    async with kvstore.open(config(path)) as store:
        for key in KEYS:
            async with store.get([key]) as chunks:
                if len(chunks):
                    assert bytes(chunks[0]) == payload(key)
                    found.add(key)
    return found


def files(path: Path) -> int:
    return sum(f.stat().st_size for f in path.glob("*/lane-0/segment-*"))


async def sparse_cache(path: Path) -> set[bytes]:
    """A cache in which two thirds of the chunks were purged at random; returns who is left."""
    await fill(path, KEYS)
    left = set(random.Random(3).sample(KEYS, 40))
    purge(path, key=set(KEYS) - left)
    return left


async def test_compaction_gives_files_back_and_loses_nothing(tmp_path: Path) -> None:
    left = await sparse_cache(tmp_path)
    before = files(tmp_path)
    (done,) = compact(tmp_path)
    assert done.result is not None
    assert done.result.after.segments == done.result.after.needed < done.result.before.segments
    assert files(tmp_path) == done.result.after.file_bytes < before
    run("verify", tmp_path)
    assert await survivors(tmp_path) == left


async def test_compaction_after_a_reset_loses_nothing_and_keeps_what_was_forgotten_forgotten(
    tmp_path: Path,
) -> None:
    await fill(tmp_path, KEYS[60:])
    async with kvstore.open(config(tmp_path)) as store:
        await store.reset()
    left = await sparse_cache(tmp_path)
    promised, done = compact(tmp_path, dry_run=True)[0], compact(tmp_path)[0]
    assert done.result is not None
    assert promised.result is not None
    assert not done.result.faults
    assert done.result.dropped == 0
    assert (done.result.before.live, done.result.after.live) == (len(left), len(left))
    assert promised.result.after.segments == done.result.after.segments
    assert done.result.after.segments < done.result.before.segments
    assert await survivors(tmp_path) == left


async def test_compaction_puts_chunks_that_follow_each_other_side_by_side(tmp_path: Path) -> None:
    shuffled = random.Random(5).sample(KEYS, len(KEYS))
    await fill(tmp_path, shuffled)
    purge(tmp_path, key=shuffled[::3])
    (done,) = compact(tmp_path)
    assert done.result is not None
    before, after = done.result.before, done.result.after
    assert after.live == before.live
    assert 2 * after.extents < before.extents


async def test_a_dry_run_says_what_would_be_gained_and_changes_nothing(tmp_path: Path) -> None:
    await sparse_cache(tmp_path)
    before = {f: f.read_bytes() for f in tmp_path.glob("*/lane-0/segment-*")}
    told = json_of("compact", tmp_path, "--dry-run")
    assert {f: f.read_bytes() for f in tmp_path.glob("*/lane-0/segment-*")} == before
    done = json_of("compact", tmp_path)
    promised, got = told["lanes"][0]["result"]["after"], done["lanes"][0]["result"]["after"]
    assert promised["segments"] == got["segments"]
    assert promised["file_bytes"] == got["file_bytes"]


@pytest.mark.parametrize("how", ["mode", "link"])
async def test_a_dry_run_promises_nothing_of_segments_that_are_left_alone(
    tmp_path: Path, how: str
) -> None:
    await sparse_cache(tmp_path)
    segment = sorted(tmp_path.glob("*/lane-0/segment-*"))[0]
    if how == "mode":
        segment.chmod(0o666)
    else:
        os.link(segment, tmp_path / "second-name")
    (promised,), (done,) = compact(tmp_path, dry_run=True), compact(tmp_path)
    assert promised.result is not None
    assert done.result is not None
    assert promised.result.before == done.result.before
    assert promised.result.after == done.result.after
    assert promised.result.faults == done.result.faults
    assert [fault.path for fault in done.result.faults] == [str(segment)]


async def test_compacting_twice_moves_nothing_the_second_time(tmp_path: Path) -> None:
    await sparse_cache(tmp_path)
    compact(tmp_path)
    (again,) = compact(tmp_path)
    assert again.result is not None
    assert again.result.moved == 0


async def test_compaction_drops_a_damaged_chunk_and_says_so(tmp_path: Path) -> None:
    left = await sparse_cache(tmp_path)
    told = json_of("inspect", tmp_path)
    segments = told["namespaces"][0]["lanes"][0]["segments"]
    segment = min((s for s in segments if s["live"]), key=lambda s: s["live"])
    with open(segment["path"], "r+b") as file:
        file.seek(segment["file_bytes"] - segment["slots"] * segment["slot_bytes"])
        file.write(os.urandom(segment["slots"] * segment["slot_bytes"]))
    result = json_of("compact", tmp_path, status=1)["lanes"][0]["result"]
    assert result["dropped"] == segment["live"]
    assert len(await survivors(tmp_path)) == len(left) - segment["live"]


@pytest.mark.parametrize("place", range(1, 6))
async def test_a_lane_that_cannot_be_compacted_for_want_of_threads_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    left = await sparse_cache(tmp_path)
    start, started = threading.Thread.start, itertools.count(1)

    def fails(thread: threading.Thread) -> None:
        if next(started) == place:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        (done,) = compact(tmp_path)
    assert done.failed is not None
    assert "can't start new thread" in done.failed
    assert set(os.listdir("/proc/self/fd")) == before
    (done,) = compact(tmp_path)
    assert (done.failed, done.refused) == (None, None)
    assert await survivors(tmp_path) == left


async def test_commands_that_change_a_lane_refuse_one_in_use_and_name_its_process(
    tmp_path: Path,
) -> None:
    await fill(tmp_path, KEYS[:10])
    async with kvstore.open(config(tmp_path)) as store:
        for name, *more in (("compact",), ("purge", "--all")):
            done = in_a_process(name, str(tmp_path), *more)
            assert done.returncode == 1
            assert f"in use by process {os.getpid()}" in done.stdout
        run("inspect", tmp_path)
        assert await store.resolve(KEYS[:10]) == 10


async def test_purge_by_age_key_and_namespace(tmp_path: Path) -> None:
    await fill(tmp_path, KEYS[:10])
    assert purge(tmp_path, unused_since_ms=1000)[0].chunks == 0
    assert purge(tmp_path, key=KEYS[3])[0].chunks == 1
    (namespace,) = [folder.name for folder in tmp_path.iterdir()]
    assert namespace in error_of("purge", tmp_path, "--namespace", "other")
    assert purge(tmp_path, namespace=namespace, dry_run=True)[0].chunks == 9
    assert await survivors(tmp_path) == set(KEYS[:10]) - {KEYS[3]}
    assert json_of("purge", tmp_path, "--unused", "1h")["lanes"][0]["chunks"] == 0
    run("purge", tmp_path, "--all")
    assert await survivors(tmp_path) == set()


async def test_what_a_neighbour_may_read_is_not_purged_as_unused(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as one, kvstore.open(config(tmp_path)) as other:
        await one.put(KEYS[:10], [payload(key) for key in KEYS[:10]], durable=True)
        await one.close()
        await until_async(lambda: other.contains_prefix(KEYS[:10]) == 10)
        (lane,) = [each for each in purge(tmp_path, unused_since_ms=2**50) if "lane-0" in each.lane]
        assert f"may be read by process {os.getpid()}" in (lane.refused or "")
        assert await other.resolve(KEYS[:10]) == 10
    assert sum(each.chunks for each in purge(tmp_path, unused_since_ms=2**50)) == 10


async def test_gc_keeps_what_can_be_found_and_goes_on_after_one_that_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("one", "two", "three", "reset"):
        its = config(tmp_path) | {"identity": {"model": model}, "namespace": model}
        async with kvstore.open(its) as store:
            await store.put(KEYS[:5], [payload(key) for key in KEYS[:5]], durable=True)
            if model == "reset":
                await store.reset()

    def purges(path: str, **named: Any) -> list[PurgedLane]:
        if Path(path).name == "two":
            shutil.rmtree(path)
        return purge(path, **named)

    monkeypatch.setattr("kvstore.tools.upkeep.purge", purges)
    told = json_of("gc", tmp_path, "--keep", "1", "--yes", status=2)
    assert sorted(told["emptied"]) == ["one", "reset", "two"]
    assert [Path(each["lane"]).name for each in told["lanes"] if each["failed"]] == ["two"]
    assert sum(each["chunks"] for each in told["lanes"]) == 5


async def test_a_lane_whose_owner_could_not_write_who_it_is_is_in_use_all_the_same(
    tmp_path: Path,
) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await store.put(KEYS[:5], [payload(key) for key in KEYS[:5]], durable=True)
        (lock,) = tmp_path.glob("*/lane-0/lock")
        os.truncate(lock, 0)
        assert re.search(r"\n +0 +\? +5 ", run("inspect", tmp_path))
        assert "is in use by process ?" in run("purge", tmp_path, "--all", "--yes", status=1)
        assert await store.resolve(KEYS[:5]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to purge"),
        (("--unused", "soon"), "allowed are ages such as"),
        (("--key", "xyz"), "must be the key in hex"),
    ],
)
def test_purge_refuses_what_it_does_not_understand(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_of("purge", tmp_path, *arguments)


async def test_what_a_tenant_has_is_counted_and_purged_by_name(tmp_path: Path) -> None:
    async with kvstore.open({**config(tmp_path), "tenants": {}}) as store:
        for tenant, count in (("alice", 30), ("bob", 20), ("carol", 10)):
            keys = kvstore.tenant_keys(tenant, KEYS[:count])
            await store.put(keys, [bytes(CHUNK)] * count, durable=True)
    names = ("--tenant", "alice", "--tenant", "bob", "--tenant", "nobody")
    said = run("inspect", tmp_path, *names)
    for row in ("alice      30", "bob      20", "nobody       0", "others      10"):
        assert row in said
    (namespace,) = json_of("inspect", tmp_path, *names)["namespaces"]
    assert namespace["tenants"] == {"alice": 30, "bob": 20, "nobody": 0, "others": 10}
    assert purge(tmp_path, tenant="alice", key=KEYS[0])[0].chunks == 0
    run("purge", tmp_path, "--tenant", "alice")
    async with kvstore.open({**config(tmp_path), "tenants": {}}) as store:
        for tenant, left in (("alice", 0), ("bob", 20), ("carol", 10)):
            assert sum(store.contains(kvstore.tenant_keys(tenant, KEYS))) == left


async def test_a_purge_of_several_keys_or_tenants_forgets_each_of_them(tmp_path: Path) -> None:
    async with kvstore.open({**config(tmp_path), "tenants": {}}) as store:
        for tenant in ("alice", "bob", "carol"):
            its = kvstore.tenant_keys(tenant, KEYS[:10])
            await store.put(its, [bytes(CHUNK)] * 10, durable=True)
    keys = [option for key in its[:3] for option in ("--key", key.hex())]
    assert "forgot 3 chunks" in run("purge", tmp_path, *keys)
    assert "forgot 20 chunks" in run("purge", tmp_path, "--tenant", "alice", "--tenant", "bob")
    assert purge(tmp_path, tenant="carol", key=its[3])[0].chunks == 1
    assert purge(tmp_path, tenant=["alice", "carol"], key=its)[0].chunks == 6


async def test_a_purge_does_not_write_into_a_file_that_others_may_write_to(tmp_path: Path) -> None:
    await fill(tmp_path, KEYS)
    segments = sorted(tmp_path.glob("*/lane-0/segment-*"))
    for segment in segments:
        segment.chmod(0o666)
    (done,) = purge(tmp_path, key=KEYS[0])
    assert done.chunks == 0
    assert [fault.path for fault in done.faults] == [str(segments[0])]
    for segment in segments:
        segment.chmod(0o600)
    assert KEYS[0] in await survivors(tmp_path)


def counted(path: Path) -> list[int]:
    """Of each lane the chunks that somebody may find, which are those that `verify` reads."""
    told = [one for one in verify(path) if isinstance(one, Progress)]
    its = [
        sum(segment.counted for segment in lane.segments)
        for namespace in survey(path)
        for lane in namespace.lanes
    ]
    done = compact(path, dry_run=True)
    for one, live in zip(done, its, strict=True):
        assert one.refused or (one.result and one.result.before.live) == live
    assert told[-1].chunks == sum(its)
    return its


async def test_chunks_count_that_somebody_may_find_over_resets(tmp_path: Path) -> None:
    payloads = [payload(key) for key in KEYS[:8]]
    async with kvstore.open(config(tmp_path)) as store:
        await store.put(KEYS[:8], payloads, durable=True)
        assert counted(tmp_path) == [8]
        await store.reset()
        # Nobody finds the old ones, and it has stored nothing since.
        assert counted(tmp_path) == [0]
        await store.put(KEYS[:2], payloads[:2], durable=True)
        assert counted(tmp_path) == [2]
        async with kvstore.open(config(tmp_path)) as neighbour:
            await neighbour.put(KEYS[4:8], payloads[4:8], durable=True)
            await until_async(lambda: store.contains_prefix(KEYS[4:8]) == 4)
            await neighbour.reset()
            assert counted(tmp_path) == [2, 4]
            # Whoever was not reset goes on with what the neighbour had.
            assert store.contains(KEYS[4:8]) == [True] * 4
            async with store.get(KEYS[4:8]) as chunks:
                assert [bytes(one) for one in chunks] == payloads[4:8]
            await neighbour.put(KEYS[20:21], [payload(KEYS[20])], durable=True)
            # The new one may lie in the place of one of those.
            assert counted(tmp_path)[1] in (4, 5)
    assert counted(tmp_path) == [0, 1]


async def strays(tmp_path: Path) -> Path:
    """A cache of four chunks, and a segment of another namespace that lies in it."""
    await fill(tmp_path / "here", KEYS[:4])
    async with kvstore.open(
        {**config(tmp_path / "there"), "identity": {"model": "other"}}
    ) as store:
        await store.put(KEYS[:60], [payload(key) for key in KEYS[:60]], durable=True)
    (lane,) = (tmp_path / "here").glob("*/lane-0")
    (stray,) = (tmp_path / "there").glob("*/lane-0/segment-0.*")
    shutil.copy(stray, lane / "segment-7.safetensors")
    return lane / "segment-7.safetensors"


async def test_a_segment_that_strayed_in_is_told_and_left_alone(tmp_path: Path) -> None:
    stray = await strays(tmp_path)
    before, here = stray.read_bytes(), tmp_path / "here"
    told = list(verify(here))
    (fault,) = (one for one in told if not isinstance(one, Progress))
    assert fault.what == "belongs to another namespace"
    assert counted(here) == [4]
    (lane,) = survey(here)[0].lanes
    assert lane.other_bytes >= stray.stat().st_size
    for forgotten in (4, 0):
        (done,) = purge(here)
        assert (done.chunks, [fault.what for fault in done.faults]) == (
            forgotten, ["belongs to another namespace"]
        )  # fmt: skip
    compact(here)
    # Nobody knows whose it is.
    assert ": belongs to another namespace" in run("gc", here, "--keep", "1", status=1)
    assert stray.read_bytes() == before


async def test_an_import_beside_files_that_are_left_alone_displaces_nothing(
    tmp_path: Path,
) -> None:
    await strays(tmp_path)
    here = tmp_path / "here"
    await fill(tmp_path / "more", KEYS[60:100])
    (namespace,) = (tmp_path / "more").iterdir()
    export_bundle(namespace, tmp_path / "bundle")
    (lane,) = here.glob("*/lane-0")
    (lane / "core.123").write_bytes(bytes(3 * 2**20))
    done = import_bundle(tmp_path / "bundle", here)
    assert done.stored == 40
    assert counted(here) == [44]


async def test_a_cache_whose_epoch_was_lost_is_told_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    async with kvstore.open(config(cache)) as store:
        await store.reset()
        await store.put(KEYS[:8], [payload(key) for key in KEYS[:8]], durable=True)
    (epoch,) = cache.glob("*/epoch")
    kept = epoch.read_bytes()
    epoch.unlink()
    for words, status in (("inspect", 1), ("verify", 1), ("compact", 2), ("purge --all", 2)):
        for more in ([], ["--dry-run"]) if status == 2 else ([],):
            name, *rest = words.split()
            assert main([name, str(cache), *rest, *more]) == status, words
            told = capsys.readouterr()
            assert (
                "was lost, so nobody can tell which chunks are still right" in told.out + told.err
            )
    epoch.write_bytes(kept)
    assert counted(cache) == [8]
    # Nor is there a chunk needed for it: whose lane it was has told its epoch.
    run("purge", cache, "--all", "--yes")
    run("compact", cache)
    epoch.unlink()
    capsys.readouterr()
    assert "was lost, so nobody can tell which chunks are still right" in run(
        "verify", cache, status=1
    )


async def test_a_person_is_asked_before_chunks_are_erased_that_nobody_finds(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await store.put(KEYS[:8], [payload(key) for key in KEYS[:8]], durable=True)
        await store.reset()
    done = answering("n", "purge", tmp_path, "--all")
    assert (done.returncode, "forget 0 chunks, 0 B" in done.stderr) == (2, True)
    assert "forgot 0 chunks, 0 B, and 8 that nobody would find" in run(
        "purge", tmp_path, "--all", "--yes"
    )
