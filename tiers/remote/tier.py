"""Store tier: names, records, digests and deadlines over the client of a remote store.

A chunk is a value named by namespace, epoch and key: a record and the payload. The record and the
digest are checked before a chunk is used, so whatever the store returns is the right bytes or a
miss.

A process begins in epoch 0 and shares what it stores with every process of the same namespace. When
its tier is cleared, it moves to an epoch of its own: others keep using what was stored before, and
never see what it stores from then on. If it is cleared again, the epoch that it leaves is removed,
provided the client can list it; values of a process that was killed go a week later (`sweeper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore.concurrency import outlast
from kvstore.tiers.base import Tier, Transfer, error_of
from kvstore.tiers.coding import Coder
from kvstore.tiers.disk.digest import digest
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.client import SHARED_EPOCH, StoreClient, StoreError, Unread, checked
from kvstore.tiers.remote.gate import Gate
from kvstore.tiers.remote.loop import ClientLoop, in_thread, two_at_once
from kvstore.tiers.remote.record import NO_KEY, RECORD_BYTES, encode, fault_of, seed_of
from kvstore.tiers.remote.suspects import Suspects
from kvstore.tiers.remote.sweeper import MOST_REMOVED, PARTS, Sweeper
from kvstore.tiers.sealing import Sealer
from kvstore.types import Changes, RecoveredTier, TierPlace

__all__ = ["StoreTier"]

_T = TypeVar("_T")

_Call = Callable[[StoreClient], Coroutine[Any, Any, _T]]

_Move = Callable[
    [Sequence[bytes], Sequence[memoryview], int], Coroutine[Any, Any, Sequence[str | None]]
]
"""Moves the chunks of some keys from or to memory; the number orders it among other moves. Returns
for each chunk an error, or None."""

DIGEST_LETTERS = 32
"""Letters of an identity's digest in names."""

MOST_CHUNKS = 1024
"""Most chunks of a call that moves them."""

LONGEST_TIMEOUT = 86400.0
"""Limit of `timeout_s`, in seconds."""

QUESTIONS_AT_ONCE = 4
"""Most questions under way at once."""

FIRST_ASKED = 4
"""Keys of the first wave of a question that takes several."""

GONE = "the store does not have the chunk"


