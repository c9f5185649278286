"""Store tier: names, records, digests and deadlines over the client of a remote engine.

A chunk is a value named by namespace, epoch and key: a record and the payload. The record and the
digest are checked before a chunk is used, so whatever the engine hands out, it is the right bytes
or a miss.

A process begins in epoch 0 and shares what it stores with every process whose namespace is the
same. When its tier is cleared, it moves to an epoch that is its own: what was stored before stays
with those who use it, and nobody ever takes what it stores from then on for theirs. An epoch that
it leaves again is removed, where the client can list it; of one whose process was killed each value
is removed a week after it was stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore.tiers.base import Tier, Transfer, error_of
from kvstore.tiers.disk.digest import digest
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.client import (
    PRIVATE_SECONDS,
    SHARED_EPOCH,
    ListingClient,
    StoreClient,
    StoreError,
    Unread,
    epoch_of,
)
from kvstore.tiers.remote.gate import Gate
from kvstore.tiers.remote.loop import ClientLoop
from kvstore.tiers.remote.record import decode, encode, seed_of
from kvstore.types import RecoveredTier, TierPlace

__all__ = ["StoreTier"]

_T = TypeVar("_T")

_Call = Callable[[StoreClient], Coroutine[Any, Any, _T]]

_Move = Callable[
    [Sequence[bytes], Sequence[memoryview], int], Coroutine[Any, Any, Sequence[str | None]]
]
"""Moves chunks of these keys from or to this memory, in the turn of a move that has this number:
for each what went wrong, or None."""

DIGEST_LETTERS = 32
"""Of the digest of an identity, in names."""

MOST_CHUNKS = 1024
"""Most chunks of such a call."""

MOST_REMOVED = 256
"""Most chunks of a call that removes them."""

QUESTIONS_AT_ONCE = 4
"""Questions, and calls that remove values, that may be under way at once."""

MOST_BAD = 2**14
"""Keys whose values are known to be no good; the oldest are forgotten for new ones."""

SWEEP_SECONDS = 3600.0
"""Between looks for values that nobody reads any more, the first of them included."""

SWEEP_PAUSE = 1.0
"""Seconds between calls that remove `MOST_REMOVED` of these."""

BAD_LASTS = 600.0
"""Seconds for which the store does not hold a key whose value is no good: others may replace it."""

GONE = "the store has none of them"
WRONG = "a value is not what was stored under its key"


class StoreTier(Tier):
    """See the module's text. A kind of store says how it is reached, by `connect`.

    More is asked of a store than it can do at a time: calls wait for their turn, move by move, and
    have their time from then on. So many bytes, and what a client needs beside them, are held
    outside host memory.

    Args:
        place: what the tier is made for.
        timeout_s: seconds after which a call to the engine has failed.
    """

    is_store = True

    batch_bytes = 8 * 2**20
    """Most payload bytes that one call to the client names, a single chunk excepted."""

    calls_at_once = 2
    """Calls that may be reading at once, and as many that may be writing. The digests of one are
    made while the engine moves the other."""

    moves_have_deadlines = True
    """Whether calls that move payloads are given up after `timeout_s`."""

    def __init__(self, place: TierPlace, *, timeout_s: float) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s = {timeout_s}: must be above 0, and finite")
        # A namespace may be named by hand; its identity is never left out.
        digest = Namespace(place.namespace, place.identity).digest
        self._place = f"{place.namespace}/{digest[:DIGEST_LETTERS]}"
        self._chunk_bytes = place.chunk_bytes
        self._timeout = timeout_s
        self._client: StoreClient | None = None
        room = self.calls_at_once * self.batch_bytes
        self._reading, self._writing = (Gate(self.calls_at_once, room) for _ in range(2))
        self._asking = Gate(QUESTIONS_AT_ONCE, 0)
        self._orders = itertools.count()
        self._sweeping = asyncio.Lock()
        # Epochs of its own that this process has left.
        self._left: set[str] = set()
        self._begin_epoch(SHARED_EPOCH)

    @abstractmethod
    def connect(self) -> StoreClient:
        """A client, made on the loop on which it is used. It need not reach its engine yet."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Kind and address of the engine, without anything secret."""

    # -- the tier ------------------------------------------------------------------------

    def open(self, region: PinnedRegion) -> RecoveredTier:
        """An engine that cannot be reached now may be reached later."""
        self._region = region
        self._loop = ClientLoop(f"kvstore-{self.address}", self._close)
        self._loop.begin(self._sweep_often)
        return RecoveredTier(self.address, "remote", [], 1, [], 0)

    @property
    def description(self) -> str:
        return f"store {self.address}, {self._place}"

    async def holds(self, keys: Sequence[bytes]) -> Transfer:
        if not keys:
            return Transfer([])

        async def ask() -> list[bool]:
            found = await self._answer(lambda client: client.exists(self._names(keys)))
            now = time.monotonic()
            return [
                there and self._bad.get(key, -math.inf) + BAD_LASTS < now
                for key, there in zip(keys, found, strict=True)
            ]

        try:
            return Transfer(await self._loop.run(ask()))
        except StoreError as fault:
            return _nothing(len(keys), str(fault))

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._in_batches(self._read, keys, rows)

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._in_batches(self._write, keys, rows)

    async def grow(self) -> tuple[int | None, str | None]:
        return None, "a store has no segments"

    async def clear(self) -> list[int] | None:
        left = self._epoch
        # A number that two processes might come to by themselves would not do.
        self._begin_epoch(secrets.token_hex(8))
        if left != SHARED_EPOCH:
            self._left.add(left)
            self._loop.begin(self._sweep)
        return []

    async def erase(self, keys: Sequence[bytes]) -> str | None:
        async def remove() -> None:
            for start in range(0, len(keys), MOST_REMOVED):
                names = self._names(keys[start : start + MOST_REMOVED])
                await self._answer(partial(_remove, names))

        try:
            await self._loop.run(remove())
        except StoreError as fault:
            return str(fault)
        return None

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        with contextlib.suppress(StoreError):
            await self._loop.run(self._close())
        # Nothing is left to wait for.
        self._loop.end()

    def detach(self) -> None:
        self._loop.cancel_all()

    def abandon(self) -> None:
        self._loop.end()

    # -- inside --------------------------------------------------------------------------

    async def _in_batches(
        self, move: _Move, keys: Sequence[bytes], rows: Sequence[int]
    ) -> Transfer:
        """Move chunks, a few at a time, until a call fails as a whole."""
        size = max(1, min(self.batch_bytes // self._chunk_bytes, MOST_CHUNKS))
        parts = [slice(start, start + size) for start in range(0, len(keys), size)]
        done = Transfer([])
        errors: list[str] = []
        unread: list[int] = []

        def note(told: Sequence[str | None]) -> None:
            unread.extend(n for n, error in enumerate(told, len(done.ok)) if type(error) is Unread)
            done.ok += [error is None for error in told]
            errors.extend(filter(None, told))

        order = next(self._orders)
        calls = (move(keys[part], self._payloads(rows[part]), order) for part in parts)
        try:
            await self._loop.run(_two_at_once(calls, note))
        except StoreError as fault:
            # The rest would take as long to fail.
            left = range(len(done.ok), len(keys))
            done.ok += [False] * len(left)
            unread += left
            errors.append(str(fault))
        done.unread = unread
        done.error = error_of(errors[0] if errors else None, done.ok)
        return done

    async def _read(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview], order: int
    ) -> list[str | None]:
        names = self._names(keys)
        records = await self._in_turn(
            self._reading, order, payloads, lambda client: client.get(names, payloads)
        )
        seed, size = self._seed, self._chunk_bytes
        told: list[str | None] = []
        for key, record, payload in zip(keys, records, payloads, strict=True):
            if isinstance(record, bytes):
                good = decode(record, key, size, seed) == digest(payload)
                told.append(None if good else WRONG)
            else:
                told.append(GONE if record is None else record)
            if type(told[-1]) is not Unread:
                self._bad.pop(key, None)
                if record is not None and told[-1] is not None:
                    self._bad[key] = time.monotonic()
        for _ in range(len(self._bad) - MOST_BAD):
            del self._bad[next(iter(self._bad))]
        return told

    async def _write(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview], order: int
    ) -> list[str | None]:
        size, seed = self._chunk_bytes, self._seed
        records = [
            encode(key, size, digest(payload), seed)
            for key, payload in zip(keys, payloads, strict=True)
        ]
        names = self._names(keys)

        def put(client: StoreClient) -> Coroutine[Any, Any, list[str | None]]:
            if any(key in self._bad for key in keys):
                return client.put(names, records, payloads, replace=True)
            return client.put(names, records, payloads)

        told = await self._in_turn(self._writing, order, payloads, put)
        for key, error in zip(keys, told, strict=True):
            if error is None:
                self._bad.pop(key, None)
        return told

    async def _answer(self, ask: _Call[_T]) -> _T:
        """What the client answers to a question."""
        return await self._in_time(self._asking, next(self._orders), 0, self._timeout, ask)

    async def _in_turn(
        self, gate: Gate, order: int, payloads: Sequence[memoryview], move: _Call[_T]
    ) -> _T:
        """What the client says of a call that moves these payloads."""
        size = len(payloads) * self._chunk_bytes
        limit = self._timeout if self.moves_have_deadlines else None
        told = await self._in_time(gate, order, size, limit, move)
        # The next call begins before the digests of this one are made.
        await asyncio.sleep(0)
        return told

    async def _in_time(
        self, gate: Gate, order: int, size: int, limit: float | None, call: _Call[_T]
    ) -> _T:
        """What the client says to a call, which has so many seconds once it is its turn."""
        async with gate.turn(order, size):
            try:
                async with asyncio.timeout(limit):
                    return await call(self._reached())
            except TimeoutError as error:
                told = f"no answer within {self._timeout:g} s"
                # Those that wait would take as long to fail, one after the other.
                gate.fail(told)
                raise StoreError(told) from error

    def _reached(self) -> StoreClient:
        if self._client is None:
            self._client = self.connect()
        return self._client

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _payloads(self, rows: Sequence[int]) -> list[memoryview]:
        return [self._region.row(row)[: self._chunk_bytes] for row in rows]

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._prefix}{key.hex()}" for key in keys]

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self._sweep()

    async def _sweep(self) -> None:
        """Remove values of epochs that nobody reads any more, as far as the client lists them."""
        async with self._sweeping:
            client, left = self._reached(), set(self._left)
            if not isinstance(client, ListingClient):
                return
            before = time.time() - PRIVATE_SECONDS
            # What cannot be removed now is looked for again.
            with contextlib.suppress(StoreError):
                async for found in client.listed(self._place, {SHARED_EPOCH, self._epoch}):
                    stale = [n for n, since in found if since < before or epoch_of(n) in left]
                    for start in range(0, len(stale), MOST_REMOVED):
                        await self._answer(partial(_remove, stale[start : start + MOST_REMOVED]))
                        await asyncio.sleep(SWEEP_PAUSE)
                self._left -= left

    def _begin_epoch(self, epoch: str) -> None:
        self._epoch = epoch
        self._prefix = f"{self._place}/{epoch}/"
        self._seed = seed_of(self._prefix)
        # Keys whose values were found to be no good, and when.
        self._bad: dict[bytes, float] = {}


async def _two_at_once(
    calls: Iterable[Coroutine[Any, Any, _T]], note: Callable[[_T], None]
) -> None:
    """Note what each call gives, in order; the next has begun before one has ended.

    So the digests of one are made while the engine moves the other. Once one raises, none goes on.
    """
    running: deque[asyncio.Task[_T]] = deque()
    try:
        for call in calls:
            running.append(asyncio.create_task(call))
            if len(running) == 2:
                note(await running[0])
                running.popleft()
        while running:
            note(await running[0])
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        while left := [task for task in running if not task.done()]:
            # They use memory until they have ended, and whoever waits may be cancelled again.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(left)
        for task in running:
            # What they raised nobody asks for.
            task.cancelled() or task.exception()


async def _remove(names: Sequence[str], client: StoreClient) -> None:
    await client.remove(names)


def _nothing(count: int, error: str) -> Transfer:
    """The outcome of a call that failed as a whole."""
    return Transfer([False] * count, error, range(count))
