"""The control server: who may ask, where it listens, what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import kvstore
from benchmarks.server_process import free_port
from kvstore.api.store import Store, start
from kvstore.control.commands import MOST_KEYS
from kvstore.errors import ConfigError
from tests.patience import PATIENCE
from tests.store.support import keys_of, payloads, small

TOKEN = "a token of enough characters"
A = keys_of("a", 4)


@asynccontextmanager
async def at_path(folder: Path, **more: Any) -> AsyncIterator[tuple[Store, aiohttp.ClientSession]]:
    """A store with a control socket, and who asks there."""
    path = folder / "ctl.sock"
    async with kvstore.open(small(folder / "cache", control=str(path), **more)) as store:
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
            yield store, session


@asynccontextmanager
async def at_port(folder: Path, token: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    where = f"127.0.0.1:{free_port()}"
    more: dict[str, Any] = {}
    if token is not None:
        more["control_token_file"] = token_file(folder, token)
    async with (
        kvstore.open(small(folder / "cache", control=where, **more)),
        aiohttp.ClientSession(f"http://{where}") as session,
    ):
        yield session


def address(session: aiohttp.ClientSession) -> tuple[str, int]:
    base = session._base_url
    assert base is not None
    assert base.host is not None
    assert base.port is not None
    return base.host, base.port


def token_file(folder: Path, token: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(token + "\n")
    path.chmod(mode)
    return path


async def told(response: aiohttp.ClientResponse) -> tuple[int, dict[str, Any]]:
    return response.status, await response.json()


async def test_a_path_is_for_its_owner_and_goes_with_the_store(tmp_path: Path) -> None:
    async with at_path(tmp_path) as (_, session):
        mode = (tmp_path / "ctl.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        status, answer = await told(await session.get("/v1/status"))
        assert (status, answer["version"], answer["pid"]) == (200, 1, os.getpid())
    assert not (tmp_path / "ctl.sock").exists()


async def test_further_stores_listen_beside_the_first(tmp_path: Path) -> None:
    path = tmp_path / "ctl.sock"
    config = small(tmp_path / "cache", control=str(path))
    async with kvstore.open(config), kvstore.open(config), kvstore.open(config):
        assert sorted(p.name for p in tmp_path.glob("*.sock")) == [
            "ctl-1.sock",
            "ctl-2.sock",
            "ctl.sock",
        ]
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize("where", ["ctl.sock", "port"])
async def test_a_forked_child_keeps_neither_socket_nor_recording(
    tmp_path: Path, where: str
) -> None:
    at = f"127.0.0.1:{free_port()}" if where == "port" else str(tmp_path / where)
    config = small(tmp_path / "cache", control=at, record_trace=str(tmp_path / "t.rec"))
    (reader, writer), (told, tell) = os.pipe(), os.pipe()
    async with kvstore.open(config) as store:
        await store.put(A, payloads(A))
        child = os.fork()
        if not child:
            os.close(writer)
            os.write(tell, b"x")
            # It lives until the parent has closed its end, however that ends.
            os.read(reader, 1)
            os._exit(0)
        os.read(told, 1)
        served = aiohttp.TCPConnector() if where == "port" else aiohttp.UnixConnector(at)
        url = f"http://{at}" if where == "port" else "http://localhost"
        async with aiohttp.ClientSession(url, connector=served) as session:
            assert (await session.get("/v1/status")).status == 200
    try:
        async with kvstore.open(config) as store:
            await store.put(A, payloads(A))
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        for each in (reader, told, tell):
            os.close(each)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"t.rec", "t.rec.old"}


async def test_a_socket_that_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "ctl.sock"))
    left.close()
    async with at_path(tmp_path) as (_, session):
        assert (await session.get("/v1/status")).status == 200


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("file", "a file that is no socket"),
        ("missing/ctl.sock", "No such file"),
        ("x" * 200, "at most 107 bytes"),
        ("10.0.0.1:9401", "must be a path, or a port of 127.0.0.1"),
        ("127.0.0.1:web", "the port must be a number"),
        ("127.0.0.1:70000", "the port must be a number"),
    ],
)
async def test_where_it_cannot_listen_is_refused(
    tmp_path: Path, where: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    config = small(tmp_path / "cache", disk=16, control=where)
    with pytest.raises(ConfigError, match=f"control = .*{reason}"):
        await start(config)
    assert (tmp_path / "file").read_text() == "mine"
    # What was opened before was closed: the next one finds it free.
    async with kvstore.open(small(tmp_path / "cache", disk=16)):
        pass


async def test_a_folder_that_somebody_holds_locked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.control.server.LOCK_SECONDS", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process holds .* locked"):
        await start(small(tmp_path / "cache", control=str(tmp_path / "ctl.sock")))
    os.close(folder)


async def test_a_socket_of_another_process_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ctl.sock"
    first = await start(small(tmp_path / "cache", control=str(path)))
    path.unlink()
    async with at_path(tmp_path) as (_, session):
        await first.close()
        assert (await session.get("/v1/status")).status == 200


async def test_connections_of_a_stranger_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.control.server.MOST_CONNECTIONS", 4)
    monkeypatch.setattr("kvstore.control.server.CHECK_SECONDS", 0.05)
    async with at_port(tmp_path, TOKEN) as session:
        idle = [socket.create_connection(address(session)) for _ in range(12)]
        # The oldest is closed.
        assert await asyncio.to_thread(idle[0].recv, 1) == b""
        assert (await session.get("/v1/status")).status == 200
        for each in idle:
            each.close()


async def test_requests_of_strangers_leave_no_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with at_port(tmp_path, TOKEN) as session:
        caplog.clear()
        for line in (
            "GET /\u00e9 HTTP/1.1",
            f"POST /v1/reset HTTP/1.1\r\nAuthorization: Bearer {TOKEN}",
            "GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1:99999999",
            "GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1:x",
        ):
            with socket.create_connection(address(session)) as client:
                host = "" if "Host" in line else "Host: 127.0.0.1\r\n"
                client.sendall(f"{line}\r\n{host}Content-Length: 9\r\n\r\n{{".encode())
                if not host:
                    assert b" 403 " in await asyncio.to_thread(client.recv, 200)
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        assert (await session.get("/v1/status")).status == 200
    assert not [line for line in caplog.messages if "request" in line or "failed" in line]


async def test_a_process_that_accepts_nothing_keeps_no_other_from_its_socket(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as hung, contextlib.ExitStack() as waiting:
        hung.bind(str(tmp_path / "ctl.sock"))
        hung.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(tmp_path / "ctl.sock"))
        began = time.monotonic()
        async with kvstore.open(small(tmp_path / "kv", control=str(tmp_path / "ctl.sock"))):
            assert (tmp_path / "ctl-1.sock").exists()
        assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("token", [TOKEN, None])
async def test_what_is_compressed_is_never_unpacked(
    tmp_path: Path, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of it may be a gigabyte, and who sends it may have no business here."""
    bomb = zlib.compress(bytes(2**28), 9, zlib.MAX_WBITS | 16)
    monkeypatch.setattr(zlib, "decompressobj", None)
    headers = {"Content-Encoding": "gzip"}
    async with at_port(tmp_path, token) as session:
        status, answer = await told(await session.post("/v1/reset", data=bomb, headers=headers))
        assert status == 403
        assert "token" in answer["error"]
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
            for data in (bomb, b"damaged"):
                sent = await session.post("/v1/reset", data=data, headers=headers)
                status, answer = await told(sent)
                assert (status, answer["error"]) == (415, "a command must not be compressed")


