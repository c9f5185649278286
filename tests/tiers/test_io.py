"""The I/O backends: every one moves the same bytes, whole or with an error."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.testing.bench import key_of
from kvstore.tiers.disk.digest import address, digest
from kvstore.tiers.disk.extents import Extent, read_extents
from kvstore.tiers.disk.io import IO_BACKENDS, IOBackend, IORequest, Moved, aio, choose_backend
from kvstore.tiers.disk.io.base import read_whole
from kvstore.tiers.disk.io.mapped import MappedIO
from kvstore.tiers.disk.segment import Segment, read_header
from kvstore.tiers.pinned import PAGE, PinnedRegion
from tests.patience import PATIENCE
from tests.tiers.conftest import OpenBench
from tests.tiers.support import SLOT, SLOTS, lane_of

try:
    from kvstore.tiers.disk.io import _aio as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

PAGES = 32


@pytest.fixture(params=sorted(IO_BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> IOBackend:
    """Each backend that works here."""
    try:
        return choose_backend(tmp_path, request.param)
    except ConfigError as error:
        pytest.skip(str(error))


def aio_in(folder: Path) -> IOBackend:
    """Native AIO, where it works."""
    try:
        return choose_backend(folder, "aio")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def memory() -> Iterator[PinnedRegion]:
    """Pages with bytes of their own, each different."""
    region = PinnedRegion.private(PAGES, PAGE)
    region.array[:] = np.random.default_rng(7).integers(0, 256, (PAGES, PAGE), np.uint8)
    yield region
    region.close()


@pytest.fixture
def file(backend: IOBackend, tmp_path: Path) -> Iterator[Path]:
    """A file of `PAGES` pages of zeros; in memory where that makes a difference."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if backend.name == "mmap" and os.access(memory, os.W_OK) else tmp_path
    ) as place:
        path = Path(place) / "file"
        path.write_bytes(bytes(PAGES * PAGE))
        yield path


@pytest.fixture
def fd(backend: IOBackend, file: Path) -> Iterator[int]:
    """The same file, opened by the backend."""
    fd = backend.open(file)
    yield fd
    backend.close(fd)


def lengths(outcomes: Sequence[Moved | OSError]) -> list[int | None]:
    """The bytes moved of each run, None where it failed."""
    return [None if isinstance(each, OSError) else each.length for each in outcomes]


def digests_of(outcomes: Sequence[Moved | OSError]) -> list[list[bytes] | None]:
    """The digests of each run, None where it failed."""
    return [None if isinstance(each, OSError) else list(each.digests) for each in outcomes]


def rows(memory: PinnedRegion, *numbers: int) -> list[memoryview]:
    return [memory.row(number) for number in numbers]


def test_a_run_is_written_from_buffers_in_their_order(
    backend: IOBackend, fd: int, file: Path, memory: PinnedRegion
) -> None:
    backend.write(fd, rows(memory, 5, 0, 9), 2 * PAGE)
    expected = b"".join([bytes(2 * PAGE), *rows(memory, 5, 0, 9), bytes((PAGES - 5) * PAGE)])
    assert file.read_bytes() == expected


def test_a_run_is_read_into_buffers_in_their_order(
    backend: IOBackend, file: Path, memory: PinnedRegion
) -> None:
    file.write_bytes(bytes(memory.view))
    before = memory.array.copy()
    fd = backend.open(file)
    assert backend.read(fd, rows(memory, 7, 3), 20 * PAGE) == 2 * PAGE
    backend.close(fd)
    before[[7, 3]] = before[[20, 21]]
    assert (memory.array == before).all(), "other rows were written to"


def test_a_file_that_was_cut_short_after_it_was_used_is_a_short_read(
    backend: IOBackend, fd: int, file: Path, memory: PinnedRegion
) -> None:
    assert backend.read(fd, rows(memory, 0, 1), 0) == 2 * PAGE
    os.truncate(file, PAGE + 100)
    assert PAGE <= backend.read(fd, rows(memory, 0, 1), 0) <= PAGE + 100
    os.truncate(file, 0)
    assert backend.read(fd, rows(memory, 0, 1), 0) == 0


