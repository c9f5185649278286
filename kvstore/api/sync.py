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
from typing import Any

from kvstore.api.arguments import (
    check_keys,
    check_request,
    check_timeout,
    chunks_of,
    targets_of,
)
from kvstore.api.lease import Chunks, Lease
from kvstore.api.portal import Handover
from kvstore.api.store import Store, start
from kvstore.api.windows import SyncWindows
from kvstore.concurrency import within
from kvstore.config import Config
from kvstore.core import CoreStats
from kvstore.errors import KVStoreError
from kvstore.types import Event

__all__ = ["SyncLease", "SyncStore", "open_sync"]

EXIT_SECONDS = 5.0
"""How long an interpreter that ends waits for stores that nobody has closed."""


def open_sync(
    config: Config | Mapping[str, Any] | None = None, *, timeout: float | None = None
) -> SyncStore:
    """Open a store that any thread may use, without an event loop of one's own.

    `config` is as for `kvstore.open`. Use the store in a ``with`` block, or close it by hand.

    Raises:
        KVStoreError: if the configuration or a path cannot be used, or for a bad timeout.
        TimeoutError: if `timeout` seconds went by first; nothing stays open.

    Example:
        ```python
        with kvstore.open_sync({"cpu_bytes_to_use": "1GiB", "chunk_bytes": "2MiB"}) as store:
            store.put([key], [chunk])
        ```
    """
    return SyncStore(_Running(config, check_timeout(timeout)))


