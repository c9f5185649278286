"""What strangers own or may write to is refused by name; accidents cost no data."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import PathUnusableError
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import trust
from kvstore.tiers.disk.epoch import raise_epoch
from kvstore.tiers.disk.lane import sharing
from kvstore.tiers.disk.peers import PeerLanes
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.trust import Trust
from tests.patience import TOO_LONG
from tests.tiers.conftest import OpenBench
from tests.tiers.support import (
    NAMESPACE,
    SEGMENT,
    SLOTS,
    STRANGER,
    Child,
    disk_of,
    lane_of,
    segment_of,
)

KEYS = [key_of(n) for n in range(SLOTS)]

StartChild = Callable[..., Child]

AUTOFS_READY = 0x9360
"""Tells the kernel that what it asked for is mounted."""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder like /tmp: everybody may make files there."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def stored(folder: Path, open_bench: OpenBench) -> Path:
    """A cache that holds KEYS in its only segment; there is room for two more."""
    bench = open_bench()
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    await bench.close([(key, slot) for slot, key in enumerate(KEYS)])
    return folder


async def served(bench: TierBench) -> int:
    """How many of KEYS are served."""
    entries = dict(bench.opening.entries)
    keys = [key for key in KEYS if key in entries]
    return sum(await bench.fetch(keys, [entries[key] for key in keys]))


def refuses(open_bench: OpenBench, path: Path, *said: object) -> str:
    """Opening is refused in words that have all of these."""
    with pytest.raises(PathUnusableError) as caught:
        open_bench(path)
    message = str(caught.value)
    assert [each for each in said if str(each) not in message] == [], message
    return message


BECOME_STRANGER = f"""
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
"""

PLANT = (
    BECOME_STRANGER
    + """
async def plant():
    opened = bench(sys.argv[1])
    keys = [key_of(n) for n in range(8)]
    assert all((await opened.store(keys, range(8))).ok)
    await opened.close(list(zip(keys, range(8))))
    say("planted")
