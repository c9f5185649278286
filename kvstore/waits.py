"""Waits that end in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(seconds: float | None, call: str, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; None as `seconds` waits for it forever.

    Raises:
        TimeoutError: names `call` and `seconds`. `work` was cancelled and has ended.
    """
    if seconds is None:
        return await work
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"{call} took longer than {seconds:g} s") from None
