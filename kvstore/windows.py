"""A prefix that is larger than host memory, leased a window at a time."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.leases import Chunks, Lease
    from kvstore.store import Store

__all__ = ["Windows"]


class Windows:
    """What `Store.windows` returns: for ``async with``, and in the block for ``async for``."""

    def __init__(self, store: Store, keys: Sequence[bytes], size: int) -> None:
        """
        Raises:
            KVStoreError: if `size` is no number of chunks.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise KVStoreError(f"a window of {size!r} chunks: must be a whole number, 1 at least")
        self._store = store
        self._keys = keys
        self._size = size
        self._name = f"windows-{uuid.uuid4()}"
        self._next = 0
        self._lease: Lease | None = None

    async def __aenter__(self) -> Windows:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._give_back(kind, error, trace)
        finally:
            self._store.release(self._name)

    async def _give_back(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(kind, error, trace)

    def __aiter__(self) -> Windows:
        return self

    async def __anext__(self) -> Chunks:
        await self._give_back()
        begin, end = self._next, min(self._next + self._size, len(self._keys))
        if begin == end:
            raise StopAsyncIteration
        lease = self._store.get(self._keys[begin:end], self._name)
        chunks = await lease.__aenter__()
        self._lease = lease
        if not chunks:
            self._next = len(self._keys)
            raise StopAsyncIteration
        # The prefix ends where something is missing.
        self._next = end if len(chunks) == end - begin else len(self._keys)
        if self._next < len(self._keys):
            # On its way while the caller works on this one.
            self._store.lookup_prefix(self._keys[end : end + self._size], self._name)
        return chunks
