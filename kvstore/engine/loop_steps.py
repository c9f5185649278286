"""Drive a core on an asyncio loop: begin and end its steps, and wake waiting tasks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.concurrency import Home
from kvstore.core import Core
from kvstore.engine.engine import Beside, Engine
from kvstore.errors import KVStoreError
from kvstore.tiers import Tier

if TYPE_CHECKING:
    from kvstore.observe.tracing import SpanWriter

__all__ = ["Driver"]

RECHECK_SECONDS = 0.02
"""How often a wait looks at its deadline when nothing arrives; each of many up to five times as
seldom."""

MANY_WAITING = 64
"""Waiting tasks from which on the lookups of one turn of the loop share the end of a step: it
costs more the more of them there are."""

STUCK = (
    "what was under way was cancelled together with other tasks of the loop, and is not kept: "
    "close the store"
)

FRESH_SECONDS = 0.001
"""How long after a step another one would find nothing new, unless something has ended."""


class Driver:
    """Drives a core: see the module's text. Belongs to the loop on which it is created.

    Attributes:
        closing: nothing is stored any more, as the end does not wait for it.
        closed: nothing is begun any more.
        on_step: called with the time when a step has begun.
        lent: whether chunks are leased, so that a wait may be for the end of that.
    """

    def __init__(
        self,
        core: Core,
        tiers: Sequence[Tier],
        home: Home,
        beside: Sequence[Beside] = (),
        spans: SpanWriter | None = None,
    ) -> None:
        self._core = core
        self._spans = spans
        self._home = home
        self.engine = Engine(tiers, self._ended, beside)
        self.engine.begin()
        self._waiters: dict[asyncio.Future[bool], str | None] = {}
        """The waiting tasks' futures, each with the deferred request that it waits for, if any."""
        self.closing = self.closed = False
        self._going_on = False
        self._ending: asyncio.Handle | None = None
        self._stepped = self._pumped = -math.inf
        self.on_step: Callable[[float], None] = lambda now: None
        self.lent: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Refuse a call from elsewhere, or after the end.

        Raises:
            KVStoreError: with the reason.
        """
        self._home.check()
        if self.closed:
            raise KVStoreError("the store is closed")

    def check_storing(self) -> None:
        """Refuse to store, where `check` would refuse or a close has begun.

        Raises:
            KVStoreError: with the reason.
        """
        self.check()
        if self.closing:
            raise KVStoreError("the store is being closed")

    @property
    def fresh(self) -> bool:
        """Whether the last step is so recent that another would find nothing new.

        Waiting tasks are woken together: one step is enough for all of them.
        """
        return not self.engine.ended and time.monotonic() - self._stepped < FRESH_SECONDS

    def begin(self) -> float:
        """Begin a step; returns the time.

        Raises:
            KVStoreError: as `check`.
        """
        self.check()
        return self._step()

    def flush(self) -> None:
        """End the step: start the moves that are due."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self.engine.start(self._core.flush(time.monotonic()))
        if self._spans is not None:
            self._spans.write(self._core.take_spans())
        if self._core.behind:
            # The rest of this step's work is done as soon as other tasks had their turn.
            self._pump_soon()

    def flush_soon(self) -> None:
        """End the step: at once, or where many wait after others have begun steps, too."""
        if len(self._waiters) < MANY_WAITING:
            self.flush()
        elif self._ending is None:
            self._ending = self._home.loop.call_soon(self._end_step)

    def _end_step(self) -> None:
        self._ending = None
        if not self.closed:
            self.flush()

    def freed(self) -> None:
        """Make a step soon if rows that have become free could be used."""
        if self._waiters or self._core.wants_room:
            self._pump_soon()

    def _ended(self) -> None:
        """Make a step after moves that have ended: one for all that end in a turn of the loop."""
        if self.closed:
            self.pump()
        else:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            self._home.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        if not self.closed:
            self.pump()

    def pump(self) -> None:
        """Take in completions, start the moves that are due, and wake waiting tasks."""
        self._step()
        if not self.closed:
            self.flush()
        self.wake()
        self._pumped = time.monotonic()

    def wake(self) -> None:
        """Wake waiting tasks, except those whose requests are still deferred."""
        deferred = self._core.is_waiting
        left: dict[asyncio.Future[bool], str | None] = {}
        for waiter, request in self._waiters.items():
            if request is not None and not self.closed and deferred(request):
                left[waiter] = request
            else:
                _answer(waiter, True)
        self._waiters = left

    async def answered(self, request: str) -> None:
        """Wait until a request is no longer deferred."""
        if not self._core.is_waiting(request):
            # It was answered in the same step in which it asked.
            await asyncio.sleep(0)
        while self._core.is_waiting(request):
            await self.moved(request)
            self._core.renew(request)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done` is true.

        Raises:
            KVStoreError: if the store is closed meanwhile, or what is under way was cancelled.
        """
        while not done():
            self.check()
            if self.engine.stuck and not self._core.behind and not self.lent():
                raise KVStoreError(STUCK)
            await self.moved()

    async def moved(self, request: str | None = None) -> None:
        """Wait until something has moved, or for a moment.

        Args:
            request: a deferred request; if given, only its answer counts.
        """
        waiter: asyncio.Future[bool] = self._home.loop.create_future()
        self._waiters[waiter] = request
        # Not `asyncio.wait_for`: in Python 3.11 it loses a cancellation that comes just after
        # the waiter was woken.
        pause = RECHECK_SECONDS * min(5.0, max(1.0, len(self._waiters) / MANY_WAITING))
        timer = self._home.loop.call_later(pause, _answer, waiter, False)
        try:
            woken = await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)
        if not woken:
            self.check()
            # One of many that wait is enough: a step of all of them may take longer than the pause.
            quiet = time.monotonic() - self._pumped >= RECHECK_SECONDS / 2
            if quiet or self.engine.ended:
                self.pump()

    def _step(self) -> float:
        now = self._stepped = time.monotonic()
        self._core.poll(now, self.engine.take())
        self.on_step(now)
        return now


def _answer(waiter: asyncio.Future[bool], woken: bool) -> None:
    if not waiter.done():
        waiter.set_result(woken)
