"""A small disk tier and what the tests of the disk tier do with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from kvstore.testing.bench import TierBench
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.keys import ALL, KEY_BYTES, KeyRing, Secret, id_of, write_keys
from kvstore.tiers.rendezvous import stem_of
from tests.patience import PATIENCE

CHUNK = 8000
SLOT = 8192
SLOTS = 8
GEOMETRY = Geometry(SLOTS, SLOT, CHUNK)
SEGMENT = GEOMETRY.file_bytes
ROWS = 16
STRANGER = 65534
"""Another user."""

NAMESPACE = Namespace.of("tiny", {"model": "tiny", "dtype": "bf16"})


def disk_tier(path: Path | list[Path], *, segments: int = 3, **options: Any) -> DiskTier:
    """A tier in `path` for chunks of `CHUNK` bytes, `SLOTS` to a segment."""
    options = {"capacity_bytes": segments * SEGMENT, "segment_bytes": SEGMENT, **options}
    namespace = options.pop("namespace", NAMESPACE)
    return DiskTier(path, namespace, CHUNK, options.pop("capacity_bytes"), **options)


def some_keys(folder: Path) -> KeyRing:
    """The keys of a file in `folder`, which is made if there is none."""
    path = folder / "keys.toml"
    if not path.exists():
        material = secrets.token_bytes(KEY_BYTES)
        write_keys(path, {ALL: [Secret(id_of(material), material)]})
    return KeyRing(str(path))


def bench_of(path: Path, **options: Any) -> TierBench:
    """An open tier with host memory beside it."""
    return TierBench(disk_tier(path, **options), ROWS, SLOT, CHUNK)


def disk_of(bench: TierBench) -> DiskTier:
    """The tier of a bench, which is a disk tier."""
    assert isinstance(bench.tier, DiskTier)
    return bench.tier


def lane_of(path: Path, number: int = 0) -> Path:
    """The folder of a lane."""
    return path / NAMESPACE.name / f"lane-{number}"


def segment_of(path: Path, number: int = 0) -> Path:
    """A segment file of lane 0."""
    return lane_of(path) / f"segment-{number}.safetensors"


def lane_bytes(path: Path) -> int:
    """Size of all that lies in lane 0, its lock excepted."""
    return sum(
        file.lstat().st_size for file in lane_of(path).iterdir() if file.name not in ("lock",)
    )


def disk_bytes(path: Path) -> int:
    """What all that lies in lane 0 takes of the disk, its lock excepted."""
    files = [file for file in lane_of(path).iterdir() if file.name != "lock"]
    return sum(min(file.lstat().st_size, file.lstat().st_blocks * 512) for file in files)


def flip(file: Path, offset: int, mask: int = 0x01) -> None:
    """Flip bits of one byte of a file."""
    with open(file, "r+b") as handle:
        handle.seek(offset)
        (byte,) = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte ^ mask]))


def memory_of(name: str) -> dict[int, int]:
    """The shared memory that living processes hold under a name: inode -> bytes that are there."""
    stem = f"/memfd:{stem_of(name)}"
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(fd).startswith(stem):
                            told = fd.stat()
                            found[told.st_ino] = told.st_blocks * 512
    return found


PREAMBLE = """
import asyncio, os, signal, sys, time
from pathlib import Path
from kvstore.errors import KVStoreError
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.pinned import PinnedRegion

def say(*words):
    print(*words, flush=True)

def bench(path, **options):
    namespace = Namespace({name!r}, {identity!r})
    options = dict(segment_bytes={segment}) | options
    tier = DiskTier(Path(path), namespace, {chunk}, {capacity}, **options)
    return TierBench(tier, {rows}, {slot}, {chunk})
"""


class Child:
    """Another Python process that runs `code` and talks over its standard streams.

    `code` finds `say` to print a line, `bench` to open the tests' tier, and its
    arguments in ``sys.argv[1:]``.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        preamble = PREAMBLE.format(
            name=NAMESPACE.name,
            identity=dict(NAMESPACE.identity),
            segment=SEGMENT,
            capacity=3 * SEGMENT,
            chunk=CHUNK,
            slot=SLOT,
            rows=ROWS,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", preamble + textwrap.dedent(code), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that the child says; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self, text: str = "") -> None:
        """Send the child one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._close()

    def kill_all(self) -> None:
        """SIGKILL, also to what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()

    def end(self) -> int:
        """Close its standard input and wait; returns the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._close()

    def _close(self) -> int:
        status = self._process.wait(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return status


# -- what others may do to a file ------------------------------------------------------------


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def link_to(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
