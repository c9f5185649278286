"""What is on the medium when its call returns: a power cut right after it takes nothing.

The simulated file system loses pages and names that were not synced, in any order, as each seed
says. So a sync that is left out is seen within a few seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from kvstore.testing.bench import key_of
from kvstore.tiers.disk import epoch
from kvstore.tiers.disk.epoch import raise_epoch, read_epoch
from kvstore.tiers.disk.extents import Extent, Writing, read_extents
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.io.buffered import BufferedIO
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.disk.relocation import relocate
from kvstore.tiers.disk.segment import Segment, read_header, segment_files
from kvstore.tiers.disk.trust import STRICT
from tests.world.files import Files
from tests.world.kernel import Kernel
from tests.world.machine import alive

CHUNK = 4096
GEOMETRY = Geometry(4, CHUNK, CHUNK)
DISK = Path("/sim/disk")
NAMESPACE = Namespace("sim", {"model": "sim"})
KEYS = [key_of(n) for n in range(3)]


def across_a_power_cut(seed: int, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Run `before` in a process, cut the power when it has returned, and run `after`."""
    rng = random.Random(seed)
    kernel = Kernel(rng)
    files = Files(kernel, rng)
    with alive(kernel, files, rng, lambda: 0.0, lambda: None):
        for act in (before, after):
            kernel.spawn(act.__name__, act)
            # Until nobody can run.
            kernel.run(lambda: False)
            if act is before:
                files.cut_power()


def new_segment() -> Segment:
    DISK.mkdir(exist_ok=True)
    return Segment.create(DISK, len(segment_files(DISK)), NAMESPACE.digest, GEOMETRY, BufferedIO())


def payloads() -> list[memoryview]:
    return [memoryview(bytearray(bytes([n + 1]) * CHUNK)) for n in range(len(KEYS))]


@pytest.mark.parametrize("seed", range(40))
def test_a_segment_that_was_made_is_there_and_whole(seed: int) -> None:
    def before() -> None:
        new_segment().close()

    def after() -> None:
        ((number, path),) = segment_files(DISK)
        assert number == 0
        assert read_header(path).geometry == GEOMETRY

    across_a_power_cut(seed, before, after)


@pytest.mark.parametrize("seed", range(40))
def test_chunks_that_were_moved_are_there_although_their_segment_is_gone(seed: int) -> None:
    def before() -> None:
        source, target = new_segment(), new_segment()
        (outcome,) = Writing(source.backend, [Extent(source, 0, KEYS, payloads())], 0).end()
        assert all(outcome.ok)
        places = [(source, slot) for slot in range(len(KEYS))]
        done = relocate(KEYS, places, [(target, slot) for slot in range(len(KEYS))])
        assert all(done.ok)
        source.remove()

    def after() -> None:
        path = dict(segment_files(DISK))[1]
        segment = Segment.open(path, NAMESPACE.digest, GEOMETRY, BufferedIO(), STRICT)
        found = payloads()
        for each in found:
            each[:] = bytes(CHUNK)
        (outcome,) = read_extents(segment.backend, [Extent(segment, 0, KEYS, found)])
        assert outcome.ok == [True] * len(KEYS), outcome.error
        assert list(map(bytes, found)) == list(map(bytes, payloads()))
        segment.close()

    across_a_power_cut(seed, before, after)


@pytest.mark.parametrize("seed", range(40))
def test_an_epoch_that_somebody_enters_stays_though_who_raised_it_failed(seed: int) -> None:
    def before() -> None:
        NAMESPACE.establish(DISK, STRICT)
        folder = DISK / NAMESPACE.name
        with (
            patch.object(epoch, "sync_folder", side_effect=OSError("full")),
            pytest.raises(OSError, match="full"),
        ):
            raise_epoch(folder, 7)
        # The next process finds it there, and writes chunks of it.
        assert raise_epoch(folder, read_epoch(folder)) == 7

    def after() -> None:
        assert read_epoch(DISK / NAMESPACE.name) == 7

    across_a_power_cut(seed, before, after)


@pytest.mark.parametrize("seed", range(40))
def test_an_epoch_that_was_raised_stays_raised(seed: int) -> None:
    def before() -> None:
        NAMESPACE.establish(DISK, STRICT)
        assert raise_epoch(DISK / NAMESPACE.name, 7) == 0

    def after() -> None:
        assert read_epoch(DISK / NAMESPACE.name) == 7

    across_a_power_cut(seed, before, after)
