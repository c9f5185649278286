"""The `kvstore` command over a real cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.tools.cli import main

CHUNK = 64 * 1024
KEYS = [b"key-%03d" % index + b"\0\0\0\0" for index in range(30)]


def config(path: Path) -> dict[str, object]:
    return {
        "cpu_bytes_to_use": "4MiB",
        "chunk_bytes": CHUNK,
        "identity": {"model": "tiny"},
        "tiers": [
            {
                "type": "disk",
                "path": str(path),
                "capacity_bytes": "4MiB",
                "segment_bytes": "1MiB",
            }
        ],
    }


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.tools", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
async def cache(tmp_path: Path) -> Path:
    async with kvstore.open(config(tmp_path / "cache")) as store:
        await store.put(KEYS, [bytes([index]) * CHUNK for index in range(30)])
    return tmp_path / "cache"


def segments(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/lane-0/segment-*.safetensors"))


def test_inspect_lists_namespaces_lanes_and_segments(cache: Path) -> None:
    done = command("inspect", str(cache))
    assert done.returncode == 0, done.stderr
    for word in ("namespace tiny-", "lane 0, not in use: 30 chunks", "segment-0.safetensors"):
        assert word in done.stdout


def test_inspect_as_json_has_counts_bytes_and_times(cache: Path) -> None:
    told = json.loads(command("inspect", str(cache), "--json").stdout)
    (namespace,) = told["namespaces"]
    assert namespace["identity"]["model"] == "tiny"
    (lane,) = namespace["lanes"]
    assert sum(segment["live"] for segment in lane["segments"]) == 30
    assert sum(segment["live_bytes"] for segment in lane["segments"]) == 30 * CHUNK
    for segment in lane["segments"]:
        if segment["live"]:
            assert 0 < segment["oldest_ms"] <= segment["newest_ms"]


async def test_reads_are_counted_across_a_restart(cache: Path) -> None:
    async with kvstore.open(config(cache)) as store, store.get(KEYS[:5]) as chunks:
        assert len(chunks) == 5
    told = json.loads(command("inspect", str(cache), "--json").stdout)
    lane = told["namespaces"][0]["lanes"][0]
    assert sum(segment["reads"] for segment in lane["segments"]) == 5


async def test_inspect_and_verify_work_beside_the_process_that_owns_the_lane(cache: Path) -> None:

    async with kvstore.open(config(cache)) as store:
        assert f"in use by process {os.getpid()}" in command("inspect", str(cache)).stdout
        assert command("verify", str(cache)).returncode == 0
        assert await store.resolve(KEYS) == 30


def test_verify_reads_every_chunk(cache: Path) -> None:
    done = command("verify", str(cache), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"chunks": 30, "bytes": 30 * CHUNK, "faults": []}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(offset)
        (byte,) = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte ^ 1]))


def test_verify_finds_a_flipped_byte_in_a_payload_and_names_its_key(cache: Path) -> None:
    path = segments(cache)[0]
    flip(path, path.stat().st_size - 1)
    done = command("verify", str(cache), "--json")
    assert done.returncode == 1
    (fault,) = json.loads(done.stdout)["faults"]
    assert fault["path"] == str(path)
    assert bytes.fromhex(fault["key"]) in KEYS
    assert "digest" in fault["what"]


def test_verify_and_inspect_find_a_damaged_record(cache: Path) -> None:
    flip(segments(cache)[0], 4096 + 128 + 64)
    for name in ("verify", "inspect"):
        done = command(name, str(cache))
        assert done.returncode == 1
        assert "slot 1: damaged record" in done.stdout


def test_verify_finds_a_truncated_segment(cache: Path) -> None:
    path = segments(cache)[0]
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    done = command("verify", str(cache))
    assert done.returncode == 1
    assert "cut short" in done.stdout


def test_verify_finds_a_damaged_header_and_a_foreign_file(cache: Path) -> None:
    first, second = segments(cache)[:2]
    flip(first, 20)
    second.write_bytes(b"something else")
    (namespace,) = cache.glob("*/namespace.json")
    namespace.write_text("{")
    for name in ("verify", "inspect"):
        done = command(name, str(cache))
        assert done.returncode == 1
        for path in (first, second, namespace):
            (line,) = (line for line in done.stdout.splitlines() if str(path) in line)
            assert line.count(str(path)) == 1, "once is enough"


def test_a_huge_claim_in_a_header_costs_no_memory(cache: Path) -> None:
    from kvstore.tiers.disk.format import Geometry, Header, encode_header

    path = segments(cache)[0]
    header = Header("00" * 32, "11" * 16, Geometry(2**40, 65536, 65536))
    with path.open("r+b") as handle:
        handle.write(encode_header(header))
    assert command("verify", str(cache)).returncode == 1


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_a_path_without_a_cache_is_a_usage_error(tmp_path: Path, name: str) -> None:
    done = command(name, str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "nowhere is not a folder" in done.stderr
    done = command(name, str(tmp_path))
    assert done.returncode == 2
    assert "holds no kvstore namespace" in done.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    assert command("frobnicate").returncode == 2


@pytest.mark.parametrize("name", ["inspect", "verify", "stat", "compact", "purge", "simulate"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: kvstore {name}" in capsys.readouterr().out


async def test_inspect_shows_the_epoch_and_compact_gives_older_chunks_back(cache: Path) -> None:
    from kvstore.tiers.disk.epoch import raise_epoch

    (namespace,) = cache.iterdir()
    assert "epoch" not in command("inspect", str(cache)).stdout
    raise_epoch(namespace, 3)
    text = command("inspect", str(cache)).stdout
    assert f"namespace {namespace.name}, epoch 3" in text
    assert ", 30 of them from before a reset" in text
    told = json.loads(command("inspect", str(cache), "--json").stdout)["namespaces"][0]
    assert (told["epoch"], told["lanes"][0]["epoch"]) == (3, 0)
    # Nobody will find them: whether they are whole, and forgetting them, matters to nobody.
    for segment in namespace.rglob("segment-*"):
        half = segment.stat().st_size // 2
        with segment.open("r+b") as file:
            file.seek(half)
            file.write(bytes(half))
    assert command("verify", str(cache)).returncode == 0
    assert "would forget 0 chunks" in command("purge", str(cache), "--all", "--dry-run").stdout
    done = command("compact", str(cache))
    assert done.returncode == 0
    told = json.loads(command("inspect", str(cache), "--json").stdout)["namespaces"][0]
    assert (told["epoch"], told["lanes"][0]["epoch"]) == (3, None)
    assert told["lanes"][0]["segments"] == []
    (namespace / "epoch").write_text("soon\n")
    done = command("inspect", str(cache))
    assert done.returncode == 1
    assert "holds no epoch" in done.stdout
