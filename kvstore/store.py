"""The asyncio face: a store on the caller's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.assembly import Assembly, assemble, rows_for
from kvstore.config import Config, check_size
from kvstore.core import CoreStats
from kvstore.engine import LEAVE_SECONDS, Engine
from kvstore.errors import ConfigError, KVStoreError, LeaseEndedError
from kvstore.types import Event, check_key
from tiers.pinned import PinnedRegion

__all__ = ["Chunks", "Store", "open"]

logger = logging.getLogger("kvstore")

COPY_INLINE_BYTES = 256 * 1024
"""Copies up to this size are done on the loop: a thread would cost more."""

COMPACTION_SECONDS = 0.02
"""How often a store that compacts looks whether it may go on."""

RECHECK_SECONDS = 0.02
"""How often a wait looks at its deadline when nothing arrives."""


@asynccontextmanager
async def open(config: Config | Mapping[str, Any]) -> AsyncIterator[Store]:
    """Open a store on the running loop, and close it in order at the end.

    `config` must give ``chunk_bytes``. Closing waits, ``drain_s`` at most, until
    what was put is on the slower tiers too.

    Raises:
        KVStoreError: if the configuration or a path cannot be used.

    Example:
        async with kvstore.open({"cpu_bytes_to_use": "1GiB", "chunk_bytes": "2MiB"}) as store:
            await store.put([key], [chunk])
    """
    checked = config if isinstance(config, Config) else Config.from_mapping(config)
    if checked.chunk_bytes is None:
        raise ConfigError("missing key chunk_bytes: the size of every chunk, in bytes")
    rows, row_bytes = rows_for(checked, checked.chunk_bytes)
    building = asyncio.get_running_loop().run_in_executor(
        None, _build, checked, checked.chunk_bytes, rows, row_bytes
    )
    try:
        assembly = await asyncio.shield(building)
    except asyncio.CancelledError:
        # A thread cannot be stopped: what it opens is let go when it ends.
        building.add_done_callback(_let_go)
        raise
    store = Store(checked, assembly)
    logger.info("kvstore: %s", assembly.description)
    try:
        yield store
    finally:
        await store._close()


def _build(config: Config, chunk_bytes: int, rows: int, row_bytes: int) -> Assembly:
    region = PinnedRegion.private(rows, row_bytes)
    try:
        label = str(config.identity.get("model", "kv"))
        return assemble(
            config, region, chunk_bytes, label, config.identity, events=config.keep_events
        )
    except BaseException:
        region.close()
        raise


def _let_go(building: asyncio.Future[Assembly]) -> None:
    if building.exception() is None:
        assembly = building.result()
        for tier in assembly.tiers:
            tier.abandon()
        if assembly.recorder is not None:
            assembly.recorder.close()
        assembly.region.close()


class Chunks(Sequence[memoryview]):
    """Chunks in host memory, leased: read-only views that are dead after the lease.

    `keys` are the keys that are here: a prefix of those asked for.
    """

    def __init__(self, keys: Sequence[bytes], rows: Sequence[memoryview], size: int) -> None:
        self.keys = keys
        # Every chunk gets an exporter of its own, which lives as long as anything that
        # looks at the chunk: that is how a view that outlives the lease is noticed. It
        # keeps the region's memory in place, however late it is looked at.
        exporters = [(ctypes.c_ubyte * size).from_buffer(row) for row in rows]
        self._exporters = [weakref.ref(exporter) for exporter in exporters]
        self._views: list[memoryview] | None = [
            memoryview(exporter).cast("B").toreadonly() for exporter in exporters
        ]

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if self._views is None:
            raise LeaseEndedError("these chunks were leased; the lease has ended")
        return self._views[index]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self[:])

    def _end(self) -> bool:
        """End the lease; False if somebody still holds on to the memory."""
        views, self._views = self._views or [], None
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()
        return not any(exporter() is not None for exporter in self._exporters)


class Store:
    """Chunks by key, in host memory and on the configured tiers.

    All methods belong to the loop on which the store was opened. Methods
    without ``await`` never block.
    """

    def __init__(self, config: Config, assembly: Assembly) -> None:
        assert config.chunk_bytes is not None
        self.chunk_bytes = config.chunk_bytes
        self.description = assembly.description
        self._config = config
        self._assembly = assembly
        self._core = assembly.core
        self._core.log_to(logger.warning)
        self._region = assembly.region
        self._engine = Engine(assembly.tiers, self._pump)
        self._engine.follow()
        self._waiters: set[asyncio.Future[None]] = set()
        self._ids = itertools.count()
        self._transfers = 0
        self._closed = False
        self._compacting: asyncio.Task[None] | None = None
        if any(tier.relocations_per_second for tier in self._core.tiers):
            self._compacting = asyncio.get_running_loop().create_task(self._compact())
        self._pump()

    def lookup_prefix(self, keys: Sequence[bytes], request: str | None = None) -> int | None:
        """How many leading `keys` are in host memory, or None: being fetched, ask again.

        Never blocks. None resolves after ``deadline_s`` without movement, at the
        latest. What was fetched is kept for `request` while it goes on asking;
        without a name, for whoever asks the same keys.
        """
        self._begin()
        answer = self._core.lookup_prefix(keys, self._name(keys, request))
        self._flush()
        return answer

    async def resolve(self, keys: Sequence[bytes], request: str | None = None) -> int:
        """Wait until `lookup_prefix` has an answer, and return it."""
        try:
            while True:
                answer = self.lookup_prefix(keys, request)
                if answer is not None:
                    return answer
                await self._something_moved()
        except BaseException:
            if request is None:
                self._core.on_request_finished(self._name(keys, None))
            raise

    async def put(self, keys: Sequence[bytes], buffers: Iterable[object]) -> int:
        """Copy `buffers` in under `keys`, in prefix order.

        A buffer is anything with the buffer protocol, a NumPy array or a torch
        tensor, of `chunk_bytes` bytes. More chunks than host memory has room
        for stream through to the slower tiers. Under pressure the tail is shed.

        Returns:
            How many leading keys the store has now.

        Raises:
            KVStoreError: for a bad key or a buffer of another size; then nothing was stored.
        """
        sources = [self._bytes_of(buffer) for buffer in buffers]
        if len(sources) != len(keys):
            raise KVStoreError(f"{len(keys)} keys but {len(sources)} buffers")
        for key in keys:
            check_key(key)
        self._check_open()
        rows = self._region.rows
        name = f"put-{next(self._ids)}"
        stored = 0
        here: list[bytes] = []  # stored by this call, and on no slower tier so far
        while stored < len(keys):
            here = [key for key in here if not self._core.may_go_below(key)]
            # A later part may not cost an earlier one its place.
            end = stored + min(max(1, rows // 2), rows - len(here))
            part = keys[stored:end]
            if not part or not await self._put_wave(part, sources[stored:end], name):
                break
            here += part
            stored = end
        self._core.on_request_finished(name)
        return next((n for n, key in enumerate(keys) if not self._has(key)), len(keys))

    @asynccontextmanager
    async def get(self, keys: Sequence[bytes], request: str | None = None) -> AsyncIterator[Chunks]:
        """Lease the longest prefix of `keys` that can be had; zero copy.

        Waits as `resolve` does. The chunks can be neither evicted nor rewritten
        until the block is left, and cannot be used afterwards.

        Raises:
            LeaseEndedError: at the end of the block, if an array made from a
                chunk is still alive: it would see other bytes from now on.
        """
        name = request if request is not None else f"get-{next(self._ids)}"
        try:
            while True:
                self._begin()
                count = self._core.lookup_prefix(keys, self._name(keys, name))
                if count is not None:
                    break
                self._flush()
                await self._something_moved()
        except BaseException:
            # Cancelled: what was fetched for this call may leave.
            self._core.on_request_finished(name)
            raise
        held = list(keys[:count])
        rows = self._core.prepare_load(held, name)
        self._flush()
        self._transfers += 1
        if request is None:
            # What `lookup_prefix` had fetched for whoever asks these keys has been had.
            self._core.on_request_finished(self._name(keys, None))
        chunks = Chunks(held, [self._region.row(row) for row in rows], self.chunk_bytes)
        released = True
        try:
            yield chunks
        finally:
            released = chunks._end()
            self._transfers -= 1
            self._core.complete_load(held, name)
            self._core.on_request_finished(name)
            self._pump()
        if not released:
            raise LeaseEndedError(
                "an array made from a leased chunk is still alive; copy it before the lease ends"
            )

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything stored so far is on every tier that accepts it.

        Returns:
            False if `timeout` seconds went by first.
        """
        self._core.save()
        self._pump()
        end = None if timeout is None else time.monotonic() + timeout
        while self._core.unsaved:
            if end is not None and time.monotonic() >= end:
                return False
            await self._something_moved()
        return True

    async def reset(self) -> None:
        """Forget everything, on every tier. Waits for leases and copies to end first."""
        self._check_open()
        while self._transfers:
            await self._something_moved()
        self._core.reset()
        self._pump()
        while self._core.in_flight:
            await self._something_moved()

    def compact(self, bytes_per_second: int | str) -> None:
        """Give sparse segments of the disk tiers back from now on, copying at most so much.

        Goes on until it is called with 0. Copies are made only while nothing else
        moves; what is stored stays available throughout.

        Raises:
            KVStoreError: if it is no size: bytes, or text such as ``"50MiB"``.
        """
        self._check_open()
        rate = check_size("bytes_per_second", bytes_per_second)
        for tier in self._core.tiers:
            tier.relocations_per_second = rate / self._region.row_bytes
        if self._compacting is not None:
            self._compacting.cancel()
            self._compacting = None
        if rate:
            self._compacting = asyncio.get_running_loop().create_task(self._compact())

    async def _compact(self) -> None:
        while True:
            await asyncio.sleep(COMPACTION_SECONDS)
            self._pump()

    def finish(self, request: str) -> None:
        """`request` asks no more: what was kept for it may leave."""
        self._core.on_request_finished(request)

    def take_events(self) -> list[Event]:
        """What appeared on or left a medium since the last call, if ``keep_events`` is set."""
        return self._core.take_events()

    def stats(self) -> CoreStats:
        """Counters and gauges."""
        return self._core.stats()

    # -- inside ------------------------------------------------------------------------

    async def _put_wave(
        self, keys: Sequence[bytes], sources: list[npt.NDArray[np.uint8]], name: str
    ) -> bool:
        """Store a part that fits host memory. False if some of it found no room in time."""
        by_key = dict(zip(keys, sources, strict=True))
        end = time.monotonic() + self._config.deadline_s
        declined: set[bytes] = set()
        try:
            while True:
                self._begin()
                grant = self._core.prepare_store(keys, name)
                self._flush()
                if grant is None:
                    if time.monotonic() >= end:
                        return False
                    await self._something_moved()
                    continue
                if grant.keys:
                    await self._copy_in(grant.keys, grant.rows, by_key, name)
                    end = time.monotonic() + self._config.deadline_s
                declined.update(grant.declined)
                missing = [key for key in keys if key not in declined and not self._has(key)]
                if not missing:
                    return True
                if time.monotonic() >= end:
                    return False
                if not grant.keys:
                    await self._something_moved()
        except BaseException:
            self._core.on_request_finished(name)
            raise

    async def _copy_in(
        self,
        keys: list[bytes],
        rows: list[int],
        by_key: Mapping[bytes, npt.NDArray[np.uint8]],
        name: str,
    ) -> None:
        array, size = self._region.array, self.chunk_bytes

        def copy() -> None:
            for key, row in zip(keys, rows, strict=True):
                np.copyto(array[row, :size], by_key[key])

        self._transfers += 1
        ok = False
        try:
            if size * len(keys) <= COPY_INLINE_BYTES:
                copy()
            else:
                # The rows are the thread's until it has ended, however often it is cancelled.
                copying = asyncio.get_running_loop().run_in_executor(None, copy)
                cancelled: asyncio.CancelledError | None = None
                while not copying.done():
                    try:
                        await asyncio.shield(copying)
                    except asyncio.CancelledError as error:
                        cancelled = error
                if cancelled is not None:
                    raise cancelled
            ok = True
        finally:
            self._transfers -= 1
            self._core.complete_store(keys, name, ok)
            self._pump()

    def _has(self, key: bytes) -> bool:
        return key in self._core.pool.chunks or any(
            key in tier.entries or key in tier.writing for tier in self._core.tiers
        )

    def _bytes_of(self, buffer: object) -> npt.NDArray[np.uint8]:
        flat: npt.NDArray[np.uint8]
        try:
            if hasattr(buffer, "detach") and hasattr(buffer, "untyped_storage"):
                import torch

                assert isinstance(buffer, torch.Tensor)
                flat = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            elif isinstance(buffer, np.ndarray):
                flat = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
            else:
                flat = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise KVStoreError(
                f"a chunk must be a buffer, an array or a tensor with bytes of its own, not this "
                f"{type(buffer).__name__} ({error})"
            ) from error
        if flat.size != self.chunk_bytes:
            raise KVStoreError(f"a chunk must have {self.chunk_bytes} bytes, not {flat.size}")
        return flat

    @staticmethod
    def _name(keys: Sequence[bytes], request: str | None) -> str:
        if keys:
            # One is enough to notice that they are of another kind; all would cost.
            check_key(keys[-1])
        if request is not None:
            return request
        return f"keys-{keys[-1].hex()}-{len(keys)}" if keys else "keys"

    def _check_open(self) -> None:
        if self._closed:
            raise KVStoreError("the store is closed")

    def _begin(self) -> None:
        self._check_open()
        self._core.poll(time.monotonic(), self._engine.take())

    def _flush(self) -> None:
        self._engine.start(self._core.flush(time.monotonic()))

    def _pump(self) -> None:
        """Take completions in, start what is due, wake whoever waits for it."""
        self._core.poll(time.monotonic(), self._engine.take())
        if not self._closed:
            self._flush()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _something_moved(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, RECHECK_SECONDS)
        except TimeoutError:
            self._check_open()
            self._pump()
        finally:
            self._waiters.discard(waiter)

    async def _close(self) -> None:
        if self._closed:
            return
        self.compact(0)
        await self.flush(self._config.drain_s)
        self._closed = True
        if self._assembly.recorder is not None:
            self._assembly.recorder.close()
        closing = asyncio.ensure_future(self._engine.close(self._assembly.recency()))
        try:
            await asyncio.wait_for(asyncio.shield(closing), self._config.drain_s)
        except TimeoutError:
            # Its rows may still be written to: the memory must stay.
            logger.warning("a tier does not answer and is left behind")
            await self._engine.leave()
            await asyncio.wait({closing}, timeout=LEAVE_SECONDS)
            return
        self._region.close()