def test_what_one_descriptor_writes_every_other_reads(
    backend: IOBackend, file: Path, memory: PinnedRegion
) -> None:
    writer, reader = backend.open(file), backend.open(file, writable=False)
    backend.write(writer, rows(memory, 1), 0)
    assert backend.read(reader, rows(memory, 2), 0) == PAGE
    assert (memory.array[2] == memory.array[1]).all()
    backend.close(writer)
    backend.close(reader)


def test_a_descriptor_that_is_used_again_is_another_file(
    backend: IOBackend, tmp_path: Path, memory: PinnedRegion
) -> None:
    for number in range(3):
        path = tmp_path / f"file-{number}"
        path.write_bytes(bytes([number]) * PAGE * (number + 1))
        fd = backend.open(path)
        assert backend.read(fd, rows(memory, 0), 0) == PAGE
        assert (memory.array[0] == number).all()
        backend.close(fd)


def test_many_threads_may_use_one_descriptor(
    backend: IOBackend, fd: int, memory: PinnedRegion
) -> None:
    expected = memory.array.copy()

    def move(page: int) -> int:
        backend.write(fd, rows(memory, page), page * PAGE)
        memory.array[page] = 0
        return backend.read(fd, rows(memory, page), page * PAGE)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(move, range(PAGES))) == [PAGE] * PAGES
    assert (memory.array == expected).all()


def test_a_link_is_not_opened(backend: IOBackend, file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        backend.open(link)


def test_no_descriptor_stays_open(backend: IOBackend, file: Path, memory: PinnedRegion) -> None:
    def use() -> int:
        fd = backend.open(file)
        backend.write(fd, rows(memory, 0, 1), 0)
        backend.read(fd, rows(memory, 2, 3), 0)
        backend.close(fd)
        return len(os.listdir("/proc/self/fd"))

    first = use()
    assert {use() for _ in range(20)} == {first}


def test_a_read_that_the_system_cuts_short_goes_on(tmp_path: Path) -> None:
    listing = "/proc/kallsyms"
    if not os.path.exists(listing) or len(whole := Path(listing).read_bytes()) < 8 * PAGE:
        pytest.skip("this system has no file that is read a page at a time")
    fd = os.open(listing, os.O_RDONLY)
    try:
        buffers = [bytearray(PAGE) for _ in range(8)]
        if os.preadv(fd, buffers, 0) == 8 * PAGE:
            pytest.skip("this system reads the file at once")
        assert read_whole(fd, [memoryview(buffer) for buffer in buffers], 0) == 8 * PAGE
    finally:
        os.close(fd)
    assert b"".join(buffers) == whole[: 8 * PAGE]


@pytest.mark.parametrize("name", ["direct", "buffered"])
def test_a_write_that_the_system_cuts_short_is_an_error_and_not_a_short_write(
    tmp_path: Path, name: str
) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from typing import Any
from kvstore.tiers.disk.io import IO_BACKENDS
from kvstore.tiers.pinned import PAGE, PinnedRegion
path = Path(sys.argv[1])
path.write_bytes(b"")
backend, memory = IO_BACKENDS[sys.argv[2]](), PinnedRegion.private(4, PAGE)
fd = backend.open(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, 2 * PAGE))
try:
    backend.write(fd, [memory.row(n) for n in range(4)], 0)
except OSError as error:
    print(error.strerror)
