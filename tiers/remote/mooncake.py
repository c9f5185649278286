"""Mooncake Store: the memory of many hosts as one pool, without intermediate copies.

Rows of host memory are registered with its transfer engine once, which reads and writes payloads in
place. For the records see `kvstore.tiers.remote.slices`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.concurrency import outlast
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.client import StoreClient, StoreError, Unread
from kvstore.tiers.remote.loop import in_thread
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.session import Session
from kvstore.tiers.remote.slices import Slices, values_of
from kvstore.tiers.remote.tier import MOST_CHUNKS, StoreTier
from kvstore.types import TierPlace

try:
    from mooncake.store import MooncakeDistributedStore as Engine
except ImportError:  # pragma: no cover
    Engine = None

__all__ = ["MooncakeTier"]

MOST_VALUES = 4 * MOST_CHUNKS
"""Most values of all calls under way."""

BUFFER_BYTES = 16 * 2**20
"""Size of the engine's own buffer."""

NICE = 10
"""Nice level of transfers: the engine's client polls for their end without a pause, and would
otherwise take a processor from other work."""

CONNECT_SECONDS = 5.0

UNREACHED = -900
"""Codes from here down mean that a call was not answered."""

GIVEN_UP_SECONDS = 30.0
"""A transfer that fails sooner has really ended. After a minute, the engine gives up a transfer
without waiting for its end."""

QUESTION_SECONDS = 1.0
"""How long `close` waits for questions that have timed out."""

CODES = {-200: "the pool is full", -704: "there is no such value", -800: "the transfer failed"}

NO_ROOM, WRONG_SIZE, NOT_READY, NO_VALUE = -200, -600, -703, -704


@dataclass(frozen=True, slots=True)
class _Settings:
    master: str
    host: str
    protocol: str
    devices: str
    metadata: str
    contributed: int


