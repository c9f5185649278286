"""Fixtures for the tests of the tiers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvstore.testing.bench import TierBench
from tests.faults.conftest import ext4, mount
from tests.tiers.support import Child, bench_of

__all__ = ["ext4", "mount"]

OpenBench = Callable[..., TierBench]

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place for a cache; not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def open_bench(folder: Path) -> Iterator[OpenBench]:
    """Opens the tests' disk tier in `folder`; what is left open is let go of at the end."""
    benches: list[TierBench] = []

    def open_one(path: Path = folder, **options: Any) -> TierBench:
        bench = bench_of(path, **options)
        benches.append(bench)
        return bench

    yield open_one
    for bench in benches:
        bench.abandon()


@pytest.fixture
def as_root() -> None:
    """Skips where this user may not give files to another one, or become one."""
    if os.geteuid() != 0:
        pytest.skip("giving files to another user, and becoming one, needs root")


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts other Python processes; what still lives of them is killed at the end."""
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        started = Child(code, *arguments)
        children.append(started)
        return started

    yield start
    for started in children:
        started.kill_all()


@pytest.fixture
def small_disk(mount: Callable[..., Path]) -> Callable[[int], Path]:
    """Makes a file system of so many bytes."""

    def make(size: int) -> Path:
        return mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    return make


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Makes control groups with a limit of memory; skips where this user may not."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        parent = Path("/sys/fs/cgroup/memory")
        knob = "memory.limit_in_bytes"
        if not parent.is_dir():
            parent, knob = Path("/sys/fs/cgroup"), "memory.max"
        folder = parent / f"kvstore-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
            made.append(folder)
            (folder / knob).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no control group with a limit of memory can be made: {error}")
        return folder

    yield make
    for folder in made:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)
