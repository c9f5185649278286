"""Redis and Valkey, through `redis.asyncio`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvstore.tiers.remote.client import (
    PRIVATE_SECONDS,
    SHARED_EPOCH,
    StoreClient,
    StoreError,
    epoch_of,
)
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.slices import copy
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace

try:
    import redis.asyncio as client
    from redis.exceptions import ReadOnlyError, RedisError
except ImportError:  # pragma: no cover
    client = None  # type: ignore[assignment]

__all__ = ["PASSWORD", "USERNAME", "RedisTier"]

USERNAME, PASSWORD = "KVSTORE_REDIS_USERNAME", "KVSTORE_REDIS_PASSWORD"
"""Environment variables with the server's credentials."""

_URL = re.compile(
    r"rediss?://([\w.-]*|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/\d*)?(\?db=\d+)?"
    r"|unix:///[^?#@]*(\?db=\d+)?"
)

VERIFIED = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
"""Options for TLS: not every release of the client checks the host name by default."""

MOST_CONNECTIONS = 8

LISTED_AT_ONCE = 500
"""Keys that the server looks at in one call that lists values; others wait for it meanwhile."""

_LIST = """
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local idle = {}
for at, name in ipairs(found[2]) do idle[at] = redis.call('OBJECT', 'IDLETIME', name) or 0 end
local function told(section, name)
    return tonumber(string.match(redis.call('INFO', section), name .. ':(%d+)'))
end
local now = tonumber(redis.call('TIME')[1])
local late = (now - told('server', 'lru_clock') + 2 ^ 23) % 2 ^ 24 - 2 ^ 23
return {found[1], now - late, found[2], idle, told('stats', 'evicted_keys')}
"""
"""Returns where the next call goes on, the time, names, for how long each value was neither read
nor stored, and how many values the server has evicted so far. In one call, as a call for each value
would keep this process busy. The time is that of the clock by which the server knows how long: it
has 24 bits of seconds, and is up to a tenth of a second late. So each listing finds the same."""

_SPECIAL = re.compile(r"[\\*?\[\]]")
"""What means something in a pattern of the server."""

SHORTEST_EXPIRY, LONGEST_EXPIRY = 0.001, 1e9
"""Limits of `expire_s`, in seconds."""


class RedisTier(StoreTier):
    """A Redis or Valkey server, shared by all processes that name it.

    The server limits its memory and evicts: set `maxmemory` and a policy such as `allkeys-lru`.
    It knows of no tenants: for their shares set `capacity_bytes`, far below `maxmemory`.

    Args:
        url: `redis://host:port/db`, `rediss://` with TLS, or `unix:///path?db=0`. Name and password
            come from the environment: `KVSTORE_REDIS_USERNAME` and `KVSTORE_REDIS_PASSWORD`.
        timeout_s: seconds after which a call has failed.
        expire_s: seconds after which the server drops a value; 0 for never.
        capacity_bytes: most bytes of chunks there, of this model. Those that were read or stored
            longest ago are removed first. By default that is the server's own affair.

    Raises:
        ValueError: for an invalid parameter, or without the package `redis`.
    """

    name = "redis"

    def __init__(
        self,
        place: TierPlace,
        *,
        url: str = "redis://127.0.0.1:6379/0",
        timeout_s: float = 1.0,
        expire_s: float = 0.0,
        capacity_bytes: int = 0,
    ) -> None:
        if client is None:
            raise ValueError("needs the package redis: pip install 'kvstore-offload[redis]'")
        if expire_s and not SHORTEST_EXPIRY <= expire_s <= LONGEST_EXPIRY:
            raise ValueError(
                f"expire_s = {expire_s}: must be 0, or from {SHORTEST_EXPIRY} to {LONGEST_EXPIRY:g}"
            )
        # An invalid URL is not shown, because it may hold a password.
        if not _URL.fullmatch(url):
            raise ValueError(
                "url: must be redis://host:port/db, rediss://host:port/db or unix:///path?db=0; "
                f"set name and password in {USERNAME} and {PASSWORD}"
            )
        for variable in (USERNAME, PASSWORD):
            try:
                os.environ.get(variable, "").encode()
            except UnicodeEncodeError:
                raise ValueError(f"{variable}: must be UTF-8") from None
        self._url = url
        self._expire_ms = round(expire_s * 1000)
        # Without a limit nothing is listed: what was left expires.
        self._client_of = _ListingClient if capacity_bytes else _Client
        super().__init__(place, timeout_s=timeout_s, capacity_bytes=capacity_bytes)
        # Reports an invalid port or database at once.
        self.connect()

    @property
    def address(self) -> str:
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def connect(self) -> StoreClient:
        return self._client_of(self._made, self._expire_ms, self._timeout)

    def _made(self) -> Any:
        pool = client.BlockingConnectionPool.from_url(
            self._url,
            username=os.environ.get(USERNAME),
            password=os.environ.get(PASSWORD),
            max_connections=MOST_CONNECTIONS,
            socket_connect_timeout=self._timeout,
            # Whole calls have a deadline. The package has one of 5 s for each read, too.
            socket_timeout=None,
            timeout=self._timeout,
            **(VERIFIED if self._url.startswith("rediss:") else {}),
        )
        return client.Redis.from_pool(pool)


