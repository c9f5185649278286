"""The Redis store against real servers: Redis and Valkey."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.base import Tier
from kvstore.types import TierPlace
from tests.patience import PATIENCE
from tests.tiers.remote.servers import RedisServer, ServerContract, redis_server, valkey_server

redis = pytest.importorskip("redis")

from kvstore.tiers.remote.redis import PASSWORD, RedisTier  # noqa: E402

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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
@pytest.mark.parametrize("refused", ["get", "exists"])
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


@pytest.mark.asyncio
async def test_values_expire_if_that_is_wanted(server: RedisServer) -> None:
    bench = await bench_of(RedisTier(PLACE, url=server.url, expire_s=100.0))
    with redis.Redis(port=server.port) as client:
        client.flushall()
    await bench.store([key_of(1)], [0])
    with redis.Redis(port=server.port) as client:
        (name,) = client.scan_iter(match=f"*{key_of(1).hex()}")
        assert 90_000 < client.pttl(name) <= 100_000
    await bench.close()


@pytest.mark.asyncio
async def test_what_a_process_stores_for_itself_alone_expires_after_a_week(
    server: RedisServer,
) -> None:
    bench = await bench_of(RedisTier(PLACE, url=server.url))
    with redis.Redis(port=server.port) as client:
        client.flushall()
        await bench.store([key_of(1)], [0])
        await bench.tier.clear()
        await bench.store([key_of(2)], [0])
        (shared,) = client.scan_iter(match=f"*{key_of(1).hex()}")
        (private,) = client.scan_iter(match=f"*{key_of(2).hex()}")
        assert client.pttl(shared) == -1
        assert 6 * 86_400_000 < client.pttl(private) <= 7 * 86_400_000
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
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kvstore")
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


@pytest.mark.asyncio
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


def test_the_package_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstore.tiers.remote.redis.client", None)
    with pytest.raises(ValueError, match=r"pip install 'kvstore-offload\[redis\]'"):
        RedisTier(PLACE)
