"""Sizes, paths and lanes that cannot be used: refused at once, by name, with what is allowed.

A refused `open` leaves nothing behind: no thread, no descriptor, no locked lane.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import (
    ConfigError,
    ForeignFileError,
    KVStoreError,
    LaneBusyError,
    NamespaceMismatchError,
    PathUnusableError,
)
from kvstore.testing.bench import key_of
from kvstore.tiers.disk.lane import LOCK_NAME, MAX_LANES, Lane, Owner, lane_owner
from kvstore.tiers.disk.namespace import Namespace, read_namespace
from tests.patience import until
from tests.tiers.conftest import OpenBench
from tests.tiers.support import CHUNK, NAMESPACE, SEGMENT, SLOT, Child, lane_of

StartChild = Callable[..., Child]


def means() -> tuple[int, int]:
    """Open descriptors and living threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def refused(folder: Path, open_bench: OpenBench) -> Callable[..., str]:
    """Checks that opening is refused in words that have these and leaves nothing behind.

    It returns the message.
    """

    def check(error: type[KVStoreError], *said: object, path: Path = folder, **options: Any) -> str:
        before = means()
        with pytest.raises(error) as caught:
            open_bench(path, **options)
        until(
            lambda: all(now <= then for now, then in zip(means(), before, strict=True)),
            "the refused tier left descriptors or threads behind",
        )
        message = str(caught.value)
        assert [each for each in said if str(each) not in message] == [], message
        return message

    return check


# -- sizes ---------------------------------------------------------------------------------


def test_a_capacity_below_one_segment_is_refused(
    refused: Callable[..., str], open_bench: OpenBench
) -> None:
    refused(
        ConfigError,
        f"capacity_bytes = {SEGMENT - 1}",
        f"{SEGMENT} bytes",
        "segment_bytes",
        capacity_bytes=SEGMENT - 1,
    )
    assert open_bench(capacity_bytes=SEGMENT).opening.max_segments == 1


@pytest.mark.parametrize("size", [1, SLOT])
def test_a_segment_too_small_for_one_chunk_is_refused_and_the_smallest_one_named(
    refused: Callable[..., str], open_bench: OpenBench, size: int
) -> None:
    message = refused(ConfigError, f"segment_bytes = {size}", f"{CHUNK} bytes", segment_bytes=size)
    least = int(message.rsplit("at least ", 1)[1].split()[0])
    assert least > SLOT
    assert open_bench(segment_bytes=least).opening.segment_slots == 1


def test_a_capacity_below_the_segments_that_are_there_says_so(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench
) -> None:
    open_bench().abandon()
    half = SEGMENT // 2
    # Where a lane may be chosen, another one is taken.
    bench = open_bench(capacity_bytes=half, segment_bytes=half)
    assert lane_of(folder).with_name("lane-1").is_dir()
    bench.abandon()
    message = refused(
        ConfigError, f"capacity_bytes = {half}", capacity_bytes=half, segment_bytes=half, lane=0
    )
    # Lowering segment_bytes is no way out here, and must not be advised.
    assert "segment_bytes" not in message
    assert str(lane_of(folder)) in message


def test_an_unknown_backend_is_refused(refused: Callable[..., str]) -> None:
    refused(ConfigError, "io = 'teleport'", "auto", "direct", "buffered", io="teleport")


# -- paths ---------------------------------------------------------------------------------


def test_a_file_as_path_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    folder.write_text("a file")
    refused(PathUnusableError, folder, "is a file")
    refused(PathUnusableError, folder / "below", path=folder / "below")
    assert folder.read_text() == "a file"


def test_a_link_as_path_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")
    refused(PathUnusableError, folder, "symbolic link")
    assert not any((folder.parent / "elsewhere").iterdir())


@pytest.mark.parametrize("part", ["namespace", "lane"])
def test_a_link_inside_the_cache_is_refused(
    folder: Path, refused: Callable[..., str], tmp_path: Path, part: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = folder / NAMESPACE.name if part == "namespace" else lane_of(folder)
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    refused(PathUnusableError, link, "symbolic link")
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["with\0nul", "x" * 5000, "y" * 300], ids=["nul", "path", "name"])
def test_a_path_that_no_file_system_takes_is_refused(
    folder: Path, refused: Callable[..., str], name: str
) -> None:
    refused(PathUnusableError, repr(str(folder / name)), path=folder / name)


