"""`kvstore export`, `import` and `show`: chunks carried from one cache to another, verified."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import kvstore
from kvstore.errors import KVStoreError, PathUnusableError
from kvstore.gate import Gate
from kvstore.maintenance import bundle, survey
from kvstore.maintenance.bundle import (
    Place,
    export_bundle,
    import_bundle,
    places_of,
    read_chunk,
    the_namespace,
)
from kvstore.maintenance.offline import compact, purge
from kvstore.tiers.disk.epoch import raise_epoch
from kvstore.tiers.disk.format import SEGMENT_BYTES
from kvstore.tiers.disk.namespace import FILE_NAME
from tests.patience import PATIENCE
from tests.store.support import CHUNK, contents, keys_of, payloads, small
from tests.tools.support import command, error_of, in_a_process, json_of, run

KEYS = keys_of("prompt", 20)


def settings(path: Path, model: str = "one") -> dict[str, Any]:
    return {**small(path, disk=64), "identity": {"model": model}}


async def fill(path: Path, keys: list[bytes] = KEYS, model: str = "one") -> Path:
    async with kvstore.open(settings(path, model)) as store:
        assert await store.put(keys, payloads(keys), durable=True) == len(keys)
    (namespace,) = path.glob(f"{model}-*")
    return namespace


def damage(place: Place) -> None:
    with place.path.open("r+b") as segment:
        segment.seek(place.offset)
        segment.write(b"damage")


def cannot_search(monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> None:
    """Folders of that name cannot be looked into."""
    real = survey._holds_namespace

    def holds(folder: Path) -> bool:
        if folder.name == name:
            raise OSError(error, os.strerror(error))
        return real(folder)

    monkeypatch.setattr(survey, "_holds_namespace", holds)


def two_keys(tmp_path: Path) -> list[Path]:
    """The files of two keys."""
    paths = [tmp_path / "keys", tmp_path / "others"]
    for number, path in enumerate(paths):
        path.write_text(f'"*" = "{bytes([number] * 32).hex()}"\n')
        path.chmod(0o600)
    return paths


async def exported(tmp_path: Path) -> Path:
    """A bundle of a cache that lies in `here`."""
    await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    run("export", tmp_path / "here", file)
    return file


async def test_what_is_exported_is_found_where_it_is_imported(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    assert "20 chunks, 80.0 KiB" in run("export", tmp_path / "here", file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"{namespace.name}: has 20 of 20 chunks now" in run("import", file, tmp_path / "there")
    # The server that comes finds them under the name that it makes itself.
    async with kvstore.open(settings(tmp_path / "there")) as store:
        assert await store.resolve(KEYS) == 8, "what host memory holds"
        async with store.windows(KEYS, 4) as windows:
            read = [bytes(chunk) async for chunks in windows for chunk in chunks]
        assert read == payloads(KEYS)
    async with kvstore.open(settings(tmp_path / "there", "other")) as store:
        assert await store.resolve(KEYS) == 0


async def test_a_bundle_is_a_safetensors_file_with_its_identity(tmp_path: Path) -> None:
    file = await exported(tmp_path)
    arrays = load_file(str(file))
    assert {bytes.fromhex(name): array.tobytes() for name, array in arrays.items()} == dict(
        zip(KEYS, payloads(KEYS), strict=True)
    )
    with safe_open(str(file), "np") as opened:
        told = opened.metadata()
    assert json.loads(told["identity"])["model"] == "one"
    assert told["format"] == "kvstore bundle"


async def test_of_two_copies_a_whole_one_is_exported_and_shown(tmp_path: Path) -> None:
    here = tmp_path / "here"
    namespace = await fill(here)
    shutil.copytree(namespace / "lane-0", namespace / "lane-1")
    found = places_of(the_namespace(here))
    assert all(place.older is not None for place in found.values())
    place = found[KEYS[0]]
    damage(place)
    file_of = tmp_path / "bundle.safetensors"
    done = export_bundle(here, file_of)
    assert (done.chunks, done.faults) == (len(KEYS), [])
    assert load_file(str(file_of))[KEYS[0].hex()].tobytes() == payloads(KEYS[:1])[0]
    told = json_of("show", here, KEYS[0].hex())
    assert told["whole"] is True
    assert told["segment"] != str(place.path)


async def test_some_keys_may_be_named_and_a_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    named = [word for key in KEYS[3:5] for word in ("--key", key.hex())]
    run("export", tmp_path / "here", file, *named)
    assert set(load_file(str(file))) == {key.hex() for key in KEYS[3:5]}
    assert "exists: remove it, or say --force" in error_of("export", tmp_path / "here", file)
    run("export", tmp_path / "here", file, "--force")
    assert len(load_file(str(file))) == 20
    assert "1 keys are not there, such as 00ff" in error_of(
        "export", tmp_path / "here", tmp_path / "x", "--key", "00ff"
    )
    assert {one.name for one in tmp_path.iterdir()} == {"here", "bundle.safetensors"}


async def test_a_disk_that_cannot_take_a_bundle_is_told_with_the_file(tmp_path: Path) -> None:
    await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    words = [sys.executable, "-m", "kvstore.tools", "export", str(tmp_path / "here"), str(file)]
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert f"kvstore: {file}: File too large" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["here"]


async def test_a_cache_that_goes_while_it_is_exported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path / "here")
    read = bundle.read_whole

    def gone(*told: Any) -> Any:
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        return read(*told)

    monkeypatch.setattr(bundle, "read_whole", gone)
    error = error_of("export", tmp_path / "here", tmp_path / "bundle.safetensors")
    assert str(tmp_path / "here") in error
    assert "None" not in error


async def test_what_a_reset_forgot_is_not_exported_beside_the_server(tmp_path: Path) -> None:
    """Its lane has chunks of before alone, and they are of other weights."""
    file = tmp_path / "bundle.safetensors"
    async with kvstore.open(settings(tmp_path / "here")) as store:
        assert await store.put(KEYS, payloads(KEYS), durable=True) == len(KEYS)
        await store.reset()
        done = command("export", str(tmp_path / "here"), str(file))
        assert (done.returncode, file.exists()) == (2, False)
        assert "holds no chunk to export" in done.stderr
        assert await store.put(KEYS[:2], payloads(KEYS[:2]), durable=True) == 2
        run("export", tmp_path / "here", file)
        assert set(load_file(str(file))) == {key.hex() for key in KEYS[:2]}


@pytest.mark.parametrize("name", ["namespace.json", "epoch"])
async def test_of_what_no_server_would_open_there_is_no_bundle(tmp_path: Path, name: str) -> None:
    """Nobody could import it, or tell which of its chunks are right."""
    (await fill(tmp_path / "here") / name).write_text("rubbish")
    assert name in error_of("export", tmp_path / "here", tmp_path / "bundle")
    assert [one.name for one in tmp_path.iterdir()] == ["here"]


async def test_where_its_epoch_is_lost_nothing_is_taken_for_right(tmp_path: Path) -> None:
    """The chunks of before a reset would be those that count again."""
    async with kvstore.open(settings(tmp_path / "here")) as store:
        assert await store.put(KEYS, payloads(KEYS), durable=True) == len(KEYS)
        await store.reset()
        assert await store.put(KEYS[:1], payloads(KEYS[:1]), durable=True) == 1
    (namespace,) = (tmp_path / "here").iterdir()
    (namespace / "epoch").unlink()
    for act in (
        ["export", str(namespace), str(tmp_path / "b")],
        ["show", str(namespace), KEYS[1].hex()],
    ):
        assert "epoch" in error_of(*act)
    assert not (tmp_path / "b").exists()


async def test_what_it_is_of_is_known_although_it_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = await fill(tmp_path / "here")

    def fails(folder: Path) -> Any:
        raise PathUnusableError("Too many open files")

    monkeypatch.setattr("kvstore.maintenance.survey.read_namespace", fails)
    export_bundle(namespace, tmp_path / "bundle")
    monkeypatch.undo()
    assert import_bundle(tmp_path / "bundle", tmp_path / "there").stored == len(KEYS)


async def test_an_import_displaces_nothing_that_is_there(tmp_path: Path) -> None:
    """Neither in its own namespace nor in others of the path, whose lanes nobody uses."""
    more = keys_of("more", 60)
    file = await exported(tmp_path)
    await fill(tmp_path / "there", more)
    await fill(tmp_path / "there", more[:30], "other")
    for lane in (tmp_path / "there").glob("*/lane-*/lock"):
        os.utime(lane, (1, 1))
    run("import", file, tmp_path / "there")
    async with kvstore.open(settings(tmp_path / "there")) as store:
        assert store.contains([*more, *KEYS]) == [True] * (len(more) + len(KEYS))
    async with kvstore.open(settings(tmp_path / "there", "other")) as store:
        assert store.contains(more[:30]) == [True] * 30


@pytest.mark.parametrize("odd", ["a link to itself", "segments cut short", "a small capacity"])
async def test_an_import_displaces_nothing_where_something_is_odd(tmp_path: Path, odd: str) -> None:
    file, there = await exported(tmp_path), tmp_path / "there"
    more = keys_of("more", 60)
    namespace = await fill(there, more)
    if odd == "a link to itself":
        (there / "loop").symlink_to("loop")
        run("verify", there)
    elif odd == "segments cut short":
        for path in sorted(namespace.rglob("segment-*"))[:2]:
            os.truncate(path, path.stat().st_size // 4)
    whole = [key for key, place in places_of(the_namespace(there)).items() if read_chunk(place)]
    small = ["--capacity", "100KiB"] if odd == "a small capacity" else []
    done = command("import", str(file), str(there), *small)
    assert done.returncode == (2 if small else 0), done.stderr
    if small:
        assert "some of the chunks that are there would be removed" in done.stderr
    async with kvstore.open(settings(there)) as store:
        assert store.contains(whole) == [True] * len(whole)
        assert store.contains(KEYS) == [not small] * len(KEYS)


async def test_an_import_does_not_guess_how_much_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, there = await exported(tmp_path), tmp_path / "there"
    namespace = await fill(there, keys_of("more", 60))
    cannot_search(monkeypatch, namespace.name, errno.EIO)
    with pytest.raises(PathUnusableError, match="Input/output error"):
        import_bundle(file, there)


@pytest.mark.parametrize("model", ["one", "a lane", "other"])
async def test_an_import_into_less_than_is_there_removes_no_free_lane(
    tmp_path: Path, model: str
) -> None:
    lanes, model = 1 + (model == "one"), model.replace("a lane", "one")
    file, there = await exported(tmp_path), tmp_path / "there"
    more = keys_of("more", 60)
    await fill(there, more, model)
    if lanes == 2:
        # As a second process has one.
        async with (
            kvstore.open(settings(there, model)),
            kvstore.open(settings(there, model)) as two,
        ):
            await two.put(more[30:], payloads(more[30:]), durable=True)
    held = sum(path.stat().st_size for path in there.rglob("segment-*"))
    for lane in there.glob("*/lane-*/lock"):
        os.utime(lane, (1, 1))
    with pytest.raises(KVStoreError, match=r"some of the chunks that are there.* at least \d+"):
        import_bundle(file, there, capacity_bytes=held + 8192)
    before = sorted(there.rglob("segment-*"))
    needed = 2 * held + 2**20
    assert import_bundle(file, there, capacity_bytes=needed).stored == len(KEYS)
    assert set(before) <= set(there.rglob("segment-*"))
    async with kvstore.open(settings(there, model)) as store:
        assert store.contains(more) == [True] * len(more)
    # Once more there is nothing to make room for.
    assert import_bundle(file, there, capacity_bytes=needed).there == len(KEYS)


async def test_an_import_fills_the_slots_that_are_free_in_its_lane(tmp_path: Path) -> None:
    file, there = await exported(tmp_path), tmp_path / "there"
    capacity = 2**20
    assert import_bundle(file, there, capacity_bytes=capacity).stored == len(KEYS)
    held = sum(path.stat().st_size for path in there.rglob("*") if path.is_file())
    purge(there, key=KEYS[:5])
    done = import_bundle(file, there, capacity_bytes=held)
    assert (done.there, done.stored) == (len(KEYS) - 5, len(KEYS))


async def test_to_import_what_is_there_is_no_use_of_it(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    file = tmp_path / "bundle"
    export_bundle(tmp_path / "here", file)
    before = places_of(the_namespace(namespace))
    assert import_bundle(file, tmp_path / "here").there == len(KEYS)
    after = places_of(the_namespace(namespace))
    assert {key: (place.reads, place.read_ms) for key, place in after.items()} == {
        key: (place.reads, place.read_ms) for key, place in before.items()
    }


async def test_an_import_of_what_is_there_makes_no_lane(tmp_path: Path) -> None:
    file = await exported(tmp_path)
    async with kvstore.open(settings(tmp_path / "here")):
        told = json_of("import", file, tmp_path / "here")
    assert (told["chunks"], told["there"], told["stored"]) == (20, 20, 20)
    assert [each.name for each in (tmp_path / "here").glob("*/lane-*")] == ["lane-0"]
    (lane,) = (tmp_path / "here").glob("*/lane-0")
    for folder in (lane.parent, lane):
        folder.chmod(0o777)
        with pytest.raises(KVStoreError, match="may be written by every user"):
            import_bundle(file, tmp_path / "here")
        folder.chmod(0o700)


async def test_an_import_mends_a_chunk_of_which_any_copy_is_damaged(tmp_path: Path) -> None:
    here, file = tmp_path / "here", tmp_path / "bundle"
    namespace = await fill(here)
    export_bundle(here, file)
    shutil.copytree(namespace / "lane-0", namespace / "lane-1")
    place = places_of(the_namespace(here))[KEYS[0]]
    assert place.older is not None
    for copy in (place, place.older):
        with copy.path.open("r+b") as segment:
            segment.seek(copy.offset)
            whole = segment.read(6)
            segment.seek(copy.offset)
            segment.write(b"damage")
        done = import_bundle(file, here)
        assert (done.faults, done.stored) == ([], len(KEYS))
        async with kvstore.open(settings(here)) as store:
            assert await contents(store, KEYS[:1]) == payloads(KEYS[:1])
        with copy.path.open("r+b") as segment:
            segment.seek(copy.offset)
            segment.write(whole)


async def test_a_capacity_counts_only_lanes_that_hold_something(tmp_path: Path) -> None:
    file, there = await exported(tmp_path), tmp_path / "there"
    with pytest.raises(KVStoreError, match=r"4096 bytes hold no segment: give at least \d+"):
        import_bundle(file, there, capacity_bytes=4096)
    assert not there.exists()
    assert import_bundle(file, there, capacity_bytes=2**20).stored == len(KEYS)
    purge(there)
    # Its files are as large as they were, and have nothing to lose.
    assert import_bundle(file, there, capacity_bytes=200 * 1024).stored == len(KEYS)


async def test_an_import_into_smaller_segments_displaces_nothing(tmp_path: Path) -> None:
    more, keys = keys_of("more", 20), keys_of("prompt", 400)
    there = settings(tmp_path / "there")
    there["tiers"][0] |= {"segment_bytes": "12KiB", "capacity_bytes": "1MiB"}
    here = settings(tmp_path / "here")
    here["tiers"][0] |= {"segment_bytes": "256KiB", "capacity_bytes": "16MiB"}
    for config, its in ((there, more), (here, keys)):
        async with kvstore.open(config) as store:
            assert await store.put(its, payloads(its), durable=True) == len(its)
    file = tmp_path / "bundle"
    export_bundle(tmp_path / "here", file)
    assert import_bundle(file, tmp_path / "there").stored == len(keys)
    there["tiers"][0]["capacity_bytes"] = "64MiB"
    async with kvstore.open(there) as store:
        assert store.contains(more) == [True] * len(more)


@pytest.mark.parametrize("below", [".", "lane-0"])
async def test_a_namespace_is_no_place_for_another_one(tmp_path: Path, below: str) -> None:
    namespace, file = await fill(tmp_path / "here"), tmp_path / "bundle"
    run("export", namespace, file)
    assert "a namespace: give the folder that it is in" in error_of(
        "import", file, namespace / below
    )


async def test_what_is_no_file_of_its_own_is_not_replaced_by_a_bundle(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("target")
    for file, what in [
        (pipe, "is no regular file"),
        (tmp_path, "is no regular file"),
        (Path("/"), "is no regular file"),
        (Path(), "is no regular file"),
        (namespace / FILE_NAME, "is in the cache itself"),
        (Path("/proc/x"), "/proc/x"),
    ]:
        with pytest.raises((KVStoreError, OSError), match=what):
            export_bundle(namespace, file, replace=True)
    assert pipe.is_fifo()
    export_bundle(namespace, link)
    assert link.is_symlink(), "the file behind it is made"
    assert (tmp_path / "target").stat().st_size > 0


async def test_what_killed_exports_have_left_is_removed(tmp_path: Path) -> None:
    namespace, file = await fill(tmp_path / "here"), tmp_path / "bundle"
    old, new, other = (tmp_path / name for name in (
        ".bundle.17-0123abcd", ".bundle.18-0123abcd", ".bundle.mine-0123abcd",
    ))  # fmt: skip
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1, 1))
    export_bundle(namespace, file)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {file.name, new.name, other.name}


async def test_a_chunk_whose_key_is_not_known_is_not_called_damaged(tmp_path: Path) -> None:
    secrets, others = two_keys(tmp_path)
    config = settings(tmp_path / "here") | {"encryption_keys": str(secrets), "tenants": {}}
    async with kvstore.open(config) as store:
        await store.put([b"key"], [bytes(CHUNK)], durable=True)
    shown = ["show", str(tmp_path / "here"), b"key".hex(), "--keys"]
    for keys, whole, status in [(secrets, "yes", 0), (others, "not checked: no key", 0)]:
        done = command(*shown, str(keys))
        assert (done.returncode, f"whole      {whole}" in done.stdout) == (status, True), done


async def test_of_two_copies_that_is_shown_which_the_keys_open(tmp_path: Path) -> None:
    secrets = two_keys(tmp_path)
    with contextlib.ExitStack() as stores:
        for path in secrets:
            config = settings(tmp_path / "here") | {"encryption_keys": str(path)}
            store = stores.enter_context(kvstore.open_sync(config))
            assert store.put([b"key"], [bytes(CHUNK)], durable=True) == 1
    for path in secrets:
        assert "whole      yes" in run("show", tmp_path / "here", b"key".hex(), "--keys", path)


async def test_with_keys_an_export_takes_the_copy_that_is_whole(tmp_path: Path) -> None:
    secrets, others = two_keys(tmp_path)
    here, file, key = tmp_path / "here", tmp_path / "bundle", b"key"
    config = settings(here) | {"encryption_keys": str(secrets)}
    with kvstore.open_sync(config) as one, kvstore.open_sync(config) as two:
        for store in (one, two):
            assert store.put([key], [bytes(CHUNK)], durable=True) == 1
    namespace = the_namespace(here)
    newest = places_of(namespace)[key]
    damage(newest)
    export = ["export", str(here), str(file), "--force"]
    for given, told in [
        ([], "1 chunk encrypted: read, but not checked; see --keys"),
        (["--keys", str(others)], f"1 chunk encrypted with keys that {others} does not have"),
    ]:
        assert told in run(*export, *given)
        assert json_of(*export, *given)["unchecked"] == 1
        # Nobody could tell, and the importer does.
        assert len(import_bundle(file, tmp_path / "there", keys=str(secrets)).faults) == 1
    with pytest.raises(KVStoreError, match="encrypted with keys that .*others has not"):
        import_bundle(file, tmp_path / "nowhere", keys=str(others))
    assert not (tmp_path / "nowhere").exists()
    done = command(*export, "--keys", str(secrets))
    assert (done.returncode, "encrypted" in done.stdout) == (0, False), done
    told_in = import_bundle(file, tmp_path / "there", keys=str(secrets))
    assert (told_in.faults, told_in.stored) == ([], 1)
    second = newest.older
    assert second is not None
    damage(second)
    with pytest.raises(KVStoreError, match="holds no whole chunk to export"):
        export_bundle(here, file, replace=True, encryption_keys=str(secrets))


async def test_a_namespace_is_known_by_its_name_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = await fill(tmp_path / "here")
    for number, (folder, path) in enumerate([(namespace, "."), (namespace / "lane-0", "..")]):
        monkeypatch.chdir(folder)
        export_bundle(path, tmp_path / f"bundle-{number}")
        done = import_bundle(tmp_path / f"bundle-{number}", tmp_path / f"there-{number}")
        assert (done.namespace, done.stored) == (namespace.name, len(KEYS))
        (lane,) = compact(path)
        assert (lane.failed, lane.refused) == (None, None)


async def test_what_is_damaged_there_is_stored_anew(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    run("export", tmp_path / "here", file)
    place = places_of(the_namespace(tmp_path / "here"))[KEYS[1]]
    damage(place)
    assert f"{namespace.name}: has 20 of 20 chunks now, 19 of them before" in run(
        "import", file, tmp_path / "here"
    )
    run("verify", tmp_path / "here")
    async with kvstore.open(settings(tmp_path / "here")) as store:
        assert await contents(store, KEYS[:3]) == payloads(KEYS[:3])


async def test_a_segment_of_another_namespace_is_not_exported(tmp_path: Path) -> None:
    theirs = await fill(tmp_path / "here", KEYS[:3], "other")
    ours = await fill(tmp_path / "here")
    stray = next(theirs.glob("lane-0/segment-*"))
    stray.rename(ours / "lane-0" / "segment-77.safetensors")
    found = places_of(the_namespace(ours))
    assert len(found) == len(KEYS)
    assert not [place for place in found.values() if place.path.name == "segment-77.safetensors"]


async def test_a_reset_meanwhile_leaves_no_bundle(tmp_path: Path) -> None:
    await fill(tmp_path / "here")
    (namespace,) = (tmp_path / "here").glob("one-*")
    file = tmp_path / "bundle.safetensors"
    with pytest.raises(KVStoreError, match="was reset meanwhile"):
        export_bundle(
            tmp_path / "here", file, progress=lambda done, total: [raise_epoch(namespace, 1)]
        )
    assert [one.name for one in tmp_path.iterdir()] == ["here"]


async def test_a_reset_just_before_an_import_leaves_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await exported(tmp_path)
    namespace, real = await fill(tmp_path / "there", keys_of("other", 1)), kvstore.open_sync

    def opened(*arguments: Any) -> Any:
        raise_epoch(namespace, 1)
        return real(*arguments)

    monkeypatch.setattr("kvstore.maintenance.bundle.open_sync", opened)
    with pytest.raises(KVStoreError, match="was reset meanwhile"):
        import_bundle(file, tmp_path / "there")
    assert places_of(the_namespace(namespace)) == {}


async def test_what_is_compacted_meanwhile_is_exported_from_its_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here"
    namespace = await fill(path, keys_of("prompt", 60))
    purge(namespace, key=keys_of("prompt", 60)[::2])
    left = set(keys_of("prompt", 60)[1::2])
    monkeypatch.setattr(bundle, "WRITTEN_AT_ONCE", 4 * CHUNK)
    before = {key: place.path for key, place in places_of(the_namespace(path)).items()}
    compacted: list[object] = []

    def progress(done: float, total: float) -> None:
        if not compacted:
            compacted.extend(compact(path))

    done = export_bundle(path, tmp_path / "bundle", progress=progress)
    after = {key: place.path for key, place in places_of(the_namespace(path)).items()}
    assert sum(before[key] != after[key] for key in left) > 4 * 2
    assert (done.faults, done.chunks) == ([], len(left))
    assert set(load_file(str(tmp_path / "bundle"))) == {key.hex() for key in left}


async def test_chunks_of_a_server_that_was_not_reset_are_not_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "bundle.safetensors"
    async with (
        kvstore.open(settings(tmp_path / "here")) as before,
        kvstore.open(settings(tmp_path / "here")) as after,
    ):
        await after.reset()
        assert await before.put(KEYS[:3], payloads(KEYS[:3]), durable=True) == 3
        assert await after.put(KEYS[3:5], payloads(KEYS[3:5]), durable=True) == 2
        run("export", tmp_path / "here", file)
        assert set(load_file(str(file))) == {key.hex() for key in KEYS[3:5]}


async def test_only_what_was_used_of_late_may_be_asked_for(tmp_path: Path) -> None:
    await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    await asyncio.sleep(2.5)
    async with kvstore.open(settings(tmp_path / "here")) as store:
        assert len(await contents(store, KEYS[:3])) == 3
    export = ["export", tmp_path / "here", file, "--used"]
    run(*export, "2s")
    assert set(load_file(str(file))) == {key.hex() for key in KEYS[:3]}
    assert "holds no chunk to export" in error_of(*export, "0s")
    assert "--used 'now': allowed are ages" in error_of(*export, "now")


async def test_a_damaged_chunk_is_left_out_and_the_file_stays_whole(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    segment = min(namespace.rglob("segment-*"))
    raw = segment.read_bytes()
    at = raw.index(payloads(KEYS)[2])
    with segment.open("r+b") as changed:
        changed.seek(at)
        changed.write(b"damage")
    file = tmp_path / "bundle.safetensors"
    told = json_of("export", namespace, file, status=1)
    assert told["chunks"] == 19
    assert [fault["key"] for fault in told["faults"]] == [KEYS[2].hex()]
    assert set(load_file(str(file))) == {key.hex() for key in KEYS} - {KEYS[2].hex()}
    assert "WRONG payload does not match its digest" in run(
        "show", namespace, KEYS[2].hex(), status=1
    )


async def test_what_was_changed_in_a_bundle_is_not_imported(tmp_path: Path) -> None:
    file = await exported(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[raw.index(payloads(KEYS)[5])] ^= 1
    file.write_bytes(raw)
    said = run("import", file, tmp_path / "there", status=1)
    assert f"payload does not match its digest (key {KEYS[5].hex()})" in said
    assert "has 19 of 20 chunks now" in said
    async with kvstore.open(settings(tmp_path / "there")) as store:
        assert store.contains_prefix(KEYS) == 5
        assert await contents(store, KEYS[6:10]) == payloads(KEYS[6:10])


async def test_a_bundle_of_which_it_cannot_be_told_what_it_is_of_is_not_imported(
    tmp_path: Path,
) -> None:
    """Another model's cache of that name would take it."""
    file = await exported(tmp_path)
    content = file.read_bytes()
    assert content.count(b'\\"model\\": \\"one\\"') == 1
    file.write_bytes(content.replace(b'\\"one\\"', b'\\"ono\\"'))
    assert "its identity is damaged" in error_of("import", file, tmp_path / "there")
    assert not (tmp_path / "there").exists()