class _Client:
    """Client of a Redis server: see `StoreClient`."""

    def __init__(self, make: Callable[[], Any], expire_ms: int, timeout: float) -> None:
        self._make = make
        self._server = make()
        self._calling: Counter[Any] = Counter()
        """Calls under way, by their connections."""
        self._closing: set[asyncio.Task[None]] = set()
        self._expire_ms = expire_ms
        self._timeout = timeout
        self._doubtful = False
        """Whether connections may be dead, or lead to what is a replica now: new ones are made."""

    async def exists(self, names: Sequence[str]) -> list[bool]:
        # One command first: usually all or none of a prompt's chunks exist.
        (count,) = await self._answers([("EXISTS", *names)])
        if count in (0, len(names)):
            return [bool(count)] * len(names)
        return [count == 1 for count in await self._answers([("EXISTS", name) for name in names])]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        there = [False] * len(names) if replace else await self.exists(names)
        lacking = [place for place, known in enumerate(there) if not known]
        options: tuple[Any, ...] = () if replace else ("NX",)
        private = epoch_of(names[0]) != SHARED_EPOCH
        limits = (self._expire_ms, PRIVATE_SECONDS * 1000 if private else 0)
        if expires := min(filter(None, limits), default=0):
            options += ("PX", int(expires))
        answers = await self._calls(
            [
                ("SET", names[place], b"".join((records[place], payloads[place])), *options)
                for place in lacking
            ]
        )
        errors: list[str | None] = [None] * len(names)
        for place, answer in zip(lacking, answers, strict=True):
            # The answer None means that another process was faster.
            if isinstance(answer, Exception):
                errors[place] = _told(answer)
        return errors

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        records: list[bytes | str | None] = []
        # One byte more than a value has: of a longer one the rest stays where it is.
        calls = [
            ("GETRANGE", name, 0, RECORD_BYTES + len(payload))
            for name, payload in zip(names, payloads, strict=True)
        ]
        answers = await self._calls(calls)
        if empty := [place for place, answer in enumerate(answers) if answer == b""]:
            # It is not there, or was stored since, or is empty.
            there = await self.exists([names[place] for place in empty])
            again = [place for place, known in zip(empty, there, strict=True) if known]
            found = await self._calls([calls[place] for place in again])
            answers = [None if answer == b"" else answer for answer in answers]
            for place, answer in zip(again, found, strict=True):
                answers[place] = answer
        for answer, payload in zip(answers, payloads, strict=True):
            if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                # What it says of one value it would say of all.
                raise _fault(answer)
            if not isinstance(answer, bytes) or len(answer) != RECORD_BYTES + len(payload):
                records.append(None if answer is None else b"")
                continue
            copy(memoryview(answer)[RECORD_BYTES:], payload)
            records.append(answer[:RECORD_BYTES])
        return records

    async def remove(self, names: Sequence[str]) -> None:
        await self._answers([("UNLINK", *names)])

    async def close(self) -> None:
        await _closed(self._server)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _answers(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands together; raise if one of them is refused."""
        answers = await self._calls(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise _fault(answer)
        return answers

    async def _calls(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands together; the answer to a refused command is an exception."""
        if not commands:
            return []
        if self._doubtful:
            self._doubtful = False
            self._server, before = self._make(), self._server
            self._let_go(before)
        server, good = self._server, False
        pipe = server.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        self._calling[server] += 1
        try:
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            good = not any(isinstance(answer, ReadOnlyError) for answer in answers)
        except (RedisError, OSError) as error:
            raise _fault(error) from error
        except Exception as error:
            # It may have what was sent in its text.
            raise StoreError(type(error).__name__) from None
        finally:
            self._calling[server] -= 1
            if server is self._server:
                self._doubtful |= not good
            else:
                self._let_go(server)
        return answers

    def _let_go(self, server: Any) -> None:
        """Close connections once no call uses them any more."""
        if not self._calling[server]:
            del self._calling[server]
            task = asyncio.get_running_loop().create_task(_closed(server))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _ListingClient(_Client):
    """The same for a store that has a capacity: see `ListingClient`."""

    complaint: str | None = None
    _evicted: int | None = None

    async def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        """Yield names, and when each value was last read or stored, by the server's clock.

        A server whose table grows meanwhile may name a value twice.
        """
        pattern = _SPECIAL.sub(r"\\\g<0>", place) + "/*"
        cursor = b"0"
        while True:
            call = ("EVAL", _LIST, 0, cursor, pattern, LISTED_AT_ONCE)
            try:
                # Older releases of the package wait for ever on a connection that has died.
                async with asyncio.timeout(self._timeout):
                    ((cursor, now, names, idle, evicted),) = await self._answers([call])
            except TimeoutError:
                raise StoreError(f"no answer within {self._timeout} s") from None
            found = sorted(
                (name.decode(errors="replace"), float(now) - seconds)
                for name, seconds in zip(names, idle, strict=True)
            )
            for epoch, some in itertools.groupby(found, lambda each: epoch_of(each[0])):
                if epoch not in but:
                    yield list(some)
            if cursor == b"0":
                break
        self.complaint = None
        if self._evicted is not None and evicted > self._evicted:
            self.complaint = (
                f"the server has evicted {evicted - self._evicted} values of all that it holds, "
                "whoever's they were: let capacity_bytes be less, or its maxmemory more"
            )
        self._evicted = evicted


async def _closed(server: Any) -> None:
    with contextlib.suppress(RedisError, OSError):
        await server.aclose()


def _fault(error: Exception) -> StoreError:
    return StoreError(f"{type(error).__name__}: {_told(error)}")


def _told(error: Exception) -> str:
    """What a server says, without what it repeats of a command: a password, or bytes of a chunk."""
    text = str(error).partition(", with args beginning with")[0]
    for name in (USERNAME, PASSWORD):
        if secret := os.environ.get(name):
            text = text.replace(secret, "...")
    return text
