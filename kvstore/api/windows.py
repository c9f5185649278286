"""Windows: lease a prefix that is larger than host memory, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.api.lease import Chunks, Lease
from kvstore.api.portal import Handover
from kvstore.errors import KVStoreError, LeaseEndedError

if TYPE_CHECKING:
    from kvstore.api.store import Store

__all__ = ["SyncWindows", "Windows"]


class Windows:
    """The result of `Store.windows`: for ``async with``, and in the block for ``async for``."""

    def __init__(self, store: Store, keys: Sequence[bytes], size: int, request: str | None) -> None:
        """
        Raises:
            KVStoreError: if `size` is no number of chunks.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise KVStoreError(f"a window of {size!r} chunks: must be a whole number, 1 at least")
        self._store = store
        self._keys = keys
        self._size = size
        self._next = 0
        self._name = f"windows-{uuid.uuid4()}" if request is None else request
        self._named = request is not None
        """Whether the request is the caller's, who ends it."""
        self._before = store.resets
        self._lease: Lease | None = None

    async def __aenter__(self) -> Windows:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            await self._give_back()
        finally:
            # What a child of a fork is told hides no other exception.
            with contextlib.suppress(*(() if kind is None else (KVStoreError,))):
                if not self._named:
                    self._store.release(self._name)

    def __aiter__(self) -> Windows:
        return self

    async def __anext__(self) -> Chunks:
        chunks = await self.following()
        if chunks is None:
            raise StopAsyncIteration
        return chunks

    async def following(self) -> Chunks | None:
        """Lease the next window; None at the end.

        Raises:
            LeaseEndedError: if views of earlier leases keep all rows.
        """
        await self._give_back()
        # Rows whose last view has gone meanwhile are given back by calls that wait on the loop.
        await asyncio.sleep(0)
        stats = self._store.stats()
        rows = max(0, stats.rows - stats.watched_rows)
        keys = self._following()
        if not keys:
            return None
        if not rows:
            raise LeaseEndedError(
                "views of chunks whose leases have ended keep all rows of host memory; drop "
                "them before asking for the next window, or make windows smaller"
            )
        lease = self._store.get(keys[:rows], self._name)
        chunks = await lease.__aenter__()
        self._lease = lease
        if not chunks or self._store.resets != self._before:
            # The next is missing or has no room, or what comes after a reset is no part of this.
            self._next = len(self._keys)
            return None
        self._next += len(chunks)
        if ahead := self._following()[: rows - len(chunks)]:
            # On its way while the caller works on this one.
            self._store.lookup_prefix(ahead, self._name)
        return chunks

    def _following(self) -> Sequence[bytes]:
        """The keys of the next window; none at the end."""
        return self._keys[self._next : self._next + self._size]

    def drop(self) -> None:
        """End the window of a store that has ended. From any thread."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop()

    def send_back(self) -> None:
        """End the window soon. From any thread."""
        if (lease := self._lease) is not None:
            lease.send_back()

    async def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__()


class SyncWindows:
    """The result of `SyncStore.windows`: for ``with``, and in the block for ``for``."""

    def __init__(self, calls: Handover, windows: Windows, face: object) -> None:
        """
        Args:
            face: is not forgotten while this is in use: the store would be closed.
        """
        self._calls = calls
        self._windows = windows
        self._face = face

    def __enter__(self) -> SyncWindows:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._calls.wait(lambda: self._windows.__aexit__(kind))
        except KVStoreError:
            if self._calls.ended:
                self._windows.drop()
            if kind is None:
                raise
            # What a store that has ended, or a child of a fork, says hides no other exception.
        except BaseException:
            # Interrupted.
            self._windows.send_back()
            raise

    def __iter__(self) -> SyncWindows:
        return self

    def __next__(self) -> Chunks:
        chunks = self._calls.wait(self._windows.following)
        if chunks is None:
            raise StopIteration
        return chunks