async def test_an_encrypted_segment_with_chunks_of_another_size_is_a_fault_and_left_out(
    tmp_path: Path,
) -> None:
    """None of its seals says how large a chunk is."""
    keys, _ = two_keys(tmp_path)
    here = {**small(tmp_path / "here", disk=64), "chunk_bytes": 4094, "encryption_keys": keys}
    async with kvstore.open(here) as store:
        for key in KEYS[:2]:
            await store.put([key], [bytes(4094)], durable=True)
        await store.put(KEYS[2:], [bytes(4094)] * 18, durable=True)
    segments = sorted((tmp_path / "here").rglob("segment-*"))
    assert len(segments) > 1
    content = segments[0].read_bytes()
    segments[0].write_bytes(content.replace(b'"chunk_bytes":"4094"', b'"chunk_bytes":"4084"', 1))
    told = f"WRONG {segments[0]}: holds chunks of 4084 bytes, its namespace others"
    file = tmp_path / "bundle"
    assert told in run("verify", tmp_path / "here", status=1)
    assert told in run("export", tmp_path / "here", file, status=1)
    assert "chunks now" in run("import", file, tmp_path / "there", "--keys", keys)


async def test_an_import_tells_what_is_there_in_the_end(tmp_path: Path) -> None:
    file, there = await exported(tmp_path), tmp_path / "there"
    # Segments are as large as where it is from: 18 chunks, and one of them fits.
    said = run("import", file, there, "--capacity", "100KiB", status=1)
    assert "has 18 of 20 chunks now" in said
    assert "its lane holds no more" in said
    assert "has 20 of 20 chunks now, 18 of them before" in run("import", file, there)
    told = json_of("import", file, there)
    assert (told["chunks"], told["there"], told["stored"]) == (20, 20, 20)