class SyncStore:
    """Chunks by key, in host memory and on the configured tiers. Made by `open_sync`.

    Each method does what the method of `Store` with the same name does, with the same arguments,
    results and errors; only what differs is said here. A method may be called from any thread,
    from several at once, and waits for its end in that thread. `lookup_prefix` and the other
    methods of `Store` without ``await`` wait for their turn on the loop, never for I/O. Calls
    begin in the order in which they are handed over. All methods raise `KVStoreError` when the
    store is closed, in the child of a fork, and on the thread of the store's own loop (in a
    policy or a finalizer that runs there).

    A `timeout` is in seconds; None waits forever. When the `TimeoutError`, or a
    `KeyboardInterrupt`, is raised, the call has ended and holds nothing: no lease, no
    chunk half stored. That may take as long as a copy that runs.

    A store that is forgotten, or left open when the interpreter ends, lets go of its
    threads and its lane, and does not wait for the slower tiers.

    Attributes:
        chunk_bytes: the size of every chunk.
        description: host memory and tiers in a few words.
        loop: None, as there is none that a caller has to know of.
    """

    loop: None = None

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

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or not self._calls.foreign:
            # What a child of a fork raises on its way out is not to be hidden.
            self.close()

    def lookup_prefix(self, keys: Sequence[bytes], request: str | None = None) -> int | None:
        """Return how many leading `keys` are in host memory, or None: being fetched, ask again."""
        return self._calls.ask(lambda: self._store.lookup_prefix(keys, request))

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` host memory or a tier holds, without side effects."""
        return self._calls.ask(lambda: self._store.contains_prefix(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether host memory or a tier holds it, for each of `keys`."""
        return self._calls.ask(lambda: self._store.contains(keys))

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Fetch leading `keys` to host memory before they are asked for."""
        return self._calls.ask(lambda: self._store.prefetch(keys))

    def pin(self, keys: Sequence[bytes], seconds: float, *, host: bool = True) -> int:
        """Protect the chunks of `keys` from eviction for `seconds`."""
        return self._calls.ask(lambda: self._store.pin(keys, seconds, host=host))

    def demote(self, keys: Sequence[bytes]) -> int:
        """Let the chunks of `keys` leave host memory: they will not be used soon."""
        return self._calls.ask(lambda: self._store.demote(keys))

    def unpin(self, keys: Sequence[bytes], *, cold: bool = False) -> int:
        """End the pins of `keys` before their time; returns how many were pinned."""
        return self._calls.ask(lambda: self._store.unpin(keys, cold=cold))

    def resolve(
        self, keys: Sequence[bytes], request: str | None = None, *, timeout: float | None = None
    ) -> int:
        """Wait until `lookup_prefix` has an answer, and return it."""
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

        The buffers are gathered in the calling thread, and free to be changed when the call
        returns. The timeout runs from then on.
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

        The chunks may be read in any thread, and the block may be left in any.
        """
        self._calls.check()
        keys, request = check_keys(keys), check_request(request)
        check_timeout(timeout)
        # It holds on to this face: a store that is forgotten closes.
        return SyncLease(self._calls, lambda: self._store.get(keys, request, timeout=timeout))

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Iterable[object],
        request: str | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Copy the longest available prefix of `keys` into `buffers`, one for each key.

        The buffers are gathered in the calling thread. The timeout runs from then on.
        """
        self._calls.check()
        keys, request = check_keys(keys), check_request(request)
        targets = targets_of(buffers, len(keys), self.chunk_bytes)
        return self._calls.wait(
            lambda: self._store.get_into(keys, targets, request, timeout=timeout)
        )

    def windows(self, keys: Sequence[bytes], size: int, request: str | None = None) -> SyncWindows:
        """Lease a prefix larger than host memory, at most `size` chunks at a time.

        For ``with``, and in the block ``for chunks``; one thread at a time.
        """
        self._calls.check()
        windows = self._calls.ask(lambda: self._store.windows(keys, size, request))
        return SyncWindows(self._calls, windows, self)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything stored so far is on every tier that accepts it."""
        return self._calls.wait(lambda: self._store.flush(timeout))

    def remove(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove the chunks of `keys` from host memory and from every tier of this process."""
        return self._calls.wait(lambda: self._store.remove(keys, timeout=timeout))

    def reset(self, timeout: float | None = None) -> None:
        """Forget everything, on every tier."""
        self._calls.wait(lambda: self._store.reset(timeout))

    @property
    def resets(self) -> int:
        """How often everything was forgotten since the store was opened."""
        return self._store.resets

    def refuse_command(self, command: str, reason: str) -> None:
        """Let `kvstore ctl` refuse a command: the server has another way to do it."""
        self._calls.ask(lambda: self._store.refuse_command(command, reason))

    def compact(self, bytes_per_second: int | str) -> None:
        """Give back sparse segments of the disk tiers, copying at most `bytes_per_second`."""
        self._calls.ask(lambda: self._store.compact(bytes_per_second))

    def release(self, request: str) -> None:
        """End `request`: chunks that were kept for it may leave."""
        self._calls.ask(lambda: self._store.release(request))

    def take_events(self) -> list[Event]:
        """Take the events since the last call, if ``keep_events`` is set."""
        return self._calls.ask(self._store.take_events)

    wait = resolve
    stream = windows
    drain_events = take_events

    def __repr__(self) -> str:
        state = "closed" if self._calls.ended else "open"
        return f"<SyncStore, {state}: {self.description}>"

    def stats(self) -> CoreStats:
        """Return counters and gauges."""
        return self._calls.ask(self._store.stats)

    def close(self, timeout: float | None = None) -> None:
        """Close in order, and end the thread; may be called again. ``with`` does it.

        When it is interrupted it does not wait for the slower tiers, but lets go of everything
        before the interrupt is raised. Calls under way in other threads raise.
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

    def __exit__(self, kind: object, *_: object) -> None:
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
            self._calls.ask(lease.give_back)
        except BaseException as error:
            if not (isinstance(error, KVStoreError) and self._calls.ended):
                # Interrupted, or on the loop's own thread.
                lease.send_back()
                raise
            lease.drop()

    def __repr__(self) -> str:
        return "<SyncLease, not begun>" if self._lease is None else f"<Sync{repr(self._lease)[1:]}"


class _Running:
    """A store on its thread. It does not know the face, which may be forgotten."""

    def __init__(self, config: Config | Mapping[str, Any] | None, timeout: float | None) -> None:
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
            self.calls.thread.end()
            _RUNNING.discard(self)

    async def _start(self, config: Config | Mapping[str, Any] | None) -> None:
        self._started = await start(config)

    async def _leave(self) -> None:
        if self._started is not None:
            with contextlib.suppress(TimeoutError):
                await self._started.close(0)

    async def _vanish(self) -> None:
        try:
            await self._leave()
        finally:
            self.calls.thread.stop()
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
        one.calls.thread.join(EXIT_SECONDS)
