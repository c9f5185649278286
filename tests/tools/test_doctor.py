"""`kvstore doctor`: what it says of a real store, and of every state that it knows."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

import kvstore
from kvstore.tools import doctor
from kvstore.tools.cli import main
from kvstore.tools.doctor import diagnose, examine
from kvstore.tools.top import Snapshot
from tests.store.support import keys_of, payloads, small
from tests.tools.support import error_of, run
from tests.tools.test_top import served

PACE = {("compute_seconds_per_chunk", ""): 0.01}


def said(values: dict[tuple[str, str], float]) -> dict[str, tuple[str, str]]:
    """The verdict and the advice on each place."""
    found = diagnose(Snapshot(0.0, {**PACE, **values}))
    return {each.place: (each.verdict, " ".join(each.advice)) for each in found}


def test_a_server_that_has_done_nothing_gets_no_verdict() -> None:
    assert said({("tier_chunks", "disk"): 0.0}) == {
        "host memory": ("not used", ""),
        "disk": ("not used", ""),
    }


def test_a_server_that_was_asked_for_nothing_yet_gets_no_verdict_on_what_it_found() -> None:
    found: dict[tuple[str, str], float] = {("tier_chunks", "disk"): 5000.0}
    assert said(found)["disk"] == ("too little to tell", "")
    assert said({**found, ("missed_keys", ""): 5000.0})["disk"][0] == "does not help"


def test_places_that_give_hits_help_and_say_how_much() -> None:
    values = {
        ("stored_chunks", ""): 500.0,
        ("loaded_host_chunks", ""): 300.0,
        ("saved_host_seconds", ""): 3.0,
        ("saved_tier_seconds", "disk"): 2.0,
        ("loaded_tier_chunks", "disk"): 200.0,
        ("tier_read_chunks", "disk"): 200.0,
        ("tier_written_chunks", "disk"): 500.0,
    }
    assert said(values) == {"host memory": ("helps", ""), "disk": ("helps", "")}
    host, disk = diagnose(Snapshot(0.0, {**PACE, **values}))
    assert [host.saved_s, disk.saved_s] == pytest.approx([3.0, 2.0])
    unknown, _ = diagnose(Snapshot(0.0, values))
    assert unknown.saved_s is None


@pytest.mark.parametrize(
    ("values", "place", "verdict", "advice"),
    [
        ({("tier_written_chunks", "disk"): 5000.0, ("tier_written_bytes", "disk"): 2.0**30},
         "disk", "does not help", "1.0 GiB were written, 5000 chunks for each"),
        ({("tier_chunks", "disk"): 10.0, ("tier_outpaced", "disk"): 1.0},
         "disk", "does not help", "Computing is faster"),
        ({("tier_chunks", "disk"): 10.0, ("tier_stalled", "disk"): 1.0},
         "disk", "too little to tell", "It is stalled now"),
        ({("stored_chunks", ""): 1000.0, ("refused_chunks", ""): 100.0},
         "host memory", "does not help", "100 of 1100 chunks found no room"),
        ({("stored_chunks", ""): 10.0, ("timeouts", ""): 3.0},
         "host memory", "too little to tell", "3 requests waited until their deadline"),
        ({("stored_chunks", ""): 1000.0, ("shed_chunks", ""): 1000.0},
         "host memory", "does not help", "1000 of 1000 chunks found no room, or left"),
        ({("loaded_tier_chunks", "disk"): 200.0, ("tier_outpaced", "disk"): 1.0},
         "disk", "helps", "Computing is faster than reading from it now, so it is not read."),
        ({("loaded_tier_chunks", "remote"): 200.0, ("store_away", "remote"): 1.0},
         "remote", "helps", "It is away now"),
        ({("loaded_tier_chunks", "disk"): 200.0, ("tier_errors", "disk"): 1.0}, "disk", "helps",
         "Since the start 1 operation on it failed, and 0 chunks could not be written"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_what_to_change(
    values: dict[tuple[str, str], float], place: str, verdict: str, advice: str
) -> None:
    found = said(values)[place]
    assert found[0] == verdict
    assert advice in found[1]


@pytest.mark.parametrize(
    ("name", "tier", "told"),
    [
        ("tier_corrupt_chunks", "disk", "3 chunks read from it had wrong bytes"),
        ("internal_errors", "", "3 internal errors: please report them"),
    ],
)
def test_what_went_wrong_counts_as_a_fault(name: str, tier: str, told: str) -> None:
    values = {**PACE, ("loaded_tier_chunks", "disk"): 200.0, (name, tier): 3.0}
    found = [each for each in diagnose(Snapshot(0.0, values)) if each.faults]
    assert [(each.faults, each.verdict) for each in found] == [(3, "helps" if tier else "not used")]
    assert told in " ".join(found[0].advice)


async def test_the_command_over_a_real_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of("prompt", 6)
    async with kvstore.open(small(tmp_path, disk=32)) as store, served(store) as url:
        await store.put(keys, payloads(keys))
        async with store.get(keys) as chunks:
            assert len(chunks) == 6
        assert await asyncio.to_thread(main, ["doctor", url]) == 0
        text = capsys.readouterr().out
        assert await asyncio.to_thread(main, ["doctor", url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(main, ["doctor", "http://127.0.0.1:1/metrics"]) == 2
    assert text.startswith("host memory: too little to tell; 6 chunks came from it\n")
    assert told["version"] == 1
    assert [each["loaded"] for each in told["places"]] == [6, 0, 0]


async def _filled(folder: Path, read: int) -> None:
    """A cache of 120 chunks, of which so many were read again by a later process."""
    keys = keys_of("prompt", 120)
    config = small(folder / "cache", rows=130, disk=160)
    async with kvstore.open(config) as store:
        await store.put(keys, payloads(keys))
    async with kvstore.open(config) as store, store.get(keys[:read]) as chunks:
        assert len(chunks) == read


async def test_a_cache_on_disk_is_judged_by_what_was_read_of_it(tmp_path: Path) -> None:
    await _filled(tmp_path, 60)
    folder = tmp_path / "cache"
    (found,) = examine(folder)
    assert (found.verdict, found.loaded, found.saved_s, found.advice) == ("helps", 60, None, [])
    assert run("doctor", folder) == f"{found.place}: helps; 60 reads of its chunks\n"
    error_of("doctor", tmp_path / "nothing")


async def test_of_a_cache_that_cannot_be_read_there_is_no_verdict(tmp_path: Path) -> None:
    await _filled(tmp_path, 60)
    folder = tmp_path / "cache"
    for segment in folder.rglob("segment-*"):
        os.truncate(segment, 100)
    (found,) = examine(folder)
    assert found.verdict == "cannot be read"
    assert found.faults


async def test_what_a_reset_has_left_is_not_kept(tmp_path: Path) -> None:
    await _filled(tmp_path, 0)
    async with kvstore.open(small(tmp_path / "cache", disk=128)) as store:
        await store.reset()
    assert "chunks are kept" not in run("doctor", tmp_path / "cache")


async def test_a_cache_that_nobody_reads_does_not_help(tmp_path: Path) -> None:
    await _filled(tmp_path, 0)
    assert "120 chunks are kept, and 0 of them were read again" in run(
        "doctor", tmp_path / "cache", status=1
    )


async def test_a_forgotten_cache_is_named_with_the_commands_that_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _filled(tmp_path, 60)
    folder = tmp_path / "cache"
    monkeypatch.setattr(doctor, "FORGOTTEN_DAYS", -1.0)
    (found,) = examine(folder)
    (advice,) = found.advice
    name = found.place.removeprefix("namespace ")
    assert f"kvstore purge {folder} --namespace {name} --all" in advice
    run("purge", folder, "--namespace", name, "--all")
    run("compact", folder)
    assert [each.verdict for each in examine(folder)] == ["not used"]


def test_an_address_without_its_scheme_is_told_how_to_be_written() -> None:
    for command in ("doctor", "top", "advise"):
        assert "write http://HOST:PORT/metrics" in error_of(command, "localhost:8000/metrics")


async def test_what_is_damaged_sparse_or_on_a_full_drive_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _filled(tmp_path, 60)
    folder = tmp_path / "cache"
    monkeypatch.setattr(doctor, "GAP", 1.1)
    (found,) = examine(folder)
    assert "can be found: kvstore compact" in found.advice[0]
    monkeypatch.setattr(doctor, "FULL", 1.1)
    segment = next(folder.glob("*/lane-*/segment-*"))
    os.truncate(segment, segment.stat().st_size // 2)
    (found,) = examine(folder)
    assert "1 fault: see kvstore verify" in found.advice[0]
    assert "The drive has" in found.advice[-1]
    shutil.rmtree(folder)