async def test_a_folder_that_others_may_write_to_takes_an_import_where_it_is_told_so(
    tmp_path: Path,
) -> None:
    file, folder = await exported(tmp_path), tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    error_of("import", file, folder)
    assert "has 20 of 20 chunks now" in run("import", file, folder, "--no-strict-modes")


async def test_a_bundle_that_was_cut_short_is_called_that_once(tmp_path: Path) -> None:
    file = await exported(tmp_path)
    size = file.stat().st_size
    os.truncate(file, size - 3 * CHUNK)
    said = run("import", file, tmp_path / "there", status=1)
    assert said.count("WRONG") == 1
    assert f"the bundle is cut short: {size - 3 * CHUNK} of {size} bytes" in said
    assert "has 17 of 20 chunks now" in said
    os.truncate(file, size - 20 * CHUNK + 100)
    there = tmp_path / "elsewhere"
    assert "and no chunk of it is whole" in error_of("import", file, there)
    assert not there.exists()


async def test_a_bundle_takes_no_more_of_a_disk_than_its_chunks_need(tmp_path: Path) -> None:
    file = await exported(tmp_path)
    content = file.read_bytes()
    claim = re.search(rb'"segment_bytes": "(\d+)"', content)
    assert claim is not None
    more = content.replace(claim[0], claim[0][:-1] + b'000000"')
    room = int.from_bytes(content[:8], "little") + len(more) - len(content)
    file.write_bytes(room.to_bytes(8, "little") + more[8:])
    assert "has 20 of 20 chunks now" in run("import", file, tmp_path / "there")
    taken = sum(each.stat().st_blocks * 512 for each in (tmp_path / "there").rglob("segment-*"))
    assert taken < 2 * SEGMENT_BYTES


