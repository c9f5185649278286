"""Host memory: what a region of rows is and what it costs; how processes meet is elsewhere."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore.tiers.pages
import kvstore.tiers.pinned
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PAGE, PinnedRegion, round_to_page
from tests.tiers.support import memory_of

ROWS, ROW = 6, 3 * PAGE


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture(params=["private", "shared"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def region(kind: str, name: str) -> Iterator[PinnedRegion]:
    """A region of either kind."""
    region = make(kind, name, ROWS, ROW)
    yield region
    region.close()


@pytest.fixture
def tailed(kind: str, name: str) -> Iterator[PinnedRegion]:
    """A region of either kind with a page behind each row."""
    region = make(kind, name, ROWS, ROW, PAGE)
    yield region
    region.close()


def make(kind: str, name: str, rows: int, row_bytes: int, tail: int = 0) -> PinnedRegion:
    if kind == "private":
        return PinnedRegion.private(rows, row_bytes, tail)
    return PinnedRegion.shared(name, rows, row_bytes, mappers=1, tail_bytes=tail)


def test_a_region_is_rows_of_zeros_at_page_boundaries(region: PinnedRegion) -> None:
    assert (region.rows, region.row_bytes, region.size) == (ROWS, ROW, ROWS * ROW)
    assert region.address % PAGE == 0
    assert region.array.shape == (ROWS, ROW)
    assert not region.array.any()
    assert len(region.view) == ROWS * ROW
    assert f"{ROWS} rows of {ROW} B" in region.description
    assert "huge pages" not in region.description, "all memory of the process would be walked"
    assert not region.claim_tails(), "nobody may write behind rows where there are no tails"


def test_rows_array_and_view_are_the_same_memory(region: PinnedRegion) -> None:
    region.row(2)[:5] = b"hello"
    assert bytes(region.view[2 * ROW : 2 * ROW + 5]) == b"hello"
    region.array[2, 0] = ord("J")
    assert bytes(region.row(2)[:5]) == b"Jello"
    assert region.array.ctypes.data == region.address


def test_what_is_written_behind_a_row_is_in_no_row(tailed: PinnedRegion) -> None:
    assert tailed.size == len(tailed.view) == ROWS * (ROW + PAGE)
    assert tailed.array.shape == (ROWS, ROW)
    for row in range(ROWS):
        begin = row * tailed.stride
        tailed.view[begin + ROW : begin + tailed.stride] = b"\xff" * PAGE
    assert not tailed.array.any()
    assert not any(bytes(tailed.row(row)).strip(b"\0") for row in range(ROWS))


def test_rows_with_tails_are_filled_whole_and_tails_stay_as_they_were(tailed: PinnedRegion) -> None:
    for row in range(ROWS):
        tailed.row(row)[:] = bytes([row + 1]) * ROW
        begin = row * tailed.stride
        assert bytes(tailed.view[begin : begin + ROW]) == bytes([row + 1]) * ROW
        assert not any(tailed.view[begin + ROW : begin + tailed.stride])
    assert (tailed.array == np.arange(1, ROWS + 1)[:, None]).all()


def test_tails_are_one_users_at_a_time(tailed: PinnedRegion) -> None:
    assert tailed.claim_tails()
    assert not tailed.claim_tails()
    tailed.release_tails()
    assert tailed.claim_tails()


def test_tails_that_are_no_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="tails of 100"):
        PinnedRegion.private(ROWS, ROW, 100)


def test_a_closed_region_gives_its_memory_back() -> None:
    before = resident_bytes()
    region = PinnedRegion.private(64, 2**20)
    assert resident_bytes() - before >= 60 * 2**20, "the memory was not touched at creation"
    region.close()
    assert resident_bytes() - before < 10 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_views_that_are_held_outlive_the_region() -> None:
    region = PinnedRegion.private(ROWS, ROW)
    region.row(1)[:4] = b"kept"
    row, array = region.row(1), region.array
    region.close()
    gc.collect()
    assert bytes(row[:4]) == b"kept"
    assert bytes(array[1, :4]) == b"kept"


def descriptors() -> set[str]:
    """What has been opened of shared memory and of sockets, by its number in the system.

    Tests that ran before in this process may leave threads that open something else.
    """
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(("/memfd:", "socket:")):
                found.add(f"{target} {fd}")
    return found


def test_closing_twice_is_closing_once(region: PinnedRegion) -> None:
    region.close()
    region.close()


def test_a_closed_region_leaves_no_descriptor(name: str) -> None:
    gc.collect()
    before = descriptors()
    PinnedRegion.shared(name, ROWS, ROW, mappers=1).close()
    PinnedRegion.private(ROWS, ROW).close()
    assert descriptors() <= before


def test_huge_pages_of_a_large_region_are_told_as_the_system_gave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore.tiers.pinned, "LARGE", 2**25)
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this system gives no transparent huge pages")
    region = PinnedRegion.private(32, 2**20)
    try:
        assert region.huge_bytes is not None
        assert "% huge pages" in region.description
        if not region.huge_bytes:
            pytest.skip("the system had no huge page free")
        assert region.huge_bytes % (2 * 2**20) == 0
        assert "0 % huge" not in f" {region.description}".replace("100 %", "")
    finally:
        region.close()


@pytest.mark.parametrize(
    ("rows", "row_bytes"), [(0, PAGE), (-1, PAGE), (1, 0), (1, -PAGE), (1, PAGE - 1), (2, PAGE + 1)]
)
def test_rows_that_are_no_pages_are_refused(
    name: str, kind: str, rows: int, row_bytes: int
) -> None:
    with pytest.raises(ConfigError, match=f"got {rows} rows of {row_bytes} bytes"):
        make(kind, name, rows, row_bytes)


@pytest.mark.parametrize("rows", [2**30, 2**52, 2**70], ids=["4TiB", "2^64", "2^82"])
def test_more_than_the_machine_has_is_refused_with_what_it_has(
    name: str, kind: str, rows: int
) -> None:
    with pytest.raises(ConfigError, match=f"host memory of {rows * PAGE} bytes") as caught:
        make(kind, name, rows, PAGE)
    assert "bytes are available" in str(caught.value)
    assert not memory_of(name)


def test_more_than_the_process_may_have_is_refused(name: str, kind: str) -> None:
    code = """
