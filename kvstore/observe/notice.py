"""Publish which chunks this process has pinned.

The record lies beside each lane of the process while anything is pinned, so that `kvstore inspect`
can show it; see `kvstore.tiers.disk.retained`. A file system that hangs or is full costs the
record alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.concurrency import Daemons
from kvstore.core import Core
from kvstore.core.residency.base import TierView
from kvstore.tiers.disk.retained import Retained, forget_retained, write_retained
from kvstore.types import about

__all__ = ["Notice"]

LOOK_SECONDS = 1.0
"""How often it is looked whether other chunks are retained."""

END_SECONDS = 1.0
"""How long the file system gets to remove the word at the end."""

logger = logging.getLogger("kvstore")


class Notice:
    """Keeps the word up to date while `run` runs, and removes it at the end.

    Args:
        lanes: the folder of each lane, with what the core knows of its tier.
    """

    def __init__(self, core: Core, lanes: Sequence[tuple[Path, TierView]]) -> None:
        self._pins = core.pins
        self._lanes = lanes
        self._threads = Daemons("kvstore-notice")
        self._stopped = asyncio.Event()
        # What was said last, by lane, and the call that has not ended.
        self._said: dict[Path, Retained] = {}
        self._call: asyncio.Future[None] | None = None
        self._complained = False

    async def run(self) -> None:
        """Look again and again, until `stop`."""
        # One that was killed may have left its word, and its process id may be ours now.
        self._begin([partial(forget_retained, lane) for lane, _ in self._lanes])
        while not self._stopped.is_set():
            stopped = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait({stopped}, timeout=LOOK_SECONDS)
            stopped.cancel()
            if self._call is None or self._call.done():
                self._begin(self._calls())
        if self._said:
            if self._call is not None:
                await asyncio.wait({self._call}, timeout=END_SECONDS)
            if self._call is None or self._call.done():
                self._begin([partial(forget_retained, lane) for lane in self._said])
        if self._call is not None:
            await asyncio.wait({self._call}, timeout=END_SECONDS)

    def stop(self) -> None:
        """Let `run` end. Called on its loop."""
        self._stopped.set()

    def _calls(self) -> list[Callable[[], None]]:
        """What is to be done on disk. The core may be at work in another thread: only numbers
        are read.
        """
        keys, calls = len(self._pins), list[Callable[[], None]]()
        now = time.time_ns() // 1_000_000
        for lane, tier in self._lanes:
            before = self._said.get(lane)
            if not keys:
                if self._said.pop(lane, None) is not None:
                    calls.append(partial(forget_retained, lane))
                continue
            pinned = len(tier.index.pinned)
            told = Retained(os.getpid(), now, pinned, self._pins.rows, keys)
            if before is None or told.differs(before) or told.is_due(before):
                self._said[lane] = told
                calls.append(partial(write_retained, lane, told))
        return calls

    def _begin(self, calls: Sequence[Callable[[], None]]) -> None:
        if calls:
            loop = asyncio.get_running_loop()
            self._call = loop.run_in_executor(self._threads, self._make, calls)

    def _make(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    logger.warning(
                        "kvstore inspect cannot be told what is retained: %s",
                        error.strerror,
                        extra=about("notice.failed", error=error.strerror),
                    )
