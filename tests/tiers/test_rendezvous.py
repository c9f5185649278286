"""Processes that meet over one memory: never two of it, nothing left, nobody blocked."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import kvstore.tiers.headroom
import kvstore.tiers.pinned
import kvstore.tiers.rendezvous
from kvstore.errors import ConfigError, PathUnusableError
from kvstore.tiers.pinned import PAGE, PinnedRegion
from kvstore.tiers.rendezvous import Rendezvous, stem_of
from tests.patience import PATIENCE, until
from tests.tiers.support import Child, memory_of

ROWS, ROW = 6, 3 * PAGE
StartChild = Callable[..., Child]
KILLED_STARTS = int(os.environ.get("KVSTORE_KILLED_STARTS", "6"))


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses; nothing may be left under it."""
    before = set(os.listdir("/dev/shm"))
    name = f"test-{secrets.token_hex(6)}"
    yield name
    assert {entry for entry in set(os.listdir("/dev/shm")) - before if "kvstore" in entry} == set()
    # A context manager of a child may end after this fixture.
    assert not [pid for pid in hosts_of(name) if pid == os.getpid()]


def hosts_of(name: str) -> list[int]:
    """Numbers under which somebody waits for others of that name."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    stem = f"@{stem_of(name)}"
    return sorted({int(one.rpartition("-")[2]) for one in names if one.startswith(stem)})


MAPPER = """
region = PinnedRegion.shared(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
say("mapped")
for line in sys.stdin:
    row, text = line.split()
    if text == "?":
        say(bytes(region.row(int(row))[:5]).decode())
    elif text == "complete":
        say(region.complete)
    else:
        region.row(int(row))[:5] = text.encode()
        say("written")
"""

BEFORE_TOUCHING = """
import kvstore.tiers.pinned
populate = kvstore.tiers.pinned.populate
def stop(*arguments, **options):
    say("met")
    sys.stdin.readline()
    populate(*arguments, **options)
kvstore.tiers.pinned.populate = stop
"""


# -- meeting ---------------------------------------------------------------------------------


def test_a_region_is_complete_when_all_have_come_and_not_before_and_stays_so(
    name: str, child: StartChild
) -> None:
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    others = []
    for _ in range(2):
        assert not region.complete
        others.append(child(MAPPER, name, ROWS, ROW, 3))
        assert others[-1].line() == "mapped"
    assert region.complete
    for other in others:
        other.answer("0 complete")
        assert other.line() == "True"
    others[0].kill()
    assert region.complete
    region.close()


def test_processes_that_come_at_the_same_time_meet_and_make_no_file(
    name: str, child: StartChild
) -> None:
    others = [child(MAPPER, name, ROWS, ROW, 4) for _ in range(4)]
    assert [other.line() for other in others] == ["mapped"] * 4
    # An end that leaves one would be seen by the fixture.
    assert not [file for file in Path("/dev/shm").iterdir() if "kvstore" in file.name]
    for row, other in enumerate(others):
        other.answer(f"{row} byte{row}")
        assert other.line() == "written"
    for other in others:
        for row in range(4):
            other.answer(f"{row} ?")
            assert other.line() == f"byte{row}"


def test_many_threads_that_come_at_the_same_time_meet(name: str) -> None:
    count = 8
    for round_ in range(4):
        barrier = threading.Barrier(count)

        def join(barrier: threading.Barrier = barrier) -> PinnedRegion:
            barrier.wait(PATIENCE)
            return PinnedRegion.shared(name, ROWS, ROW, mappers=count)

        with ThreadPoolExecutor(count) as pool:
            regions = [future.result() for future in [pool.submit(join) for _ in range(count)]]
        regions[0].array[:] = round_ + 1
        assert all((region.array == round_ + 1).all() for region in regions)
        assert all(region.complete for region in regions)
        for region in regions:
            region.close()
        assert not memory_of(name)
        assert not hosts_of(name)


def test_many_that_came_and_went_do_not_keep_others_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.tiers.rendezvous, "_WAITING", 2)
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    try:
        for _ in range(5):
            PinnedRegion.shared(name, ROWS, ROW, mappers=3, timeout=1.0).close()
    finally:
        region.close()


@pytest.mark.parametrize("odd", ["a/b", "../../etc/passwd", "", "\n", "\0", "x" * 300, "ü" * 50])
def test_any_name_is_a_name_of_its_own(name: str, odd: str) -> None:
    region = PinnedRegion.shared(name + odd, ROWS, ROW, mappers=2)
    other = PinnedRegion.shared(name + odd + "2", ROWS, ROW, mappers=2)
    joined = PinnedRegion.shared(name + odd, ROWS, ROW, mappers=2)
    region.row(0)[:4] = b"same"
    assert bytes(joined.row(0)[:4]) == b"same"
    assert bytes(other.row(0)[:4]) == bytes(4)
    for one in (region, other, joined):
        one.close()


def test_another_server_of_the_same_name_gets_memory_of_its_own(name: str) -> None:
    first = [PinnedRegion.shared(name, ROWS, ROW, mappers=2) for _ in range(2)]
    second = [PinnedRegion.shared(name, ROWS, ROW, mappers=2) for _ in range(2)]
    third = [PinnedRegion.shared(name, 2 * ROWS, ROW, mappers=2) for _ in range(2)]
    for number, pair in enumerate((first, second, third)):
        pair[0].array[:] = number + 1
    for number, pair in enumerate((first, second, third)):
        assert (pair[1].array == number + 1).all()
        assert all(region.complete for region in pair)
    for region in (*first, *second, *third):
        region.close()


@pytest.mark.parametrize("sizes", [(6000, PAGE), (300, 2 * PAGE)], ids=["size", "shape"])
def test_other_sizes_are_refused_by_those_who_come_later(name: str, sizes: tuple[int, int]) -> None:
    region = PinnedRegion.shared(name, 600, PAGE, mappers=2)
    with pytest.raises(ConfigError) as caught:
        PinnedRegion.shared(name, *sizes, mappers=2)
    assert name in str(caught.value)
    assert "same sizes" in str(caught.value)
    # The first is not disturbed by it.
    other = PinnedRegion.shared(name, 600, PAGE, mappers=2)
    other.row(1)[:2] = b"ok"
    assert bytes(region.row(1)[:2]) == b"ok"
    other.close()
    region.close()


# -- memory at start -------------------------------------------------------------------------


def test_processes_that_start_together_make_one_memory_before_any_page_is_there(
    name: str, child: StartChild
) -> None:
    others = [child(BEFORE_TOUCHING + MAPPER, name, 512, PAGE, 4) for _ in range(4)]
    assert [other.line() for other in others] == ["met"] * 4
    assert list(memory_of(name).values()) == [0]
    for other in others:
        other.answer()
        assert other.line() == "mapped"
    assert list(memory_of(name).values()) == [512 * PAGE]


def test_who_joins_does_not_ask_for_the_memory_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = PinnedRegion.shared(name, 1024, PAGE, mappers=2)
    monkeypatch.setattr(kvstore.tiers.headroom, "_rooms", lambda root: [("", 1024 * PAGE // 2)])
    joined = PinnedRegion.shared(name, 1024, PAGE, mappers=2)
    joined.row(9)[:2] = b"ok"
    assert bytes(region.row(9)[:2]) == b"ok"
    with pytest.raises(ConfigError, match="2097152 bytes are available"):
        PinnedRegion.shared(name, 1024, PAGE, mappers=2)
    joined.close()
    region.close()


def test_who_joins_before_all_pages_are_there_may_use_them(name: str, child: StartChild) -> None:
    host = child(BEFORE_TOUCHING + MAPPER, name, 512, PAGE, 2)
    assert host.line() == "met"
    region = PinnedRegion.shared(name, 512, PAGE, mappers=2)
    region.row(511)[:5] = b"early"
    host.answer()
    assert host.line() == "mapped"
    host.answer("511 ?")
    assert host.line() == "early"
    assert list(memory_of(name).values()) == [512 * PAGE]
    region.close()


# -- whoever is killed ----------------------------------------------------------------------


def test_a_killed_creator_leaves_nothing_and_is_replaced(name: str, child: StartChild) -> None:
    creator = child(MAPPER, name, ROWS, ROW, 2)
    assert creator.line() == "mapped"
    creator.answer("0 stale")
    assert creator.line() == "written"
    assert len(memory_of(name)) == 1
    assert hosts_of(name) == [0]
    creator.kill()
    assert memory_of(name) == {}
    assert hosts_of(name) == []
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    assert not region.array.any()
    other = child(MAPPER, name, ROWS, ROW, 2)
    assert other.line() == "mapped"
    other.answer("1 fresh")
    assert other.line() == "written"
    assert bytes(region.row(1)[:5]) == b"fresh"
    region.close()


def test_who_comes_after_the_creator_was_killed_takes_up_the_memory_of_the_others(
    name: str, child: StartChild
) -> None:
    creator = child(BEFORE_TOUCHING + MAPPER, name, ROWS, ROW, 3)
    assert creator.line() == "met"
    second = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    creator.kill()
    third = child(MAPPER, name, ROWS, ROW, 3)
    assert third.line() == "mapped"
    assert not second.complete
    assert len(memory_of(name)) == 1
    # The place of the dead is free again.
    fourth = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    assert second.complete
    third.answer("1 equal")
    assert third.line() == "written"
    assert bytes(second.row(1)[:5]) == bytes(fourth.row(1)[:5]) == b"equal"
    fourth.close()
    second.close()


BEFORE_LISTENING = """
import kvstore.tiers.pinned
make = kvstore.tiers.pinned.new_memfd
def stop(*arguments):
    fd = make(*arguments)
    say("made")
    sys.stdin.readline()
    return fd
kvstore.tiers.pinned.new_memfd = stop
"""


def test_a_creator_that_stops_before_it_listens_is_an_error_and_is_replaced_once_it_is_killed(
    name: str, child: StartChild
) -> None:
    creator = child(BEFORE_LISTENING + MAPPER, name, ROWS, ROW, 2)
    assert creator.line() == "made"
    os.kill(creator.pid, signal.SIGSTOP)
    other = child(MAPPER, name, ROWS, ROW, 2)
    with pytest.raises(PathUnusableError, match=f"{name}.* has not created the memory within 0 s"):
        PinnedRegion.shared(name, ROWS, ROW, mappers=2, timeout=0.1)
    assert len(memory_of(name)) == 1, "who did not meet keeps nothing"
    creator.kill()
    assert other.line() == "mapped"
    assert len(memory_of(name)) == 1


def test_a_creator_that_dies_while_its_memory_is_opened_is_not_trusted(
    name: str, child: StartChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have looked for the memory when nobody else had it open yet."""
    creator = child(MAPPER, name, ROWS, ROW, 3)
    assert creator.line() == "mapped"
    successors: list[Child] = []
    open_of = Rendezvous._open_of

    def slowly(self: Rendezvous, pid: int) -> int | None:
        path = next(
            str(fd)
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if os.readlink(fd).startswith(f"/memfd:{stem_of(name)}")
        )
        path_fd = os.open(path, os.O_PATH)
        monkeypatch.setattr(Rendezvous, "_open_of", open_of)
        creator.kill()
        successors.append(child(MAPPER, name, ROWS, ROW, 3))
        assert successors[0].line() == "mapped"
        opened = os.open(f"/proc/self/fd/{path_fd}", os.O_RDWR)
        os.close(path_fd)
        return opened

    monkeypatch.setattr(Rendezvous, "_open_of", slowly)
    # The first number is free for a moment only: the joiner must find it taken.
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=3)
    assert len(memory_of(name)) == 1
    successors[0].answer("2 equal")
    assert successors[0].line() == "written"
    assert bytes(region.row(2)[:5]) == b"equal"
    region.close()


