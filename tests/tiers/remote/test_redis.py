"""The Redis store against real servers: Redis and Valkey."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.base import Tier
from kvstore.tiers.remote.client import ListingClient, StoreError
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.types import TierPlace
from tests.patience import PATIENCE
from tests.tiers.remote.servers import (
    RedisServer,
    ServerContract,
    all_arrive_over_a_slow_link,
    redis_server,
    valkey_server,
)
from tests.tiers.remote.test_sweeper import LEFT, ROOM, keys_of

redis = pytest.importorskip("redis")

from kvstore.tiers.remote.redis import PASSWORD, RedisTier, _Client  # noqa: E402

Starting = Callable[..., AbstractContextManager[RedisServer]]


@pytest.fixture(scope="module", params=[redis_server, valkey_server])
def starting(request: pytest.FixtureRequest) -> Starting:
    start: Starting = request.param
    return start


@pytest.fixture(scope="module")
def server(starting: Starting) -> Iterator[RedisServer]:
    with starting() as running:
        yield running


class TestRedis(ServerContract):
    @pytest.fixture(autouse=True)
    def _use(self, server: RedisServer) -> Iterator[None]:
        self.server = server
        self.client = redis.Redis(port=server.port)
        self.client.flushall()
        yield
        self.client.close()

    def new_tier(self, place: TierPlace) -> Tier:
        return RedisTier(place, url=self.server.url, timeout_s=self.timeout)

    def values(self) -> Mapping[str, bytes]:
        names = list(self.client.scan_iter())
        return {name.decode(): self.client.get(name) for name in names}

    def put(self, name: str, value: bytes) -> None:
        self.client.set(name, value)


PLACE = TierPlace("place", {"model": "tiny"}, 8000)
WEEK = 7 * 86_400.0


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"url": "http://host"}, "must be redis://"),
        ({"url": "redis://user:secret@host"}, "password in KVSTORE_REDIS_USERNAME"),
        ({"url": "redis://host/0?password=secret"}, "password in KVSTORE_REDIS_USERNAME"),
        ({"url": "unix:///run/sock?db=0&username=secret"}, "password in KVSTORE_REDIS_USERNAME"),
        ({"url": "redis://host/0?decode_responses=true"}, "must be redis://host:port/db"),
        ({"url": "redis://host:port"}, "must be redis://host:port/db"),
        ({"url": "redis://host:99999"}, "Port out of range"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s = inf"),
        ({"timeout_s": float("nan")}, "timeout_s = nan"),
        ({"expire_s": -1.0}, "expire_s = -1.0: must be 0, or from 0.001"),
        ({"expire_s": 1e-4}, "expire_s = 0.0001"),
        ({"expire_s": float("inf")}, "expire_s = inf"),
        ({"expire_s": float("nan")}, "expire_s = nan"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        RedisTier(PLACE, **parameters)
    assert "secret" not in str(raised.value)


async def bench_of(tier: Tier) -> TierBench:
    return TierBench(tier, 16, 8192, 8000)


async def test_a_password_comes_from_the_environment_and_is_shown_nowhere(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with starting("--requirepass", "s3cret") as locked:
        bench = await bench_of(RedisTier(PLACE, url=locked.url))
        told = await bench.tier.holds([key_of(1)])
        assert told.error
        assert list(told.unread) == [0]
        await bench.close()
        monkeypatch.setenv(PASSWORD, "s3cret")
        bench = await bench_of(RedisTier(PLACE, url=locked.url))
        assert (await bench.tier.holds([key_of(1)])).error is None
        assert "s3cret" not in bench.tier.description + bench.opening.name
        await bench.close()


async def test_what_a_server_repeats_of_a_command_that_it_does_not_know_is_not_told(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's greeting has the password in it."""
    monkeypatch.setenv(PASSWORD, "s3cret")
    with starting("--rename-command", "HELLO", "") as older:
        bench = await bench_of(RedisTier(PLACE, url=older.url))
        told = await bench.tier.holds([key_of(1)])
        assert "unknown command 'HELLO'" in str(told.error)
        assert "s3cret" not in str(told.error)
        await bench.close()