class StoreTier(Tier):
    """Base of all stores; a kind of store implements `connect` and `address`.

    The core may begin more moves than a store can serve at once. So calls wait for their turn, move
    by move, and their timeout begins with their turn. This also bounds the memory that clients use
    outside host memory.

    Args:
        place: namespace, identity and chunk size, the keys with which chunks are encrypted, and the
            codec with which they are encoded.
        timeout_s: seconds after which a call to the store has failed.
        capacity_bytes: most bytes of chunks in the store, of this model, beyond which the oldest
            are removed; 0 if that is the store's own affair.
    """

    is_store = True
    encrypts = True
    encodes = True

    batch_bytes = 8 * 2**20
    """Most payload bytes of one call to the client, unless a single chunk is larger."""

    calls_at_once = 2
    """Most calls that read at once, and most that write. While the store moves one, the digests of
    another are computed."""

    asked_at_once = MOST_CHUNKS
    """Keys of one wave of a question: as many as the store answers in a moment. The others have
    their own turn and timeout, and are not asked about after a wave of which it has none."""

    moves_have_deadlines = True
    """Whether calls that move payloads fail after `timeout_s`."""

    def __init__(self, place: TierPlace, *, timeout_s: float, capacity_bytes: int = 0) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout_s = {timeout_s}: must be above 0, and {LONGEST_TIMEOUT:g} at most"
            )
        self._chunk_bytes = place.chunk_bytes
        self._codec = place.codec
        self._payload_bytes = Coder(None, self._codec, self._chunk_bytes).payload_bytes
        capacity = capacity_bytes // (self._payload_bytes + RECORD_BYTES)
        if capacity_bytes and capacity < PARTS:
            least = PARTS * (self._payload_bytes + RECORD_BYTES)
            raise ValueError(
                f"capacity_bytes = {capacity_bytes}: must be 0, or {least} at least, which is room "
                f"for {PARTS} chunks"
            )
        # An operator may choose the namespace's name, so the identity is always included.
        digest = Namespace(place.namespace, place.identity).digest
        self._place = f"{place.namespace}/{digest[:DIGEST_LETTERS]}"
        self._keys = place.keys
        self.refreshes = place.keys is not None
        self._keys_seen = 0
        self._timeout = timeout_s
        self._client: StoreClient | None = None
        room = self.calls_at_once * self.batch_bytes
        self._reading, self._writing = (Gate(self.calls_at_once, room) for _ in range(2))
        self._asking, self._erasing = Gate(QUESTIONS_AT_ONCE, 0), Gate(1, 0)
        self._orders = itertools.count()
        self._sweeper = Sweeper(
            self._place,
            capacity or None,
            place.partitions,
            self._reached,
            # Nobody else waits for it, nor fails if it takes too long.
            partial(self._remove, Gate(1, 0)),
        )
        self._begin_epoch(SHARED_EPOCH)

    @abstractmethod
    def connect(self) -> StoreClient:
        """Create a client, on the loop on which it is used. It need not connect yet."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Kind and address of the store, without secrets."""

    # -- the tier ------------------------------------------------------------------------

    def open(self, region: PinnedRegion) -> RecoveredTier:
        """Start the client's loop. The store need not be reachable yet."""
        self._region = region
        self._loop = ClientLoop(f"kvstore-{self.address}", self._close)
        self._loop.begin(self._sweeper.run)
        return RecoveredTier(
            self.address, "remote", [], 1, [], 0, payload_bytes=self._payload_bytes
        )

    @property
    def description(self) -> str:
        told = "" if self._codec is None else f", {self._codec}"
        return f"store {self.address}, {self._place}{told}"

    async def holds(self, keys: Sequence[bytes]) -> Transfer:
        try:
            return await self._loop.run(self._ask(keys))
        except StoreError as fault:
            return Transfer([False] * len(keys), str(fault), range(len(keys)))

    async def _ask(self, keys: Sequence[bytes]) -> Transfer:
        """Ask in waves, until one has no value: nothing after so large a gap is needed."""
        if self._keys is not None and self._keys.changes != self._keys_seen:
            # Values may be valid that were encrypted with keys that were not known.
            self._keys_seen = self._keys.changes
            self._suspects.trust_again(NO_KEY)
        names, order = self._names(keys), next(self._orders)
        found: list[bool] = []
        unread, error = range(0), None
        size = len(names) if len(names) <= self.asked_at_once else FIRST_ASKED

        def exist(client: StoreClient) -> Coroutine[Any, Any, list[bool]]:
            return client.exists(names[len(found) : len(found) + size])

        while len(found) < len(names):
            try:
                there = await self._answer(self._asking, exist, order)
            except StoreError as fault:
                # What was answered before counts.
                unread, error = range(len(found), len(names)), str(fault)
                break
            found += map(bool, checked("exists", there, len(names[len(found) :][:size]), object))
            if not any(there):
                break
            size = self.asked_at_once
        ok = [
            there and not self._suspects.missing(key)
            for key, there in zip(keys, found, strict=False)
        ]
        return Transfer(ok + [False] * (len(names) - len(ok)), error, unread)

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        return await self._in_batches(self._read, keys, rows)

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        coder = self._coder and self._coder.begun()
        done = await self._in_batches(partial(self._write, coder), keys, rows)
        done.removed = self._sweeper.tell_removed()
        done.error = done.error or self._sweeper.tell_fault()
        return done

    async def refresh(self) -> Changes:
        """Tell of keys that are not known any more."""
        return Changes() if self._keys is None else self._keys.forgotten()

    async def grow(self) -> tuple[int | None, str | None]:
        return None, "a store has no segments"

    async def clear(self) -> list[int] | str:
        left = self._sweeper.epoch
        # Random, so that two processes never choose the same epoch.
        self._begin_epoch(secrets.token_hex(8))
        if left != SHARED_EPOCH:
            self._loop.begin(partial(self._sweeper.leave, left))
        return []

    async def erase(self, keys: Sequence[bytes]) -> str | None:
        # After a reset others still find what is in the epoch that they share.
        prefixes = {self._prefix, f"{self._place}/{SHARED_EPOCH}/"}

        async def remove() -> None:
            self._suspects.removed(keys)
            for prefix, start in itertools.product(prefixes, range(0, len(keys), MOST_REMOVED)):
                part = keys[start : start + MOST_REMOVED]
                await self._remove(self._erasing, [f"{prefix}{key.hex()}" for key in part])

        try:
            await self._loop.run(remove())
        except StoreError as fault:
            return str(fault)
        return None

    async def sweep(self) -> None:
        """Sweep the store now: see `Sweeper`. It is swept by itself, too.

        Raises:
            StoreError: if the tier is closed.
        """
        await self._loop.run(self._sweeper.sweep())

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        with contextlib.suppress(StoreError):
            await self._loop.run(self._close())
        try:
            # A client that ends slowly holds up nobody's loop.
            ending = in_thread(self._loop.end)
        except StoreError:
            # No thread can be started any more, as when the interpreter ends.
            self._loop.end()
        else:
            await outlast(ending)

    def detach(self) -> None:
        self._loop.cancel_all()

    def abandon(self) -> None:
        # There is none where `open` has failed.
        if hasattr(self, "_loop"):
            self._loop.end()

    # -- inside --------------------------------------------------------------------------

    async def _in_batches(
        self, move: _Move, keys: Sequence[bytes], rows: Sequence[int]
    ) -> Transfer:
        """Move chunks in batches, until a call fails as a whole."""
        size = max(1, min(self.batch_bytes // self._payload_bytes, MOST_CHUNKS))
        parts = [slice(start, start + size) for start in range(0, len(keys), size)]
        done = Transfer([])
        errors: list[str] = []

        def note(batch: Sequence[str | None]) -> None:
            done.ok += [error is None for error in batch]
            errors.extend(filter(None, batch))

        order = next(self._orders)
        calls = (move(keys[part], self._chunks(rows[part]), order) for part in parts)
        try:
            await self._loop.run(two_at_once(calls, note))
        except StoreError as fault:
            # Do not try the other batches, which would take as long to fail.
            done.unread = range(len(done.ok), len(keys))
            done.ok += [False] * len(done.unread)
            errors.append(str(fault))
        done.error = error_of(errors[0] if errors else None, done.ok)
        return done

    async def _read(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], order: int
    ) -> list[str | None]:
        names = self._names(keys)
        payloads = [chunk[: self._payload_bytes] for chunk in chunks]
        records = await self._in_turn(
            self._reading, order, payloads, lambda client: client.get(names, payloads)
        )
        records = checked("get", records, len(keys), bytes, bytearray, memoryview, str)
        records = [
            None if self._suspects.may_return(key) else record
            for key, record in zip(keys, records, strict=True)
        ]
        unread = [key for key, it in zip(keys, records, strict=True) if type(it) is Unread]
        if unread:
            # If the store answers this, and others can be read, those values are at fault alone.
            await self._answer(self._asking, lambda client: client.exists(self._names(unread[:1])))
        errors: list[str | None] = []
        for key, record, payload, chunk in zip(keys, records, payloads, chunks, strict=True):
            if not isinstance(record, str | None):
                sealer = None if self._coder is None else self._coder.sealer
                errors.append(fault_of(bytes(record), key, payload, self._seed, sealer))
                if errors[-1] is None and self._coder is not None:
                    self._coder.decode(chunk)
            else:
                errors.append(GONE if record is None else record)
        if self._suspects.was_read(keys, records, errors):
            raise StoreError(str(next(filter(None, errors))))
        return errors

    async def _write(
        self, coder: Coder | None, keys: Sequence[bytes], chunks: Sequence[memoryview], order: int
    ) -> list[str | None]:
        named, seed = (keys, chunks, self._names(keys)), self._seed
        replaced = False

        def put(client: StoreClient) -> Coroutine[Any, Any, list[str | None]]:
            nonlocal replaced
            replaced = self._suspects.must_replace(keys)
            return self._put(named, seed, coder, replaced, client)

        try:
            errors = await self._in_turn(self._writing, order, chunks, put)
            if not replaced and self._suspects.invalid(keys):
                # A value was found invalid in the meantime, and this call left it as it was.
                errors = await self._in_turn(self._writing, order, chunks, put)
        except BaseException:
            self._suspects.gave_up(keys)
            raise
        self._suspects.gave_up(key for key, error in zip(keys, errors, strict=True) if error)
        if replaced:
            self._suspects.replaced(
                key for key, error in zip(keys, errors, strict=True) if error is None
            )
        self._sweeper.stored(errors.count(None))
        return errors

    async def _put(
        self,
        named: tuple[Sequence[bytes], Sequence[memoryview], Sequence[str]],
        seed: int,
        coder: Coder | None,
        replace: bool,
        client: StoreClient,
    ) -> list[str | None]:
        """Store chunks, whose turn has come: no more memory is lent than calls are under way."""
        keys, chunks, names = named
        plain = contextlib.nullcontext((chunks, [b""] * len(chunks)))
        with coder.encoded(keys, chunks) if coder else plain as (payloads, seals):
            records = [
                encode(key, self._payload_bytes, seal or digest(payload), seed)
                for key, payload, seal in zip(keys, payloads, seals, strict=True)
            ]
            more = {"replace": True} if replace else {}
            done = await client.put(names, records, payloads, **more)
            return checked("put", done, len(names), str)

    async def _answer(self, gate: Gate, ask: _Call[_T], order: int | None = None) -> _T:
        """Make a call that moves no payloads."""
        order = next(self._orders) if order is None else order
        return await self._in_time(gate, order, 0, self._timeout, ask)

    async def _in_turn(
        self, gate: Gate, order: int, payloads: Sequence[memoryview], move: _Call[_T]
    ) -> _T:
        """Make a call that moves payloads."""
        size = len(payloads) * self._payload_bytes
        limit = self._timeout if self.moves_have_deadlines else None
        result = await self._in_time(gate, order, size, limit, move)
        # Let the next call begin before the digests of this one are computed.
        await asyncio.sleep(0)
        return result

    async def _in_time(
        self, gate: Gate, order: int, size: int, limit: float | None, call: _Call[_T]
    ) -> _T:
        """Make a call when its turn comes, with a limit in seconds from then on."""
        async with gate.turn(order, size):
            try:
                async with asyncio.timeout(limit):
                    return await call(self._reached())
            except TimeoutError as error:
                reason = f"no answer within {self._timeout:g} s"
                # The waiting calls would take as long to fail, one after the other.
                gate.fail(reason)
                raise StoreError(reason) from error

    def _reached(self) -> StoreClient:
        if self._client is None:
            self._client = self.connect()
        return self._client

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _chunks(self, rows: Sequence[int]) -> list[memoryview]:
        size = max(self._chunk_bytes, self._payload_bytes)
        return [self._region.row(row)[:size] for row in rows]

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._prefix}{key.hex()}" for key in keys]

    async def _remove(self, gate: Gate, names: Sequence[str]) -> None:
        await self._answer(gate, lambda client: client.remove(names))

    def _begin_epoch(self, epoch: str) -> None:
        self._sweeper.epoch = epoch
        self._prefix = f"{self._place}/{epoch}/"
        self._seed = seed_of(self._prefix)
        sealer = None if self._keys is None else Sealer(self._keys, self._prefix)
        self._coder = Coder.of(sealer, self._codec, self._chunk_bytes)
        self._suspects = Suspects()
        self._keys_seen = 0 if self._keys is None else self._keys.changes
