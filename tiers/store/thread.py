"""Calls that block, each in a thread of its own for which nobody waits at the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tiers.store.client import StoreError

__all__ = ["in_thread", "to_the_end"]

_T = TypeVar("_T")


def in_thread(call: Callable[[], _T]) -> asyncio.Future[_T]:
    """What a blocking call returns; what it raises is a `StoreError`.

    Nobody waits for its thread, not even the interpreter at its end.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_T] = loop.create_future()

    def work() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(ended.set_result, call())
        except StoreError as error:
            tell = partial(ended.set_exception, error)
        except Exception as error:
            tell = partial(ended.set_exception, StoreError(repr(error)))
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if ended.done() else tell())

    threading.Thread(target=work, name="kvstore-client", daemon=True).start()
    return ended


async def to_the_end(call: Callable[[], _T]) -> _T:
    """What a blocking call returns, cancelled or not: it uses memory until it has ended."""
    running = in_thread(call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            # Of a task everybody could be cancelled; a future only its thread ends.
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # What it raised, if it did, nobody asks for.
        running.exception()
        raise cancelled
    return running.result()