class MooncakeTier(StoreTier):
    """The pool of a Mooncake master, shared by all processes that name it.

    Args:
        master: host and port of `mooncake_master`.
        host: address at which others reach this process; by default that of the interface that
            leads to the master.
        protocol: "tcp" or "rdma".
        devices: RDMA devices, separated by commas.
        metadata: metadata server of the transfer engine, or P2PHANDSHAKE for none.
        contribute_bytes: memory of this host that is added to the pool. Its contents are lost when
            the process ends. 0: only use what others contribute.
        timeout_s: seconds after which a question has failed. Transfers have no timeout; the engine
            gives them up after a minute.

    Raises:
        ValueError: for an invalid parameter, or without the package `mooncake`.
    """

    name = "mooncake"

    tail_bytes = RECORD_BYTES

    batch_bytes = 64 * 2**20
    """Large, because a call moves all of its values at once and has a high fixed cost."""

    calls_at_once = 1
    """Two calls at once are slower than one after the other."""

    moves_have_deadlines = False

    encrypts = encodes = False
    """Rows are moved as they are, by their addresses."""

    def __init__(
        self,
        place: TierPlace,
        *,
        master: str = "127.0.0.1:50051",
        host: str = "",
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        contribute_bytes: int = 0,
        timeout_s: float = 1.0,
    ) -> None:
        if Engine is None:
            raise ValueError(
                "needs the package mooncake: pip install mooncake-transfer-engine on hosts with "
                "CUDA, mooncake-transfer-engine-non-cuda elsewhere"
            )
        found = re.fullmatch(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", master)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise ValueError("master: must be a host and a port, such as cache:50051")
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol = {protocol!r}: must be tcp or rdma")
        if contribute_bytes < 0:
            raise ValueError("contribute_bytes must not be negative")
        self._settings = _Settings(master, host, protocol, devices, metadata, contribute_bytes)
        super().__init__(place, timeout_s=timeout_s)

    @property
    def address(self) -> str:
        return f"mooncake://{self._settings.master}"

    def connect(self) -> StoreClient:
        return _Client(self._settings, self._region, self._chunk_bytes, self._timeout)


class _Client:
    """Client of a Mooncake pool: see `StoreClient`. The engine's blocking calls run in threads."""

    def __init__(
        self, settings: _Settings, region: PinnedRegion, chunk_bytes: int, timeout_s: float
    ) -> None:
        self._settings = settings
        self._timeout = timeout_s
        self._region = region
        self._starting: asyncio.Future[Session] | None = None
        # Guards the next three, which threads set and `close` reads.
        self._made = threading.Lock()
        self._contributor: Any = None
        self._session: Session | None = None
        self._closed = False
        self._values = values_of(region, chunk_bytes, MOST_VALUES)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        codes = await self._asked("batch_is_exist", list(names))
        return [code == 1 for code in codes]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        if replace:
            # The engine does not replace existing values.
            async with self._in_time():
                await self.remove(names)
        session = await self._found()
        async with self._values.lent(payloads) as slices:
            for place, record in zip(slices.records, records, strict=True):
                place[:] = record
            codes = await _moved(session, "batch_put_from_multi_buffers", names, slices)
        _check(codes)
        return [None if code == 0 else _message(code) for code in codes]

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        session = await self._found()
        async with self._values.lent(payloads) as slices:
            codes = await _moved(session, "batch_get_into_multi_buffers", names, slices)
            records = [bytes(place) for place in slices.records]
        _check(codes)
        return [
            record if code == len(payload) + RECORD_BYTES else _without_record(code)
            for record, code, payload in zip(records, codes, payloads, strict=True)
        ]

    async def remove(self, names: Sequence[str]) -> None:
        # Forced, because a recent reader holds a lease.
        codes = await self._asked("batch_remove", list(names), True)
        failed = [code for code in codes if code not in (0, NO_VALUE)]
        if failed:
            raise StoreError(_message(failed[0]))

    async def close(self) -> None:
        def end() -> None:
            with self._made:
                self._closed = True
            try:
                if self._session is not None:
                    self._session.end(QUESTION_SECONDS)
            finally:
                if self._contributor is not None:
                    self._contributor.close()

        try:
            with contextlib.suppress(StoreError):
                await outlast(in_thread(end))
        finally:
            self._values.close()

    # -- inside --------------------------------------------------------------------------

    async def _asked(self, call: str, *about: Any) -> Sequence[int]:
        """Return the codes of a call that uses none of our memory, and so may be abandoned."""
        session = await self._reached()

        def ask() -> Sequence[int]:
            with session.used() as engine:
                codes: Sequence[int] = getattr(engine, call)(*about)
                return codes

        codes = await in_thread(ask)
        _check(codes)
        return codes

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Apply the timeout of questions to the calls before a transfer."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise StoreError(f"no answer within {self._timeout:g} s") from error

    async def _found(self) -> Session:
        async with self._in_time():
            return await self._reached()

    async def _reached(self) -> Session:
        """Return the session; connect to the master first, which may outlast the caller."""
        if self._session is not None and not self._session.ends:
            return self._session
        # A new session need not wait for the end of the old one.
        if self._starting is None or self._starting.done():
            self._starting = in_thread(self._start)
        return await asyncio.shield(self._starting)

    def _start(self) -> Session:
        contributed = self._settings.contributed
        if contributed and self._contributor is None:
            # An engine of its own, so that the contributed values outlast a session.
            contributor = self._connected(contributed)
            with self._made:
                closed = self._closed
                if not closed:
                    self._contributor = contributor
            if closed:
                contributor.close()
                raise StoreError("the client is closed")
        engine = self._connected(0)
        for address, size in [(self._region.address, self._region.size), *self._values.memory]:
            failed = engine.register_buffer(address, size)
            if failed:
                engine.close()
                raise StoreError(f"host memory cannot be registered ({failed})")
        session = Session(engine)
        with self._made:
            if not self._closed:
                self._session = session
                return session
        session.end()
        raise StoreError("the client is closed")

    def _connected(self, contributed: int) -> Any:
        """Return an engine connected to the master that contributes memory to the pool."""
        settings = self._settings
        host = _own_address(settings.master)
        engine = Engine()
        failed = engine.setup(
            settings.host or host,
            settings.metadata,
            contributed,
            BUFFER_BYTES,
            settings.protocol,
            settings.devices,
            settings.master,
        )
        if failed:
            raise StoreError(f"the master cannot be reached ({failed})")
        return engine


async def _moved(
    session: Session, call: str, names: Sequence[str], slices: Slices
) -> Sequence[int]:
    """Return the codes of a transfer once it has really ended, even when cancelled."""

    def move() -> Sequence[int]:
        over, began = True, time.monotonic()
        try:
            with session.used() as engine:
                over = False
                codes: Sequence[int] = getattr(engine, call)(
                    list(names), slices.addresses, slices.sizes
                )
                over = time.monotonic() - began < GIVEN_UP_SECONDS or all(map(_is_over, codes))
                return codes
        finally:
            if not over:
                session.end()

    return await outlast(in_thread(move, NICE))


def _without_record(code: int) -> bytes | str | None:
    """Return what `StoreClient.get` returns for a value that was not read."""
    if code in (NOT_READY, NO_VALUE):
        # Another process may be storing it.
        return None
    if code >= 0 or code == WRONG_SIZE:
        return b""
    return Unread(_message(code)) if code <= UNREACHED else _message(code)


def _is_over(code: int) -> bool:
    """Whether this code means that the transfer is complete or never began."""
    return code >= 0 or code in (NO_ROOM, WRONG_SIZE, NOT_READY, NO_VALUE) or code <= UNREACHED


def _check(codes: Sequence[int]) -> None:
    if codes and all(code <= UNREACHED for code in codes):
        raise StoreError(_message(codes[0]))


def _message(code: int) -> str:
    return CODES.get(code, f"Mooncake error {code}")


def _own_address(master: str) -> str:
    """Return this machine's address on the route to the master.

    Raises:
        StoreError: if the master does not accept connections. The engine itself would try for
            a minute and a half.
    """
    name, _, port = master.rpartition(":")
    try:
        with socket.create_connection((name.strip("[]"), int(port)), CONNECT_SECONDS) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise StoreError(f"{master}: {error.strerror or error}") from error
