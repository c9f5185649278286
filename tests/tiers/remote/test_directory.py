"""A shared directory: whose folders and files a store uses, and with which modes it makes them."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.directory import MOST_LEFT, THREADS, DirectoryClient
from kvstore.tiers.remote.mount import MARK, Mount
from kvstore.tiers.remote.object import ObjectTier
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.types import TierPlace
from tests.patience import PATIENCE, until_async
from tests.tiers.support import STRANGER, give_away, link_to, open_to_all

PLACE = TierPlace("place", {"model": "tiny"}, 8000)
KEYS = [key_of(number) for number in range(4)]


@pytest.fixture
def share(tmp_path: Path) -> Path:
    return tmp_path / "share"


def opened(share: Path, **parameters: Any) -> TierBench:
    return TierBench(ObjectTier(PLACE, url=share.as_uri(), **parameters), 16, 8192, 8000)


async def stored(share: Path, **parameters: Any) -> None:
    bench = opened(share, **parameters)
    assert (await bench.store(KEYS, [0] * 4)).ok == [True] * 4
    await bench.close()


async def found(share: Path, **parameters: Any) -> list[bool]:
    bench = opened(share, **parameters)
    told = await bench.fetch(KEYS, [0] * 4)
    await bench.close()
    return told


def hurried(share: Path) -> TierBench:
    """One whose calls have hardly any time."""
    bench = opened(share)
    assert isinstance(bench.tier, ObjectTier)
    bench.tier._timeout = 0.05
    return bench


def late(patch: pytest.MonkeyPatch, method: str) -> tuple[threading.Event, list[str]]:
    """Let a method of the client wait for the event; the list has an entry for each call."""
    goes_on, calls, real = threading.Event(), list[str](), getattr(DirectoryClient, method)

    def waits(self: DirectoryClient, *about: Any) -> Any:
        calls.append(method)
        goes_on.wait(PATIENCE)
        return real(self, *about)

    patch.setattr(DirectoryClient, method, waits)
    return goes_on, calls


def threads() -> int:
    return sum(each.name == "kvstore-client" for each in threading.enumerate())


def value_of(share: Path, key: bytes) -> Path:
    (path,) = (path for path in share.rglob(key.hex()) if path.is_file())
    return path


def refusal(share: Path) -> str:
    with pytest.raises(ValueError, match="url = ") as caught:
        opened(share)
    return str(caught.value)


async def test_a_directory_that_was_not_there_is_made_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = "was not there and has been made"
    (tmp_path / "mounted").mkdir()
    Mount(tmp_path / "mounted")
    assert told not in caplog.text
    for _ in range(2):
        Mount(tmp_path / "mistyped")
    assert caplog.text.count(told) == 1
    assert str(tmp_path / "mistyped") in caplog.text


async def test_what_is_made_is_its_owners_alone_whatever_the_mask(share: Path) -> None:
    before = os.umask(0)
    try:
        await stored(share)
    finally:
        os.umask(before)
    for path in (share, *share.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == expected, path


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("part", ["share", "namespace", "identity", "epoch"])
async def test_a_folder_of_another_user_is_refused_by_name_at_opening(
    share: Path, part: str
) -> None:
    await stored(share)
    epoch = value_of(share, KEYS[0]).parents[1]
    above = {"share": share, "namespace": epoch.parents[1], "identity": epoch.parent}
    folder = above.get(part, epoch)
    os.chown(folder, STRANGER, STRANGER)
    told = refusal(share)
    assert f"{folder} belongs to user nobody" in told
    assert "strict_modes = false" in told
    assert await found(share, strict_modes=False) == [True] * 4


@pytest.mark.parametrize("part", ["above", "share", "epoch"])
async def test_a_folder_that_others_may_write_to_is_refused_by_name_at_opening(
    share: Path, part: str
) -> None:
    await stored(share)
    epoch = value_of(share, KEYS[0]).parents[1]
    folder = {"above": share.parent, "share": share}.get(part, epoch)
    folder.chmod(0o777)
    assert f"{folder} may be written by every user (mode 0777)" in refusal(share)
    assert await found(share, strict_modes=False) == [True] * 4


@pytest.mark.usefixtures("as_root")
async def test_neither_the_mark_nor_a_value_is_written_through_a_link(
    share: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("somebody's")
    share.mkdir(mode=0o700)
    (share / MARK).symlink_to(precious)
    await stored(share)
    path = value_of(share, KEYS[0])
    path.unlink()
    path.symlink_to(precious)
    await stored(share)
    assert precious.read_text() == "somebody's"
    (share / MARK).unlink()
    (share / MARK).symlink_to(tmp_path / "not there")
    await stored(share)
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize("kind", ["link", "folder", "socket", "pipe"])
async def test_what_is_no_file_in_the_place_of_a_value_costs_that_value_alone(
    share: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(share)
    bench = opened(share)
    paths = [value_of(share, key) for key in KEYS[:3]]
    for path in paths:
        path.unlink()
        if kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                # Its whole path may be too long for a socket.
                monkeypatch.chdir(path.parent)
                # Its whole path may be too long.
                monkeypatch.chdir(path.parent)
                server.bind(path.name)
        elif kind == "link":
            path.symlink_to("elsewhere")
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    done = await bench.tier.read(KEYS, [0] * 4, range(4))
    # What is unread is the store's fault, and asked for again.
    assert (done.ok, list(done.unread)) == ([False] * 3 + [True], [])
    assert any(str(path) in (done.error or "") for path in paths)
    await bench.close()


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("plant", [give_away, open_to_all, link_to])
async def test_a_mark_that_others_could_have_made_marks_nothing(
    share: Path, plant: Callable[[Path], None]
) -> None:
    mount = Mount(share)
    plant(share / MARK)
    mount.check()
    mount._device += 1
    with pytest.raises(StoreError, match="the shared directory is not mounted"):
        mount.check()


@pytest.mark.parametrize("namespace", ["..", "../elsewhere", "/etc", ".", "a/b"])
async def test_a_namespace_that_leads_elsewhere_is_refused(share: Path, namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace name"):
        ObjectTier(TierPlace(namespace, {}, 8000), url=share.as_uri())


async def test_nothing_is_called_erased_while_the_directory_is_away(share: Path) -> None:
    await stored(share)
    bench, aside = opened(share), share.with_name("aside")
    share.rename(aside)
    assert await bench.tier.erase(KEYS) is not None
    aside.rename(share)
    assert await bench.fetch(KEYS, [0] * 4) == [True] * 4
    assert await bench.tier.erase(KEYS) is None
    # Where no folder of values is left, nothing is to be erased.
    assert await bench.tier.erase(KEYS) is None
    await bench.close()
    assert await found(share) == [False] * 4


async def test_values_are_spread_over_folders(share: Path) -> None:
    bench = opened(share)
    keys = [key_of(number) for number in range(128)]
    for start in range(0, 128, 16):
        assert all((await bench.store(keys[start : start + 16], [0] * 16)).ok)
    await bench.close()
    folders = {value_of(share, key).parent for key in keys}
    assert len(folders) > 80
    assert len({folder.parent for folder in folders}) == 1


async def test_a_read_that_was_given_up_writes_to_no_row_after_it_has_ended(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it read more than it had begun to."""
    bench, keys = opened(share), [key_of(number) for number in range(16)]
    assert all((await bench.store(keys, [0] * 16)).ok)
    await bench.close()
    goes_on, calls = late(monkeypatch, "_read")
    bench = hurried(share)
    assert await bench.fetch(keys, [0] * 16) == [False] * 16
    goes_on.set()
    await until_async(lambda: not threads())
    assert all(bench.is_smeared(row) for row in range(16))
    assert 0 < len(calls) <= THREADS
    await bench.close()


