"""`kvstore inspect` shows what a running process retains, and what is stale it marks so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.maintenance.survey import LaneSurvey, survey
from kvstore.tiers.disk.retained import Retained, read_retained, write_retained
from tests.patience import PATIENCE, until
from tests.tools.test_command import CHUNK, KEYS, command, config

OWNER = """
import json, sys, time
import kvstore
path, keys = sys.argv[1], [bytes.fromhex(key) for key in sys.argv[2:]]
with kvstore.open_sync(json.loads(path)) as store:
    store.put(keys, [bytes(65536)] * len(keys))
    assert store.flush(50.0)
    print("put", flush=True)
    for line in sys.stdin:
        keep = [key for key in keys[: int(line)]]
        store.unpin(keys)
        store.pin(keep, 600.0) if keep else None
        print("done", flush=True)
"""


class Owner:
    """A process that owns the lane and pins as many chunks as it is told."""

    def __init__(self, cache: Path, keys: list[bytes]) -> None:
        arguments = [json.dumps(config(cache)), *(key.hex() for key in keys)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._said() == "put"

    def pin(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self._said() == "done"

    def end(self) -> None:
        """End it as it ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def owner_of(cache: Path, keys: list[bytes]) -> Iterator[Owner]:
    owner = Owner(cache, keys)
    try:
        yield owner
    finally:
        owner.kill()


def lane_of(cache: Path) -> LaneSurvey:
    (namespace,) = survey(cache)
    assert not namespace.faults
    (lane,) = namespace.lanes
    return lane


def words(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/*retained*"))


def test_what_a_running_process_retains_is_shown(tmp_path: Path) -> None:
    with owner_of(tmp_path, KEYS[:8]) as owner:
        assert lane_of(tmp_path).retained is None
        owner.pin(5)
        until(lambda: lane_of(tmp_path).retained is not None)
        lane = lane_of(tmp_path)
        told = lane.retained
        assert told is not None
        assert (told.process, told.chunks, told.host_chunks, told.keys) == (lane.owner, 5, 5, 5)
        assert not lane.retained_stale
        done = command("inspect", str(tmp_path))
        assert done.returncode == 0
        assert "pinned: 5 chunks on this tier, 5 in host memory, 5 keys" in done.stdout
        owner.pin(3)
        until(lambda: (told := lane_of(tmp_path).retained) is not None and told.chunks == 3)
        owner.pin(0)
        until(lambda: lane_of(tmp_path).retained is None)
        assert words(tmp_path) == []


def test_word_of_a_process_that_was_killed_is_stale_and_the_next_one_removes_it(
    tmp_path: Path,
) -> None:
    with owner_of(tmp_path, KEYS[:4]) as owner:
        owner.pin(4)
        until(lambda: lane_of(tmp_path).retained is not None)
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait(PATIENCE)
    lane = lane_of(tmp_path)
    assert lane.retained is not None
    assert lane.retained_stale
    done = command("inspect", str(tmp_path))
    assert done.returncode == 0
    assert f"pinned: unknown; process {owner.process.pid} last reported" in done.stdout
    told = json.loads(command("inspect", str(tmp_path), "--json").stdout)
    assert told["namespaces"][0]["lanes"][0]["retained_stale"] is True
    with owner_of(tmp_path, KEYS[:4]):
        # Although nothing is retained now.
        until(lambda: words(tmp_path) == [])


def test_who_ends_leaves_no_word(tmp_path: Path) -> None:
    with owner_of(tmp_path, KEYS[:4]) as owner:
        owner.pin(4)
        until(lambda: lane_of(tmp_path).retained is not None)
        owner.end()
    assert words(tmp_path) == []
    with owner_of(tmp_path, KEYS[:4]) as owner:
        assert lane_of(tmp_path).retained is None


async def test_word_that_its_owner_does_not_renew_is_stale(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        await store.put(KEYS[:2], [bytes(CHUNK)] * 2)
        lane = Path(lane_of(tmp_path).path)
        now = time.time_ns() // 1_000_000
        write_retained(lane, Retained(os.getpid(), now, 2, 2, 2))
        assert not lane_of(tmp_path).retained_stale
        write_retained(lane, Retained(os.getpid(), now - 31_000, 2, 2, 2))
        assert lane_of(tmp_path).retained_stale


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 4096,
        b"{}" + b" " * 5000,
        b'{"process": 1}',
        b'{"process": 1, "written_ms": 1, "chunks": 1, "host_chunks": 1, "keys": "many"}',
        b'{"process": 1, "written_ms": 1, "chunks": true, "host_chunks": 1, "keys": 1}',
        b'{"process": 1, "written_ms": 1, "chunks": -1, "host_chunks": 1, "keys": 1}',
        b'{"process": 1, "written_ms": 1, "chunks": 1, "host_chunks": 1, "keys": 1, "more": 1}',
    ],
)
def test_what_nobody_can_read_is_no_fault(tmp_path: Path, raw: bytes) -> None:
    cache = tmp_path / "cache"
    with kvstore.open_sync(config(cache)) as store:
        store.put(KEYS[:2], [bytes(CHUNK)] * 2)
    lane = Path(lane_of(cache).path)
    lane.with_name("retained-0").write_bytes(raw)
    assert read_retained(lane) is None
    assert lane_of(cache).retained is None


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_no_fault_and_stops_nobody(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    with kvstore.open_sync(config(cache)) as store:
        store.put(KEYS[:2], [bytes(CHUNK)] * 2)
    path = Path(lane_of(cache).path).with_name("retained-0")
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        target = tmp_path / "others"
        write_retained(tmp_path / "lane-1", Retained(1, 1, 1, 1, 1))
        (tmp_path / "retained-1").rename(target)
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    assert lane_of(cache).retained is None
    with kvstore.open_sync(config(cache)) as store:
        assert store.pin(KEYS[:2], 60.0) == 2
        until(lambda: kind == "folder" or path.is_file())
    if kind == "link":
        assert target.is_file()


def test_faces_see_every_number(tmp_path: Path) -> None:
    told: dict[str, Any] = {"process": 1, "written_ms": 2, "chunks": 3, "host_chunks": 4, "keys": 5}
    write_retained(tmp_path / "lane-7", Retained(**told))
    assert json.loads((tmp_path / "retained-7").read_bytes()) == told
    assert read_retained(tmp_path / "lane-7") == Retained(**told)
    assert (tmp_path / "retained-7").stat().st_mode & 0o777 == 0o600
