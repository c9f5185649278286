"""An object store whose service says odd things, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.types import TierPlace
from tests.patience import PATIENCE

pytest.importorskip("obstore")

from kvstore.tiers.remote.client import StoreError
from kvstore.tiers.remote.object import ObjectTier

PLACE = TierPlace("place", {"model": "tiny"}, 8000)


@contextlib.asynccontextmanager
async def service(
    answer: Callable[[str, asyncio.StreamWriter], bytes | None],
) -> AsyncIterator[str]:
    """The endpoint of an S3 service that answers each request so; None is no answer."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                if length := re.search(r"content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                if (answered := answer(head.partition(" ")[0], writer)) is not None:
                    writer.write(answered)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for writer in writers:
        writer.close()
    server.close()
    await asyncio.sleep(0)


def http(status: str, body: str = "", **headers: str) -> bytes:
    fields = {"content-length": str(len(body)), **headers}
    lines = (f"{name}: {value}" for name, value in fields.items())
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", body]).encode()


FOUND = {"etag": '"x"', "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT"}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


async def test_what_a_service_says_at_length_is_not_told() -> None:
    """It repeats the session's token."""
    body = f"<Error><Code>InvalidToken</Code><Token-0>s3cret</Token-0>{'x' * 100_000}</Error>"
    refused = http("400 Bad Request", body)

    def answer(method: str, writer: asyncio.StreamWriter) -> bytes:
        return http("404 Not Found") if method == "head" else refused

    async with service(answer) as endpoint:
        tier = ObjectTier(PLACE, url="s3://bucket/p", endpoint=endpoint, region="eu")
        bench = TierBench(tier, 2, 8192, 8000)
        said = str((await bench.store([key_of(1)], [0])).error)
        await bench.close()
    assert "400 Bad Request" in said
    assert "s3cret" not in said
    assert len(said) < 2000


async def test_an_endpoint_without_tls_may_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service(lambda method, writer: http("404 Not Found")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        tier = ObjectTier(PLACE, url="s3://bucket/p", region="eu")
        bench = TierBench(tier, 2, 8192, 8000)
        done = await tier.holds([key_of(1)])
        await bench.close()
    assert (done.ok, done.error) == ([False], None)


async def test_a_list_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.remote.object.PAGE_SECONDS", 0.2)
    body = (
        "<ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount><IsTruncated>true</IsTruncated>"
        "<NextContinuationToken>again</NextContinuationToken></ListBucketResult>"
    )
    async with service(lambda method, writer: http("200 OK", body)) as endpoint:
        tier = ObjectTier(PLACE, url="s3://bucket/p", endpoint=endpoint, region="eu")
        listed = tier.connect().listed("place", ())  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="no list of names within 0.2 s"):
            await asyncio.wait_for(anext(listed), PATIENCE)


async def test_dead_connections_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a firewall has forgotten them: what is sent is lost without a word."""
    monkeypatch.setattr("kvstore.tiers.remote.object.IDLE_SECONDS", 0.2)
    dead: set[asyncio.StreamWriter] = set()
    seen: set[asyncio.StreamWriter] = set()

    def answer(method: str, writer: asyncio.StreamWriter) -> bytes | None:
        seen.add(writer)
        return None if writer in dead else http("200 OK", **FOUND)

    async with service(answer) as endpoint:
        tier = ObjectTier(PLACE, url="s3://bucket/p", endpoint=endpoint, region="eu", timeout_s=0.5)
        client = tier.connect()
        assert await client.exists([f"{number}" for number in range(32)]) == [True] * 32
        dead |= seen
        await asyncio.sleep(0.5)
        assert await client.exists(["a"]) == [True]