def test_a_creator_that_closed_its_region_early_is_replaced(name: str) -> None:
    PinnedRegion.shared(name, ROWS, ROW, mappers=2).close()
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    assert not region.array.any()
    assert region.complete
    region.close()


def test_a_name_that_a_process_keeps_without_the_memory_blocks_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of the creator is such a process, when the creator is gone."""
    monkeypatch.setattr(kvstore.tiers.rendezvous, "GRACE_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(Rendezvous(name, (ROWS, ROW), 2)._address(0))
        keeper.listen()
        region = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
        other = PinnedRegion.shared(name, ROWS, ROW, mappers=2)
    other.row(1)[:2] = b"ok"
    assert bytes(region.row(1)[:2]) == b"ok"
    assert region.complete
    other.close()
    region.close()


def test_starts_that_are_killed_at_random_moments_never_make_two_regions(name: str) -> None:
    """KVSTORE_KILLED_STARTS=200 for the long run. One place is kept for the end of each."""
    rng = random.Random(KILLED_STARTS)
    sizes, processes = (512, 16 * PAGE), 4
    living: list[int] = []

    def is_complete(region: PinnedRegion) -> bool:
        return region.complete

    def kill(pid: int) -> None:
        living.remove(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    try:
        for _ in range(KILLED_STARTS):
            living.extend(fork_mapper(name, sizes, processes + 1) for _ in range(processes))
            for _ in range(rng.randint(1, 4)):
                time.sleep(rng.random() * 0.02)
                kill(rng.choice(living))
                living.append(fork_mapper(name, sizes, processes + 1))
                assert len(memory_of(name)) <= 1
            last = PinnedRegion.shared(name, *sizes, mappers=processes + 1, timeout=PATIENCE)
            until(partial(is_complete, last), "some never came")
            assert list(memory_of(name).values()) == [sizes[0] * sizes[1]]
            for pid in list(living):
                kill(pid)
            last.close()
            assert memory_of(name) == {}
            assert hosts_of(name) == []
    finally:
        for pid in list(living):
            kill(pid)


def fork_mapper(name: str, sizes: tuple[int, int], mappers: int) -> int:
    """A process that comes to the region and stays until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        region = PinnedRegion.shared(name, *sizes, mappers, timeout=PATIENCE)
        while region.rows:
            time.sleep(60)
    finally:
        os._exit(1)


