"""Host memory: private and shared regions, and what is left of them when a process is killed."""

from __future__ import annotations

import gc
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError, PathUnusableError
from tests.tiers.support import Child
from tiers.pinned import PAGE, PinnedRegion, round_to_page

ROWS, ROW = 6, 3 * PAGE
StartChild = Callable[..., Child]


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses; its rendezvous is removed at the end."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    rendezvous_of(name).unlink(missing_ok=True)


def rendezvous_of(name: str) -> Path:
    return Path(f"/dev/shm/kvstore-{os.getuid()}-{name}.json")


def holders(token: str) -> list[int]:
    """Processes that hold the memory of a region, by descriptor or by mapping."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            held = [os.readlink(fd) for fd in (process / "fd").iterdir()]
            held.append((process / "maps").read_text())
        except OSError:
            continue
        if any(token in text for text in held):
            found.append(int(process.name))
    return found


# -- private -------------------------------------------------------------------------------


@pytest.fixture(params=["private", "shared"])
def region(request: pytest.FixtureRequest, name: str) -> Iterator[PinnedRegion]:
    """A region of either kind."""
    if request.param == "private":
        region = PinnedRegion.private(ROWS, ROW)
    else:
        region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    yield region
    region.close()


def test_a_region_is_rows_of_zeros_at_page_boundaries(region: PinnedRegion) -> None:
    assert (region.rows, region.row_bytes, region.size) == (ROWS, ROW, ROWS * ROW)
    assert region.address % PAGE == 0
    assert region.array.shape == (ROWS, ROW)
    assert not region.array.any()
    assert len(region.view) == ROWS * ROW


def test_rows_array_and_view_are_the_same_memory(region: PinnedRegion) -> None:
    region.row(2)[:5] = b"hello"
    assert bytes(region.view[2 * ROW : 2 * ROW + 5]) == b"hello"
    region.array[2, 0] = ord("J")
    assert bytes(region.row(2)[:5]) == b"Jello"
    assert region.array.ctypes.data == region.address


def test_a_row_does_not_reach_into_the_next(region: PinnedRegion) -> None:
    row = region.row(0)
    assert len(row) == ROW
    row[:] = b"\xff" * ROW
    assert not region.array[1:].any()


def test_a_region_says_what_it_is(region: PinnedRegion) -> None:
    assert f"{ROWS} rows of {ROW} B" in region.description
    assert "% huge pages" in region.description


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


def test_closing_twice_is_closing_once(region: PinnedRegion) -> None:
    region.close()
    region.close()


def test_a_closed_region_leaves_no_descriptor(name: str) -> None:
    before = os.listdir("/proc/self/fd")
    PinnedRegion.shared(name, ROWS, ROW, mappers=1).close()
    PinnedRegion.private(ROWS, ROW).close()
    assert os.listdir("/proc/self/fd") == before


def test_huge_pages_are_reported_as_the_system_gave_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this system gives no transparent huge pages")
    region = PinnedRegion.private(32, 2**20)
    try:
        assert region.huge_bytes >= 0
        if not region.huge_bytes:
            pytest.skip("the system had no huge page free")
        assert region.huge_bytes % (2 * 2**20) == 0
        assert "0 % huge" not in f" {region.description}".replace("100 %", "")
    finally:
        region.close()


@pytest.mark.parametrize("kind", ["private", "shared"])
@pytest.mark.parametrize(
    ("rows", "row_bytes"), [(0, PAGE), (-1, PAGE), (1, 0), (1, -PAGE), (1, PAGE - 1), (2, PAGE + 1)]
)
def test_rows_that_are_no_pages_are_refused(
    name: str, kind: str, rows: int, row_bytes: int
) -> None:
    with pytest.raises(ConfigError, match=f"got {rows} rows of {row_bytes} bytes"):
        make(kind, name, rows, row_bytes)


@pytest.mark.parametrize("kind", ["private", "shared"])
@pytest.mark.parametrize("rows", [2**30, 2**52, 2**70], ids=["4TiB", "2^64", "2^82"])
def test_more_than_the_machine_has_is_refused_with_what_it_has(
    name: str, kind: str, rows: int
) -> None:
    with pytest.raises(ConfigError, match=f"host memory of {rows * PAGE} bytes") as caught:
        make(kind, name, rows, PAGE)
    assert "bytes are available" in str(caught.value)
    assert not rendezvous_of(name).exists()


def make(kind: str, name: str, rows: int, row_bytes: int) -> PinnedRegion:
    if kind == "private":
        return PinnedRegion.private(rows, row_bytes)
    return PinnedRegion.shared(name, rows, row_bytes, mappers=1)


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_more_than_the_process_may_have_is_refused(name: str, kind: str) -> None:
    code = """
