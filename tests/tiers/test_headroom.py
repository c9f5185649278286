"""How much memory may still be taken, on made-up machines and on this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers import headroom
from kvstore.tiers.headroom import available_bytes, most_bytes
from tests.patience import PATIENCE

MIB = 2**20
FREE = 1000 * MIB

StartGroup = Callable[[int], Path]


class Machine:
    """A root with ``/proc`` and control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {FREE // 1024} kB\n")
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, kind: str, group: str, *, top: str = "/", options: str = "rw") -> None:
        """A hierarchy mounted at /sys/fs/cgroup, with this process in `group`."""
        controllers = "" if kind == "cgroup2" else "cpuset,memory"
        self.write("proc/self/cgroup", f"5:pids:/elsewhere\n4:{controllers}:{group}\n")
        self.write(
            "proc/self/mountinfo",
            "24 1 0:22 / /proc rw shared:5 - proc proc rw\n"
            f"35 24 0:31 {top} /sys/fs/cgroup rw,nosuid shared:9 - {kind} {kind} {options}\n",
        )

    def v2(self, group: str, limit: int | str, used: int, **more: int | str) -> None:
        at = f"sys/fs/cgroup{group}"
        self.write(f"{at}/memory.max", f"{limit}\n")
        self.write(f"{at}/memory.high", f"{more.pop('high', 'max')}\n")
        self.write(f"{at}/memory.current", f"{used}\n")
        self.write(f"{at}/memory.stat", "".join(f"{k} {v}\n" for k, v in more.items()))

    def v1(self, group: str, limit: int, used: int, **stat: int) -> None:
        at = f"sys/fs/cgroup{group}"
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{at}/memory.stat", "".join(f"{k} {v}\n" for k, v in stat.items()))

    @property
    def available(self) -> int | None:
        return available_bytes(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_it_is_what_the_machine_has_free(machine: Machine) -> None:
    assert machine.available == FREE


def test_the_most_is_the_smallest_limit_whatever_is_used_of_it(machine: Machine) -> None:
    whole = most_bytes(machine.root)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine.mount("cgroup2", "/pod/one")
    machine.v2("/pod/one", "max", 0)
    assert most_bytes(machine.root) == whole
    machine.v2("/pod", 300 * MIB, 299 * MIB)
    assert most_bytes(machine.root) == 300 * MIB
    machine.v2("/pod/one", "max", 0, high=200 * MIB)
    assert most_bytes(machine.root) == 200 * MIB
    machine.mount("cgroup", "/job", options="rw,memory")
    machine.v1("/job", 100 * MIB, 0)
    assert most_bytes(machine.root) == 100 * MIB


def test_a_system_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("broken", ["", "x", "1:2", "::", "0::/a\n:::", "\n\n"])
def test_files_that_make_no_sense_are_as_if_they_were_not_there(
    machine: Machine, broken: str
) -> None:
    for file in ("proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/memory.max"):
        machine.write(file, broken)
    assert machine.available == FREE
    machine.mount("cgroup2", "/a")
    machine.v2("/a", 100 * MIB, 0)
    for file in ("memory.stat", "memory.high"):
        machine.write(f"sys/fs/cgroup/a/{file}", broken)
    assert machine.available == 100 * MIB


def test_version_2_counts_clean_cache_as_free(machine: Machine) -> None:
    machine.mount("cgroup2", "/server")
    machine.v2(
        "/server",
        500 * MIB,
        500 * MIB,
        inactive_file=300 * MIB,
        active_file=100 * MIB,
        file_dirty=30 * MIB,
        file_writeback=20 * MIB,
        slab_reclaimable=5 * MIB,
        shmem=100 * MIB,
    )
    assert machine.available == 355 * MIB


def test_version_2_counts_the_limit_at_which_processes_are_slowed_down(machine: Machine) -> None:
    machine.mount("cgroup2", "/server")
    machine.v2("/server", 500 * MIB, 100 * MIB, high=300 * MIB)
    assert machine.available == 200 * MIB
    machine.v2("/server", "max", 100 * MIB, high=250 * MIB)
    assert machine.available == 150 * MIB
    machine.v2("/server", "max", 100 * MIB)
    assert machine.available == FREE


@pytest.mark.parametrize("tight", ["", "/a", "/a/b", "/a/b/c"])
def test_every_group_on_the_way_up_counts(machine: Machine, tight: str) -> None:
    for kind, put in (("cgroup2", machine.v2), ("cgroup", machine.v1)):
        machine.mount(kind, "/a/b/c", options="rw,memory")
        for group in ("", "/a", "/a/b", "/a/b/c"):
            put(group, (200 if group == tight else 900) * MIB, 50 * MIB)
        assert machine.available == 150 * MIB


def test_a_group_beside_ours_does_not_count(machine: Machine) -> None:
    machine.mount("cgroup2", "/ab")
    machine.v2("/a", 1, 1)
    machine.v2("/ab", 200 * MIB, 0)
    machine.v2("/ab/inner", 1, 1)
    assert machine.available == 200 * MIB


@pytest.mark.parametrize(
    ("top", "group"),
    [
        pytest.param("/docker/1234", "/docker/1234", id="a container that sees its whole path"),
        pytest.param("/", "/", id="a container with a namespace of its own"),
        pytest.param("/", "/../../other", id="a group outside of the namespace"),
        pytest.param("/docker/1234", "/docker/12345", id="a mount of another group"),
    ],
)
def test_a_container_is_limited_by_what_is_mounted(machine: Machine, top: str, group: str) -> None:
    for kind, put in (("cgroup2", machine.v2), ("cgroup", machine.v1)):
        machine.mount(kind, group, top=top, options="rw,memory")
        put("", 300 * MIB, 100 * MIB)
        assert machine.available == 200 * MIB


def test_version_1_counts_clean_cache_as_free_with_that_of_the_groups_below(
    machine: Machine,
) -> None:
    machine.mount("cgroup", "/server", options="rw,memory")
    machine.v1(
        "/server",
        500 * MIB,
        500 * MIB,
        inactive_file=1,
        total_inactive_file=300 * MIB,
        total_active_file=100 * MIB,
        total_dirty=30 * MIB,
        total_writeback=20 * MIB,
    )
    assert machine.available == 350 * MIB


def test_version_1_counts_limits_above_what_is_mounted(machine: Machine) -> None:
    machine.mount("cgroup", "/pod/server", top="/pod/server", options="rw,memory")
    machine.v1("", 2**63 - 4096, 100 * MIB, hierarchical_memory_limit=400 * MIB)
    assert machine.available == 300 * MIB


def test_another_controllers_hierarchy_is_not_memory(machine: Machine) -> None:
    machine.mount("cgroup", "/server", options="rw,cpu")
    machine.v1("/server", 1, 1)
    assert machine.available == FREE


def test_more_in_use_than_the_limit_is_no_memory(machine: Machine) -> None:
    machine.mount("cgroup2", "/server")
    machine.v2("/server", 100 * MIB, 200 * MIB)
    assert machine.available == 0


FILL = """
import os, sys
from pathlib import Path
group, file, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(group / "cgroup.procs").write_text(str(os.getpid()))
with open(file, "wb") as handle:
    for _ in range(size >> 20):
        handle.write(bytes(1 << 20))
    handle.flush()
    os.fsync(handle.fileno())
from kvstore.errors import ConfigError
from kvstore.tiers.headroom import available_bytes
from kvstore.tiers.pinned import PinnedRegion
print(available_bytes())
PinnedRegion.private(32, 2 << 20).close()
try:
    PinnedRegion.private(256, 2 << 20)
except ConfigError as error:
    print(error)
"""


def test_a_limit_that_is_full_of_clean_cache_has_room(
    memory_group: StartGroup, tmp_path: Path
) -> None:
    folder = memory_group(256 * MIB)
    done = subprocess.run(
        [sys.executable, "-c", FILL, folder, tmp_path / "file", str(400 * MIB)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    available, refused = done.stdout.splitlines()
    assert 64 * MIB < int(available) < 256 * MIB
    assert "does not fit" in refused


# -- processes that start together --------------------------------------------------------------

START = """
import sys, time
from pathlib import Path
import kvstore.tiers.headroom, kvstore.tiers.pinned
from kvstore.errors import ConfigError

folder, size, limit, kind, number = Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:]
touch = kvstore.tiers.pinned.populate

def populate(*args, **more):
    time.sleep(0.5)
    touch(*args, **more)
    (folder / number).write_bytes(bytes(size // 1024))

kvstore.tiers.pinned.populate = populate
kvstore.tiers.headroom.ASKING, kvstore.tiers.headroom.CLAIM = f"{folder.name}", f"{folder.name}-of-"
def rooms(root):
    yield "", limit - sum(1024 * each.stat().st_size for each in folder.iterdir())

kvstore.tiers.headroom._rooms = rooms
print("ready", flush=True)
sys.stdin.readline()
try:
    if kind == "private":
        region = kvstore.tiers.pinned.PinnedRegion.private(1, size)
    else:
        region = kvstore.tiers.pinned.PinnedRegion.shared(f"{folder}-{number}", 1, size, mappers=1)
except ConfigError as error:
    print(error, flush=True)
else:
    print("taken", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_processes_that_start_together_take_no_more_than_there_is(
    tmp_path: Path, kind: str
) -> None:
    size, count, fit = 2 * MIB, 4, 2
    folder = tmp_path / f"room-{os.getpid()}-{kind}"
    folder.mkdir()
    command = [sys.executable, "-c", START, str(folder), str(size), str(fit * size + MIB), kind]
    started = [
        subprocess.Popen(
            [*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    try:
        pipes = [(one.stdin, one.stdout) for one in started]
        assert all(out and out.readline() == "ready\n" for _, out in pipes)
        for go, _ in pipes:
            assert go is not None
            print(file=go, flush=True)
        told = [out.readline().strip() for _, out in pipes if out is not None]
    finally:
        for one in started:
            one.kill()
            one.communicate()
    assert told.count("taken") == fit
    assert sum("does not fit" in line for line in told) == count - fit


CLAIM = """
import sys
import kvstore.tiers.headroom
kvstore.tiers.headroom.CLAIM = sys.argv[1]
kvstore.tiers.headroom._rooms = lambda root: [("", 100)]
with kvstore.tiers.headroom.claimed(60):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


def test_a_claim_ends_with_its_process_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "CLAIM", f"test-{os.getpid()}-of-")
    monkeypatch.setattr(headroom, "_rooms", lambda root: [("", 100)])
    monkeypatch.setattr(headroom, "WAIT_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, headroom.CLAIM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with headroom.claimed(40):
            pass
        with (
            pytest.raises(ConfigError, match="other processes are taking 60"),
            headroom.claimed(60),
        ):
            pass
        other.kill()
        other.wait()
    with headroom.claimed(60):
        pass


def test_a_claim_that_ends_while_another_is_made_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(headroom, "CLAIM", f"ending-{os.getpid()}-of-")
    monkeypatch.setattr(headroom, "WAIT_S", 0.1)
    room, read_claims = [100], headroom._claims
    other = headroom.claimed(60)

    def ends_after(read: list[Any]) -> list[Any]:
        """Another process has taken its memory right after the first of two looks."""
        if room == [100]:
            room[0] = 40
            other.__exit__(None, None, None)
        return read

    other.__enter__()
    monkeypatch.setattr(headroom, "_rooms", lambda root: ends_after([(headroom.MACHINE, *room)]))
    monkeypatch.setattr(headroom, "_claims", lambda: ends_after(list(read_claims())))
    with pytest.raises(ConfigError, match="does not fit: 40 bytes are available"):
        headroom.claimed(60).__enter__()


def test_what_others_claim_counts_against_the_limits_that_they_are_under(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in containers that share a network: each has memory of its own."""
    monkeypatch.setattr(headroom, "CLAIM", f"apart-{os.getpid()}-of-")
    monkeypatch.setattr(headroom, "WAIT_S", 0.1)

    def under(**limits: int) -> None:
        rooms = [(headroom.MACHINE, 150), *limits.items()]
        monkeypatch.setattr(headroom, "_rooms", lambda root: rooms)

    under(a1=100, f0=130)
    with headroom.claimed(80):
        # Another container below the same limit of both.
        under(b2=100, f0=130)
        with headroom.claimed(50):
            pass
        with pytest.raises(ConfigError, match="130 bytes are available, .* taking 80"):
            headroom.claimed(51).__enter__()
        under(b2=100)
        with headroom.claimed(70):
            pass
        for limits in ({"b2": 100}, {}):
            under(**limits)
            with pytest.raises(ConfigError, match="150 bytes are available, .* taking 80"):
                headroom.claimed(71).__enter__()
        under(a1=100)
        with pytest.raises(ConfigError, match="100 bytes are available, .* taking 80"):
            headroom.claimed(30).__enter__()
    # Who is under no limit takes nothing of anybody's but the machine's.
    under()
    with headroom.claimed(80):
        under(a1=70)
        with headroom.claimed(70):
            pass
    # A release that did not tell.
    with (
        headroom._named(f"{headroom.CLAIM}80-token") or contextlib.nullcontext(),
        pytest.raises(ConfigError, match="70 bytes are available, .* taking 80"),
    ):
        headroom.claimed(20).__enter__()


def test_a_limit_of_version_1_that_is_none_is_not_told(machine: Machine) -> None:
    machine.mount("cgroup", "/docker/c0", options="rw,memory")
    machine.v1("/docker/c0", 100 * MIB, 0)
    for group in ("/docker", ""):
        machine.v1(group, 2**63 - 4096, 0)
    assert [room for _, room in headroom._limits(machine.root)] == [100 * MIB]
    machine.v1("/docker/c0", 2**63 - 4096, 100 * MIB)
    assert machine.available == FREE


def test_a_forked_child_keeps_no_claim_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "CLAIM", f"forked-{os.getpid()}-of-")
    monkeypatch.setattr(headroom, "WAIT_S", 0.1)
    monkeypatch.setattr(headroom, "_rooms", lambda root: [(headroom.MACHINE, 100)])
    ready, go_on = os.pipe()
    with headroom.claimed(60):
        child = os.fork()
        if not child:
            os.close(go_on)
            os.read(ready, 1)
            os._exit(0)
    try:
        with headroom.claimed(60):
            pass
    finally:
        os.close(go_on)
        os.close(ready)
        os.waitpid(child, 0)