async def test_a_write_that_was_given_up_is_not_there_afterwards(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as failed, and its key may have been removed since."""
    with monkeypatch.context() as patched:
        goes_on, _ = late(patched, "_has")
        bench = hurried(share)
        assert (await bench.store(KEYS, [0] * 4)).ok == [False] * 4
        goes_on.set()
        await until_async(lambda: not threads())
        await bench.close()
    assert not [path for path in share.rglob("*") if path.is_file() and path.parent.name != "share"
                and len(path.name) > 12]  # fmt: skip
    assert await found(share) == [False] * 4


async def test_a_file_that_cannot_be_looked_at_costs_no_other(
    share: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose inode is damaged. The next write replaces it."""
    await stored(share)
    has, damaged = DirectoryClient._has, {KEYS[0].hex()}

    def fails(self: DirectoryClient, folder: int, at: str) -> bool:
        if not damaged or at.rpartition("/")[2] in damaged:
            raise OSError(errno.EUCLEAN, "structure needs cleaning")
        return has(self, folder, at)

    monkeypatch.setattr(DirectoryClient, "_has", fails)
    bench = opened(share)
    # It is told once a minute, not whenever the one before was looked at.
    for keys in (KEYS, KEYS[1:], KEYS, KEYS[:1]):
        done = await bench.tier.holds(keys)
        assert done.ok == [key != KEYS[0] for key in keys]
        assert (done.error, list(done.unread)) == (None, [])
    assert caplog.text.count("cannot be looked at") == 1
    assert (await bench.store(KEYS, [0] * 4)).ok == [True] * 4
    # Where nothing can be looked at it is the directory's fault.
    damaged.clear()
    assert list((await bench.tier.holds(KEYS[:1])).unread) == [0]
    await bench.close()


async def test_a_directory_that_hangs_keeps_a_bounded_number_of_threads(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS server that answers from caches and reads nothing any more."""
    await stored(share)
    bench = hurried(share)
    assert isinstance(bench.tier, ObjectTier)
    errors: set[str] = set()
    with monkeypatch.context() as patched:
        goes_on, _ = late(patched, "_read")
        for _ in range(3 * MOST_LEFT // len(KEYS)):
            done = await bench.tier.read(KEYS, [0] * 4, range(4))
            assert (done.ok, list(done.unread)) == ([False] * 4, [0, 1, 2, 3])
            errors.add(done.error or "")
        assert threads() == MOST_LEFT
        assert any(f"{MOST_LEFT} threads wait for {share}" in each for each in errors)
        assert "threads wait" in ((await bench.tier.holds(KEYS)).error or "")
        goes_on.set()
        await until_async(lambda: not threads())
    bench.tier._timeout = PATIENCE
    assert await bench.fetch(KEYS, [0] * 4) == [True] * 4
    await bench.close()


async def test_a_value_is_read_whole_by_calls_that_return_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(1000, size or 1000))

    def short(fd: int, mode: str, buffering: int) -> Any:
        return Short(fd, mode) if mode == "rb" else open(fd, mode, buffering=buffering)

    monkeypatch.setattr("kvstore.tiers.remote.directory.open", short, raising=False)
    client = DirectoryClient(Mount(tmp_path))
    payload, record = memoryview(bytearray(b"x" * 8192)), bytes(RECORD_BYTES)
    names = ["place/shared/6b6579"]
    assert await client.put(names, [record], [payload]) == [None]
    found = memoryview(bytearray(8192))
    assert await client.get(names, [found]) == [record]
    assert found == payload


async def test_a_value_found_damaged_while_it_is_written_is_replaced(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(share)
    path = value_of(share, KEYS[1])
    value = path.read_bytes()
    path.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
    begun, read = threading.Event(), threading.Event()
    put = DirectoryClient.put

    async def late(client: DirectoryClient, *args: Any, **named: Any) -> list[str | None]:
        begun.set()
        while not read.is_set():
            await asyncio.sleep(0.001)
        return await put(client, *args, **named)

    monkeypatch.setattr(DirectoryClient, "put", late)
    bench = opened(share)
    writing = asyncio.create_task(bench.store(KEYS, [0] * 4))
    await until_async(begun.is_set)
    found = await bench.tier.read(KEYS, [0] * 4, range(8, 12))
    assert found.ok == [True, False, True, True]
    read.set()
    assert (await writing).ok == [True] * 4
    assert path.read_bytes() == value
    assert await bench.fetch(KEYS, [0] * 4) == [True] * 4
    await bench.close()