print(path.stat().st_size // PAGE, "pages")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "file", name],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if "Invalid argument" in done.stdout + done.stderr:
        pytest.skip("O_DIRECT is refused here")
    assert done.stdout.splitlines() == ["File too large", "2 pages"], done.stderr


def test_runs_of_one_batch_are_moved_each_to_its_place(
    backend: IOBackend, fd: int, file: Path, memory: PinnedRegion
) -> None:
    runs = [IORequest(fd, rows(memory, n, n + 1), 3 * n * PAGE) for n in range(10)]
    assert lengths(backend.move_all(runs, load=False)) == [2 * PAGE] * 10
    back = [IORequest(fd, rows(memory, 20 + n), 3 * n * PAGE) for n in range(10)]
    assert lengths(backend.move_all(back, load=True)) == [PAGE] * 10
    for n in range(10):
        assert (memory.array[20 + n] == memory.array[n]).all()
    content = np.frombuffer(file.read_bytes(), np.uint8).reshape(PAGES, PAGE)
    for n in range(10):
        assert (content[3 * n] == memory.array[n]).all()
        assert (content[3 * n + 1] == memory.array[n + 1]).all()
        assert not content[3 * n + 2].any(), "a run wrote beyond its end"


def test_more_runs_than_the_kernel_takes_at_once_are_all_moved(
    backend: IOBackend, tmp_path: Path, memory: PinnedRegion
) -> None:
    path, many = tmp_path / "long", 1000
    path.write_bytes(bytes(many * PAGE))
    fd = backend.open(path)
    runs = [IORequest(fd, rows(memory, n % PAGES), n * PAGE) for n in range(many)]
    assert lengths(backend.move_all(runs, load=False)) == [PAGE] * many
    backend.close(fd)
    content = np.frombuffer(path.read_bytes(), np.uint8).reshape(many, PAGE)
    for n in range(many):
        assert (content[n] == memory.array[n % PAGES]).all()


@pytest.mark.parametrize("size", [1, 240, 241, 1000, PAGE])
def test_digests_are_those_of_the_first_bytes_of_each_buffer(
    backend: IOBackend, fd: int, memory: PinnedRegion, size: int
) -> None:
    runs = [IORequest(fd, rows(memory, 3 * n, 3 * n + 1), 2 * n * PAGE) for n in range(8)]
    expected = [[digest(row[:size]) for row in run.buffers] for run in runs]
    assert digests_of(backend.move_all(runs, size, load=False)) == expected
    memory.array[:] = 0
    assert digests_of(backend.move_all(runs, size, load=True)) == expected
    assert [[digest(row[:size]) for row in run.buffers] for run in runs] == expected


def test_no_digest_is_told_of_what_was_not_moved(
    backend: IOBackend, fd: int, memory: PinnedRegion
) -> None:
    runs = [
        IORequest(fd, rows(memory, 0, 1, 2), (PAGES - 1) * PAGE),
        IORequest(10**6, rows(memory, 3), 0),
        IORequest(fd, rows(memory, 4), PAGES * PAGE),
        IORequest(fd, rows(memory, 5), 0),
    ]
    outcomes = backend.move_all(runs, 100, load=True)
    zeros = digest(memoryview(bytes(100)))
    assert digests_of(outcomes) == [[zeros], None, [], [zeros]]
    assert lengths(outcomes) == [PAGE, None, 0, PAGE]
    (failed,) = backend.move_all(runs[1:2], 100, load=False)
    assert isinstance(failed, OSError)


LONG = 131 * PAGE
"""No multiple and no divisor of what the backends move by one call."""


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_requests_longer_than_a_call_are_moved_whole(
    backend: IOBackend, tmp_path: Path, count: int
) -> None:
    memory = PinnedRegion.private(3 * count, LONG)
    chance = np.random.default_rng(count)
    memory.array[:] = chance.integers(0, 256, memory.array.shape, np.uint8)
    path = tmp_path / "long"
    path.write_bytes(bytes(3 * count * LONG))
    fd = backend.open(path)
    runs = [
        IORequest(fd, rows(memory, *range(n * count, (n + 1) * count)), n * count * LONG)
        for n in (2, 0, 1)
    ]
    expected = [[digest(row[: LONG - 7]) for row in run.buffers] for run in runs]
    written = backend.move_all(runs, LONG - 7, load=False)
    assert lengths(written) == [count * LONG] * 3
    assert digests_of(written) == expected
    before = memory.array.copy()
    assert path.read_bytes() == before.tobytes()
    memory.array[:] = 0
    read = backend.move_all(runs, LONG - 7, load=True)
    assert lengths(read) == [count * LONG] * 3
    assert digests_of(read) == expected
    assert (memory.array == before).all()
    backend.close(fd)
    del runs
    memory.close()


def test_a_long_read_ends_where_the_file_does(backend: IOBackend, tmp_path: Path) -> None:
    memory = PinnedRegion.private(2, LONG)
    for pages in (0, 1, 127, 128, 129, 131, 200, 261):
        path, content = tmp_path / f"of {pages}", os.urandom(pages * PAGE)
        path.write_bytes(content)
        fd = backend.open(path)
        (moved,) = backend.move_all([IORequest(fd, rows(memory, 0, 1), 0)], LONG, load=True)
        assert not isinstance(moved, OSError)
        assert moved.length == pages * PAGE
        assert len(moved.digests) == pages * PAGE // LONG
        assert bytes(memory.view[: pages * PAGE]) == content
        backend.close(fd)
    memory.close()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_batches_that_are_under_way_at_once_end_in_any_order(
    backend: IOBackend, tmp_path: Path, memory: PinnedRegion, first: int
) -> None:
    # Together more than the kernel takes of one thread.
    path, many = tmp_path / "long", 3 * 100
    path.write_bytes(bytes(many * PAGE))
    fd = backend.open(path)
    batches = [
        [IORequest(fd, rows(memory, n % PAGES), n * PAGE) for n in range(part, many, 3)]
        for part in range(3)
    ]
    order = [(first + n) % 3 for n in range(3)]
    writes = [backend.begin(batch, 9, load=False) for batch in batches]
    written = {part: writes[part].end() for part in order}
    expected = [[digest(run.buffers[0][:9])] for run in batches[first]]
    assert digests_of(written[first]) == expected
    assert all(lengths(each) == [PAGE] * 100 for each in written.values())
    before = memory.array.copy()
    memory.array[:] = 0
    reads = [backend.begin(batch, 9, load=True) for batch in batches]
    read = {part: reads[part].end() for part in order}
    assert digests_of(read[first]) == expected
    assert all(lengths(each) == [PAGE] * 100 for each in read.values())
    assert (memory.array == before).all()
    backend.close(fd)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_whatever_may_be_in_flight_all_is_moved(
    tmp_path: Path,
    memory: PinnedRegion,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
) -> None:
    monkeypatch.setattr(aio, "DEPTH", depth)
    monkeypatch.setattr(aio, "STORE_DEPTH", depth)
    monkeypatch.setattr(aio, "CALL_BYTES", 5 * PAGE)
    backend = aio_in(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    fd = backend.open(path)
    # Runs of 1 to 7 pages, in batches of two: calls of more buffers than there is depth, too.
    starts = [sum(range(1, n)) for n in range(1, 8)]
    runs = [
        IORequest(fd, rows(memory, *range(start, start + n)), start * PAGE)
        for n, start in enumerate(starts, 1)
    ]
    bad = IORequest(10**6, rows(memory, 31), 0)
    batches = [[*runs[0:2], bad], [bad, *runs[2:4]], [*runs[4:6]], [*runs[6:]]]
    expected = [[None if run is bad else len(run.buffers) * PAGE for run in its] for its in batches]
    under_way = [backend.begin(batch, 9, load=False) for batch in batches]
    assert [lengths(each.end()) for each in reversed(under_way)] == expected[::-1]
    before = memory.array.copy()
    memory.array[:28] = 0
    under_way = [backend.begin(batch, 9, load=True) for batch in batches]
    assert [lengths(each.end()) for each in under_way] == expected
    assert (memory.array == before).all()
    backend.close(fd)


def test_a_batch_that_fails_leaves_the_one_beside_it_whole(
    backend: IOBackend, fd: int, memory: PinnedRegion
) -> None:
    bad = backend.begin([IORequest(10**6, rows(memory, n), 0) for n in range(4)], 5, load=True)
    good = backend.begin([IORequest(fd, rows(memory, n), n * PAGE) for n in range(4)], 5, load=True)
    assert lengths(good.end()) == [PAGE] * 4
    assert lengths(bad.end()) == [None] * 4


def test_what_has_ended_does_not_wait(backend: IOBackend, fd: int, memory: PinnedRegion) -> None:
    under_way = backend.begin([IORequest(fd, rows(memory, n), 0) for n in range(4)], load=True)
    under_way.end()
    assert not under_way.waits()


def test_digests_are_only_made_where_they_are_wanted(
    backend: IOBackend, fd: int, memory: PinnedRegion
) -> None:
    runs = [IORequest(fd, rows(memory, 0, 1), 0)]
    assert (
        digests_of(backend.move_all(runs, load=False))
        == digests_of(backend.move_all(runs, load=True))
        == [[]]
    )


def test_a_run_that_fails_fails_alone(
    backend: IOBackend, file: Path, tmp_path: Path, memory: PinnedRegion
) -> None:
    fd, closed = backend.open(file), backend.open(file, writable=False)
    backend.close(closed)
    bad = 10**6  # No descriptor has this number.
    runs = [IORequest(bad if n % 3 == 1 else fd, rows(memory, n), n * PAGE) for n in range(6)]
    for outcomes in (backend.move_all(runs, load=False), backend.move_all(runs, load=True)):
        for n, outcome in enumerate(outcomes):
            if n % 3 == 1:
                assert isinstance(outcome, OSError)
                assert outcome.errno == errno.EBADF
                assert outcome.__traceback__ is None, "its frames keep the memory"
            else:
                assert lengths([outcome]) == [PAGE]
    backend.close(fd)


def test_no_runs_are_no_work(backend: IOBackend) -> None:
    assert backend.move_all([], load=True) == backend.move_all([], load=False) == []


def test_a_call_that_failed_leaves_nothing_for_the_next(
    backend: IOBackend, fd: int, file: Path, memory: PinnedRegion
) -> None:
    backend.write(fd, rows(memory, 1), 0)
    for _ in range(3):
        with pytest.raises(OSError, match="Bad file descriptor"):
            backend.read(10**6, rows(memory, 2, 3), 0)
        assert backend.read(fd, rows(memory, 4), 0) == PAGE
        assert (memory.array[4] == memory.array[1]).all()
        memory.array[4] = 0


def test_a_thread_that_gets_no_context_for_native_aio_goes_on_without(
    tmp_path: Path, file: Path, memory: PinnedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = aio_in(tmp_path)

    def exhausted(*_: int) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(backend, "_make", exhausted)
    fd = backend.open(file)
    runs = [IORequest(fd, rows(memory, n), 2 * n * PAGE) for n in range(4)]
    assert lengths(backend.move_all(runs, load=False)) == [PAGE] * 4
    assert (
        lengths(backend.move_all([IORequest(fd, rows(memory, 9), 0), *runs[1:]], load=True))
        == [PAGE] * 4
    )
    assert (memory.array[9] == memory.array[0]).all()
    backend.close(fd)


REFUSING = """
import ctypes, errno, os, platform, struct, sys
from pathlib import Path
from kvstore.tiers.disk.io import choose_backend

NUMBERS = {"x86_64": {"setup": 206, "submit": 209}, "aarch64": {"setup": 0, "submit": 2}}
number = NUMBERS[platform.machine()][sys.argv[2]]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0):
    print("no filter:", os.strerror(ctypes.get_errno()))
    sys.exit(0)
print(choose_backend(Path(sys.argv[1])).name)
try:
    choose_backend(Path(sys.argv[1]), "aio")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("call", ["setup", "submit"])
def test_where_a_filter_refuses_native_aio_another_way_is_chosen(tmp_path: Path, call: str) -> None:
    best = choose_backend(tmp_path).name
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, str(tmp_path), call],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    if told[0].startswith("no filter"):
        pytest.skip(told[0])
    assert told[0] == ("direct" if best == "aio" else best)
    assert "io = 'aio' does not work in" in told[1]
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_plain_calls_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstore")
    monkeypatch.setattr(aio, "compiled", None)
    assert choose_backend(tmp_path).name in ("direct", "buffered")
    assert "no C compiler at installation" in caplog.text
    with pytest.raises(ConfigError, match=r"io = 'aio' does not work in .* no C compiler"):
        choose_backend(tmp_path, "aio")


# -- batches in C ---------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    compiled is None, reason="kvstore.tiers.disk.io._aio is not compiled"
)


@needs_compiler
def test_the_function_that_makes_digests_is_found() -> None:
    assert address() is not None, "batches are moved in Python, though C is there"


@needs_compiler
@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ([(0, [b"read only"], 0)], BufferError),
        ([(0, [5], 0)], TypeError),
        ([(0, 5, 0)], TypeError),
        ([("no descriptor", [], 0)], TypeError),
        ([(0, [], "no offset")], TypeError),
        ([(0, [], 1 << 70)], OverflowError),
        ([(0, [])], TypeError),
        ([5], TypeError),
        (5, TypeError),
    ],
)
def test_what_is_no_request_is_refused_and_holds_no_memory(
    requests: object, error: type[Exception]
) -> None:
    context: Any = compiled.Context(4, PAGE, address() or 0)
    view = memoryview(bytearray(PAGE))
    good = (10**6, [view], 0)
    with pytest.raises(error):
        context.begin([good, *requests] if isinstance(requests, list) else requests, True, 0)
    assert context.begin([good], True, 10).end() == [(-errno.EBADF, [])]
    # Raises while somebody holds it.
    view.release()


@needs_compiler
def test_what_is_no_context_is_refused() -> None:
    wrong = ((0, PAGE, address()), (-1, PAGE, address()), (1 << 20, PAGE, address()), (4, PAGE, 0))
    for depth, call_bytes, function in (*wrong, (4, 0, address())):
        with pytest.raises(ValueError, match="depth: 1 to 65536; call_bytes: from 1; function: an"):
            compiled.Context(depth, call_bytes, function or 0)
    with pytest.raises(ValueError, match="hashed: must not be negative"):
        compiled.Context(4, PAGE, address() or 0).begin([], True, -1)


@needs_compiler
def test_a_batch_that_nobody_ends_is_waited_for_before_its_memory_is_given_back(
    memory: PinnedRegion, tmp_path: Path
) -> None:
    context: Any = compiled.Context(128, PAGE, address() or 0)
    (tmp_path / "file").write_bytes(bytes(PAGES * PAGE))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    for _ in range(200):
        batch = context.begin([(fd, rows(memory, n), n * PAGE) for n in range(PAGES)], True, 9)
        del batch
    whole = [IORequest(fd, rows(memory, n), n * PAGE) for n in range(PAGES)]
    assert [moved for moved, _ in context.begin(whole, True, 9).end()] == [PAGE] * PAGES
    os.close(fd)


@needs_compiler
def test_a_batch_ends_once() -> None:
    batch = compiled.Context(4, PAGE, address() or 0).begin([], True, 0)
    assert batch.end() == []
    with pytest.raises(RuntimeError, match="ended before"):
        batch.end()


@needs_compiler
def test_batches_keep_no_reference(memory: PinnedRegion, tmp_path: Path) -> None:
    backend = choose_backend(tmp_path, "aio")
    (tmp_path / "file").write_bytes(bytes(PAGES * PAGE))
    fd = backend.open(tmp_path / "file")
    run = IORequest(fd, rows(memory, 0, 1), 0)
    before = [sys.getrefcount(each) for each in (run, run.buffers, run.buffers[0], fd)]
    for _ in range(1000):
        backend.move_all([run], 10, load=False)
        backend.move_all([run], 10, load=True)
        backend.move_all([IORequest(10**6, run.buffers, 0)], 10, load=True)
    after = [sys.getrefcount(each) for each in (run, run.buffers, run.buffers[0], fd)]
    assert after == before
    backend.close(fd)


@needs_compiler
def test_contexts_that_are_let_go_of_are_given_back_to_the_system() -> None:
    # More than the system has, if none came back.
    most, depth = int(Path("/proc/sys/fs/aio-max-nr").read_text()), 8192
    for _ in range(min(most, 2**20) // depth + 1):
        compiled.Context(depth, PAGE, address() or 0)


@needs_compiler
def test_contexts_that_threads_let_go_of_serve_the_next_ones(
    memory: PinnedRegion, tmp_path: Path
) -> None:
    """To end one takes the kernel tens of milliseconds."""
    (tmp_path / "file").write_bytes(bytes(PAGES * PAGE))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)

    def read() -> None:
        context: Any = compiled.Context(64, PAGE, address() or 0)
        batch = context.begin([(fd, rows(memory, n), n * PAGE) for n in range(PAGES)], True, 9)
        assert [moved for moved, _ in batch.end()] == [PAGE] * PAGES

    def run(count: int) -> float:
        started = time.monotonic()
        for _ in range(count):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        return time.monotonic() - started

    run(1)
    assert min(run(20) for _ in range(5)) < 20 * 0.01
    os.close(fd)


@needs_compiler
def test_a_fork_uses_no_context_of_the_process_before(memory: PinnedRegion, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)

    def read(context: Any) -> None:
        assert context.begin([(fd, rows(memory, 0), 0)], True, 0).end() == [(PAGE, [])]

    def new() -> Any:
        return compiled.Context(64, PAGE, address() or 0)

    inherited = new()
    read(new())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            read(new())
            del inherited
            read(new())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    read(inherited)
    os.close(fd)


def test_a_mapped_file_may_be_closed_by_the_garbage_collector_at_any_moment(
    tmp_path: Path,
) -> None:
    """A finalizer runs in whatever thread allocates, also amid the backend's own work."""
    backend = IO_BACKENDS["mmap"]()
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    fd = backend.open(path)
    with backend._lock:  # type: ignore[attr-defined]
        closing = threading.Thread(target=backend.close, args=(fd,), daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()


async def test_a_reader_of_a_removed_file_on_a_full_memory_file_system_lives(
    small_disk: Callable[[int], Path], open_bench: OpenBench
) -> None:
    """A page of a mapping that is not there any more would be a signal."""
    place = small_disk(16 * 2**20)
    owner = open_bench(place / "cache", io="mmap")
    keys = [key_of(number) for number in range(SLOTS)]
    assert all((await owner.store(keys, range(SLOTS))).ok)
    path = lane_of(place / "cache") / "segment-0.safetensors"
    follower = Segment.follow(path, read_header(path), MappedIO())
    page = memoryview(mmap.mmap(-1, SLOT))
    assert read_extents(follower.backend, [Extent(follower, 0, keys[:1], [page])])[0].ok == [True]
    assert (await owner.tier.grow())[0] == 1
    assert await owner.tier.remove_segment(0) is None
    with open(place / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    assert read_extents(follower.backend, [Extent(follower, 1, keys[1:2], [page])])[0].wrong == [1]
    # Holes of a copied file are filled before they are written to, or the write fails.
    hole = place / "hole"
    hole.touch()
    os.truncate(hole, 2**16)
    backend = MappedIO()
    fd = backend.open(hole)
    with pytest.raises(OSError, match="No space left"):
        backend.write(fd, [page], 0)
    backend.close(fd)
    # So are those that somebody makes while it is mapped.
    (place / "filler").unlink()
    fd = backend.open(hole)
    backend.write(fd, [page], 0)
    os.truncate(hole, 4096)
    os.truncate(hole, 2**16)
    with open(place / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(OSError, match="No space left"):
        backend.write(fd, [page], 0)
    backend.close(fd)
