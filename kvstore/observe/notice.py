"""Publish which chunks this process has pinned.

While anything is pinned, a file in each lane of the process says how much, so that `kvstore
inspect` can show it: see `kvstore.tiers.disk.retained`. If the file system hangs or is full, only
this file is affected.
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
"""Seconds between two checks of what is pinned."""

END_SECONDS = 1.0
"""How long to wait at the end for the files to be removed."""

logger = logging.getLogger("kvstore")


class Notice:
    """Keeps the files up to date while `run` runs, and removes them at the end.

    Args:
        lanes: the folder of each lane, with the core's view of its tier.
    """

    def __init__(self, core: Core, lanes: Sequence[tuple[Path, TierView]]) -> None:
        self._pins = core.pins
        self._lanes = lanes
        self._threads = Daemons("kvstore-notice")
        self._stopped = asyncio.Event()
        # What was written last, by lane, and the call under way.
        self._written: dict[Path, Retained] = {}
        self._call: asyncio.Future[None] | None = None
        self._warned = False

    async def run(self) -> None:
        """Check what is pinned every `LOOK_SECONDS`, until `stop`."""
        # A killed process may have left its file, and may have had our process id.
        self._begin([partial(forget_retained, lane) for lane, _ in self._lanes])
        while not self._stopped.is_set():
            stopped = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait({stopped}, timeout=LOOK_SECONDS)
            stopped.cancel()
            if self._call is None or self._call.done():
                self._begin(self._calls())
        if self._written:
            if self._call is not None:
                await asyncio.wait({self._call}, timeout=END_SECONDS)
            if self._call is None or self._call.done():
                self._begin([partial(forget_retained, lane) for lane in self._written])
        if self._call is not None:
            await asyncio.wait({self._call}, timeout=END_SECONDS)

    def stop(self) -> None:
        """Let `run` end. Called on its loop."""
        self._stopped.set()

    def _calls(self) -> list[Callable[[], None]]:
        """Return the calls that bring the files up to date.

        The core may be at work in another thread, so only counts are read.
        """
        keys, calls = len(self._pins), list[Callable[[], None]]()
        now = time.time_ns() // 1_000_000
        for lane, tier in self._lanes:
            before = self._written.get(lane)
            if not keys:
                if self._written.pop(lane, None) is not None:
                    calls.append(partial(forget_retained, lane))
                continue
            pinned = len(tier.index.pinned)
            retained = Retained(os.getpid(), now, pinned, self._pins.rows, keys)
            if before is None or retained.differs(before) or retained.is_due(before):
                self._written[lane] = retained
                calls.append(partial(write_retained, lane, retained))
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
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "cannot write what is pinned for kvstore inspect: %s",
                        error.strerror,
                        extra=about("notice.failed", error=error.strerror),
                    )