import resource, sys
from kvstore.errors import ConfigError
from tiers.pinned import PinnedRegion
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


# -- shared --------------------------------------------------------------------------------

MAPPER = """
region = PinnedRegion.shared(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
say("mapped")
for line in sys.stdin:
    row, text = line.split()
    if text == "?":
        say(bytes(region.row(int(row))[:5]).decode())
    else:
        region.row(int(row))[:5] = text.encode()
        say("written")
"""


def test_another_process_sees_the_bytes(name: str, child: StartChild) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    other = child(MAPPER, name, ROWS, ROW, 2)
    assert other.line() == "mapped"
    region.row(3)[:5] = b"hello"
    other.answer("3 ?")
    assert other.line() == "hello"
    other.answer("5 world")
    assert other.line() == "written"
    assert bytes(region.row(5)[:5]) == b"world"
    region.close()


@pytest.mark.parametrize("mappers", [1, 2, 3])
def test_the_rendezvous_is_gone_as_soon_as_all_have_mapped(
    name: str, child: StartChild, mappers: int
) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers)
    others = []
    for _ in range(mappers - 1):
        assert rendezvous_of(name).exists()
        others.append(child(MAPPER, name, ROWS, ROW, mappers))
        assert others[-1].line() == "mapped"
    assert not rendezvous_of(name).exists()
    region.close()


def test_the_rendezvous_is_for_this_user_alone(name: str) -> None:
    old = os.umask(0)
    try:
        region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    finally:
        os.umask(old)
    assert rendezvous_of(name).stat().st_mode & 0o777 == 0o600
    region.close()


def test_processes_that_come_at_the_same_time_meet(name: str, child: StartChild) -> None:
    others = [child(MAPPER, name, ROWS, ROW, 4) for _ in range(4)]
    assert [other.line() for other in others] == ["mapped"] * 4
    for row, other in enumerate(others):
        other.answer(f"{row} byte{row}")
        assert other.line() == "written"
    for other in others:
        for row in range(4):
            other.answer(f"{row} ?")
            assert other.line() == f"byte{row}"
    assert not rendezvous_of(name).exists()


def test_the_region_lives_on_without_its_creator(name: str, child: StartChild) -> None:
    creator = child(MAPPER, name, ROWS, ROW, 2)
    assert creator.line() == "mapped"
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    creator.answer("0 still")
    assert creator.line() == "written"
    creator.kill()
    assert bytes(region.row(0)[:5]) == b"still"
    region.close()


def test_a_killed_creator_leaves_no_memory_behind_and_is_replaced(
    name: str, child: StartChild
) -> None:
    creator = child(MAPPER, name, ROWS, ROW, 2)
    assert creator.line() == "mapped"
    creator.answer("0 stale")
    assert creator.line() == "written"
    token = json.loads(rendezvous_of(name).read_text())["token"]
    assert holders(token) == [creator.pid]
    creator.kill()
    # The memory has no name, so without a holder it is free.
    assert holders(token) == []
    assert rendezvous_of(name).exists()
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    assert not region.array.any(), "the region of the dead was mapped"
    other = child(MAPPER, name, ROWS, ROW, 2)
    assert other.line() == "mapped"
    other.answer("1 fresh")
    assert other.line() == "written"
    assert bytes(region.row(1)[:5]) == b"fresh"
    assert not rendezvous_of(name).exists()
    region.close()