async def test_when_another_server_takes_over_connections_lead_to_that(starting: Starting) -> None:
    """The old one goes on as a replica: its connections stay, and take no value any more."""
    with starting() as old, starting() as new:
        leads_to = old

        async def forward(*client: Any) -> None:
            server = await asyncio.open_connection("127.0.0.1", leads_to.port)

            async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(2**16):
                    writer.write(data)
                writer.close()

            await asyncio.gather(pump(client[0], server[1]), pump(server[0], client[1]))

        balancer = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = balancer.sockets[0].getsockname()[1]
        bench = await bench_of(RedisTier(PLACE, url=f"redis://127.0.0.1:{port}/0"))
        assert (await bench.store([key_of(1)], [0])).ok == [True]
        with redis.Redis(port=old.port) as operator:
            operator.replicaof("127.0.0.1", new.port)
        leads_to = new
        assert "read only replica" in str((await bench.store([key_of(2)], [0])).error)
        assert (await bench.store([key_of(3)], [0])).ok == [True]
        await bench.close()
        balancer.close()


async def test_new_connections_cost_no_call_that_is_under_way(server: RedisServer) -> None:
    client: Any = RedisTier(PLACE, url=server.url).connect()

    async def ask(number: int) -> list[bool]:
        await asyncio.sleep(number % 3 / 1000)
        client._doubtful |= number == 5
        found: list[bool] = await client.exists(["nothing"])
        return found

    for _ in range(20):
        client._doubtful = True
        assert await asyncio.gather(*map(ask, range(8))) == [[False]] * 8
    await client.close()
    assert not client._closing


def test_only_whole_calls_have_a_deadline() -> None:
    client = RedisTier(PLACE, url="redis://127.0.0.1:1/0", timeout_s=60).connect()
    pool = client._server.connection_pool  # type: ignore[attr-defined]
    assert pool.connection_kwargs["socket_timeout"] is None