async def test_an_entry_called_encryption_that_an_earlier_version_took_is_refused(
    tmp_path: Path,
) -> None:
    """Without it the chunks would be found by others."""
    file = await exported(tmp_path)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    told = json.loads(raw[8 : 8 + size])
    identity = json.loads(told["__metadata__"]["identity"]) | {"encryption": "mine"}
    told["__metadata__"]["identity"] = json.dumps(identity)
    # Earlier versions did not say it.
    del told["__metadata__"]["digest"]
    more = json.dumps(told).encode()
    file.write_bytes(len(more).to_bytes(8, "little") + more + raw[8 + size :])
    assert "identity has 'encryption'" in error_of("import", file, tmp_path / "there")


def header(offsets: list[int], version: int, epoch: int = 0, namespace: str = "one-0") -> bytes:
    size = offsets[1] - offsets[0]
    told = {"format": "kvstore bundle", "version": str(version), "namespace": namespace}
    told |= {
        "identity": json.dumps({"chunk_bytes": size}),
        "digests": json.dumps({"aa": "00" * 16}),
    }
    told |= {"epoch": str(epoch), "segment_bytes": "65536"}
    raw = json.dumps({"__metadata__": told, "aa": {"data_offsets": offsets}}).encode()
    return len(raw).to_bytes(8, "little") + raw


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it is not a safetensors file"),
        (b"\xff" * 100, "it is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "its header cannot be read"),
        ((9).to_bytes(8, "little") + b'{"a": [}}', "its header cannot be read"),
        ((58).to_bytes(8, "little") + b'{"__metadata__": {"format": "pt", "version": "1"}}        ',
         "its format is 'pt'"),
        (header([5000, 0], 1), "its chunks are not of one size"),
        (header([-5000, -904], 1), "a chunk of it begins before its first byte"),
        (header([0, 4096], 1, namespace="a\0b"), "namespace name 'a\\x00b': allowed are"),
        (header([0, 4096], 1, namespace="\ud800"), "namespace name '\\ud800': allowed are"),
        (header([0, 4096], 1, namespace="../x"), "namespace name '../x': allowed are"),
        (header([0, 4096], 1, epoch=-1), "its epoch is -1"),
        (header([0, 4096], 1, epoch=2**64), "its epoch is 18446744073709551616"),
    ],
)  # fmt: skip
def test_what_is_no_bundle_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert what in error_of("import", file, tmp_path / "there")
    assert not (tmp_path / "there").exists()


