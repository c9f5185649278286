"""File systems that can be made to fail, and processes that can be killed and stopped."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from tests.faults.neighbour import Neighbour
from tests.patience import PATIENCE

Rule = dict[str, Any]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store tries a tier again after a fraction of a second instead of five."""
    monkeypatch.setattr("kvstore.core.residency.health.STORE_PAUSE", 0.3)
    monkeypatch.setattr("kvstore.core.residency.slots.RETRY_PAUSE", 0.3)
    monkeypatch.setattr("kvstore.core.residency.base.RETRY_PAUSE", 0.3)


@pytest.fixture(autouse=True)
def calm(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A fault of the disk is a warning: nothing raised where nobody looked, no traceback."""
    caplog.set_level(logging.INFO, "kvstore")
    yield
    told = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [r.getMessage() for r in told if r.levelno > logging.WARNING] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place for a cache; not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system with the given arguments; skips where this user may not."""
    places: list[Path] = []

    def make(*arguments: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *arguments, place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield make
    for place in reversed(places):
        # Some are unmounted already, and one that is down cannot be asked.
        subprocess.run(["umount", "-l", place], capture_output=True)


DEVICE_BYTES = {"ext4": 16 * 2**20, "xfs": 300 * 2**20, "btrfs": 300 * 2**20}

IOC_SHUTDOWN = 0x8004587D
"""The GOINGDOWN call, the same of both."""
WITHOUT_FLUSH = 2

FREEZE = """
import fcntl, os, select, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.ioctl(fd, 0xC0045877, 0)
try:
    print("frozen", flush=True)
    select.select([sys.stdin], [], [], float(sys.argv[2]))
finally:
    fcntl.ioctl(fd, 0xC0045878, 0)
"""
"""Freezes until it is told to thaw, or whoever would tell it is gone, or the time is over."""


class Device:
    """A file system on a loop device over a file; it can lose its power and come back."""

    def __init__(self, kind: str, image: Path, mount: Callable[..., Path]) -> None:
        self.kind = kind
        self._image = image
        self._mount = mount
        with image.open("wb") as file:
            file.truncate(DEVICE_BYTES[kind])
        try:
            subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a file system: {error}")
        self.place = self._attach()

    def _attach(self) -> Path:
        return self._mount("-o", "loop", str(self._image))

    def sync(self) -> None:
        subprocess.run(["sync", "-f", self.place], check=True)

    def cut_power(self) -> None:
        """From now on every access fails; what was not synced is lost."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, IOC_SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
        except OSError as error:
            pytest.skip(f"this file system cannot be shut down: {error}")
        finally:
            os.close(fd)

    @contextmanager
    def frozen(self, seconds: float) -> Iterator[None]:
        """The file system is frozen, as for a snapshot, for `seconds` at most.

        Another process freezes and thaws it: this one may be what stands still.
        """
        other = subprocess.Popen(
            [sys.executable, "-c", FREEZE, self.place, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            if other.stdout.readline() != "frozen\n":
                pytest.skip("this file system cannot be frozen")
            yield
        finally:
            other.stdin.close()
            other.wait()
            other.stdout.close()

    def turn_read_only(self) -> None:
        """What the kernel does by itself when it finds the file system damaged."""
        done = subprocess.run(["mount", "-o", "remount,errors=remount-ro", self.place])
        found: list[str | Path] = ["findmnt", "-no", "SOURCE", self.place]
        loop = subprocess.run(found, capture_output=True, text=True).stdout.strip()
        trigger = Path("/sys/fs/ext4", Path(loop).name, "trigger_fs_error")
        if done.returncode or not trigger.exists():
            pytest.skip("this kernel has no way to make ext4 find an error")
        trigger.write_text("made for a test")

    def repair(self) -> None:
        """Check the file system and mount it again, elsewhere."""
        subprocess.run(["umount", self.place], check=True)
        subprocess.run(["e2fsck", "-fy", self._image], capture_output=True)
        self.place = self._attach()

    def restart(self) -> None:
        """Power is back: mounted again, elsewhere, as it is."""
        subprocess.run(["umount", self.place], check=True)
        self.place = self._attach()


@pytest.fixture(params=["ext4", "xfs"])
def device(request: pytest.FixtureRequest, tmp_path: Path, mount: Callable[..., Path]) -> Device:
    """A small file system of each kind that can lose its power."""
    return Device(request.param, tmp_path / "image", mount)


@pytest.fixture
def ext4(tmp_path: Path, mount: Callable[..., Path]) -> Device:
    """A small ext4."""
    return Device("ext4", tmp_path / "image", mount)


class FaultyDisk:
    """A mounted file system that obeys rules; see `tests.faults.file_system`."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.path = place
        self.behind = folder
        folder.mkdir()
        place.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.file_system", folder, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        end = time.monotonic() + PATIENCE
        while not place.is_mount():
            if self._process.poll() is not None or time.monotonic() > end:
                self.remove()
                pytest.skip("this machine does not mount a FUSE file system")
            time.sleep(0.01)

    def obey(self, *rules: Rule) -> None:
        """Put `rules` in force instead of those before; none: all is well again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(rules), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"

    @contextmanager
    def hanging(self, op: str, **where: Any) -> Iterator[None]:
        """Operations hang for as long as the block lasts, however it is left."""
        try:
            self.obey({"op": op, "hang": True, **where})
            yield
        finally:
            self.obey()

    def die(self) -> None:
        """The device is gone: whatever waits for it is told so."""
        self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", self.path], capture_output=True)
        else:
            subprocess.run(["fusermount3", "-uz", self.path], capture_output=True)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDisk]:
    """A file system that fails where it is told to."""
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    if not (find_library("fuse3") or find_library("fuse")):
        pytest.skip("libfuse is not installed (package fuse3)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be used here")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        pytest.skip("mounting FUSE without root needs fusermount3")
    disk = FaultyDisk(tmp_path / "behind", tmp_path / "faulty")
    yield disk
    disk.remove()


@pytest.fixture
def neighbour() -> Iterator[Callable[..., Neighbour]]:
    """Starts other processes that use the cache; those that still live are killed at the end."""
    started: list[Neighbour] = []

    def start(*arguments: Any, **changes: Any) -> Neighbour:
        one = Neighbour(*arguments, **changes)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()


def error_of(number: int) -> Rule:
    return {"error": number}


EIO = error_of(errno.EIO)