def test_nobody_else_may_look_in(folder: Path, open_bench: OpenBench) -> None:
    old = os.umask(0)
    try:
        open_bench()
    finally:
        os.umask(old)
    modes = {
        path: stat.S_IMODE(path.lstat().st_mode)
        for path in [folder, *folder.rglob("*")]
        if path.name != "__pycache__"
    }
    assert {path.name for path in modes} >= {"namespace.json", "lock", "segment-0.safetensors"}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"


# -- file systems --------------------------------------------------------------------------


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("as_root")
def test_a_folder_of_another_user_is_refused(public_folder: Path, child: StartChild) -> None:
    code = """
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    for path in sys.argv[1:]:
        try:
            bench(path)
        except KVStoreError as error:
            say(type(error).__name__, error)
        else:
            say("opened")
    """
    hidden = public_folder / "hidden" / "of root"
    hidden.mkdir(parents=True)
    hidden.parent.chmod(0o700)
    where = {public_folder: "", public_folder / "below": "", hidden / "cache": f"{hidden}: "}
    other = child(code, *where)
    for path, at in where.items():
        message = other.line()
        assert message == f"PathUnusableError '{path}' cannot be used: {at}Permission denied"
    assert other.end() == 0


async def test_a_cache_beside_which_no_file_can_be_made_is_opened(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without a free inode."""
    keys = [key_of(number) for number in range(4)]
    bench = open_bench()
    await bench.store(keys, range(4))
    await bench.close([(key, slot) for slot, key in enumerate(keys)])
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and "probe" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    again = open_bench()
    assert await again.fetch(keys, range(4)) == [True] * 4


def test_a_read_only_file_system_is_refused(
    mount: Callable[..., Path], refused: Callable[..., str]
) -> None:
    place = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    refused(PathUnusableError, place, "Read-only file system", path=place)


@pytest.mark.parametrize("fault", ["small", "full", "taken meanwhile"])
def test_a_disk_with_no_room_for_a_segment_is_refused_and_keeps_what_room_it_has(
    small_disk: Callable[[int], Path],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    path = small_disk(64 * 1024 if fault == "full" else SEGMENT // 2)
    if fault == "full":
        fill(path)
    if fault == "taken meanwhile":
        monkeypatch.setattr("kvstore.tiers.disk.segment.check_room", lambda fd, size: None)
    else:
        # Until it fails, it takes the rest of the disk from everybody else.
        monkeypatch.delattr(os, "posix_fallocate")
    refused(PathUnusableError, path, "No space left on device", path=path)
    assert not list(path.rglob("*segment*")), "part of a segment was left behind"


def test_a_capacity_above_the_size_of_the_disk_is_warned_of_once(
    small_disk: Callable[[int], Path], open_bench: OpenBench, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk(4 * SEGMENT)
    open_bench(path, segments=3).abandon()
    assert "more than its file system has" not in caplog.text
    open_bench(path, segments=5)
    told = [line for line in caplog.messages if "more than its file system has" in line]
    assert len(told) == 1
    assert str(path) in told[0]
    assert str(5 * SEGMENT) in told[0]
    assert str(4 * SEGMENT) in told[0]


async def test_a_cache_on_a_disk_that_is_full_by_now_is_opened_and_served(
    small_disk: Callable[[int], Path], open_bench: OpenBench
) -> None:
    path = small_disk(2 * SEGMENT)
    bench = open_bench(path)
    await bench.store([key_of(1)], [0])
    await bench.close([(key_of(1), 0)])
    fill(path)
    again = open_bench(path)
    assert await again.fetch([key_of(1)], [0]) == [True]
    assert (await again.store([key_of(2)], [1])).ok == [True], "its segments have their space"
    assert await again.fetch([key_of(2)], [1]) == [True]


def fill(path: Path) -> None:
    """Use up the file system to the last byte."""
    with open(path / "filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


# -- namespaces ----------------------------------------------------------------------------


def test_a_namespace_of_another_model_is_refused_with_the_difference(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench
) -> None:
    ours = Namespace("shared", {"model": "ours", "dtype": "bf16", "heads": 8})
    theirs = Namespace("shared", {"model": "theirs", "dtype": "bf16", "layers": 4})
    open_bench(namespace=theirs).abandon()
    message = refused(
        NamespaceMismatchError,
        folder / "shared",
        "model is 'theirs' there and 'ours' here",
        "heads is None there and 8 here",
        "layers is 4 there and None here",
        namespace=ours,
    )
    assert "dtype" not in message


def test_namespaces_of_different_models_live_side_by_side(open_bench: OpenBench) -> None:
    for model in ("a", "b"):
        namespace = Namespace.of("same label", {"model": model})
        assert list(open_bench(namespace=namespace).opening.entries) == []


@pytest.mark.parametrize("label", ["", "..", "../../etc", "/", "a/b", ".hidden", "-rf", "\n", "ü"])
def test_any_label_makes_a_folder_of_its_own_below_the_path(
    folder: Path, open_bench: OpenBench, label: str
) -> None:
    open_bench(namespace=Namespace.of(label, {"model": label}))
    (made,) = folder.iterdir()
    assert made.is_dir()
    assert not made.name.startswith((".", "-"))


@pytest.mark.parametrize(
    "name", ["", "..", ".", "../up", "a/b", "/root", ".hidden", "x" * 129, "ü"]
)
def test_a_namespace_name_that_is_no_folder_name_is_refused(
    folder: Path, refused: Callable[..., str], name: str
) -> None:
    refused(PathUnusableError, repr(name), "allowed are", namespace=Namespace(name, {}))
    assert not folder.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "something else"}', b"[" * 100_000],
    ids=["empty", "half", "list", "null", "not-utf8", "other-format", "deep"],
)
def test_a_damaged_namespace_file_is_refused_by_name(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench, content: bytes
) -> None:
    open_bench().abandon()
    file = folder / NAMESPACE.name / "namespace.json"
    file.write_bytes(content)
    assert str(file) in refused(ForeignFileError)
    assert file.read_bytes() == content


def test_a_namespace_file_whose_identity_has_changed_is_that_of_no_model(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench
) -> None:
    open_bench().abandon()
    file = folder / NAMESPACE.name / "namespace.json"
    told = json.loads(file.read_bytes())
    changed = told["identity"] | {"model": "of other weights"}
    file.write_text(json.dumps(told | {"identity": changed}))
    for namespace in (NAMESPACE, Namespace(NAMESPACE.name, changed)):
        found = refused(ForeignFileError, namespace=namespace)
        assert "its digest does not match its identity" in found


def test_an_identity_with_numbers_as_names_is_the_one_that_is_read_back(
    folder: Path, open_bench: OpenBench
) -> None:
    namespace = Namespace("numbers", {**NAMESPACE.identity, "scales": {2: "a", 10: "b"}})
    open_bench(namespace=namespace)
    told = read_namespace(folder / namespace.name)
    assert Namespace(namespace.name, told["identity"]).digest == namespace.digest


def test_a_namespace_file_of_a_newer_version_is_refused(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench
) -> None:
    open_bench().abandon()
    file = folder / NAMESPACE.name / "namespace.json"
    told = json.loads(file.read_bytes())
    told["version"] = 2
    file.write_text(json.dumps(told))
    assert "version 2; this program reads version 1" in refused(ForeignFileError)


def test_a_link_as_namespace_file_is_refused(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench
) -> None:
    open_bench().abandon()
    file = folder / NAMESPACE.name / "namespace.json"
    file.rename(folder / "elsewhere.json")
    file.symlink_to(folder / "elsewhere.json")
    assert str(file) in refused(PathUnusableError)


def test_the_namespace_file_says_in_full_whose_bytes_they_are(
    folder: Path, open_bench: OpenBench
) -> None:
    open_bench()
    told = json.loads((folder / NAMESPACE.name / "namespace.json").read_text())
    assert told["identity"] == NAMESPACE.identity


@pytest.mark.parametrize(
    "identity", [{"model": {1, 2}}, {"model": b"raw"}, {"scale": float("nan")}], ids=str
)
def test_an_identity_that_cannot_be_written_down_is_refused(
    folder: Path, refused: Callable[..., str], identity: dict[str, Any]
) -> None:
    refused(ConfigError, "identity", namespace=Namespace("odd", identity))
    assert not folder.exists()


# -- lanes ---------------------------------------------------------------------------------

HOLD = """
held = bench(sys.argv[1])
say(held.tier.description)
sys.stdin.readline()
"""


def test_a_lane_that_another_process_writes_is_refused_with_its_id(
    folder: Path, refused: Callable[..., str], child: StartChild
) -> None:
    owner = child(HOLD, folder)
    assert "lane-0" in owner.line()
    refused(LaneBusyError, "lane 0", folder, f"process {owner.pid}", lane=0)
    assert lane_owner(lane_of(folder)) == Owner(owner.pid, 0)


def test_the_nth_process_gets_the_nth_lane_and_a_free_one_is_used_again(
    folder: Path, child: StartChild
) -> None:
    owners = [child(HOLD, folder) for _ in range(3)]
    lanes = sorted(owner.line().split(",")[0].rsplit("lane-")[1] for owner in owners)
    assert lanes == ["0", "1", "2"]
    (second,) = (owner for owner in owners if Owner(owner.pid, 0) == lane_owner(lane_of(folder, 1)))
    second.kill()
    assert lane_owner(lane_of(folder, 1)) is None
    assert "lane-1," in child(HOLD, folder).line()


def test_a_forked_child_does_not_give_the_lane_of_its_parent_away(
    folder: Path, refused: Callable[..., str], child: StartChild
) -> None:
    code = """
    parent = bench(sys.argv[1])
    forked = os.fork()
    if not forked:
        parent.abandon()
        os._exit(0)
    os.waitpid(forked, 0)
    say("the child is gone")
    sys.stdin.readline()
    """
    owner = child(code, folder)
    assert owner.line() == "the child is gone"
    assert f"process {owner.pid}" in refused(LaneBusyError, lane=0)


@pytest.mark.parametrize("instead", ["link", "folder"])
def test_a_lock_that_is_no_file_is_refused(
    folder: Path, refused: Callable[..., str], open_bench: OpenBench, instead: str
) -> None:
    open_bench().abandon()
    lock = lane_of(folder) / "lock"
    lock.unlink()
    if instead == "link":
        lock.symlink_to(folder / "elsewhere")
    else:
        lock.mkdir()
    assert str(lock) in refused(PathUnusableError)
    assert not (folder / "elsewhere").exists()


def test_when_every_lane_is_in_use_the_message_says_how_many_there_are(
    folder: Path, refused: Callable[..., str]
) -> None:
    lanes = [Lane.acquire(NAMESPACE.establish(folder)) for _ in range(MAX_LANES)]
    try:
        refused(LaneBusyError, MAX_LANES, folder)
    finally:
        for lane in lanes:
            lane.release()


def test_a_file_system_that_fails_at_a_close_keeps_no_lane(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane.acquire(namespace := NAMESPACE.establish(folder))
    real = os.close

    def failing(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        lane.release()
    assert len(os.listdir("/proc/self/fd")) == before - 3
    Lane.acquire(namespace, lane.number).release()


def test_looking_at_a_lane_does_not_take_it(folder: Path, open_bench: OpenBench) -> None:
    open_bench().abandon()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lane_owner(lane_of(folder))

    onlooker = threading.Thread(target=look)
    onlooker.start()
    try:
        for _ in range(8):
            open_bench(lane=0).abandon()
    finally:
        stop.set()
        onlooker.join()


def test_one_who_looks_whose_a_lane_is_may_be_slow(folder: Path, open_bench: OpenBench) -> None:
    open_bench().abandon()
    fd = os.open(lane_of(folder) / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    slow = threading.Timer(0.5, os.close, [fd])
    slow.start()
    try:
        open_bench(lane=0).abandon()
    finally:
        slow.join()
