"""Share: a store of values in memory, with what servers and networks do at the worst moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Collection, Sequence
from functools import lru_cache

from kvstore.tiers.remote.client import StoreClient, StoreError, Unread
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace

__all__ = ["SERVERS", "ShareClient", "ShareServer", "ShareTier"]


@lru_cache(2**16)
def _place_of(name: str) -> tuple[str, str]:
    """Place and epoch of a value: they are asked for again and again."""
    where, epoch, _ = name.rsplit("/", 2)
    return where, epoch


class ShareServer:
    """A server of values.

    Attributes:
        values: by name, what was put and when.
        rotted: names of values that were damaged since they were put.
        stored: how many new values were put.
        away: no call is answered: each fails at once.
        frozen: calls are accepted and not answered.
        lost: chance that a call fails, before or after it was obeyed.
        delay: most seconds that a call takes.
        later: seconds until others see what was put.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.values: dict[str, tuple[bytes, float]] = {}
        self.rotted: set[str] = set()
        self.stored = 0
        self.away = self.frozen = False
        self.lost = self.delay = self.later = 0.0

    def heal(self) -> None:
        """Answer at once from now on."""
        self.away = self.frozen = False
        self.lost = self.delay = self.later = 0.0

    @property
    def present(self) -> bool:
        """Whether something is wrong with it."""
        return self.away or self.frozen or bool(self.lost)

    def seen(self, name: str) -> bytes | None:
        """What a reader gets."""
        value, since = self.values.get(name, (None, 0.0))
        # The clock may have jumped back.
        return value if abs(time.time() - since) >= self.later else None


SERVERS: dict[str, ShareServer] = {}
"""Servers by the name in their URL."""


class ShareClient:
    """A client of a `ShareServer`; see `StoreClient`. Payloads are moved in two halves.

    Attributes:
        met: names of damaged values that it has read.
    """

    complaint: str | None = None

    def __init__(self, server: ShareServer) -> None:
        self._server = server
        self.met: set[str] = set()

    async def exists(self, names: Sequence[str]) -> list[bool]:
        await self._reach()
        return [self._server.seen(name) is not None for name in names]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        firsts = [bytes(payload[: len(payload) // 2]) for payload in payloads]
        await self._reach()
        values = self._server.values
        for name, record, first, payload in zip(names, records, firsts, payloads, strict=True):
            if replace or name not in values:
                whole = record + first + bytes(payload[len(first) :])
                self._server.stored += name not in values
                values[name] = (whole, time.time())
                self._server.rotted.discard(name)
        await self._answer()
        return [None] * len(names)

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        await self._reach()
        found = [self._server.seen(name) for name in names]
        results: list[bytes | str | None] = []
        for value, payload in zip(found, payloads, strict=True):
            if value is None:
                results.append(None)
            elif len(value) != RECORD_BYTES + len(payload):
                results.append(b"")
            elif self._server.rng.random() < self._server.lost:
                payload[: len(payload) // 3] = b"x" * (len(payload) // 3)
                results.append(Unread("the connection was lost"))
            else:
                half = len(payload) // 2
                payload[:half] = value[RECORD_BYTES : RECORD_BYTES + half]
                results.append(value[:RECORD_BYTES])
        await self._answer()
        for name, value, payload, record in zip(names, found, payloads, results, strict=True):
            if value is not None and isinstance(record, bytes):
                self.met.update(self._server.rotted.intersection([name]))
                if record:
                    half = len(payload) // 2
                    payload[half:] = value[RECORD_BYTES + half :]
        return results

    async def remove(self, names: Sequence[str]) -> None:
        await self._reach()
        for name in names:
            self._server.values.pop(name, None)
            self._server.rotted.discard(name)
        await self._answer()

    async def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        await self._reach()
        epochs: dict[str, list[tuple[str, float]]] = {}
        for name, (_, since) in self._server.values.items():
            where, epoch = _place_of(name)
            if where == place and epoch not in but:
                epochs.setdefault(epoch, []).append((name, since))
        for its in epochs.values():
            yield its

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _reach(self) -> None:
        server = self._server
        if server.away:
            raise StoreError("nobody is there")
        while server.frozen:
            await asyncio.sleep(0.05)
        if server.delay:
            await asyncio.sleep(server.rng.random() * server.delay)
        if server.rng.random() < server.lost:
            raise StoreError("the question was lost")

    async def _answer(self) -> None:
        server = self._server
        if server.delay:
            await asyncio.sleep(server.rng.random() * server.delay)
        if server.rng.random() < server.lost:
            raise StoreError("the answer was lost")


class ShareTier(StoreTier):
    """A store over a `ShareServer`; a kind of tier only while a world is alive."""

    name = "simulated"

    def __init__(
        self,
        place: TierPlace,
        *,
        url: str = "share",
        timeout_s: float = 5.0,
        capacity_bytes: int = 0,
    ) -> None:
        super().__init__(place, timeout_s=timeout_s, capacity_bytes=capacity_bytes)
        self.server = SERVERS[url]
        self._url = url
        self._asker: ShareClient | None = None

    def connect(self) -> StoreClient:
        self._asker = ShareClient(self.server)
        return self._asker

    def held(self) -> int:
        """How many values the server has of this model."""
        return sum(name.startswith(f"{self._place}/") for name in self.server.values)

    def damaged(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of `keys` whose values are damaged."""
        names = zip(self._names(keys), keys, strict=True)
        return {key for name, key in names if name in self.server.rotted}

    def met(self, key: bytes) -> bool:
        """Whether it has read the key's value when that was damaged."""
        client = self._asker
        return client is not None and not client.met.isdisjoint(self._names([key]))

    @property
    def address(self) -> str:
        return f"simulated {self._url}"
