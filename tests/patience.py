"""Waiting for what comes true sooner or later, on whatever machine.

How long that takes says nothing but how slow and how busy the machine is. So there is one bound
for all of it, far above what any machine needs; it costs nothing where the thing comes true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE", "TOO_LONG", "answered", "answered_async", "until", "until_async"]

PATIENCE = 60.0
"""Seconds after which a thing is taken for one that never happens.

Below the time that a test may take (`timeout` in pyproject.toml), so that a test which waits in
vain fails with a message.
"""

TOO_LONG = 3 * PATIENCE
"""A deadline that a test shows not to be waited for: what ends within PATIENCE did not."""

T = TypeVar("T")

Told = str | Callable[[], object]
"""What to say when it never comes true: words, or a function that is asked then."""


def until(true: Callable[[], T], told: Told = "it never came true", pause: float = 0.001) -> T:
    """Wait until `true()` is true, and return what it returned.

    Args:
        pause: seconds between two looks.
    """
    return answered(lambda: true() or None, told, pause)


async def until_async(
    true: Callable[[], T], told: Told = "it never came true", pause: float = 0.001
) -> T:
    """`until` for coroutines: the loop runs on."""
    return await answered_async(lambda: true() or None, told, pause)


def answered(
    ask: Callable[[], T | None], told: Told = "it is never answered", pause: float = 0.001
) -> T:
    """Ask until the answer is not None, and return it; it may be 0 or False."""
    end = time.monotonic() + PATIENCE
    while (answer := ask()) is None:
        assert time.monotonic() < end, _words(told)
        time.sleep(pause)
    return answer


async def answered_async(
    ask: Callable[[], T | None], told: Told = "it is never answered", pause: float = 0.001
) -> T:
    """`answered` for coroutines: the loop runs on."""
    end = time.monotonic() + PATIENCE
    while (answer := ask()) is None:
        assert time.monotonic() < end, _words(told)
        await asyncio.sleep(pause)
    return answer


def _words(told: Told) -> str:
    return f"{told if isinstance(told, str) else told()} (waited for {PATIENCE:g} s)"
