"""`kvstore gc`, and the question before what cannot be undone."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.maintenance.offline import PurgedLane, purge
from tests.store.support import CHUNK, keys_of, payloads, small
from tests.tools.support import answering, command, error_of, json_of, on_terminal, run


def model(path: Path, name: str) -> dict[str, Any]:
    return {**small(path, disk=32), "identity": {"model": name}}


async def three_models(path: Path) -> None:
    for name in ("first", "second", "third"):
        keys = keys_of(name, 6)
        async with kvstore.open(model(path, name)) as store:
            await store.put(keys, payloads(keys))
        await asyncio.sleep(0.01)


def held(path: Path) -> dict[str, int]:
    """Chunks on disk, by model."""
    told = json.loads(command("inspect", str(path), "--json").stdout)
    return {
        namespace["identity"]["model"]: sum(
            segment["live"] for lane in namespace["lanes"] for segment in lane["segments"]
        )
        for namespace in told["namespaces"]
    }


async def test_gc_empties_all_namespaces_but_those_used_last(tmp_path: Path) -> None:
    await three_models(tmp_path)
    said = run("gc", tmp_path, "--keep", "2", "--dry-run")
    assert "empty first-" in said
    assert "would forget 6 chunks" in said
    assert held(tmp_path) == {"first": 6, "second": 6, "third": 6}
    assert "keep  third-" in run("gc", tmp_path, "--keep", "2")
    assert held(tmp_path) == {"first": 0, "second": 6, "third": 6}
    assert not list(tmp_path.glob("first-*/*/segment-*")), "the space is given back"
    assert json_of("gc", tmp_path, "--keep", "2")["emptied"] == []
    async with kvstore.open(model(tmp_path, "first")) as store:
        assert await store.put(keys_of("first", 6), payloads(keys_of("first", 6))) == 6


async def test_what_was_read_last_and_what_is_in_use_stay(tmp_path: Path) -> None:
    await three_models(tmp_path)
    first = keys_of("first", 6)
    async with kvstore.open(model(tmp_path, "first")) as store:
        assert await store.get_into(first, [bytearray(CHUNK) for _ in first]) == 6
    async with kvstore.open(model(tmp_path, "second")) as store:
        run("gc", tmp_path, "--keep", "2")
        assert await store.resolve(keys_of("second", 6)) == 6
    assert held(tmp_path) == {"first": 6, "second": 6, "third": 0}


async def test_what_is_used_again_after_gc_has_looked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await three_models(tmp_path)
    servers: list[kvstore.SyncStore] = []

    def purges(path: str, **named: Any) -> list[PurgedLane]:
        if not servers:
            servers.append(kvstore.open_sync(model(tmp_path, "first")))
        return purge(path, **named)

    monkeypatch.setattr("kvstore.tools.upkeep.purge", purges)
    told = json_of("gc", tmp_path, "--keep", "1", "--yes", status=1)
    servers[0].close()
    assert [name.split("-")[0] for name in told["emptied"]] == ["second"]
    (first,) = [each for each in told["lanes"] if "/first-" in each["lane"]]
    assert first["refused"] == "used by a process by now: not emptied"
    assert held(tmp_path) == {"first": 6, "second": 0, "third": 6}


async def test_purge_and_gc_ask_a_person(tmp_path: Path) -> None:
    await three_models(tmp_path)
    for name, *more in (("purge", "--all"), ("gc", "--keep", "1")):
        for typed in ("n", ""):
            done = answering(typed, name, tmp_path, *more)
            assert done.returncode == 2
            assert "? [y/N]" in done.stderr
            assert "nothing was changed" in done.stderr
            assert sum(held(tmp_path).values()) == 18
        asked, ended = on_terminal([name, str(tmp_path), *more], "y\n")
        assert "? [y/N]" in asked
        assert (ended, "nothing was changed" in asked) == (0, False), asked
        await three_models(tmp_path)
    done = answering("", "purge", tmp_path, "--all", "--yes")
    assert (done.returncode, "[y/N]" in done.stderr) == (0, False)
    assert sum(held(tmp_path).values()) == 0


async def test_a_reset_of_a_server_asks_a_person(tmp_path: Path) -> None:
    where, keys = str(tmp_path / "socket"), keys_of("first", 6)
    async with kvstore.open(model(tmp_path / "kv", "first") | {"control": where}) as store:
        await store.put(keys, payloads(keys))
        for arguments, typed, status in (
            ((), "n\n", 2),
            (("--dry-run",), "", 0),
            (("--yes",), "", 0),
        ):
            words = ["ctl", where, "reset", *arguments]
            asked, ended = await asyncio.to_thread(on_terminal, words, typed)
            assert ("forget everything that" in asked) == (not arguments)
            assert ended == status, asked
            assert store.lookup_prefix(keys[:1]) == ("--yes" not in arguments)


async def test_a_namespace_may_be_called_like_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "kv"
    for name in ("kv", "new"):
        async with kvstore.open({**model(place, name), "namespace": name}) as store:
            await store.put(keys_of(name, 6), payloads(keys_of(name, 6)))
        await asyncio.sleep(0.01)
    run("gc", place, "--keep", "1")
    assert held(place) == {"kv": 0, "new": 6}


async def test_gc_follows_no_link(tmp_path: Path) -> None:
    place, link = tmp_path / "kv", tmp_path / "link"
    await three_models(place)
    link.symlink_to(place)
    assert "is a symbolic link" in error_of("gc", link, "--keep", "1")
    (first,) = place.glob("first-*")
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    assert "REFUSED" in run("gc", place, "--keep", "2", status=1)
    first.unlink()
    (tmp_path / "elsewhere").rename(first)
    assert sum(held(place).values()) == 18


async def test_gc_tells_of_a_namespace_of_which_nothing_but_a_linked_lane_is_there(
    tmp_path: Path,
) -> None:
    place = tmp_path / "kv"
    await three_models(place)
    (lane,) = place.glob("third-*/lane-0")
    lane.rename(tmp_path / "elsewhere")
    lane.symlink_to(tmp_path / "elsewhere")
    told = run("gc", place, "--keep", "1", "--yes", status=1)
    assert f"leave {lane.parent.name}, 0 B: {lane}: is a symbolic link" in told


async def test_what_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    await three_models(tmp_path)
    (first,) = tmp_path.glob("first-*")
    run("purge", tmp_path, "--namespace", first.name, "--all")
    assert list(first.rglob("segment-*"))
    assert "no chunks" in run("gc", tmp_path, "--keep", "2")
    assert not list(first.rglob("segment-*"))
    assert held(tmp_path) == {"first": 0, "second": 6, "third": 6}


async def test_the_question_is_not_in_the_output_and_json_asks_as_well(tmp_path: Path) -> None:
    await three_models(tmp_path)
    done = answering("n", "purge", tmp_path, "--all", "--json")
    assert (done.returncode, "[y/N]" in done.stderr, "[y/N]" in done.stdout) == (2, True, False)
    assert sum(held(tmp_path).values()) == 18


@pytest.mark.parametrize("epoch", [None, "junk"])
async def test_a_namespace_that_no_server_opens_takes_no_place_among_the_kept(
    tmp_path: Path, epoch: str | None
) -> None:
    await three_models(tmp_path)
    third = keys_of("third", 6)
    async with kvstore.open(model(tmp_path, "third")) as store:
        await store.reset()
        await store.put(third, payloads(third))
    (file,) = tmp_path.glob("third-*/epoch")
    file.unlink()
    if epoch is not None:
        file.write_text(epoch)
    for more in (["--dry-run"], []):
        said = run("gc", tmp_path, "--keep", "1", *more, status=1)
        assert "keep  second-" in said
        assert "leave third-" in said
        assert "remove the folder" in said
    assert held(tmp_path) == {"first": 0, "second": 6, "third": 6}
    told = json_of("gc", tmp_path, "--keep", "1", status=1)
    assert [name.startswith("third-") for name in told["left"]] == [True]
    # Nor is anything of it forgotten.
    assert "remove the folder" in run(
        "purge", tmp_path, "--namespace", file.parent.name, "--all", status=2
    )


async def test_gc_tells_what_it_left_with_a_fault(tmp_path: Path) -> None:
    await three_models(tmp_path)
    (segment, *_) = sorted(tmp_path.glob("first-*/lane-0/segment-*"))
    os.truncate(segment, segment.stat().st_size - 5000)
    (compacted,) = json_of("gc", tmp_path, "--keep", "2", status=1)["compacted"]
    assert compacted["result"]["faults"]


async def test_gc_empties_nothing_that_may_have_been_used_later_than_it_can_read(
    tmp_path: Path,
) -> None:
    await three_models(tmp_path)
    (lane,) = tmp_path.glob("first-*/lane-0")
    newest = lane.with_name("lane-1")
    newest.mkdir(mode=0o700)
    (newest / "segment-0.safetensors").write_bytes(b"damaged")
    for more in (["--dry-run"], [], ["--json"]):
        said = run("gc", tmp_path, "--keep", "2", *more, status=1)
        assert f"{newest}/segment-0.safetensors: " in said
    told = json.loads(said)
    assert (told["dry_run"], told["emptied"], len(told["kept"])) == (False, [], 2)
    assert list(told["left"]) == [lane.parent.name]
    assert held(tmp_path) == {"first": 6, "second": 6, "third": 6}
    # Whoever says so can empty it.
    run("purge", tmp_path, "--namespace", lane.parent.name, "--all", status=1)
    assert held(tmp_path)["first"] == 0


async def test_gc_empties_nothing_for_a_model_whose_clock_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now() + 86400 * 10**9)
        async with kvstore.open(model(tmp_path, "early")) as store:
            await store.put(keys_of("early", 6), payloads(keys_of("early", 6)))
    await three_models(tmp_path)
    told = json_of("gc", tmp_path, "--keep", "3", status=1)
    assert (told["emptied"], len(told["kept"])) == ([], 3)
    (reason,) = told["left"].values()
    assert reason == "used in the future, by a clock that was ahead"
    assert held(tmp_path) == {"early": 6, "first": 6, "second": 6, "third": 6}


def test_all_of_a_purge_is_all(tmp_path: Path) -> None:
    for more in (["--unused", "3d"], ["--tenant", "alice"], ["--key", "00"]):
        assert "--all is every chunk" in error_of("purge", tmp_path, "--all", *more)


def test_keys_in_a_variable_are_not_changed(tmp_path: Path) -> None:
    assert "give a file" in error_of("keys", "env:KEYS", "--add", "*")
    assert not Path("env:KEYS").exists()


def test_who_retires_keys_is_asked(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    for _ in range(2):
        run("keys", keys, "--add", "*")
    before = run("keys", keys)
    done = answering("n", "keys", keys, "--retire", "*")
    assert "remove 1 older key of '*'?" in done.stderr
    assert "reencrypt comes first" in done.stderr
    assert done.returncode == 2
    assert run("keys", keys) == before
    assert answering("y", "keys", keys, "--retire", "*").returncode == 0
    assert run("keys", keys) != before
    # There is none to be lost now.
    assert "remove" not in answering("", "keys", keys, "--retire", "*").stderr


def test_who_forgets_keys_is_asked(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    for tenant in ("*", "alice"):
        run("keys", keys, "--add", tenant)
    done = answering("n", "keys", keys, "--forget", "alice")
    assert "forget the keys of 'alice'?" in done.stderr
    assert done.returncode == 2
    assert "alice" in run("keys", keys)
    assert answering("y", "keys", keys, "--forget", "alice").returncode == 0
    assert "alice" not in run("keys", keys)