async def test_a_folder_is_no_bundle_and_a_name_that_no_import_takes_is_not_exported(
    tmp_path: Path,
) -> None:
    assert f"{tmp_path}: Is a directory" in error_of("import", tmp_path, tmp_path / "there")
    await fill(tmp_path / "cache", model="one")
    (folder,) = (tmp_path / "cache").iterdir()
    odd = folder.rename(folder.with_name("a copy"))
    assert "namespace name 'a copy': allowed are" in error_of("export", odd, tmp_path / "x")
    assert not (tmp_path / "x").exists()


async def test_a_chunk_that_is_missing_where_a_lane_cannot_be_read_is_told_with_that(
    tmp_path: Path,
) -> None:
    await fill(tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "lane-1").mkdir(mode=0o700)
    (folder / "lane-1" / "segment-0.safetensors").write_bytes(b"damaged")
    for what in (["show", str(folder), "ff"], ["export", str(folder), "x", "--key", "ff"]):
        assert f"ff; {folder}/lane-1/segment-0.safetensors: " in error_of(*what)


async def test_of_several_namespaces_one_has_to_be_named(tmp_path: Path) -> None:
    await fill(tmp_path, model="one")
    await fill(tmp_path, model="two")
    assert "holds 2 namespaces: name the path of one of one-" in error_of(
        "export", tmp_path, tmp_path / "x"
    )


