"""Object stores: an S3 server (Ceph's gateway), Azure's emulator (Azurite) and a directory."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.testing.store import StoreContract
from kvstore.tiers.base import Tier
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote import suspects
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace
from tests.patience import PATIENCE, TOO_LONG, until_async
from tests.tiers.remote.servers import (
    Azurite,
    CephGateway,
    ServerContract,
    all_arrive_over_a_slow_link,
    azurite,
    ceph_gateway,
)
from tests.tiers.support import some_keys

obstore = pytest.importorskip("obstore")

from obstore.exceptions import GenericError, PermissionDeniedError  # noqa: E402
from obstore.store import AzureStore, MemoryStore, S3Store  # noqa: E402

from kvstore.tiers.remote.client import StoreError, Unread  # noqa: E402
from kvstore.tiers.remote.directory import DirectoryClient  # noqa: E402
from kvstore.tiers.remote.mount import MARK, Mount  # noqa: E402
from kvstore.tiers.remote.object import CONNECTIONS, RANGE_BYTES, ObjectTier, _Client  # noqa: E402
from kvstore.tiers.remote.record import RECORD_BYTES  # noqa: E402
from kvstore.tiers.remote.sweeper import MOST_REMOVED  # noqa: E402

PLACE = TierPlace("place", {"model": "tiny"}, 8000)


@pytest.fixture(scope="module")
def gateway() -> Iterator[CephGateway]:
    with ceph_gateway() as running:
        yield running


@pytest.fixture
def s3(gateway: CephGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the bucket; it is empty, and credentials are in the environment."""
    for name, value in gateway.environment.items():
        monkeypatch.setenv(name, value)
    client = S3Store(gateway.bucket, endpoint=gateway.endpoint, client_options={"allow_http": True})
    obstore.delete(client, _names(client))
    return client


def _names(client: Any) -> list[str]:
    return [entry["path"] for entries in obstore.list(client) for entry in entries]


class ServedContract(ServerContract):
    client: Any

    def new_tier(self, place: TierPlace) -> Tier:
        return ObjectTier(
            place, url=self.server.url, endpoint=self.server.endpoint, timeout_s=self.timeout
        )

    def values(self) -> Mapping[str, bytes]:
        names = _names(self.client)
        return {name: bytes(obstore.get(self.client, name).bytes()) for name in names}

    def put(self, name: str, value: bytes) -> None:
        obstore.put(self.client, name, value)


class TestS3(ServedContract):
    @pytest.fixture(autouse=True)
    def _use(self, gateway: CephGateway, s3: Any) -> None:
        self.server, self.client = gateway, s3


@pytest.fixture(scope="module")
def emulator() -> Iterator[Azurite]:
    with azurite() as running:
        yield running