def test_many_that_find_the_rendezvous_of_the_dead_still_meet_each_other(
    name: str, child: StartChild
) -> None:
    dead = child(MAPPER, name, ROWS, ROW, 2)
    assert dead.line() == "mapped"
    dead.kill()
    left = rendezvous_of(name).read_bytes()
    count = 8
    for round_ in range(10):
        rendezvous_of(name).write_bytes(left)
        barrier = threading.Barrier(count)

        def join(barrier: threading.Barrier = barrier) -> PinnedRegion:
            barrier.wait(10)
            return PinnedRegion.shared(name, ROWS, ROW, mappers=count)

        with ThreadPoolExecutor(count) as pool:
            regions = [future.result() for future in [pool.submit(join) for _ in range(count)]]
        regions[0].array[:] = round_ + 1
        assert all((region.array == round_ + 1).all() for region in regions)
        assert not rendezvous_of(name).exists()
        for region in regions:
            region.close()


def test_who_comes_late_to_the_rendezvous_of_the_dead_does_not_remove_its_successor(
    name: str, child: StartChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = child(MAPPER, name, ROWS, ROW, 2)
    assert dead.line() == "mapped"
    dead.kill()
    first: list[PinnedRegion] = []
    readlink = os.readlink

    def slowly(path: str) -> str:
        # Between looking at the dead one's memory and removing its rendezvous,
        # another process replaces it.
        if not first and str(path).startswith("/proc/") and "self" not in str(path):
            monkeypatch.setattr(os, "readlink", readlink)
            thread = threading.Thread(
                target=lambda: first.append(PinnedRegion.shared(name, ROWS, ROW, 2))
            )
            thread.start()
            thread.join(1)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", slowly)
    second = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    for _ in range(200):
        if first:
            break
        threading.Event().wait(0.01)
    first[0].row(0)[:4] = b"same"
    assert bytes(second.row(0)[:4]) == b"same"
    second.close()
    first[0].close()


def test_other_sizes_are_refused_by_those_who_come_later(name: str) -> None:
    region = PinnedRegion.shared(name, 600, PAGE, mappers=2)
    with pytest.raises(ConfigError) as caught:
        PinnedRegion.shared(name, 6000, PAGE, mappers=2)
    assert name in str(caught.value)
    assert "same sizes" in str(caught.value)
    # The first is not disturbed by it.
    other = PinnedRegion.shared(name, 600, PAGE, mappers=2)
    other.row(1)[:2] = b"ok"
    assert bytes(region.row(1)[:2]) == b"ok"
    other.close()
    region.close()


def test_another_shape_of_the_same_size_is_refused(name: str) -> None:
    region = PinnedRegion.shared(name, 8, PAGE, mappers=2)
    with pytest.raises(ConfigError, match="same sizes"):
        PinnedRegion.shared(name, 4, 2 * PAGE, mappers=2)
    region.close()


def test_a_creator_that_closed_its_region_early_is_replaced(name: str) -> None:
    PinnedRegion.shared(name, ROWS, ROW, mappers=2).close()
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    assert not region.array.any()
    assert not rendezvous_of(name).exists()
    region.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"{}",
        b'{"pid": "x", "fd": 0, "token": "t", "size": 1}',
        b'{"pid": 1, "fd": 0, "token": "t", "size": 1}',
        pytest.param(
            json.dumps({"pid": os.getpid(), "fd": 0, "token": "t", "size": 1}).encode(),
            id="this process",
        ),
    ],
)
def test_a_rendezvous_that_leads_nowhere_is_replaced(name: str, content: bytes) -> None:
    rendezvous_of(name).write_bytes(content)
    rendezvous_of(name).chmod(0o600)
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    assert json.loads(rendezvous_of(name).read_bytes())["pid"] == os.getpid()
    region.close()


def test_a_process_that_has_the_number_of_a_dead_one_is_not_taken_for_it(name: str) -> None:
    # The number of the dead creator and its descriptor are in use again, for other memory.
    other = os.memfd_create("kvstore-somebody-else")
    told = {"pid": os.getpid(), "fd": other, "token": "kvstore-the-dead", "shape": [ROWS, ROW]}
    rendezvous_of(name).write_text(json.dumps(told))
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    assert json.loads(rendezvous_of(name).read_bytes())["token"] != told["token"]
    region.close()
    os.close(other)