async def test_a_server_that_runs_is_exported_from_and_reads_what_is_imported(
    tmp_path: Path,
) -> None:
    namespace = await fill(tmp_path / "here")
    file = tmp_path / "bundle.safetensors"
    async with kvstore.open(settings(tmp_path / "here")) as store:
        assert in_a_process("export", str(namespace), str(file)).returncode == 0
        assert await store.resolve(KEYS[:4]) == 4
    async with kvstore.open(settings(tmp_path / "there")) as store:
        assert in_a_process("import", str(file), str(tmp_path / "there")).returncode == 0
    async with kvstore.open(settings(tmp_path / "there")) as store:
        # In the lane beside its own.
        assert await contents(store, KEYS[:4]) == payloads(KEYS[:4])


async def test_a_chunk_is_shown_with_its_numbers(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, CHUNK // 4, dtype=np.float32)
    values[7] = np.nan
    async with kvstore.open(settings(tmp_path)) as store:
        await store.put([b"key"], [values], durable=True)
    told = json_of("show", tmp_path, b"key".hex(), "--dtype", "float32")
    assert (told["values"], told["not_finite"], told["min"], told["max"]) == (1024, 1, -2.0, 2.0)
    assert told["whole"]
    async with kvstore.open(settings(tmp_path)) as store:
        await store.put([b"huge"], [np.tile([-1e300, 1e300], CHUNK // 16)], durable=True)
    told = command("show", str(tmp_path), b"huge".hex(), "--dtype", "float64", "--json").stdout
    assert json.loads(told, parse_constant=pytest.fail)["std"] is None
    text = command("show", str(tmp_path), b"key".hex(), "--dtype", "bfloat16").stdout
    assert "slot" in text
    assert "mean" in text
    assert "holds no chunk 00" in error_of("show", tmp_path, "00")
    for wrong in ("xyz", ""):
        assert "must be the key in hex" in command("show", str(tmp_path), wrong).stderr or not wrong


def test_numbers_are_shown_decoded_if_a_codec_of_ours_encoded_them(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    Gate("int8", "bfloat16", {}, {}).write(gate)
    ones = [bytes.fromhex("803f") * (CHUNK // 2)]
    with kvstore.open_sync(settings(tmp_path / "coded") | {"disk_codec": str(gate)}) as store:
        assert store.put([b"key"], ones, durable=True) == 1
    own = settings(tmp_path / "own")
    own["identity"] = {"codec": {"name": "int8", "dtype": "bfloat16", "by": "a friend"}}
    with kvstore.open_sync(own) as store:
        assert store.put([b"key"], ones, durable=True) == 1
    for cache in ("coded", "own"):
        shown = ["show", str(tmp_path / cache), b"key".hex(), "--json", "--dtype"]
        told = json.loads(command(*shown, "bfloat16").stdout)
        assert (told["values"], told["min"], told["max"]) == (CHUNK // 2, 1, 1)
        done = command(*shown, "float16")
        assert done.returncode == (2 if cache == "coded" else 0), done
        assert ("encoded, int8 of bfloat16: say bfloat16" in done.stderr) == (cache == "coded")


@pytest.mark.parametrize("sealed", [False, True])
async def test_what_a_server_replaces_meanwhile_is_left_out_and_no_fault(
    tmp_path: Path, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "keys.toml"
    more: dict[str, Any] = {}
    if sealed:
        run("keys", secrets, "--add", "*")
        more = {"encryption_keys": str(secrets), "tenants": {}}
    keys = kvstore.tenant_keys("alice", keys_of("old", 32))
    new = kvstore.tenant_keys("alice", keys_of("new", 20))
    path, real, begun = tmp_path / "here", bundle.read_chunk, False
    config = small(path, disk=32)
    config["tiers"][0]["capacity_bytes"] = 2 * config["tiers"][0]["segment_bytes"] + 2**14
    async with kvstore.open({**config, **more}) as store:
        assert await store.put(keys, payloads(keys), durable=True) == 32
        loop = asyncio.get_running_loop()

        def read(*what: Any) -> bytes | None:
            nonlocal begun
            if not begun:
                begun = True
                put = store.put(new, payloads(new), durable=True)
                assert asyncio.run_coroutine_threadsafe(put, loop).result(60) == 20
            return real(*what)

        monkeypatch.setattr(bundle, "read_chunk", read)
        file = tmp_path / "bundle"
        done = await asyncio.to_thread(export_bundle, path, file)
    assert done.faults == []
    assert 0 < done.chunks < 32
    read_in = import_bundle(file, tmp_path / "there", keys=str(secrets) if sealed else None)
    assert (read_in.faults, read_in.stored) == ([], done.chunks)


async def test_of_chunks_that_are_all_damaged_there_is_no_bundle(tmp_path: Path) -> None:
    namespace = await fill(tmp_path / "here")
    file = tmp_path / "bundle"
    run("export", tmp_path / "here", file)
    whole = file.read_bytes()
    for place in places_of(the_namespace(namespace)).values():
        damage(place)
    assert "holds no whole chunk to export: see kvstore verify" in error_of(
        "export", tmp_path / "here", file, "--force"
    )
    assert file.read_bytes() == whole
    assert list(tmp_path.glob(".bundle*")) == []


@pytest.mark.parametrize("age", ["9" * 400 + "d", "99999999999d", "d", "-1d"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, age: str) -> None:
    assert "allowed are ages such as" in error_of(
        "export", tmp_path, tmp_path / "bundle", f"--used={age}"
    )


async def test_a_folder_that_cannot_be_searched_is_no_namespace_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path / "here")
    (tmp_path / "here" / "private").mkdir()
    (tmp_path / "there" / "private").mkdir(parents=True)
    cannot_search(monkeypatch, "private", errno.EACCES)
    assert export_bundle(tmp_path / "here", tmp_path / "bundle").chunks == len(KEYS)
    with pytest.raises(PathUnusableError, match="name a capacity with --capacity"):
        import_bundle(tmp_path / "bundle", tmp_path / "there")
    done = import_bundle(tmp_path / "bundle", tmp_path / "there", capacity_bytes=2**22)
    assert done.stored == len(KEYS)