class TestAzure(ServedContract):
    @pytest.fixture(autouse=True)
    def _use(self, emulator: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        self.server = emulator
        self.client = AzureStore(
            emulator.container, endpoint=emulator.endpoint, client_options={"allow_http": True}
        )
        obstore.delete(self.client, _names(self.client))


class TestDirectory(StoreContract):
    seconds = PATIENCE

    @pytest.fixture(autouse=True)
    def _use(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "shared"
        self.away = tmp_path / "away"

    def new_tier(self, place: TierPlace) -> Tier:
        return ObjectTier(place, url=self.folder.as_uri())

    def values(self) -> Mapping[str, bytes]:
        files = [each for each in self.folder.rglob("*") if each.is_file() and each.name != MARK]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def put(self, name: str, value: bytes) -> None:
        (self.folder / name).write_bytes(value)

    def stop(self) -> None:
        """A file where the directory was: nothing can be found or made below it."""
        if self.folder.exists():
            self.folder.rename(self.away)
        self.folder.write_text("")

    def start(self) -> None:
        if self.folder.is_file():
            self.folder.unlink()
        if self.away.exists():
            self.away.rename(self.folder)

    def freeze(self) -> None:
        self.stop()

    async def test_it_opens_while_its_engine_is_away_and_serves_when_it_comes(
        self, place: TierPlace, benches: list[TierBench]
    ) -> None:
        """Other than a server, a directory has to be there at the start."""
        self.stop()
        with pytest.raises(ValueError, match="shared"):
            self.new_tier(place)


class TestSealedDirectory(TestDirectory):
    """Chunks that are encrypted before they leave the host."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> TierPlace:
        return TierPlace("contract", {"test": "sealed"}, self.chunk_bytes, some_keys(tmp_path))


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"url": "http://host"}, "must be s3://bucket/prefix"),
        ({"url": "s3://"}, "must be s3://bucket/prefix"),
        ({"url": "s3://key:secret@bucket"}, "belong in the environment"),
        ({"url": "s3://bucket?secret=1"}, "belong in the environment"),
        ({"url": "s3://bucket", "endpoint": "http://key:secret@host"}, "in the environment"),
        ({"url": "file:///"}, "file:///directory"),
        ({"url": "file://host/path"}, "file:///directory"),
        ({"url": "file:///tmp/x", "endpoint": "http://host"}, "endpoint"),
        ({"url": "gs://bucket", "region": "eu"}, "region"),
        ({"url": "s3://bucket", "timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        ObjectTier(PLACE, **parameters)
    assert "secret" not in str(raised.value)


def test_a_directory_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/below"):
        ObjectTier(PLACE, url=(tmp_path / "file" / "below").as_uri())


async def test_wrong_credentials_are_told_and_shown_nowhere(
    gateway: CephGateway, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    tier = ObjectTier(PLACE, url=gateway.url, endpoint=gateway.endpoint)
    bench = TierBench(tier, 16, 8192, 8000)
    told = await bench.tier.holds([key_of(1)])
    assert told.error
    assert list(told.unread) == [0]
    assert "wr0ng" not in told.error + bench.tier.description + bench.opening.name
    await bench.close()


async def test_a_bucket_that_is_not_there_stores_nothing_and_says_so(
    gateway: CephGateway, s3: Any
) -> None:
    tier = ObjectTier(PLACE, url="s3://elsewhere", endpoint=gateway.endpoint)
    bench = TierBench(tier, 16, 8192, 8000)
    done = await bench.store([key_of(1)], [0])
    assert done.ok == [False]
    assert done.error
    await bench.close()


@pytest.mark.parametrize("extra", [-200, -128, -127, 0, 5000])
async def test_a_large_value_is_read_in_ranges(
    gateway: CephGateway, s3: Any, tmp_path: Path, extra: int
) -> None:
    size = 2 * RANGE_BYTES + extra
    row_bytes = -(-size // 4096) * 4096
    place = TierPlace("place", {"model": "large"}, size)
    for tier in (
        ObjectTier(place, url=gateway.url, endpoint=gateway.endpoint),
        ObjectTier(place, url=tmp_path.as_uri()),
    ):
        bench = TierBench(tier, 2, row_bytes, size)
        keys = [key_of(n) for n in range(2)]
        assert (await bench.store(keys, [0] * 2)).ok == [True] * 2
        assert await bench.fetch(keys, [0] * 2) == [True] * 2
        await bench.close()
    (cut, *_) = [path for path in tmp_path.rglob(f"*{keys[0].hex()}") if path.is_file()]
    value = cut.read_bytes()
    for length in (0, 100, RANGE_BYTES, RANGE_BYTES + 1, len(value) - 1, len(value) + 1):
        cut.write_bytes(value[:length].ljust(length, b"x"))
        bench = TierBench(ObjectTier(place, url=tmp_path.as_uri()), 2, row_bytes, size)
        assert await bench.fetch(keys, [0] * 2) == [False, True]
        await bench.close()


async def test_all_chunks_arrive_however_many_moves_share_a_slow_link(
    gateway: CephGateway, s3: Any, tmp_path: Path
) -> None:
    def tier(place: TierPlace, port: int, seconds: float) -> ObjectTier:
        endpoint = f"http://127.0.0.1:{port}"
        return ObjectTier(place, url=gateway.url, endpoint=endpoint, timeout_s=seconds)

    await all_arrive_over_a_slow_link(tier, gateway.port, tmp_path)


async def test_many_values_are_removed_by_calls_of_which_each_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []
    remove = DirectoryClient.remove

    async def counting(self: DirectoryClient, names: Sequence[str]) -> None:
        named.append(len(names))
        if len(named) == 9:
            raise StoreError("it has ended")
        await remove(self, names)

    monkeypatch.setattr(DirectoryClient, "remove", counting)
    bench = TierBench(ObjectTier(PLACE, url=tmp_path.as_uri()), 16, 8192, 8000)
    keys = [key_of(number) for number in range(1000)]
    await bench.store([keys[0], keys[-1]], [0, 0])
    assert await bench.tier.erase(keys) is None
    assert (sum(named), max(named)) == (1000, MOST_REMOVED)
    assert await bench.fetch([keys[0], keys[-1]], [0, 0]) == [False, False]
    assert await bench.tier.erase(keys * 2) == "it has ended"
    await bench.close()


async def test_a_directory_that_hangs_keeps_one_thread_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), threading.Semaphore(0)
    check = Mount.check

    def hangs(self: Mount) -> None:
        asked.release()
        answers.wait()
        check(self)

    tier = ObjectTier(PLACE, url=tmp_path.as_uri(), timeout_s=PATIENCE)
    bench = TierBench(tier, 16, 8192, 8000)
    assert (await bench.store([key_of(1)], [0])).ok == [True]
    monkeypatch.setattr(Mount, "check", hangs)
    tier._timeout = 0.05
    for _ in range(5):
        assert "no answer" in ((await bench.tier.holds([key_of(1)])).error or "")
    assert asked.acquire(blocking=False)
    assert not asked.acquire(blocking=False)
    answers.set()
    await until_async(lambda: not [t for t in threading.enumerate() if t.name == "kvstore-client"])
    tier._timeout = PATIENCE
    assert (await bench.tier.holds([key_of(1)])).ok == [True]
    await bench.close()


async def test_of_a_prompt_that_nobody_has_stored_only_the_first_values_are_asked_for(
    gateway: CephGateway, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    head = obstore.head_async

    def counting(store: Any, name: str) -> Any:
        asked.append(name)
        return head(store, name)

    monkeypatch.setattr("kvstore.tiers.remote.object.obstore.head_async", counting)
    bench = TierBench(ObjectTier(PLACE, url=gateway.url, endpoint=gateway.endpoint), 16, 8192, 8000)
    keys = [key_of(n) for n in range(200)]
    assert (await bench.tier.holds(keys)).ok == [False] * 200
    assert len(asked) == 4
    await bench.store(keys[:16], [0] * 16)
    asked.clear()
    assert (await bench.tier.holds(keys)).ok == [True] * 16 + [False] * 184
    assert len(asked) == 4 + 2 * CONNECTIONS, "until nothing of a wave is there"
    await bench.close()


async def test_the_oldest_leave_a_bucket_that_holds_too_much(gateway: CephGateway, s3: Any) -> None:
    capacity = 32 * (8000 + RECORD_BYTES)
    tier = ObjectTier(PLACE, url=gateway.url, endpoint=gateway.endpoint, capacity_bytes=capacity)
    bench = TierBench(tier, 16, 8192, 8000)
    keys = [key_of(number) for number in range(36)]
    for first in range(0, 36, 12):
        assert (await bench.store(keys[first : first + 12], [0] * 12)).ok == [True] * 12
        # Its times are of whole seconds.
        await asyncio.sleep(1.1)
    await tier.sweep()
    found = [await bench.fetch(keys[first : first + 12], [0] * 12) for first in range(0, 36, 12)]
    assert [sum(each) for each in found] == [6, 12, 12]
    await bench.close()


@pytest.mark.parametrize("kind", ["s3", "directory"])
async def test_what_a_process_that_was_killed_had_for_itself_is_removed_after_a_week(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> TierBench:
        if kind == "directory":
            return TierBench(ObjectTier(PLACE, url=tmp_path.as_uri()), 16, 8192, 8000)
        server = request.getfixturevalue("gateway")
        request.getfixturevalue("s3")
        return TierBench(
            ObjectTier(PLACE, url=server.url, endpoint=server.endpoint), 16, 8192, 8000
        )

    bench, killed = opened(), opened()
    keys = [key_of(number) for number in range(4)]
    await bench.store(keys, [0] * 4)
    assert isinstance(killed.tier, ObjectTier)
    await killed.tier.clear()
    await killed.store(keys, [0] * 4)
    assert isinstance(bench.tier, ObjectTier)
    await bench.tier.sweep()
    assert await killed.fetch(keys, [0] * 4) == [True] * 4, "it may be used"
    monkeypatch.setattr("kvstore.tiers.remote.sweeper.PRIVATE_SECONDS", -100.0)
    await bench.tier.sweep()
    assert await killed.fetch(keys, [0] * 4) == [False] * 4
    assert await bench.fetch(keys, [0] * 4) == [True] * 4
    await killed.close()
    if kind == "directory":
        epoch = next(path for path in tmp_path.rglob(killed.tier._sweeper.epoch))
        within = next(path for path in epoch.iterdir())
        half = within / ".half"
        half.write_text("")
        os.utime(half, (0, 0))
        await bench.tier.sweep()
        await bench.tier.sweep()
        assert within.exists(), "somebody may be about to write to it"
        monkeypatch.setattr("kvstore.tiers.remote.directory.OLD_SECONDS", -1.0)
        await bench.tier.sweep()
        await bench.tier.sweep()
        assert not epoch.exists()
    await bench.close()


async def test_an_object_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is archived, or whose key the service has lost; the next write replaces it."""
    client = _Client(MemoryStore())
    names = [f"place/0/{number:04x}" for number in range(3)]
    payloads = [bytes([number]) * 100 for number in range(3)]
    records = [bytes([number]) * RECORD_BYTES for number in range(3)]
    assert await client.put(names, records, [memoryview(one) for one in payloads]) == [None] * 3
    real, away, said = obstore.get_async, False, "storage class"
    fault: type[Exception] = PermissionDeniedError

    async def get(store: Any, name: str, **more: Any) -> Any:
        if name == names[1]:
            raise fault(f"The operation is not valid for the object's {said}")
        return await real(store, name, **more)

    async def head(store: Any, name: str) -> Any:
        if away:
            raise GenericError("nobody answers")
        return await real_head(store, name)

    real_head = obstore.head_async
    monkeypatch.setattr(obstore, "get_async", get)
    monkeypatch.setattr(obstore, "head_async", head)
    into = [bytearray(100) for _ in names]
    found = await client.get(names, [memoryview(one) for one in into])
    assert [found[0], found[2]] == [records[0], records[2]]
    assert isinstance(found[1], str)
    assert "storage class" in found[1]
    assert isinstance(found[1], Unread)
    assert [bytes(into[at]) for at in (0, 2)] == [payloads[0], payloads[2]]
    # A service that has lost the value's key says so with a status of its own.
    fault = GenericError
    said = "Server returned non-2xx status code: 400 Bad Request: KMS.DisabledException"
    found = await client.get(names, [memoryview(one) for one in into])
    assert [found[0], found[2]] == [records[0], records[2]]
    assert said in str(found[1])
    # Nor does one that fails otherwise, as in the middle, cost others.
    said = "connection closed"
    found = await client.get(names, [memoryview(one) for one in into])
    assert [found[0], found[2]] == [records[0], records[2]]
    assert isinstance(found[1], Unread)
    # Whether the store itself is at fault is asked.
    away = True
    with pytest.raises(StoreError, match="nobody answers"):
        await client.exists(names)


async def test_a_value_that_cannot_be_read_costs_no_other_and_four_are_the_stores_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InMemory(ObjectTier):
        def connect(self) -> Any:
            return client

    client = _Client(MemoryStore())
    bench = TierBench(InMemory(PLACE, url="s3://bucket/p", region="us-east-1"), 16, 8192, 8000)
    keys, rows = [key_of(n) for n in range(16)], list(range(16))
    await bench.store(keys, [0] * 16)
    real, bad = obstore.get_async, {keys[10].hex()}

    async def get(store: Any, name: str, **more: Any) -> Any:
        if name.rpartition("/")[2] in bad:
            raise GenericError("error reading a body from connection")
        return await real(store, name, **more)

    monkeypatch.setattr(obstore, "get_async", get)
    done = await bench.tier.read(keys, [0] * 16, rows)
    assert done.ok == [n != 10 for n in range(16)]
    assert list(done.unread) == []
    # It is there; when it is written it is replaced.
    assert (await bench.tier.holds(keys)).ok == [True] * 16
    # However many: others of the same batch can be read.
    bad.update(key.hex() for key in keys[4:10])
    done = await bench.tier.read(keys, [0] * 16, rows)
    assert done.ok == [not 4 <= n <= 10 for n in range(16)]
    assert list(done.unread) == []
    bad.update(key.hex() for key in keys)
    done = await bench.tier.read(keys, [0] * 16, rows)
    assert list(done.unread) == rows
    bad.clear()
    await bench.store(keys[10:11], [0])
    assert (await bench.tier.read(keys, [0] * 16, rows)).ok == [True] * 16
    await bench.close()


async def test_what_was_given_up_and_arrives_after_its_removal_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a server that hangs, and goes on with what it was sent."""
    tier = ObjectTier(PLACE, url=tmp_path.as_uri(), timeout_s=PATIENCE)
    bench = TierBench(tier, 4, 8192, 8000)
    keys, put, late = [key_of(n) for n in range(3)], DirectoryClient.put, []

    async def hang(
        self: DirectoryClient, names: Any, records: Any, payloads: Any, **more: Any
    ) -> Any:
        late.append((self, names, records, [memoryview(bytes(each)) for each in payloads]))
        raise StoreError("no answer")

    replaced = []

    async def note(self: DirectoryClient, *values: Any, replace: bool = False) -> Any:
        replaced.append(replace)
        return await put(self, *values, replace=replace)

    monkeypatch.setattr(DirectoryClient, "put", hang)
    assert not any((await bench.store(keys, [0] * 3)).ok)
    monkeypatch.setattr(DirectoryClient, "put", put)
    for _ in range(2):
        assert await tier.erase(keys[:2]) is None
        assert (await tier.read(keys[:2], [0] * 2, [0, 1])).ok == [False] * 2
        await put(*late[0])
        assert (await tier.holds(keys)).ok == [False, False, True]
        assert await bench.fetch(keys, [0] * 3) == [False, False, True]
        # What is stored anew takes the place of what was sent before, or the other way round.
        monkeypatch.setattr(DirectoryClient, "put", note)
        assert all((await bench.store(keys, [0] * 3)).ok)
        assert replaced.pop()
        monkeypatch.setattr(DirectoryClient, "put", put)
        assert (await tier.holds(keys)).ok == [False, False, True]
    await bench.close()


@pytest.mark.parametrize("again", [False, True])
async def test_so_it_is_with_one_that_fails_alone_or_at_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    tier = ObjectTier(PLACE, url=tmp_path.as_uri(), timeout_s=PATIENCE)
    bench = TierBench(tier, 2, 8192, 8000)
    key, put, late = key_of(0), DirectoryClient.put, []

    async def fail(
        self: DirectoryClient, names: Any, records: Any, payloads: Any, **more: Any
    ) -> Any:
        late.append((self, names, records, [memoryview(bytes(each)) for each in payloads]))
        if again and len(late) == 1:
            tier._suspects.was_read([key], [b""], ["found invalid meanwhile"])
            return [None]
        if again:
            raise StoreError("no answer")
        return ["504"]

    monkeypatch.setattr(DirectoryClient, "put", fail)
    assert (await bench.store([key], [0])).ok == [False]
    monkeypatch.setattr(DirectoryClient, "put", put)
    assert await tier.erase([key]) is None
    tier._suspects.replaced([key])
    await put(*late[-1])
    assert (await tier.holds([key])).ok == [False]
    await bench.close()


def test_what_was_given_up_last_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MOST_KEYS", 4)
    late, keys = suspects.Suspects(), [key_of(n) for n in range(6)]
    for some in (keys[:3], keys[:1], keys[3:]):
        late.gave_up(some)
        late.removed(some)
    assert [late.may_return(key) for key in keys] == [True, False, False, True, True, True]
    late.gave_up(keys[1:3])
    assert [late.may_return(key) for key in keys] == [False] * 4 + [True] * 2
    # It arrives within a time, or not at all.
    monkeypatch.setattr(suspects, "LASTS", 0.0)
    late.removed(keys[4:5])
    assert [late.may_return(key) for key in keys[4:]] == [False, True]
    # Given up again, it is another write, and was not removed since.
    monkeypatch.undo()
    late.gave_up(keys[4:])
    assert [late.may_return(key) for key in keys[4:]] == [False, True]


async def test_each_wave_of_a_question_has_its_time_and_what_was_answered_counts() -> None:
    waves: list[int] = []

    class Slow:
        async def exists(self, names: Sequence[str]) -> list[bool]:
            waves.append(len(names))
            await asyncio.sleep(0.1 if len(waves) <= 8 else TOO_LONG)
            return [True] * len(names)

        async def close(self) -> None:
            return

    class SlowTier(StoreTier):
        address = "slow"
        asked_at_once = 10

        def connect(self) -> Any:
            return Slow()

    tier = SlowTier(PLACE, timeout_s=0.5)
    tier.open(PinnedRegion.private(2, 8192))
    try:
        keys = [key_of(n) for n in range(100)]
        done = await tier.holds(keys)
        assert waves == [4, *[10] * 8], "all of them take longer than one may"
        assert done.ok == [True] * 74 + [False] * 26
        assert list(done.unread) == list(range(74, 100))
        assert (await tier.holds(keys)).unread == range(100)
    finally:
        await tier.close([])


def test_a_value_is_suspected_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """For none if it could not be read for the first time; several in a row are the store's."""
    now = 0.0
    monkeypatch.setattr(suspects, "time", SimpleNamespace(monotonic=lambda: now))
    known, keys = suspects.Suspects(), [key_of(n) for n in range(4)]
    wrong, unread = (b"", "wrong"), (Unread("cut off"), "cut off")

    def read(*found: tuple[object, str | None]) -> bool:
        return known.was_read(keys[: len(found)], *zip(*found, strict=True))

    read(wrong, unread, (None, "gone"), (b"", None))
    assert [known.missing(key) for key in keys] == [True, False, False, False]
    assert [known.invalid([key]) for key in keys] == [True, True, False, False]
    read(wrong, unread)
    assert [known.missing(key) for key in keys] == [True, True, False, False]
    now = suspects.LASTS
    assert [known.missing(key) for key in keys] == [False] * 4
    assert known.must_replace(keys[:1])
    assert not read(unread, unread, unread)
    assert not read((b"", None))
    assert not known.was_read(keys[3:], *zip(unread, strict=True)), "one could be read since"
    assert read(unread, unread, unread)
    assert not known.was_read(keys[:1], [None], ["gone"])
    # The oldest are forgotten.
    monkeypatch.setattr(suspects, "MOST_KEYS", 2)
    read(wrong, wrong, wrong)
    assert [known.invalid([key]) for key in keys] == [False, True, True, False]