def test_a_password_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one in Latin-1. Python would tell all of it."""
    monkeypatch.setenv(PASSWORD, os.fsdecode(b"s3cr\xfct"))
    with pytest.raises(ValueError, match=f"^{PASSWORD}: must be UTF-8$"):
        RedisTier(PLACE, url="redis://127.0.0.1:1/0")


async def test_a_value_of_another_kind_or_length_is_replaced_and_costs_no_other_one(
    starting: Starting,
) -> None:
    with starting() as server, redis.Redis(port=server.port) as client:
        bench = await bench_of(RedisTier(PLACE, url=server.url))
        keys = [key_of(number) for number in range(6)]
        await bench.store(keys[:5], [0] * 5)
        names = [name for key in keys[:5] for name in client.keys(f"*/{key.hex()}")]
        client.delete(names[1])
        client.rpush(names[1], "a list")
        client.set(names[3], bytes(32 << 20))
        client.set(names[4], b"")
        good = [True, False, True, False, False, False]
        before = client.info()["total_net_output_bytes"]
        told = await bench.tier.read(keys, [0] * 6, list(range(6)))
        assert told.ok == good
        assert list(told.unread) == []
        assert client.info()["total_net_output_bytes"] - before < 1 << 20
        assert (await bench.tier.holds(keys)).ok == good
        await bench.store(keys, [0] * 6)
        assert await bench.fetch(keys, [0] * 6) == [True] * 6
        await bench.close()


async def test_a_server_that_is_full_refuses_and_still_serves(starting: Starting) -> None:
    with starting("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as full:
        bench = await bench_of(RedisTier(PLACE, url=full.url))
        refused = []
        for first in range(0, 640, 16):
            keys = [key_of(n) for n in range(first, first + 16)]
            done = await bench.store(keys, [0] * 16)
            refused += [key for key, ok in zip(keys, done.ok, strict=True) if not ok]
            if refused:
                assert "memory" in str(done.error)
                assert list(done.unread) == []
                break
        assert refused
        assert await bench.fetch([key_of(0), refused[-1]], [0, 0]) == [True, False]
        await bench.close()


async def test_a_value_that_is_stored_while_it_is_asked_for_is_good(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with starting() as server, redis.Redis(port=server.port) as client:
        bench = await bench_of(RedisTier(PLACE, url=server.url))
        keys = [key_of(number) for number in range(2)]
        await bench.store(keys, [0] * 2)
        (name,) = client.keys(f"*/{keys[1].hex()}")
        client.rename(name, "away")
        exists = _Client.exists

        async def stored_by_another(self: _Client, names: Sequence[str]) -> list[bool]:
            client.rename("away", name)
            return await exists(self, names)

        monkeypatch.setattr(_Client, "exists", stored_by_another)
        assert await bench.fetch(keys, [0] * 2) == [True] * 2
        monkeypatch.undo()
        assert (await bench.tier.holds(keys)).ok == [True] * 2
        await bench.close()


async def test_all_chunks_arrive_however_many_moves_share_a_slow_link(tmp_path: Path) -> None:
    def tier(place: TierPlace, port: int, seconds: float) -> RedisTier:
        return RedisTier(place, url=f"redis://127.0.0.1:{port}/0", timeout_s=seconds)

    with redis_server() as server:
        await all_arrive_over_a_slow_link(tier, server.port, tmp_path)


@pytest.mark.parametrize("refused", ["getrange", "exists"])
async def test_what_the_server_refuses_is_not_taken_for_a_value_that_is_not_there(
    starting: Starting, refused: str
) -> None:
    with starting() as strict, redis.Redis(port=strict.port) as client:
        bench = await bench_of(RedisTier(PLACE, url=strict.url))
        keys = [key_of(number) for number in range(4)]
        await bench.store(keys[:2], [0] * 2)
        client.acl_setuser("default", enabled=True, commands=[f"-{refused}"])
        if refused == "exists":
            told = await bench.tier.holds(keys)
        else:
            told = await bench.tier.read(keys, [0] * 4, list(range(4)))
        assert told.ok == [False] * 4
        assert list(told.unread) == list(range(4))
        assert "permission" in (told.error or "").lower()
        client.acl_setuser("default", enabled=True, commands=[f"+{refused}"])
        assert await bench.fetch(keys, [0] * 4) == [True, True, False, False]
        await bench.close()


@pytest.mark.parametrize(
    ("expire_s", "shared_s", "private_s"),
    [(0.0, None, WEEK), (100.0, 100.0, 100.0), (1e8, 1e8, WEEK)],
)
async def test_values_expire_if_that_is_wanted_and_what_is_for_one_process_alone_after_a_week(
    server: RedisServer, expire_s: float, shared_s: float | None, private_s: float
) -> None:
    bench = await bench_of(RedisTier(PLACE, url=server.url, expire_s=expire_s))
    with redis.Redis(port=server.port) as client:
        client.flushall()
        await bench.store([key_of(1)], [0])
        await bench.tier.clear()
        await bench.store([key_of(2)], [0])
        for key, most in ((key_of(1), shared_s), (key_of(2), private_s)):
            (name,) = client.scan_iter(match=f"*{key.hex()}")
            left_ms = client.pttl(name)
            assert left_ms == -1 if most is None else 900 * most < left_ms <= 1000 * most
    await bench.close()


class TlsServer(RedisServer):
    """A server that speaks TLS alone, with the certificate in its folder."""

    def command(self) -> Sequence[str]:
        folder = str(self._folder)
        return [
            *super().command(),
            *("--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", f"{folder}/server.crt", "--tls-key-file", f"{folder}/server.key"),
        ]


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Starts a server with a certificate for a name, which this process trusts; tells its URL."""
    if not (shutil.which("openssl") and shutil.which("redis-server")):
        pytest.skip("openssl or redis-server is not installed")

    def openssl(*words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=tmp_path, capture_output=True, check=False)
        assert not done.returncode, done.stderr

    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    own = ("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kvstore")
    openssl("req", "-x509", *key, *own, "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))

    def start(name: str) -> str:
        openssl("req", *key[:3], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=x")
        (tmp_path / "names").write_text(f"subjectAltName={name}")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt", "-days", "2")
        servers.append(TlsServer(tmp_path))
        return f"rediss://127.0.0.1:{servers[-1].port}/0"

    servers: list[TlsServer] = []
    yield start
    for server in servers:
        server.stop()


async def test_a_server_whose_certificate_is_for_another_name_is_not_used(
    certified: Callable[[str], str],
) -> None:
    bench = await bench_of(RedisTier(PLACE, url=certified("DNS:other.example")))
    told = await bench.tier.holds([key_of(1)])
    assert list(told.unread) == [0]
    assert "certificate is not valid for" in (told.error or "")
    assert (await bench.store([key_of(1)], [0])).ok == [False]
    await bench.close()
    bench = await bench_of(RedisTier(PLACE, url=certified("IP:127.0.0.1"), timeout_s=PATIENCE))
    assert (await bench.store([key_of(1)], [0])).ok == [True]
    assert await bench.fetch([key_of(1)], [0]) == [True]
    await bench.close()


# -- a server of which chunks may have a part ----------------------------------------------------


class Limited:
    """A store of room for `ROOM` chunks, on a server that begins empty."""

    def __init__(self, server: RedisServer, place: TierPlace = PLACE) -> None:
        self.client = redis.Redis(port=server.port)
        self.client.flushall()
        self.client.config_set("maxmemory-policy", "allkeys-lru")
        capacity = ROOM * (PLACE.chunk_bytes + RECORD_BYTES)
        self.tier = RedisTier(place, url=server.url, capacity_bytes=capacity)
        self.bench = TierBench(self.tier, ROOM, 8192, PLACE.chunk_bytes)

    async def store(self, keys: list[bytes]) -> set[str | None]:
        """Store these keys; return what was told of other faults with that."""
        faults = set()
        for at in range(0, len(keys), ROOM):
            some = keys[at : at + ROOM]
            done = await self.bench.store(some, [0] * len(some))
            assert done.ok == [True] * len(some)
            faults.add(done.error)
        return faults

    def there(self, keys: list[bytes]) -> list[bool]:
        names = {name.rpartition(b"/")[2] for name in self.client.scan_iter()}
        return [key.hex().encode() in names for key in keys]

    def age(self, keys: list[bytes], seconds: int) -> None:
        """These were used so long ago, one after the other."""
        names = {name.rpartition(b"/")[2]: name for name in self.client.scan_iter()}
        for number, key in enumerate(keys):
            name = names[key.hex().encode()]
            idle = seconds - number
            self.client.restore(name, 0, self.client.dump(name), replace=True, idletime=idle)


@pytest.fixture
async def limited(server: RedisServer) -> AsyncIterator[Callable[..., Limited]]:
    made: list[Limited] = []

    def make(place: TierPlace = PLACE) -> Limited:
        made.append(Limited(server, place))
        return made[-1]

    yield make
    for one in made:
        await one.bench.close()
        one.client.config_set("maxmemory-policy", "noeviction")
        one.client.close()


@pytest.mark.parametrize("namespace", ["place", "a*[b]?c"])
async def test_what_was_used_longest_ago_leaves_a_store_that_holds_too_much(
    limited: Callable[..., Limited], namespace: str
) -> None:
    one = limited(replace(PLACE, namespace=namespace))
    keys, more = keys_of(range(60)), keys_of(range(60, 68))
    await one.store(keys)
    one.age(keys, 500)
    await one.tier.sweep()
    assert one.there(keys) == [True] * 60, "there is room for them"
    assert await one.bench.fetch(keys[:4], [0] * 4) == [True] * 4
    await one.store(more)
    # Its own sweeps go on beside this.
    (latest,) = one.client.scan_iter(b"*" + more[-1].hex().encode())
    value = one.client.dump(latest)  # That is a use.
    for foreign in (b"ours?", b"aXb/0/00", b"place/\xff/ab", b"place/x"):
        one.client.restore(foreign, 0, value, idletime=9999)
    await one.tier.sweep()
    assert one.there(keys + more) == [True] * 4 + [False] * 8 + [True] * (LEFT - 4)
    assert one.client.exists(b"ours?", b"aXb/0/00", b"place/\xff/ab", b"place/x") == 4


async def test_what_a_process_left_by_its_resets_is_removed(
    limited: Callable[..., Limited],
) -> None:
    one = limited()
    for number in range(3):
        await one.tier.clear()
        await one.store(keys_of(range(number, number + 1)))
    await one.tier.sweep()
    assert one.there(keys_of(range(3))) == [False, False, True]


async def test_a_server_that_does_not_know_when_values_were_used_is_told_of(
    limited: Callable[..., Limited], caplog: pytest.LogCaptureFixture
) -> None:
    one = limited()
    one.client.config_set("maxmemory-policy", "allkeys-lfu")
    await one.store(keys_of(range(ROOM)))
    await one.tier.sweep()
    assert "the store cannot be swept (" in caplog.text
    assert "LFU" in caplog.text
    (fault,) = await one.store(keys_of(range(1)))
    assert fault is not None
    assert "LFU" in fault


async def test_a_server_that_evicts_by_itself_is_told_of(
    limited: Callable[..., Limited], caplog: pytest.LogCaptureFixture
) -> None:
    """Its maxmemory is less than the capacity: it knows of no tenants, and takes from any."""
    one = limited()
    await one.store(keys_of(range(60)))
    await one.tier.sweep()
    assert await one.store(keys_of(range(1))) == {None}
    used = one.client.info("memory")["used_memory"]
    one.client.config_set("maxmemory", int(used) - 100_000)
    # These may begin a sweep, too.
    faults = await one.store(keys_of(range(60, 64)))
    await one.tier.sweep()
    one.client.config_set("maxmemory", 0)
    assert "values of all that it holds, whoever's they were" in caplog.text
    faults |= await one.store(keys_of(range(1)))
    assert any("capacity_bytes be less, or its maxmemory" in str(fault) for fault in faults)
    await one.tier.sweep()
    assert await one.store(keys_of(range(1))) == {None}


async def test_every_listing_finds_the_same_times(limited: Callable[..., Limited]) -> None:
    """The server knows the time by two clocks, one of them up to a tenth of a second late."""
    one = limited()
    await one.store(keys_of(range(3)))
    client = one.tier.connect()
    assert isinstance(client, ListingClient)
    found: set[tuple[str, float]] = set()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        async for values in client.listed(one.tier._place, ()):
            found.update(values)
    await client.close()
    assert len(found) == 3
    assert all(abs(time.time() - since) < 30 for _, since in found)


async def test_a_sweep_of_a_server_that_is_frozen_ends_and_is_told_of(
    server: RedisServer, limited: Callable[..., Limited], caplog: pytest.LogCaptureFixture
) -> None:
    one = limited()
    await one.store(keys_of(range(1)))
    one.tier._timeout = 0.3
    client = one.tier.connect()
    assert isinstance(client, ListingClient)
    server.freeze()
    try:
        with pytest.raises(StoreError, match=r"no answer within 0\.3 s"):
            async for _ in client.listed(one.tier._place, ()):
                pass
    finally:
        server.start()
        await client.close()


def test_without_a_capacity_nothing_is_listed() -> None:
    assert not isinstance(RedisTier(PLACE).connect(), ListingClient)
