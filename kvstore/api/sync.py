"""Synchronous store: the library for programs without asyncio, from any thread.

It is the asyncio store on a loop in one background thread. Calls are handed to that loop and waited
for. What they do and guarantee is said there.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvstore.api.arguments import check_keys, check_request, check_timeout, chunks_of
from kvstore.api.lease import STILL_ALIVE, Chunks, Lease
from kvstore.api.portal import Handover
from kvstore.api.store import Store, start
from kvstore.api.windows import SyncWindows
from kvstore.concurrency import within
from kvstore.config import Config
from kvstore.core import CoreStats
from kvstore.errors import KVStoreError, LeaseEndedError
from kvstore.types import Event

__all__ = ["SyncLease", "SyncStore", "open_sync"]

EXIT_SECONDS = 5.0
"""How long an interpreter that ends waits for stores that nobody has closed."""


def open_sync(config: Config | Mapping[str, Any], *, timeout: float | None = None) -> SyncStore:
    """Open a store that any thread may use, without an event loop of one's own.

    `config` must give ``chunk_bytes``, and with a tier ``identity``. Use it in a ``with`` block,
    or close it by hand.

    Raises:
        KVStoreError: if the configuration or a path cannot be used, or for a bad timeout.
        TimeoutError: if `timeout` seconds went by first; nothing stays open.

    Example:
        with kvstore.open_sync({"cpu_bytes_to_use": "1GiB", "chunk_bytes": "2MiB"}) as store:
            store.put([key], [chunk])
    """
    return SyncStore(_Running(config, check_timeout(timeout)))


class SyncStore:
    """Chunks by key, in host memory and on the configured tiers. Made by `open_sync`.

    Every method may be called from any thread, from several at once, and waits for its
    end in that thread. Calls are begun in the order in which they are handed over. All
    methods raise `KVStoreError` when the store is closed, in the child of a fork, and on
    the thread of the store's own loop (in a policy or a finalizer that runs there).

    A `timeout` is in seconds; None waits forever. When the `TimeoutError`, or a
    `KeyboardInterrupt`, is raised, the call has ended and holds nothing: no lease, no
    chunk half stored. That may take as long as a copy that runs.

    A store that is forgotten, or left open when the interpreter ends, lets go of its
    threads and its lane, and does not wait for the slower tiers.

    Attributes:
        chunk_bytes: the size of every chunk.
        description: host memory and tiers in a few words.
    """

    def __init__(self, running: _Running) -> None:
        store = running.store
        self.chunk_bytes = store.chunk_bytes
        self.description = store.description
        self._running = running
        self._store = store
        self._calls = running.calls
        weakref.finalize(self, running.forget).atexit = False

    def __enter__(self) -> SyncStore:
        self._calls.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or not self._calls.foreign:
            # What a child of a fork raises on its way out is not to be hidden.
            self.close()

    def lookup_prefix(self, keys: Sequence[bytes], request: str | None = None) -> int | None:
        """How many leading `keys` are in host memory, or None: being fetched, ask again.

        Waits for its turn on the loop, never for I/O. None resolves after ``deadline_s``
        without movement, at the latest. What was fetched is kept for `request` until it
        gets or puts something, finishes, or has not asked for ``lease_s``; without a
        name, until it is got, or others need the room and nobody asks.

        Raises:
            KVStoreError: for bad keys, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.lookup_prefix(keys, request))

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading `keys` host memory or a slower tier holds, for whom it may concern.

        Waits for its turn on the loop, and changes nothing: nothing is fetched or kept, and
        no lookup, miss or use is counted. What it tells of may have left a moment later, and
        a chunk on a disk may turn out to be damaged. Tiers that do not answer at present do
        not count.

        Raises:
            KVStoreError: for bad keys, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.contains_prefix(keys))

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Fetch leading `keys` to host memory before anybody asks for them.

        Waits for its turn on the loop, never for I/O. It happens a portion at a time, while no
        lookup waits for a fetch, and keeps nothing: what has come is a chunk like any other, which
        may leave for others. At most half of host memory is waited for; of a longer prefix
        that much comes.

        Returns:
            How many chunks are on their way, or will be. Those in host memory do not count.

        Raises:
            KVStoreError: for bad keys, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.prefetch(keys))

    def pin(self, keys: Sequence[bytes], seconds: float, *, host: bool = True) -> int:
        """Keep the chunks of `keys` for so long, whatever comes.

        They do not leave for others: neither host memory, unless `host` is false, nor the tiers
        of this process. That counts for what is there, and for what comes before the pin ends:
        put or fetched, it stays where it arrives. To pin again prolongs; `math.inf` lasts until
        `unpin`, `remove`, `reset` or the end of the process, which ends all pins.

        Host memory and each tier hold at most ``pinned_share`` of their room for pins. There the
        first that come are kept, and others are chunks like any other.

        Returns:
            How many leading keys are pinned: the others would be more than any of them holds.

        Raises:
            KVStoreError: for bad keys or bad `seconds`, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.pin(keys, seconds, host=host))

    def demote(self, keys: Sequence[bytes]) -> int:
        """Let the chunks of `keys` leave host memory: they will not be used soon.

        What a slower tier has leaves at once, what none has is copied to the first tier before.
        Whoever gets a chunk meanwhile keeps it, and so does a pin.

        Returns:
            How many chunks will leave; none without a tier.

        Raises:
            KVStoreError: for bad keys, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.demote(keys))

    def unpin(self, keys: Sequence[bytes], *, cold: bool = False) -> int:
        """End the pins of `keys` before their time; returns how many were pinned.

        Args:
            cold: nobody will use these chunks soon. When others need room they leave first,
                whether they were pinned or not, as far as the eviction policies take advice.

        Raises:
            KVStoreError: for bad keys, or when the store is closed.
        """
        return self._calls.ask(lambda: self._store.unpin(keys, cold=cold))

    def resolve(
        self, keys: Sequence[bytes], request: str | None = None, *, timeout: float | None = None
    ) -> int:
        """Wait until `lookup_prefix` has an answer, and return it.

        Raises:
            KVStoreError: as `lookup_prefix`, or for a bad timeout.
            TimeoutError: if `timeout` seconds went by first; without a name, what was
                being fetched is not kept.
        """
        return self._calls.wait(lambda: self._store.resolve(keys, request, timeout=timeout))

    def put(
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

        A buffer is anything with the buffer protocol, a NumPy array or a torch tensor, of
        `chunk_bytes` bytes. They are gathered in the calling thread, and free to be changed
        when the call returns. More chunks than host memory has room for stream through to
        the slower tiers. Puts are served in the order in which they came. Under pressure
        the tail is shed.

        Without `wait` it takes the room that there is and sheds the rest at once: all of it,
        while another put waits.

        With `durable` it returns when the chunks are on the first tier, as after a `flush`:
        only those count that a later process will find there, even after kill -9. What the
        tier cannot take at present, or does not admit, does not count, nor what follows it.

        Returns:
            How many leading keys the store has now; with `durable`, its first tier.

        Raises:
            KVStoreError: for a bad key or a buffer of another size; then nothing was
                stored. For `durable` without a tier, for a bad timeout, or when the store is
                or gets closed.
            TimeoutError: if `timeout` seconds went by after the buffers were gathered.
                Chunks that were whole before it stay stored, the others are not.
        """
        self._calls.check()
        keys, request = check_keys(keys), check_request(request)
        # An iterable may do anything, make other calls too: not on the loop.
        sources = chunks_of(buffers, len(keys), self.chunk_bytes)
        return self._calls.wait(
            lambda: self._store.put(
                keys, sources, request, durable=durable, wait=wait, timeout=timeout
            )
        )

    def get(
        self, keys: Sequence[bytes], request: str | None = None, *, timeout: float | None = None
    ) -> SyncLease:
        """Lease the longest prefix of `keys` that there is; zero copy. For ``with``.

        Waits as `resolve` does. The chunks can be neither evicted nor rewritten until the
        block is left, by whatever exception, and cannot be used afterwards. They may be
        read in any thread, and the block may be left in any. What is looked at even then
        stays as it is, and its row pinned, until nobody looks at it any more.

        Raises:
            KVStoreError: as `resolve`.
            TimeoutError: if `timeout` seconds went by before the block began.
            LeaseEndedError: at the end of the block, unless another exception ends it, if
                an array made from a chunk is still alive: its row is missing until it is gone.
        """
        self._calls.check()
        keys, request = list(check_keys(keys)), check_request(request)
        check_timeout(timeout)
        # It holds on to this face: a store that is forgotten closes.
        return SyncLease(self._calls, lambda: self._store.get(keys, request, timeout=timeout))

    def windows(self, keys: Sequence[bytes], size: int) -> SyncWindows:
        """Lease a prefix larger than host memory, at most `size` chunks at a time.

        For ``with``, and in the block ``for chunks``: leases as of `get`, one after the other,
        in prefix order, to the end of `keys` or the first chunk that is missing. Each ends
        when the next one is asked for, which is fetched meanwhile, and the last at the end
        of the block. Host memory has room for two windows at best.

        Raises:
            KVStoreError: for bad keys, if `size` is no number of chunks, or when the store is
                closed.
            LeaseEndedError: at the end of a window, as `get` at the end of its block; if views of
                earlier windows are alive and leave no row.
        """
        self._calls.check()
        return SyncWindows(self, check_keys(keys), size)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything stored so far is on every tier that accepts it.

        What is put while it waits is not waited for.

        Returns:
            False if `timeout` seconds went by first.

        Raises:
            KVStoreError: for a bad timeout, or when the store is closed.
        """
        return self._calls.wait(lambda: self._store.flush(timeout))

    def remove(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Take the chunks of `keys` out of host memory, and of every tier of this process.

        From the call on they are misses, and a `put` under way stores nothing of them. Returns
        when their records are erased, so that no later process finds them, even after
        kill -9; a power cut may bring them back, as only `reset` waits for the medium. Rows that
        leases or copies use are free when those end; until then a `put` of these keys waits for
        room as any other. What other processes keep in lanes of their own is theirs: it is
        found again afterwards, if it was shared.

        Returns:
            How many of the keys were there.

        Raises:
            KVStoreError: for bad keys or a bad timeout, or when the store is or gets closed.
                If a tier could not erase a record: it may be found by a later process.
            TimeoutError: if `timeout` seconds went by first. The removal goes on.
        """
        return self._calls.wait(lambda: self._store.remove(keys, timeout=timeout))

    def reset(self, timeout: float | None = None) -> None:
        """Forget everything, on every tier.

        From the call on, nothing stored before is found, and a `put` under way stores
        nothing more. Returns when the slower tiers have forgotten too, and earlier
        leases and copies have ended: until then they keep their rows. It does not wait for
        who looks at a chunk although the lease has ended.

        Raises:
            KVStoreError: for a bad timeout, or when the store is closed.
                If a tier could not forget: this process finds nothing, a later one may.
            TimeoutError: if `timeout` seconds went by first. Everything is forgotten all
                the same, and the slower tiers go on forgetting.
        """
        self._calls.wait(lambda: self._store.reset(timeout))

    def compact(self, bytes_per_second: int | str) -> None:
        """Give sparse segments of the disk tiers back from now on, copying at most so much.

        Goes on until it is called with 0. Copies are made only while nothing else
        moves; what is stored stays available throughout.

        Raises:
            KVStoreError: if it is no size, or when the store is closed.
        """
        self._calls.ask(lambda: self._store.compact(bytes_per_second))

    def release(self, request: str) -> None:
        """`request` asks no more: what was kept for it may leave.

        Raises:
            KVStoreError: if it is no name, or when the store is closed.
        """
        self._calls.ask(lambda: self._store.release(request))

    def take_events(self) -> list[Event]:
        """What appeared on or left a medium since the last call, if ``keep_events`` is set.

        Of what is not taken for long the older part is dropped: ``stats().events_lost``.

        Raises:
            KVStoreError: when the store is closed.
        """
        return self._calls.ask(self._store.take_events)

    def stats(self) -> CoreStats:
        """Counters and gauges.

        Raises:
            KVStoreError: when the store is closed.
        """
        return self._calls.ask(self._store.stats)

    def close(self, timeout: float | None = None) -> None:
        """Close in order, and end the thread; may be called again. ``with`` does it.

        Waits, ``shutdown_timeout_s`` at most, until what was put is on the slower tiers
        too. When it is interrupted it does not wait for that, but lets go of everything
        before the interrupt is raised. Calls under way in other threads raise.

        Raises:
            KVStoreError: for a bad timeout.
            TimeoutError: if `timeout` seconds went by first; closed it is all the same,
                as if it had been interrupted.
        """
        self._running.close(check_timeout(timeout))


class SyncLease:
    """What `SyncStore.get` returns: chunks from the beginning of a ``with`` block to its end."""

    def __init__(self, calls: Handover, get: Callable[[], Lease]) -> None:
        self._calls = calls
        self._get = get
        self._lease: Lease | None = None

    def __enter__(self) -> Chunks:
        if self._lease is not None:
            raise KVStoreError("a lease can be begun once; call get again")
        try:
            return self._calls.wait(self._begin)
        except BaseException:
            # Interrupted, perhaps just when it had begun.
            self._end(raising=True)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(raising=kind is not None)

    async def _begin(self) -> Chunks:
        self._lease = self._get()
        return await self._lease.__aenter__()

    def _end(self, *, raising: bool) -> None:
        lease = self._lease
        if lease is None or (raising and self._calls.foreign):
            # What a child of a fork raises on its way out is not to be hidden.
            return
        try:
            released = self._calls.ask(lease.give_back)
        except BaseException as error:
            if not (isinstance(error, KVStoreError) and self._calls.ended):
                # Interrupted, or on the loop's own thread.
                lease.send_back()
                raise
            released = lease.drop()
        if not released and not raising:
            raise LeaseEndedError(STILL_ALIVE)


class _Running:
    """A store on its thread. It does not know the face, which may be forgotten."""

    def __init__(self, config: Config | Mapping[str, Any], timeout: float | None) -> None:
        self.calls = Handover("kvstore-sync", self)
        self._started: Store | None = None
        # A handler of a signal that interrupts a close may close too.
        self._closing = threading.RLock()
        try:
            self.calls.wait(lambda: within(timeout, "open_sync", self._start(config)))
        except BaseException:
            self._let_go()
            raise
        _RUNNING.add(self)

    @property
    def store(self) -> Store:
        assert self._started is not None
        return self._started

    def close(self, timeout: float | None) -> None:
        """See `SyncStore.close`."""
        self.calls.check_place()
        patience = -1.0 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        if not self._closing.acquire(timeout=patience):
            raise TimeoutError(f"close took longer than {timeout:g} s")
        try:
            if not self.calls.ended:
                self.calls.wait(lambda: self.store.close(timeout))
        finally:
            try:
                self._let_go()
            finally:
                self._closing.release()

    def forget(self) -> None:
        """Nobody will close it: let go of everything soon. From any thread; does not wait."""
        self.calls.send(self._vanish)

    def _let_go(self) -> None:
        """Close at once what is not closed, and end the thread."""
        try:
            with contextlib.suppress(KVStoreError):
                self.calls.wait(self._leave)
        finally:
            self.calls.end()
            _RUNNING.discard(self)

    async def _start(self, config: Config | Mapping[str, Any]) -> None:
        self._started = await start(config)

    async def _leave(self) -> None:
        if self._started is not None:
            with contextlib.suppress(TimeoutError):
                await self._started.close(0)

    async def _vanish(self) -> None:
        try:
            await self._leave()
        finally:
            self.calls.stop()
            _RUNNING.discard(self)


_RUNNING: set[_Running] = set()
"""Those that nobody has closed; in the child of a fork, its parent's too."""


@atexit.register
def _forget_all() -> None:
    """The interpreter ends, and with it the threads: lanes are let go of before."""
    running = [one for one in list(_RUNNING) if not one.calls.foreign]
    for one in running:
        one.forget()
    for one in running:
        one.calls.join(EXIT_SECONDS)