def test_a_system_without_abstract_sockets_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rendezvous, "_address", lambda self, number: f"/proc/{name}-{number}")
    with pytest.raises(PathUnusableError, match="cannot find each other by an abstract socket"):
        PinnedRegion.shared(name, ROWS, ROW, mappers=2)


# -- other users, and processes that hide ---------------------------------------------------


@pytest.mark.usefixtures("as_root")
def test_a_name_that_another_user_holds_is_refused(name: str, child: StartChild) -> None:
    code = """
    import socket
    os.setuid(65534)
    host = socket.socket(socket.AF_UNIX)
    host.bind(sys.argv[1].replace("@", chr(0)))
    host.listen()
    say("bound")
    sys.stdin.readline()
    """
    address = Rendezvous(name, (ROWS, ROW), 2)._address(0)
    assert child(code, address.replace("\0", "@")).line() == "bound"
    with pytest.raises(PathUnusableError, match="a process of another user"):
        PinnedRegion.shared(name, ROWS, ROW, mappers=2)


@pytest.mark.usefixtures("as_root")
def test_memory_that_another_user_planted_is_not_taken_up(name: str, child: StartChild) -> None:
    code = """
    os.setuid(65534)
    memory = os.memfd_create(sys.argv[1], os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 << 20)
    os.pwrite(memory, b"planted", 0)
    say("planted")
    sys.stdin.readline()
    """
    planter = child(code, f"{stem_of(name)}{ROWS}x{ROW}")
    assert planter.line() == "planted"
    region = PinnedRegion.shared(name, ROWS, ROW, mappers=1)
    assert not region.array.any()
    region.close()


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


