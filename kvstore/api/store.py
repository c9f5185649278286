"""Store: the library on the caller's own event loop.

This module is long because each public method says in full what it guarantees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.api.arguments import (
    check_keys,
    check_request,
    check_seconds,
    check_timeout,
    chunks_of,
    targets_of,
)
from kvstore.api.lease import Chunks, Lease, Onlookers
from kvstore.api.put import COPY_INLINE_BYTES, Copies, Puts, copy_threads, run_copy
from kvstore.api.windows import Windows
from kvstore.assembly import Assembly, build
from kvstore.concurrency import Home, outlast, within
from kvstore.config import Config, check_size
from kvstore.core import Core, CoreStats
from kvstore.engine.engine import end_engine
from kvstore.engine.loop_steps import STUCK, Driver
from kvstore.engine.unnamed_requests import Prompt, Prompts
from kvstore.errors import KVStoreError, LeaseEndedError
from kvstore.observe.logs import warn_of_uncleared
from kvstore.tiers.pinned import round_to_page
from kvstore.types import Event, about

__all__ = ["COPY_INLINE_BYTES", "Chunks", "Store", "open", "start"]

logger = logging.getLogger("kvstore")

END_SECONDS = 5.0
"""Most seconds that a close waits for what does not answer, where all its time has gone by."""

UPKEEP_SECONDS = 0.02
"""How often a store that compacts, or changes its size, checks whether it may continue."""

_T = TypeVar("_T")


def open(config: Config | Mapping[str, Any] | None = None) -> Opening:
    """Open a store on the running loop: in an ``async with`` block, which closes it, or by await.

    `config` must give ``chunk_bytes``, and with a tier ``identity``. None: see
    `Config.from_environment`.

    Raises:
        KVStoreError: when it is opened, if the configuration or a path cannot be used.

    Example:
        ```python
        async with kvstore.open({"cpu_bytes_to_use": "1GiB", "chunk_bytes": "2MiB"}) as store:
            await store.put([key], [chunk])

        store = await kvstore.open(config)
        ...
        await store.close()
        ```
    """
    return Opening(config)


class Opening:
    """The result of `open`: for ``async with`` or ``await``, once."""

    def __init__(self, config: Config | Mapping[str, Any] | None) -> None:
        self._config = config
        self._used = False
        self._store: Store | None = None

    def __await__(self) -> Generator[Any, None, Store]:
        return self._open().__await__()

    async def __aenter__(self) -> Store:
        self._store = await self._open()
        return self._store

    async def __aexit__(self, *_: object) -> None:
        assert self._store is not None
        await self._store.close()

    async def _open(self) -> Store:
        if self._used:
            raise KVStoreError("what open returns opens one store; call it again for another")
        self._used = True
        return await start(self._config)


async def start(config: Config | Mapping[str, Any] | None) -> Store:
    """As `open`, but the caller closes the store."""
    if config is None:
        config = Config.from_environment()
    checked = config if isinstance(config, Config) else Config.from_mapping(config)
    store = Store(checked, await build(checked))
    logger.info(
        "kvstore: %s", store.description, extra=about("store.opened", description=store.description)
    )
    return store


class Store:
    """Chunks by key, in host memory and on the configured tiers.

    All methods belong to the loop on which the store was opened, while it runs:
    anywhere else they raise `KVStoreError`. Methods without ``await`` never block.

    A *request* is one prompt that the server works on. Calls that name it
    belong together until `release`; calls without a name are matched by their keys.

    A `timeout` is in seconds; None waits forever. A call whose timeout passes is cancelled,
    which is safe for every call; when the `TimeoutError` is raised it has ended and holds nothing.

    Attributes:
        chunk_bytes: the size of every chunk.
        description: host memory and tiers in a few words.
    """

    def __init__(self, config: Config, assembly: Assembly) -> None:
        assert config.chunk_bytes is not None
        self.chunk_bytes = config.chunk_bytes
        self.description = assembly.description
        self._config = config
        self._assembly = assembly
        self._core = assembly.core
        self._region = assembly.region
        self._home = Home()
        self._spans = assembly.spans
        self._driver = Driver(self._core, assembly.tiers, self._home, assembly.beside, self._spans)
        self._prompts = Prompts(
            self._core, config.lease_s, self._record if assembly.recorder is not None else None
        )
        self._threads = copy_threads()
        self._onlookers = Onlookers(self._home)
        self._puts = Puts(
            self._core,
            self._region,
            self._driver,
            self._threads,
            self._onlookers,
            deadline=config.deadline_s,
            max_wait=config.max_wait_s,
        )
        self._driver.on_step = self._expire
        self._leases = 0
        self._driver.lent = lambda: bool(self._leases or self._onlookers.rows)
        self._hurry = False
        self._closing: asyncio.Task[None] | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._keep_up()
        if assembly.commands is not None:
            assembly.commands.attach(self._act, self._core.reset)
        self._driver.pump()

    def lookup_prefix(self, keys: Sequence[bytes], request: str | None = None) -> int | None:
        """Return how many leading `keys` are in host memory, or None: being fetched, ask again.

        Never blocks. None resolves after ``deadline_s`` without movement, at the
        latest. Fetched chunks are kept for `request` until it gets or puts
        something, finishes, or has not asked for ``lease_s``. Without a name they are kept
        until they are got, or until others need the room and the lookup is not repeated.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        return self._look_up(keys, request)[1]

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` host memory or a tier holds, without side effects.

        Never blocks, and changes nothing: nothing is fetched or kept, and no lookup, miss or
        use is counted. The chunks may leave a moment later, and a chunk on a
        disk may turn out to be damaged. Tiers that do not answer at present do not count.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        self._driver.check()
        return self._core.contains_prefix(check_keys(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether host memory or a tier holds it, for each of `keys`.

        As `contains_prefix`, for keys that are no prefix: their order means nothing.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        self._driver.check()
        return self._core.contains(check_keys(keys))

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Fetch leading `keys` to host memory before they are asked for.

        Never blocks. Chunks are fetched a portion at a time, while no lookup waits for a fetch.
        Fetched chunks are not kept: they may be evicted like any other. At most half
        of host memory is filled so; of a longer prefix only that much is fetched.

        Returns:
            How many chunks are on their way, or will be. Those in host memory do not count.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        self._driver.check()
        coming = self._core.prefetch(check_keys(keys))
        self._driver.pump()
        return coming

    def pin(self, keys: Sequence[bytes], seconds: float, *, host: bool = True) -> int:
        """Protect the chunks of `keys` from eviction for `seconds`.

        They are evicted neither from host memory, unless `host` is false, nor from the tiers
        of this process. This applies to chunks that are there and to chunks that are put or
        fetched before the pin ends. Pinning again prolongs the pin; `math.inf` lasts until
        `unpin`, `remove`, `reset` or the end of the process, which ends all pins.

        Host memory and each tier hold at most ``pinned_share`` of their room for pins. Up to that
        share the first chunks to arrive are kept; the others are ordinary chunks.

        Returns:
            How many leading keys are pinned; the others are beyond the limit of every place.

        Raises:
            KVStoreError: for bad keys or bad `seconds`, on another loop, or when the store is
                closed.
        """
        self._driver.check()
        keys, until = check_keys(keys), time.monotonic() + check_seconds(seconds)
        pinned = self._core.pin(keys, until, host=host)
        self._driver.pump()
        return pinned

    def demote(self, keys: Sequence[bytes]) -> int:
        """Let the chunks of `keys` leave host memory: they will not be used soon.

        Never blocks. A chunk that a slower tier has leaves at once; one that no tier has is first
        copied to the first tier. A chunk that is got meanwhile, or pinned, stays.

        Returns:
            How many chunks will leave; none without a tier.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        self._driver.check()
        leaving = self._core.demote(check_keys(keys), time.monotonic())
        self._driver.pump()
        return leaving

    def unpin(self, keys: Sequence[bytes], *, cold: bool = False) -> int:
        """End the pins of `keys` before their time; returns how many were pinned.

        Args:
            cold: these chunks will not be used soon. When others need room they leave first,
                whether they were pinned or not, as far as the eviction policies take advice.

        Raises:
            KVStoreError: for bad keys, on another loop, or when the store is closed.
        """
        self._driver.check()
        keys = check_keys(keys)
        ended = self._core.unpin(keys, cold=cold)
        self._driver.pump()
        return ended

    async def resolve(
        self, keys: Sequence[bytes], request: str | None = None, *, timeout: float | None = None
    ) -> int:
        """Wait until `lookup_prefix` has an answer, and return it.

        Raises:
            KVStoreError: as `lookup_prefix`, or for a bad timeout.
            TimeoutError: if `timeout` seconds went by first; without a name, chunks that
                were being fetched are not kept.
        """
        return await within(check_timeout(timeout), "resolve", self._resolve(keys, request))

    async def put(
        self,
        keys: Sequence[bytes],
        buffers: Iterable[object],
        request: str | None = None,
        *,
        durable: bool = False,
        wait: bool = True,
        timeout: float | None = None,
    ) -> int:
        """Copy `buffers` in under `keys`, in prefix order.

        A buffer is anything with the buffer protocol, a NumPy array or a torch
        tensor, of `chunk_bytes` bytes. All are gathered first, and must stay as they are until
        this returns. Of a key that stands twice the first buffer counts. More chunks than host
        memory has room for stream through to the slower tiers. Puts are served in the order in
        which they came. Under pressure the tail is shed.

        Without `wait` it uses the room that is free and sheds the rest at once: all of it,
        while another put waits.

        If a chunk is being read from a tier, this waits for that in the end, `deadline_s` at most,
        and stores the buffer if it fails. Without `wait` the tier is believed.

        With `durable` it returns when the chunks are on the first tier, as after a `flush`:
        only those count that a later process will find there, even after kill -9. A chunk that the
        tier cannot take at present, or does not admit, does not count, nor do those that follow it;
        nor does one of a tenant that is seen to be forgotten meanwhile.
        A later process is of the newest epoch: where others that share the path were reset since,
        it finds none.

        Returns:
            How many leading keys the store has now; with `durable`, its first tier.

        Raises:
            KVStoreError: for a bad key or a buffer of another size; then nothing was
                stored. For `durable` without a tier, for a bad timeout, on another loop, or
                when the store is or gets closed.
            TimeoutError: if `timeout` seconds went by first. A copy under way is waited for;
                chunks that were complete before it stay stored, the others are not.
        """
        return await within(
            check_timeout(timeout), "put", self._put(keys, buffers, request, durable, wait)
        )

    def get(
        self, keys: Sequence[bytes], request: str | None = None, *, timeout: float | None = None
    ) -> Lease:
        """Lease the longest available prefix of `keys`, without a copy. For ``async with``.

        Waits as `resolve` does. The chunks can be neither evicted nor rewritten
        until the block is left, and cannot be used afterwards. A chunk that is still in use then,
        by an array or by a thread whose task was cancelled, stays unchanged and its row
        pinned until it is not in use any more. That is counted (``stats().outlived``) and logged
        once.

        Raises:
            KVStoreError: as `resolve`; a block that is left on another loop raises
                it too, and the lease still ends on the store's loop.
            TimeoutError: if `timeout` seconds went by before the block began.
        """
        self._driver.check()
        keys, request = check_keys(keys), check_request(request)
        seconds = check_timeout(timeout)
        if not keys:
            return Lease(self._home, self._nothing, lambda chunks: None)
        # The same prompt at the beginning and the end of the lease.
        held: list[tuple[Prompt, int]] = []
        return Lease(
            self._home,
            lambda: within(seconds, "get", self._begin_lease(keys, request, held)),
            lambda chunks: self._end_lease(chunks, *held[0]),
        )

    async def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Iterable[object],
        request: str | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Copy the longest available prefix of `keys` into `buffers`, one for each key.

        Waits as `resolve` does. A buffer is anything writable with the buffer protocol, a NumPy
        array or a torch tensor on the CPU, of `chunk_bytes` bytes; an array or tensor whose first
        dimension counts chunks is an iterable of them. A prefix larger than half of host memory
        is copied piece by piece, while the next piece is fetched. A chunk that is removed and put
        anew meanwhile may be the old or the new one.

        Returns:
            How many leading buffers were filled. The others are as they were, but for one piece
            where `timeout` seconds went by. None, 0, if there was a `reset` meanwhile: some may
            hold what was stored before it.

        Raises:
            KVStoreError: as `resolve`, and for a buffer of another size or one that cannot be
                written to; then none was changed.
            TimeoutError: if `timeout` seconds went by before a buffer counted as filled. A copy
                under way is waited for: no buffer is written to afterwards.
        """
        limit, era, copied = check_timeout(timeout), self._core.era, list[int]()
        try:
            await within(limit, "get_into", self._get_into(keys, buffers, request, copied))
        except TimeoutError:
            if not copied:
                raise
        return sum(copied) if self._core.era == era else 0

    def windows(self, keys: Sequence[bytes], size: int, request: str | None = None) -> Windows:
        """Lease a prefix larger than host memory, at most `size` chunks at a time.

        For ``async with``, and in the block ``async for chunks``: leases like those of `get`, one
        after the other, in prefix order, to the end of `keys` or the first missing chunk. Each
        ends when the next one, which is fetched meanwhile, is asked for, and the last at the
        end of the block. At best host memory has room for two windows. A window has fewer chunks
        if others leave less room, and there is none if they leave no room until the deadline, nor
        after a `reset`.

        Raises:
            KVStoreError: for bad keys or a bad request, if `size` is no number of chunks, on
                another loop, or when the store is closed.
            LeaseEndedError: if views of earlier windows are alive and leave no row.
        """
        self._driver.check()
        return Windows(self, check_keys(keys), size, check_request(request))

    @property
    def resets(self) -> int:
        """How often everything was forgotten since the store was opened."""
        return self._core.era

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything stored so far is on every tier that accepts it.

        Chunks that are put while it waits are not waited for.

        Returns:
            False if `timeout` seconds went by first.

        Raises:
            KVStoreError: for a bad timeout, on another loop, or when the store is closed.
        """
        self._driver.check()
        return await self._save(check_timeout(timeout))

    async def remove(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove the chunks of `keys` from host memory and from every tier of this process.

        From the call on they are misses, and a `put` under way stores none of them. Returns
        when their records are erased, so that no later process finds them, even after
        kill -9; a power cut may bring them back, as only `reset` waits for the medium. Rows that
        leases or copies use become free when those end; until then a `put` of these keys waits for
        room like any other. Chunks in the lanes of other processes are not removed: they are
        found again afterwards, if they were shared.

        Returns:
            How many of the keys were there.

        Raises:
            KVStoreError: for bad keys or a bad timeout, on another loop, or when the store is or
                gets closed.
                If a tier could not erase a record: it may be found by a later process. So may one
                in a store where a `reset` came first: others go on with the names of before.
            TimeoutError: if `timeout` seconds went by first. The removal continues.
        """
        return await within(check_timeout(timeout), "remove", self._remove(keys))

    async def reset(self, timeout: float | None = None) -> None:
        """Forget everything, on every tier.

        From the call on, nothing stored before is found, and a `put` under way stores
        nothing more. Returns when the slower tiers have forgotten too, and earlier
        leases and copies have ended: until then they keep their rows. It does not wait for
        chunks that are still in use after their lease has ended.

        Raises:
            KVStoreError: for a bad timeout, on another loop, or when the store is closed.
                If a tier could not forget: this process finds nothing, a later one may.
            TimeoutError: if `timeout` seconds went by first. Everything is forgotten
                nevertheless, and the slower tiers continue to forget.
        """
        await within(check_timeout(timeout), "reset", self._reset())

    def refuse_command(self, command: str, reason: str) -> None:
        """Let `kvstore ctl` refuse a command: the server has another way to do it.

        A server that holds chunks elsewhere, too, refuses ``remove`` and ``reset`` and names
        in `reason` what forgets all of them. Without ``control`` nothing is to be refused.

        Raises:
            ConfigError: if there is no such command.
            KVStoreError: on another loop, or when the store is closed.
        """
        from kvstore.control.commands import check_command

        self._driver.check()
        check_command(command)
        if self._assembly.commands is not None:
            self._assembly.commands.refuse(command, reason)

    def compact(self, bytes_per_second: int | str) -> None:
        """Give back sparse segments of the disk tiers, copying at most `bytes_per_second`.

        Continues until it is called with 0. Copies are made only while nothing else
        moves; stored chunks stay available throughout.

        Raises:
            KVStoreError: if it is no size, on another loop, or when the store is closed.
        """
        self._driver.check()
        rate = check_size("bytes_per_second", bytes_per_second)
        for tier in self._core.owned:
            size = round_to_page(tier.payload_bytes or self.chunk_bytes)
            tier.compactor.set_rate(rate / size)
        self._keep_up()

    def release(self, request: str) -> None:
        """End `request`: chunks that were kept for it may leave.

        Raises:
            KVStoreError: if it is no name, or on another loop.
        """
        self._home.check()
        if check_request(request) is None:
            raise KVStoreError("request must be a name (str), not None")
        self._prompts.release(request)

    def take_events(self) -> list[Event]:
        """Take the events since the last call, if ``keep_events`` is set.

        If events are not taken for long the older ones are dropped: ``stats().events_lost``.

        Raises:
            KVStoreError: on another loop.
        """
        self._home.check()
        return self._core.take_events()

    wait = resolve
    stream = windows
    drain_events = take_events

    async def __aenter__(self) -> Store:
        self._driver.check()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "open" if self._closing is None else "closed"
        return f"<Store, {state}: {self.description}>"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it was opened; all its methods are to be called there."""
        return self._home.loop

    def stats(self) -> CoreStats:
        """Return counters and gauges.

        Raises:
            KVStoreError: on another loop.
        """
        self._home.check()
        stats = self._core.stats()
        stats.outlived, stats.watched_rows = self._onlookers.outlived, self._onlookers.rows
        return stats

    async def close(self, timeout: float | None = None) -> None:
        """Close in order; may be called again. The end of the block of `open` does it.

        Waits, ``shutdown_timeout_s`` at most, until all chunks that were put are on the slower
        tiers too. If it is cancelled it does not wait for that, but releases everything before
        the cancellation is delivered. Calls under way raise.

        Raises:
            KVStoreError: for a bad timeout, or on another loop.
            TimeoutError: if `timeout` seconds went by first; the store is closed nevertheless,
                as if the call had been cancelled.
        """
        await within(check_timeout(timeout), "close", self._close())

    # -- inside ------------------------------------------------------------------------

    async def _resolve(self, keys: Sequence[bytes], request: str | None) -> int:
        # The caller may change its list while this waits.
        self._driver.check()
        keys, request = check_keys(keys), check_request(request)
        if keys and request is None:
            self._prompts.forget_lapsed(keys, time.monotonic())
        prompt, answer = self._look_up(keys, request)
        while answer is None:
            assert prompt is not None
            prompt.busy += 1
            try:
                await self._driver.answered(prompt.id)
            except BaseException:
                self._prompts.given_up(prompt)
                raise
            prompt.busy -= 1
            prompt, answer = self._look_up(keys, request)
        return answer

    async def _put(
        self,
        keys: Sequence[bytes],
        buffers: Iterable[object],
        request: str | None,
        durable: bool,
        wait: bool,
    ) -> int:
        self._driver.check_storing()
        if durable and not self._core.targets:
            raise KVStoreError("durable: the store has no tier that chunks could be written to")
        keys, request = check_keys(keys), check_request(request)
        sources = chunks_of(buffers, len(keys), self.chunk_bytes)
        if not keys:
            return 0
        ring = self._assembly.tiers[self._core.targets[0].number].key_ring if durable else None
        owned = () if ring is None else ring.owned
        prompt = self._prompts.storing(keys, request, time.monotonic())
        # Chunks that find no room are part of the prompt, too.
        self._core.extend_prompt(prompt.id, keys)
        prompt.busy += 1
        try:
            stored = await self._puts.put(keys, sources, prompt.id, wait=wait, durable=durable)
        except BaseException:
            self._prompts.give_up(prompt)
            raise
        finally:
            self._prompts.returned(prompt)
        if durable:
            stored = await self._puts.save(keys[:stored])
        return stored if ring is None else ring.lasting(keys[:stored], owned)

    async def _remove(self, keys: Sequence[bytes]) -> int:
        self._driver.check()
        removal = self._core.remove(check_keys(keys))
        era = self._core.era
        self._driver.pump()
        await self._driver.until(lambda: removal.done)
        if self._core.era != era:
            # A reset has taken it over.
            await self._cleared()
        if removal.unerased:
            raise KVStoreError(
                f"the records of {len(removal.unerased)} chunks could not be erased, the first of "
                f"{removal.unerased[0].hex()}: they may be found when the cache is opened again"
            )
        return removal.found

    async def _reset(self) -> None:
        self._driver.check()
        self._core.reset()
        self._driver.pump()
        self._keep_up()
        core = self._core
        # Chunks may be in use without a lease for an unlimited time.
        await self._driver.until(
            lambda: (
                not core.clearing and core.late_transfers <= self._onlookers.pins_before(core.era)
            )
        )
        await self._cleared()

    async def _cleared(self) -> None:
        """Wait until the tiers have forgotten all chunks from before a reset.

        Raises:
            KVStoreError: if one of them cannot, or as `Driver.until`.
        """
        await self._driver.until(lambda: not self._core.clearing)
        if self._core.uncleared:
            raise KVStoreError(
                f"{', '.join(self._core.uncleared)} cannot be cleared now, which is tried again: "
                "until then the next process may find what was stored before"
            )

    def _look_up(
        self, keys: Sequence[bytes], request: str | None
    ) -> tuple[Prompt | None, int | None]:
        """Return the request that asks (None without keys), and the answer."""
        self._driver.check()
        now = time.monotonic()
        prompt = self._prompts.waiting(keys, request, now)
        if prompt is None:
            keys, request = check_keys(keys), check_request(request)
            if not keys:
                self._driver.pump()
                return None, 0
            prompt = self._prompts.asking(keys, request, now)
        answer, stepped = self._ask(keys, prompt)
        self._prompts.told(prompt, answer)
        if stepped:
            self._driver.flush_soon()
        return prompt, answer

    def _ask(
        self, keys: Sequence[bytes], prompt: Prompt, *, again: bool = False
    ) -> tuple[int | None, bool]:
        """Look up `keys`, in a new step unless that could not tell the request anything new.

        Args:
            again: the request has waited for its answer, which came with the last step.

        Returns:
            The answer, and whether a step was begun, which the caller must flush.
        """
        waiting = self._core.is_waiting(prompt.id)
        if self._driver.fresh and (again or prompt.told is not None or waiting):
            answer = self._core.lookup_prefix(keys, prompt.id)
            # Who only waits since then came after a step had looked up enough: not the next.
            if answer is not None or (waiting and self._core.is_waiting(prompt.id)):
                return answer, False
        self._driver.begin()
        answer = self._core.lookup_prefix(keys, prompt.id)
        if self._spans is not None and answer is None and not waiting:
            self._spans.belongs(prompt.id)
        return answer, True

    async def _begin_lease(
        self, keys: list[bytes], request: str | None, held: list[tuple[Prompt, int]]
    ) -> Chunks:
        self._driver.check()
        prompt = self._prompts.getting(keys, request, time.monotonic())
        prompt.busy += 1
        try:
            count, stepped = self._ask(keys, prompt)
            while count is None:
                if stepped:
                    self._driver.flush_soon()
                await self._driver.answered(prompt.id)
                count, stepped = self._ask(keys, prompt, again=True)
            keys = keys[:count]
            rows = self._core.prepare_load(keys, prompt.id)
        except BaseException:
            # Cancelled: chunks that were fetched for this call may leave.
            self._prompts.give_up(prompt)
            self._prompts.returned(prompt)
            raise
        held.append((prompt, self._core.era))
        self._leases += 1
        self._prompts.had(prompt, count)
        if stepped:
            self._driver.flush_soon()
        sources = list(map(self._core.load_source, keys))
        return Chunks(keys, [self._region.row(row) for row in rows], self.chunk_bytes, sources)

    async def _get_into(
        self,
        keys: Sequence[bytes],
        buffers: Iterable[object],
        request: str | None,
        copied: list[int],
    ) -> None:
        """Copy chunks into buffers; `copied` gets how many each piece has."""
        self._driver.check()
        keys, request = check_keys(keys), check_request(request)
        targets = targets_of(buffers, len(keys), self.chunk_bytes)
        era = self._core.era
        piece = max(1, self._core.reach(keys) // 2)
        if len(keys) <= piece:
            async with self.get(keys, request) as chunks:
                await self._copy_out(chunks, targets)
                copied.append(len(chunks))
        else:
            if request is not None:
                self._prompts.release(request)
            # One request, so that what is put after it is known to lie behind it.
            prompt = self._prompts.getting(keys, request, time.monotonic())
            # What was fetched for it would leave no room for the pieces after the first.
            self._core.lapse(prompt.id)
            prompt.busy += 1
            try:
                async with self.windows(keys, piece, prompt.id) as windows:
                    # Views that others have kept may leave no row for the rest.
                    with contextlib.suppress(LeaseEndedError):
                        async for chunks in windows:
                            if self._core.era != era:
                                break
                            await self._copy_out(chunks, targets[sum(copied) :])
                            copied.append(len(chunks))
            except BaseException:
                self._prompts.give_up(prompt)
                raise
            else:
                self._prompts.had(prompt, sum(copied))
            finally:
                self._prompts.returned(prompt)

    async def _copy_out(self, chunks: Chunks, targets: Sequence[npt.NDArray[np.uint8]]) -> None:
        views = chunks[:]

        def copy() -> None:
            for view, target in zip(views, targets, strict=False):
                target[:] = np.frombuffer(view, np.uint8)

        try:
            await run_copy(copy, len(views) * self.chunk_bytes, self._threads)
        finally:
            # The views end with the lease, and would be told to have outlived it.
            views.clear()

    def _end_lease(self, chunks: Chunks, prompt: Prompt, era: int) -> None:
        self._leases -= 1

        def unpin(key: bytes) -> None:
            self._core.complete_load([key], prompt.id, era)
            self._driver.freed()

        seen = self._onlookers.see(chunks, era, unpin)
        self._core.complete_load([key for key in chunks.keys if key not in seen], prompt.id, era)
        self._prompts.returned(prompt)
        self._driver.freed()

    async def _nothing(self) -> Chunks:
        self._driver.check()
        return Chunks([], [], self.chunk_bytes)

    def _expire(self, now: float) -> None:
        self._prompts.expire(now, crowded=self._core.waiting > 0 or self._puts.waiting)

    def _record(self, chains: Sequence[Sequence[bytes]], since: float) -> None:
        recorder = self._assembly.recorder
        if recorder is not None:
            recorder.add(chains, time.monotonic() - since)

    async def _save(self, timeout: float | None) -> bool:
        """Do as `flush`; also ends when the store has to close at once.

        A store that closes clears its tiers first, if it was reset.
        """
        self._core.save()
        self._driver.pump()
        copies = Copies.all(self._core)
        end = None if timeout is None else time.monotonic() + timeout
        while not copies.ended() or (self._driver.closing and self._core.clearing):
            if self._hurry:
                return False
            if self._driver.engine.stuck:
                if not self._driver.closing:
                    logger.warning("kvstore: %s", STUCK, extra=about("store.stuck"))
                return False
            if end is not None and time.monotonic() >= end:
                return False
            await self._driver.moved()
        return True

    async def _act(self, call: Callable[[Core, float], _T]) -> _T:
        """Make a call on the core, with the time, in a step of its own.

        Raises:
            KVStoreError: if the store is closed.
        """
        now = self._driver.begin()
        told = call(self._core, now)
        self._driver.flush()
        self._driver.wake()
        self._keep_up()
        return told

    def _keep_up(self) -> None:
        """Make steps regularly while the core needs them."""
        # Calls go on while the store is closed, which makes its own steps.
        if self._upkeep is None and self._closing is None and self._core.needs_steps:
            self._upkeep = self._home.loop.create_task(self._make_steps())

    async def _make_steps(self) -> None:
        try:
            while self._core.needs_steps:
                await asyncio.sleep(UPKEEP_SECONDS)
                self._driver.pump()
        finally:
            self._upkeep = None

    def _stop_upkeep(self) -> None:
        for tier in self._core.owned:
            tier.compactor.set_rate(0.0)
        if self._upkeep is not None:
            self._upkeep.cancel()
            self._upkeep = None

    # -- the end -----------------------------------------------------------------------

    async def _close(self) -> None:
        """Close completely, however often it is cancelled."""
        self._home.check()
        if self._closing is None:
            self._driver.closing = True
            self._closing = self._home.loop.create_task(self._shut())
        await outlast(self._closing, self._make_haste)

    def _make_haste(self) -> None:
        """Close without waiting for chunks to reach the slower tiers."""
        self._hurry = True
        self._driver.wake()

    async def _shut(self) -> None:
        whole = self._config.shutdown_timeout_s
        end = time.monotonic() + whole
        with _survived():
            self._stop_upkeep()
            # A loop that ends cancels every task once, this one too; it continues nevertheless.
            try:
                await self._save(whole)
                if self._core.uncleared:
                    # Clearing that has failed meanwhile is tried once more.
                    await self._save(end - time.monotonic())
            except asyncio.CancelledError:
                self._make_haste()
            warn_of_uncleared(self._core.uncleared)
            self._prompts.end_all()
        self._driver.closed = True
        self._driver.wake()
        self._threads.shutdown(wait=False)
        left = max(end - time.monotonic(), min(whole, END_SECONDS))
        if await end_engine(self._driver.engine, self._assembly.recency(), left):
            self._region.close()


@contextlib.contextmanager
def _survived() -> Iterator[None]:
    """A block that keeps no store from being closed: a policy may raise in it."""
    try:
        yield
    except Exception:
        logger.exception("kvstore: a step of closing failed", extra=about("store.not_closed"))