async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="another process listens there"):
            await start(small(tmp_path, control=where))


@pytest.mark.parametrize(
    ("token", "mode", "reason"),
    [
        (TOKEN, 0o640, "others may read or write it: chmod 600"),
        ("short", 0o600, "at least 16 characters"),
        ("an umläut is no ASCII character", 0o600, "ascii"),
        (None, 0, "No such file"),
    ],
)
async def test_a_token_that_others_may_read_or_guess_is_refused(
    tmp_path: Path, token: str | None, mode: int, reason: str
) -> None:
    path = tmp_path / "token" if token is None else token_file(tmp_path, token, mode)
    config = small(tmp_path / "cache", control=str(tmp_path / "s"), control_token_file=path)
    with pytest.raises(ConfigError, match=f"control_token_file = .*{reason}"):
        await start(config)


async def test_a_pipe_in_place_of_the_token_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    port = small(tmp_path, control="127.0.0.1:0", control_token_file=tmp_path / "token")
    with pytest.raises(ConfigError, match="control_token_file = "):
        await asyncio.wait_for(start(port), PATIENCE)


async def test_a_token_without_a_socket_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path / "cache", control_token_file=token_file(tmp_path, TOKEN))
    with pytest.raises(ConfigError, match="belongs to control"):
        await start(config)


