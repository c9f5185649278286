"""Calls that block, each in a thread of its own for which nobody waits at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.tiers.remote.client import StoreError

__all__ = ["in_thread", "to_the_end"]

_T = TypeVar("_T")


def in_thread(call: Callable[[], _T], nice: int = 0) -> asyncio.Future[_T]:
    """What a blocking call returns; what it raises is a `StoreError`.

    Nobody waits for its thread, not even the interpreter at its end.

    Args:
        nice: how much its thread gives way to others of the machine, 0 to 19.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_T] = loop.create_future()
    # Who asked may not wait any more: what it raises then nobody asks for.
    ended.add_done_callback(lambda _: ended.cancelled() or ended.exception())

    def work() -> None:
        tell: Callable[[], None]
        if nice:
            # Of Linux a thread has a priority of its own; elsewhere this may be refused.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
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


async def to_the_end(running: asyncio.Future[_T]) -> _T:
    """What a call in a thread returns, cancelled or not: it uses memory until it has ended."""
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
