"""Ending an engine, however often its loop cancels whoever waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from kvstore.concurrency import DETACH_SECONDS
from kvstore.engine.engine import Engine
from kvstore.types import about

__all__ = ["end_engine"]

logger = logging.getLogger("kvstore")


async def end_engine(
    engine: Engine, recency: Sequence[Sequence[tuple[bytes, int]]], seconds: float
) -> bool:
    """Close the engine and its tiers, or leave them behind after `seconds`.

    A loop that ends cancels every task once, this one too; it goes on all the same.

    Args:
        recency: see `Engine.close`.

    Returns:
        Whether everything has ended. If not, rows may still be written to: the memory must stay.
    """
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + seconds
    closing = loop.create_task(engine.close(recency))
    while not await _ended(closing, deadline - time.monotonic()) or closing.cancelled():
        if not closing.done():
            logger.warning(
                "a tier does not answer and is left behind", extra=about("tier.left_behind")
            )
            await _ended(loop.create_task(engine.detach()), 2 * DETACH_SECONDS)
            await _ended(closing, DETACH_SECONDS)
            return False
        closing = loop.create_task(engine.close(recency))
    return True


async def _ended(task: asyncio.Future[None], seconds: float) -> bool:
    """Wait at most `seconds` for `task` to end, cancelled or not; returns whether it has."""
    end = time.monotonic() + seconds
    while not task.done() and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=left)
    return task.done()