@pytest.mark.parametrize("token", [TOKEN, None])
async def test_on_a_port_who_changes_something_names_the_token(
    tmp_path: Path, token: str | None
) -> None:
    reset = "/v1/reset"
    async with at_port(tmp_path, token) as session:
        assert (await session.get("/v1/status")).status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN[:-1]}):
            status, answer = await told(await session.post(reset, headers=headers))
            assert status == 403
            assert "token" in answer["error"]
        # As bytes that are no text.
        with socket.create_connection(address(session)) as raw:
            raw.sendall(b"POST /v1/reset HTTP/1.1\r\nHost: localhost\r\n")
            raw.sendall(b"Authorization: Bearer \xff\xc3\r\nContent-Length: 0\r\n\r\n")
            assert b" 403 " in await asyncio.to_thread(raw.recv, 200)
        good = {"Authorization": f"Bearer {TOKEN}"}
        assert (await session.post(reset, headers=good)).status == (202 if token else 403)
        # A page in a browser that has another name for this machine.
        status, answer = await told(
            await session.get("/v1/status", headers={"Host": "rebound.example:80"})
        )
        assert (status, "loopback" in answer["error"]) == (403, True)


@pytest.mark.parametrize(
    ("command", "body", "reason"),
    [
        ("frobnicate", {}, "unknown command 'frobnicate'; known are: prefetch"),
        ("remove", {}, "by keys or by tokens"),
        ("remove", {"keys": ["00"], "tokens": [1]}, "by keys or by tokens"),
        ("remove", {"keys": "00"}, "must be a list"),
        ("remove", {"keys": ["zz"]}, "'zz' is not 1 to 56 bytes in hexadecimal"),
        ("remove", {"keys": [""]}, "'' is not 1 to 56 bytes"),
        ("remove", {"keys": ["00" * 57]}, "is not 1 to 56 bytes"),
        ("remove", {"keys": [5]}, "5 is not 1 to 56 bytes"),
        ("remove", {"keys": ["00"], "model": "m"}, "model belongs to tokens"),
        ("remove", {"keys": ["00"], "force": True}, "unknown field remove.force"),
        ("remove", {"keys": ["00"], "dry_run": 1}, "dry_run must be true or false"),
        ("remove", {"tokens": [1, 2]}, "name them by keys"),
        ("retain", {"keys": ["00"]}, "seconds must be given"),
        ("retain", {"keys": ["00"], "seconds": True}, "seconds must be given"),
        ("retain", {"keys": ["00"], "seconds": -1}, "a number above 0"),
        ("retain", {"keys": ["00"], "seconds": float("nan")}, "a number above 0"),
        ("retain", {"keys": ["00"], "seconds": 10**400}, "a number above 0 and at most"),
        ("remove", {"keys": ["00"] * (MOST_KEYS + 1)}, "keys must be a list of at most 65536"),
        ("retain", {"keys": ["00"], "seconds": 1, "host": "no"}, "host must be true or false"),
        ("release", {"keys": ["00"], "cold": 1}, "cold must be true or false"),
        ("reset", {"keys": ["00"]}, "unknown field reset.keys; allowed are: none"),
        ("settings", {}, "nothing to change"),
        ("settings", {"hosts": {}}, "unknown field settings.hosts"),
        ("settings", {"host": 5}, "host: must be a table"),
        ("settings", {"host": {"rows": 5}}, "unknown field host.rows"),
        ("settings", {"host": {"bytes": "lots"}}, "host.bytes = 'lots'"),
        ("settings", {"host": {"bytes": 100}}, "at least 4096 bytes"),
        ("settings", {"host": {"bytes": "1GiB"}}, "at most 32768, which were allocated"),
        ("settings", {"host": {"eviction_policy": "best"}}, "unknown policy 'best'; known are"),
        ("settings", {"host": {"eviction_policy": "arc(x=1)"}}, "eviction_policy = "),
        ("settings", {"host": {"eviction_policy": "lru(x=1,x=2)"}}, "x is given twice"),
        ("settings", {"host": {"eviction_policy": f"lru({'x=1,' * 10**6})"}}, "at most 1000 char"),
        ("settings", {"host": {"eviction_policy": f"lru(x={'-' * 900}1)"}}, "no parameter 'x'"),
        ("settings", {"tiers": {"7": {}}}, "tiers.7: unknown; tiers that can be changed: 0 "),
        ("settings", {"tiers": {"0": {}, "00": {}}}, "tiers.00: unknown"),
        ("settings", {"tiers": {"0": 5}}, "tiers.0: must be a table"),
        ("settings", {"tiers": {"0": {"path": "/"}}}, "unknown field tiers.0.path"),
        ("settings", {"tiers": {"0": {"capacity_bytes": 5}}}, "needs at least"),
        ("settings", {"tiers": {"0": {"compaction_rate": -1}}}, "compaction_rate = -1"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name_and_nothing_is_done(
    tmp_path: Path, command: str, body: dict[str, Any], reason: str
) -> None:
    async with at_path(tmp_path, disk=64) as (store, session):
        await store.put(A, payloads(A))
        status, answer = await told(await session.post(f"/v1/{command}", json=body))
        assert status == 400
        assert reason in answer["error"]
        assert store.lookup_prefix(A) == 4
        state = await (await session.get("/v1/status")).json()
        assert (state["jobs"], state["changing"]) == ([], 0)


@pytest.mark.parametrize("body", ["[]", "{", '"reset"', "\udcff", "[" * 100_000, "[[]," * 2000])
async def test_a_body_that_is_no_object_is_refused(tmp_path: Path, body: str) -> None:
    async with at_path(tmp_path) as (_, session):
        data = body.encode("utf-8", "surrogateescape")
        assert (await session.post("/v1/reset", data=data)).status == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/jobs/5"),
        ("GET", "/v1/jobs/\u00b2"),
        ("GET", "/v1/jobs/" + "9" * 5000),
        ("DELETE", "/v1/jobs/x"),
        ("PUT", "/v1/status"),
    ],
)
async def test_what_is_not_there_is_told_as_json(tmp_path: Path, method: str, path: str) -> None:
    async with at_path(tmp_path) as (_, session):
        status, answer = await told(await session.request(method, path))
        assert status in (404, 405)
        assert answer["error"]


async def test_without_the_package_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kvstore.control.server", None)
    with pytest.raises(
        ConfigError, match=r"needs aiohttp, pip install 'kvstore-offload\[control\]'"
    ):
        await start(small(tmp_path, control=str(tmp_path / "s")))


async def test_a_store_closes_while_jobs_run_and_requests_wait(tmp_path: Path) -> None:
    keys = keys_of("long", 64)
    async with at_path(tmp_path, rows=128) as (store, session):
        await store.put(keys, payloads(keys))
        async with store.get(keys):
            # They wait for a row that is in use.
            asked = {"host": {"bytes": 4096}}
            job = await (await session.post("/v1/settings", json=asked)).json()
            waiting = asyncio.create_task(
                session.get(f"/v1/jobs/{job['job']}?wait=60").__aenter__()
            )
            await asyncio.sleep(0.05)
            await store.close()
        try:
            response = await waiting
            assert (await response.json())["state"] == "failed"
        except aiohttp.ClientError:
            # The connection may be closed first.
            pass