import resource, sys
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion
kind, name = sys.argv[1:]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + 32 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    if kind == "private":
        PinnedRegion.private(64, 2**20)
    else:
        PinnedRegion.shared(name, 64, 2**20, mappers=1)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, kind, name], capture_output=True, text=True, timeout=30
    )
    assert str(64 * 2**20) in done.stdout, done.stderr
    assert "Cannot allocate memory" in done.stdout


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (0, 0)])
def test_round_to_page(size: int, pages: int) -> None:
    assert round_to_page(size) == pages * PAGE


def test_a_region_that_was_joined_costs_no_page_fault_later(name: str) -> None:
    region = PinnedRegion.shared(name, 4096, PAGE, mappers=2)
    joined = PinnedRegion.shared(name, 4096, PAGE, mappers=2)
    for one in (region, joined):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        one.array[:, 0] = 1
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 400
        one.close()


def test_a_row_of_a_shared_region_survives_the_fork_of_a_reader(name: str) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    forked = os.fork()
    if not forked:
        np.copyto(region.array[0], 7)
        os._exit(0)
    os.waitpid(forked, 0)
    assert (region.array[0] == 7).all()
    region.close()


def test_memory_that_the_system_cannot_give_is_an_error_and_leaves_nothing(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = descriptors()

    def refuse(address: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(kvstore.tiers.pages, "_touch", refuse)
    with pytest.raises(ConfigError, match=f"{ROWS * ROW} bytes cannot be allocated: Cannot"):
        make(kind, name, ROWS, ROW)
    gc.collect()
    assert descriptors() <= before
    assert not memory_of(name)


def unknown(address: int, length: int) -> None:
    """The system does not know the advice."""
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_system_that_does_not_know_the_advice_gets_its_pages_touched(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.tiers.pages, "_touch", unknown)
    region = make(kind, name, 4096, PAGE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    region.array[:, 0] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 400
    region.close()


def test_memory_that_others_write_to_is_touched_without_changing_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    region.array[:] = 7
    joined = PinnedRegion.shared(name, ROWS, ROW, mappers=3)

    monkeypatch.setattr(kvstore.tiers.pages, "_touch", unknown)
    late = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    for one in (region, joined, late):
        assert (one.array == 7).all()
        one.close()


def test_large_memory_is_touched_whole_by_several_threads_from_any_share_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore.tiers.pages, "STEP", 4 * PAGE)
    touched: list[tuple[int, int]] = []
    touch = kvstore.tiers.pages._touch

    def watch(address: int, length: int) -> None:
        touched.append((address, length))
        touch(address, length)

    monkeypatch.setattr(kvstore.tiers.pages, "_touch", watch)
    for share in (0.0, 0.25, 0.5, 0.99):
        touched.clear()
        with mmap.mmap(-1, 64 * 4 * PAGE + PAGE) as memory:
            kvstore.tiers.pages.populate(memory, shared=False, share=share)
            address = np.frombuffer(memory, np.uint8).ctypes.data
        assert sorted(touched) == [
            (address + at, min(4 * PAGE, 64 * 4 * PAGE + PAGE - at))
            for at in range(0, 64 * 4 * PAGE + PAGE, 4 * PAGE)
        ]


def test_the_pace_of_large_memory_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvstore.tiers.pinned, "LARGE", 2**20)
    with caplog.at_level("INFO", "kvstore"):
        PinnedRegion.private(256, PAGE).close()
        PinnedRegion.private(255, PAGE).close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "host memory ready in" in line
    assert "GB/s" in line