def test_a_rendezvous_is_not_followed_through_a_link(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("{}")
    rendezvous_of(name).symlink_to(target)
    with pytest.raises(PathUnusableError, match=name):
        PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    assert target.read_text() == "{}"


def test_a_rendezvous_of_another_user_is_refused(name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("making another user's file needs root")
    rendezvous_of(name).write_text("{}")
    os.chown(rendezvous_of(name), 65534, 65534)
    with pytest.raises(PathUnusableError, match="belongs to another user"):
        PinnedRegion.shared(name, ROWS, ROW, mappers=2)


@pytest.mark.parametrize("odd", ["a/b", "../../etc/passwd", "", "\n", "x" * 300, "ü" * 50])
def test_any_name_makes_one_file_beside_the_others(name: str, odd: str) -> None:
    region = PinnedRegion.shared(name + odd, ROWS, ROW, mappers=2)
    try:
        (made,) = files_of(name)
        assert made.parent == Path("/dev/shm")
        assert made.name.startswith(f"kvstore-{os.getuid()}-{name}")
        made.unlink()
    finally:
        region.close()


def files_of(name: str) -> list[Path]:
    """What lies in shared memory under a name, finished or not."""
    return [file for file in Path("/dev/shm").iterdir() if name in file.name]


def test_a_killed_process_leaves_no_file_when_all_had_mapped(name: str, child: StartChild) -> None:
    both = [child(MAPPER, name, ROWS, ROW, 2) for _ in range(2)]
    assert [one.line() for one in both] == ["mapped"] * 2
    for one in both:
        one.kill()
    assert files_of(name) == []


def test_a_region_that_was_joined_costs_no_page_fault_later(name: str) -> None:
    region = PinnedRegion.shared(name, 4096, PAGE, mappers=2)
    joined = PinnedRegion.shared(name, 4096, PAGE, mappers=2)
    for one in (region, joined):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        one.array[:, 0] = 1
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 400
        one.close()


NOBODY = """
import ctypes
dumpable = lambda yes: ctypes.CDLL(None).prctl(4, yes, 0, 0, 0)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
dumpable(1)
try:
    region = PinnedRegion.shared(sys.argv[1], 4, 4096, 2)
    say("mapped", bytes(region.row(0)[:5]))
    region.row(0)[:5] = b"bytes"
    sys.stdin.readline()
    dumpable(0)
    say("hidden")
    sys.stdin.readline()
except KVStoreError as error:
    say(type(error).__name__, error)
"""


@pytest.fixture
def name_of_nobody(name: str) -> Iterator[str]:
    """A name under which processes of an unprivileged user meet."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    yield name
    Path(f"/dev/shm/kvstore-65534-{name}.json").unlink(missing_ok=True)


def test_a_creator_that_is_dead_but_not_reaped_is_replaced(
    name_of_nobody: str, child: StartChild
) -> None:
    creator = child(NOBODY, name_of_nobody)
    assert creator.line().startswith("mapped")
    os.kill(creator.pid, signal.SIGKILL)
    # Its output ends with it, while its process waits for this one to ask.
    assert creator.line() == ""
    assert child(NOBODY, name_of_nobody).line() == f"mapped {bytes(5)!r}"


def test_a_creator_that_may_not_be_looked_at_is_an_error_and_not_another_region(
    name_of_nobody: str, child: StartChild
) -> None:
    creator = child(NOBODY, name_of_nobody)
    assert creator.line().startswith("mapped")
    creator.answer()
    assert creator.line() == "hidden"
    message = child(NOBODY, name_of_nobody).line()
    assert message.startswith("PathUnusableError")
    assert f"process {creator.pid}" in message


def test_a_row_of_a_shared_region_survives_the_fork_of_a_reader(name: str) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    forked = os.fork()
    if not forked:
        np.copyto(region.array[0], 7)
        os._exit(0)
    os.waitpid(forked, 0)
    assert (region.array[0] == 7).all()
    region.close()
