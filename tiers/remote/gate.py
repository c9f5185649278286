"""Gate: limit the calls to a store that are under way at once."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator

from kvstore.tiers.remote.client import StoreError

__all__ = ["Gate"]


class Gate:
    """A limit for the calls of one kind, and for the bytes that they move. Used on one loop.

    Args:
        calls: most calls under way at once.
        room: most bytes that these move; a single call may move more.
    """

    def __init__(self, calls: int, room: int) -> None:
        self._calls, self._room = calls, room
        self._used = self._under_way = 0
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, order: int, size: int) -> AsyncIterator[None]:
        """Wait until a call that moves `size` bytes may be made; the call ends with the block.

        Args:
            order: the lowest goes first; of equals, the first to arrive.

        Raises:
            StoreError: if `fail` was called meanwhile.
        """
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._arrivals), size, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled() and admitted.exception() is None:
                self._under_way -= 1
                self._used -= size
            self._admit()

    def fail(self, error: str) -> None:
        """Fail all waiting calls, because the store does not answer the calls before them."""
        waiting, self._waiting = self._waiting, []
        for *_, admitted in waiting:
            if not admitted.done():
                admitted.set_exception(StoreError(error))

    def _admit(self) -> None:
        while self._waiting and self._under_way < self._calls:
            *_, size, admitted = self._waiting[0]
            if admitted.done():
                # The waiting call was cancelled.
                heapq.heappop(self._waiting)
                continue
            if self._under_way and self._used + size > self._room:
                return
            heapq.heappop(self._waiting)
            self._under_way += 1
            self._used += size
            admitted.set_result(None)