asyncio.run(plant())
"""
)


# -- strangers -----------------------------------------------------------------------------


@pytest.mark.usefixtures("as_root")
async def test_what_another_user_planted_is_refused_and_served_to_who_says_that_it_is_trusted(
    public: Path, child: StartChild, open_bench: OpenBench
) -> None:
    assert child(PLANT, public).line() == "planted"
    message = refuses(open_bench, public, "root", "chown", "strict_modes = false")
    assert message.startswith(f"{public / NAMESPACE.name} belongs to user nobody")
    assert await served(open_bench(public, strict_modes=False)) == SLOTS


@pytest.mark.usefixtures("as_root")
async def test_what_root_makes_in_the_cache_of_a_user_belongs_to_that_user(
    folder: Path, open_bench: OpenBench, as_root: None
) -> None:
    folder.mkdir(exist_ok=True)
    os.chown(folder, STRANGER, STRANGER)
    bench = open_bench(strict_modes=False)
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    assert isinstance(await bench.tier.clear(), list)
    segment, why = await bench.tier.grow()
    assert segment is not None, why
    await bench.close([])
    made = [path for path in folder.rglob("*") if not path.name.startswith(".")]
    assert len([path for path in made if path.is_file()]) >= 5
    assert {path.stat().st_uid for path in made} == {STRANGER}


def test_a_cache_of_ones_own_below_a_folder_like_tmp_is_used(
    public: Path, child: StartChild, open_bench: OpenBench
) -> None:
    open_bench(public / "ours")
    assert child(PLANT, public / "theirs").line() == "planted"


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o2777, 0o703])
def test_a_parent_that_every_user_may_write_to_is_refused(
    folder: Path, open_bench: OpenBench, mode: int
) -> None:
    parent = folder / "open"
    parent.mkdir(parents=True)
    parent.chmod(mode)
    for path in (parent, parent / "cache", parent / "deep" / "er"):
        written = f"{parent} may be written by every user (mode {mode:04o})"
        refuses(open_bench, path, written, "chmod")
    assert not any(parent.iterdir()), "something was made in a folder that was refused"


@pytest.mark.usefixtures("as_root")
def test_a_folder_that_a_group_may_write_to_is_refused(folder: Path, open_bench: OpenBench) -> None:
    folder.mkdir()
    os.chown(folder, -1, STRANGER)
    folder.chmod(0o770)
    refuses(open_bench, folder, "may be written by group ", "(mode 0770)")


def test_the_group_that_a_user_has_alone_is_that_user(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp
    import pwd

    owner = pwd.getpwuid(os.geteuid())
    folder.mkdir()
    os.chown(folder, -1, owner.pw_gid)
    folder.chmod(0o770)
    found = [owner.pw_name, "x", owner.pw_gid, []]
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(found))
    open_bench().abandon()
    found[3] = [owner.pw_name, "somebody"]
    refuses(open_bench, folder, "may be written by group")


def test_a_group_that_is_another_users_primary_one_is_not_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import grp
    import pwd

    def user(name: str, uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd([name, "x", uid, 4321, "", "/", "/bin/sh"])

    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(["me", "x", 4321, []]))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user("me", 4321))
    for others, private in (
        ([], True),
        ([user("my other name", 4321)], True),
        ([user("x", 5)], False),
    ):
        monkeypatch.setattr(pwd, "getpwall", lambda others=others: [user("me", 4321), *others])
        trust._primary_members.cache_clear()
        assert trust._is_private(4321, 4321) == private
    trust._primary_members.cache_clear()


@pytest.mark.parametrize("part", ["path", "namespace", "lane", "namespace.json"])
async def test_what_an_access_control_list_lets_others_write_to_is_refused(
    stored: Path, open_bench: OpenBench, part: str
) -> None:
    path, nobody = part_of(stored, part), 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 7, STRANGER), (4, 0, nobody), (16, 7, nobody), (32, 0, nobody)]
    packed = [struct.pack("<HHI", *entry) for entry in entries]
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(packed))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    refuses(open_bench, stored, path, ", by its access control list: setfacl -b")
    # What gives nobody else more is no reason, be it read, or of the owner itself.
    entries[1:2] = [(2, 5, STRANGER), (2, 7, os.geteuid()), (2, 7, 0)]
    entries[1:4] = sorted(set(entries[1:4]), key=lambda entry: entry[2])
    packed = [struct.pack("<HHI", *entry) for entry in entries]
    os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(packed))
    open_bench(stored).abandon()


FILES = ["namespace.json", "epoch", "lock"]


def part_of(cache: Path, part: str) -> Path:
    """A file or folder of a cache by its name."""
    lane = lane_of(cache)
    return {
        "path": cache,
        "parent": cache.parent,
        "namespace": lane.parent,
        "lane": lane,
        "namespace.json": lane.parent / "namespace.json",
        "epoch": lane.parent / "epoch",
        "lock": lane / "lock",
    }[part]


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("part", ["path", "parent", "namespace", "lane", *FILES])
def test_what_belongs_to_another_user_is_refused_by_name(
    tmp_path: Path, open_bench: OpenBench, part: str
) -> None:
    folder = tmp_path / "parent" / "cache"
    open_bench(folder).abandon()
    raise_epoch(lane_of(folder).parent, 1)
    target = part_of(folder, part)
    os.chown(target, STRANGER, -1)
    refuses(open_bench, folder, target, "belongs to user nobody")


@pytest.mark.parametrize("part", ["namespace", "lane", *FILES])
def test_what_others_may_write_to_is_refused_by_name(
    folder: Path, open_bench: OpenBench, part: str
) -> None:
    open_bench().abandon()
    raise_epoch(lane_of(folder).parent, 1)
    target = part_of(folder, part)
    # Sticky is no excuse where nobody else has any business.
    target.chmod(0o1777 if target.is_dir() else 0o666)
    refuses(open_bench, folder, target, "may be written by every user")
    open_bench(strict_modes=False)


def give_away(segment: Path) -> None:
    os.chown(segment, STRANGER, -1)


def open_up(segment: Path) -> None:
    segment.chmod(0o606)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("change", [give_away, open_up])
async def test_a_segment_that_others_own_or_may_write_to_is_left_alone(
    stored: Path,
    open_bench: OpenBench,
    change: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(segment_of(stored))
    before = segment_of(stored).read_bytes()
    bench = open_bench()
    assert await served(bench) == 0
    assert str(segment_of(stored)) in caplog.text
    assert segment_of(stored).read_bytes() == before
    bench.abandon()
    assert await served(open_bench(strict_modes=False)) == SLOTS


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("part", ["lane", "segment"])
async def test_lanes_and_segments_of_other_users_are_not_followed(
    stored: Path, open_bench: OpenBench, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = open_bench(lane=1)
    target = lane_of(stored) if part == "lane" else segment_of(stored)
    assert len(followed(second)) == SLOTS
    os.chown(target, STRANGER, -1)
    assert followed(second) == []
    assert followed(second) == []
    assert caplog.text.count("it is not read") == (part == "lane"), "said once"
    second.abandon()
    assert len(followed(open_bench(lane=1, strict_modes=False))) == SLOTS


def followed(bench: TierBench) -> list[tuple[bytes, int]]:
    assert isinstance(bench.tier, DiskTier)
    others = PeerLanes(bench.tier)
    entries = list(others.open(bench.region).entries)
    others.abandon()
    return entries


@pytest.mark.usefixtures("as_root")
def test_links_on_the_way_are_followed_where_their_owner_is_trusted(
    tmp_path: Path, open_bench: OpenBench
) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/deep/../deep")
    open_bench(tmp_path / "relative" / "cache")
    assert (tmp_path / "real" / "deep" / "cache" / NAMESPACE.name).is_dir()
    os.chown(tmp_path / "absolute", STRANGER, -1, follow_symlinks=False)
    link = f"{tmp_path / 'absolute'} is a symbolic link that belongs to user nobody"
    refuses(open_bench, tmp_path / "relative" / "cache", link)


def test_where_a_link_leads_is_looked_at_too(tmp_path: Path, open_bench: OpenBench) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    refuses(open_bench, tmp_path / "link" / "cache", f"{tmp_path / 'open'} may be")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("below", ["", "below/it"])
def test_what_is_mounted_when_it_is_used_is_used(tmp_path: Path, below: str) -> None:
    place, libc = tmp_path / "on-demand", ctypes.CDLL(None, use_errno=True)
    place.mkdir()
    asked, told = os.pipe()
    options = f"fd={told},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct".encode()
    if libc.mount(b"kvstore-test", bytes(place), b"autofs", 0, options):
        pytest.skip(f"nothing can be mounted on demand: {os.strerror(ctypes.get_errno())}")
    root = os.open(place, os.O_RDONLY)
    os.close(told)

    def serve() -> None:
        while packet := os.read(asked, 304):
            libc.mount(b"kvstore-test", bytes(place), b"tmpfs", 0, b"mode=0700")
            (token,) = struct.unpack_from("I", packet, 8)
            fcntl.ioctl(root, AUTOFS_READY, token)

    server = threading.Thread(target=serve)
    server.start()
    code = """
        import os, sys
        from pathlib import Path
        from kvstore.tiers.disk.trust import STRICT, open_folder
        print(os.fstat(open_folder(Path(sys.argv[1]), STRICT, own=True, make=True)).st_dev)
    """
    try:
        # The kernel asks nobody on behalf of its own group of processes.
        run = [sys.executable, "-c", textwrap.dedent(code), str(place / below)]
        done = subprocess.run(run, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert int(done.stdout) not in (os.fstat(root).st_dev, tmp_path.stat().st_dev)
    finally:
        os.close(root)
        while place.is_mount() and not libc.umount2(bytes(place), 2):
            pass
        server.join(TOO_LONG)
        os.close(asked)


def test_links_in_a_circle_are_refused(tmp_path: Path, open_bench: OpenBench) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refuses(open_bench, tmp_path / "a" / "cache", "Too many levels")


def test_what_is_made_passes_whatever_the_mask(folder: Path, open_bench: OpenBench) -> None:
    old = os.umask(0)
    try:
        open_bench(folder / "deep" / "er").abandon()
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder / "deep").stat().st_mode) == 0o755
    open_bench(folder / "deep" / "er")


def test_a_walk_leaves_no_descriptor(tmp_path: Path, open_bench: OpenBench) -> None:
    before = os.listdir("/proc/self/fd")
    open_bench(tmp_path / "cache").abandon()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    refuses(open_bench, tmp_path / "open" / "cache")
    assert os.listdir("/proc/self/fd") == before


def test_a_user_trusts_root_and_none_but_itself_beside_it() -> None:
    def found(owner: int, mode: int) -> os.stat_result:
        return os.stat_result([stat.S_IFDIR | mode, 1, 1, 1, owner, STRANGER, 0, 0, 0, 0])

    me, strict = os.geteuid(), Trust()
    for owner in (0, me):
        assert strict.doubt(found(owner, 0o755)) is None
        assert strict.doubt(found(owner, 0o1777), sticky=True) is None
        assert strict.doubt(found(owner, 0o1777)) is not None
        assert strict.doubt(found(owner, 0o775), sticky=True) is not None
    assert "belongs to" in (strict.doubt(found(me + 4321, 0o1777), sticky=True) or "")
    assert Trust(strict=False).doubt(found(me + 4321, 0o777)) is None


# -- links, pipes and folders in the place of files ---------------------------------------------


def test_a_lock_with_a_second_name_is_refused_and_its_target_kept(
    folder: Path, open_bench: OpenBench, tmp_path: Path
) -> None:
    open_bench().abandon()
    precious = tmp_path / "precious"
    precious.write_text("somebody's")
    lock = lane_of(folder) / "lock"
    lock.unlink()
    os.link(precious, lock)
    refuses(open_bench, folder, lock, "2 names (hard links)")
    assert precious.read_text() == "somebody's"


async def test_a_segment_with_a_second_name_is_left_alone(
    stored: Path, open_bench: OpenBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.link(segment_of(stored), tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    bench = open_bench()
    assert await served(bench) == 0
    assert "2 names (hard links)" in caplog.text
    await bench.tier.clear()
    assert (tmp_path / "backup").read_bytes() == before


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("somebody's")


def a_link(path: Path) -> None:
    path.symlink_to("segment-0.safetensors")


LEFTOVERS = [".segment-0.0123abcd.tmp", ".probe-4711-0123abcd", ".probe-4711-0123"]


@pytest.mark.parametrize("make", [a_folder, os.mkfifo, a_link], ids=["folder", "pipe", "link"])
@pytest.mark.parametrize("name", LEFTOVERS)
async def test_what_is_named_like_a_leftover_and_is_no_file_stays_and_stops_nobody(
    stored: Path, open_bench: OpenBench, make: Callable[[Path], None], name: str
) -> None:
    odd = lane_of(stored) / name
    make(odd)
    assert await served(open_bench()) == SLOTS
    assert os.path.lexists(odd)


async def test_a_folder_named_like_an_unpublished_namespace_stops_nobody(
    stored: Path, open_bench: OpenBench
) -> None:
    folder = lane_of(stored).parent
    # The name of a process that cannot be.
    a_folder(folder / ".namespace.json.9999999-00000000")
    left = folder / ".namespace.json.9999998-00000000"
    left.write_text("left by a process that was killed")
    assert await served(open_bench()) == SLOTS
    assert not left.exists()


# -- foreign files and the capacity --------------------------------------------------------


async def test_a_foreign_file_takes_the_room_that_it_has_on_the_disk(
    stored: Path, open_bench: OpenBench
) -> None:
    with (lane_of(stored) / "core.1234").open("wb") as file:
        file.write(b"x" * SEGMENT)
        file.truncate(2**40)
    bench = open_bench()
    assert await served(bench) == SLOTS
    assert (await bench.tier.grow())[0] == 1
    assert await bench.tier.grow() == (None, None), "its capacity is used up"


def test_a_child_that_is_forked_while_a_lane_is_looked_at_does_not_keep_it(
    stored: Path, open_bench: OpenBench
) -> None:
    lane = lane_of(stored)
    with sharing(lane, Trust()) as lock:
        assert lock is not None
        child = os.fork()
        if not child:
            time.sleep(TOO_LONG)
            os._exit(0)
    try:
        assert disk_of(open_bench(stored)).volumes[0].lane.folder == lane
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_the_lane_of_its_parent(folder: Path) -> None:
    space = NAMESPACE.establish(folder)
    program = """
        import os, pathlib, sys, time
        from kvstore.tiers.disk.lane import Lane

        space = pathlib.Path(sys.argv[1])
        lane = Lane.acquire(space, 0)
        lives, begun = os.pipe()
        child = os.fork()
        if not child:
            os.write(begun, b".")
            time.sleep(60)
            os._exit(0)
        os.read(lives, 1)
        lane.release()
        try:
            Lane.acquire(space, 0).release()
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(space)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOO_LONG)
    assert done.returncode == 0, done.stderr