@pytest.mark.usefixtures("as_root")
def test_two_processes_of_an_unprivileged_user_meet(name: str, child: StartChild) -> None:
    assert child(NOBODY, name).line() == f"mapped {bytes(5)!r}"
    assert child(NOBODY, name).line() == f"mapped {b'bytes'!r}"


@pytest.mark.usefixtures("as_root")
def test_a_creator_that_is_dead_but_not_reaped_is_replaced(name: str, child: StartChild) -> None:
    creator = child(NOBODY, name)
    assert creator.line().startswith("mapped")
    os.kill(creator.pid, signal.SIGKILL)
    # Its output ends with it, while its process waits for this one to ask.
    assert creator.line() == ""
    assert child(NOBODY, name).line() == f"mapped {bytes(5)!r}"


@pytest.mark.usefixtures("as_root")
def test_a_creator_that_may_not_be_looked_at_is_an_error_and_not_another_region(
    name: str, child: StartChild
) -> None:
    creator = child(NOBODY, name)
    assert creator.line().startswith("mapped")
    creator.answer()
    assert creator.line() == "hidden"
    message = child(NOBODY, name).line()
    assert message.startswith("PathUnusableError")
    assert f"process {creator.pid}" in message


def test_where_no_place_is_free_the_wait_ends_all_the_same() -> None:
    name = f"rendezvous-{secrets.token_hex(8)}"
    others = [PinnedRegion.shared(name, 4, 4096, 3) for _ in range(2)]
    with pytest.raises(PathUnusableError, match="shared memory"):
        PinnedRegion.shared(name, 4, 4096, 2, timeout=0.3)
    for one in others:
        one.close()
