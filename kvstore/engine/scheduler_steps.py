"""Drives a core by the calls of a scheduler, over an engine thread.

A step of the core begins with the first call that needs one. While the server is idle
and takes no steps, upkeep goes on from the engine's thread, in turns with the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from kvstore.assembly import Assembly
from kvstore.engine.engine import EngineThread
from kvstore.types import about

__all__ = ["Stepper"]

logger = logging.getLogger("kvstore")

IDLE_STEP_SECONDS = 0.0005
"""A step shorter than this had nothing to do but wait."""

WAIT_SECONDS = 0.001
"""How long an idle step waits for the next completion, instead of spinning."""

IDLE_SECONDS = 0.25
"""Without a step for so long, a server is idle."""

UPKEEP_SECONDS = 0.02
"""How often upkeep goes on while the server is idle."""


class Stepper:
    """See the module's text.

    All methods but `close` are called by one thread at a time, while it holds `turn`
    or, between `begin` and `end`, has seen that the step has `begun`.

    Attributes:
        turn: held by whoever uses the core.
        begun: a step has begun and not ended.
        began: when it has.
        ends_told: the scheduler says where its steps end.
        on_begin: called with the time when a step has begun.
    """

    def __init__(self, assembly: Assembly, *, steady: bool) -> None:
        """
        Args:
            steady: the scheduler says where its steps end. While it is idle, upkeep goes on with
                copies to tiers, compaction, and what is fetched unasked.
        """
        self._assembly = assembly
        self.core = assembly.core
        self.engine = _engine_over(assembly)
        self._spans = assembly.spans
        self.turn = threading.RLock()
        self.begun = False
        self._steady = self.ends_told = steady
        self.began = self._ended = 0.0
        self.on_begin: Callable[[float], None] = lambda now: None
        self._closed = False
        self._compacts = any(tier.compaction_rate for tier in self.core.tiers)
        if self.core.tiers or not steady:
            self.engine.repeat(weakref.WeakMethod(self._go_on_while_idle))

    def begin(self) -> None:
        """Begin a step."""
        self.begun = True
        self.began = time.monotonic()
        self._poll(self.began)

    def hand_over(self) -> None:
        """Start what is due; the step goes on."""
        self.engine.submit(self.core.flush(time.monotonic()))
        if self._spans is not None and (taken := self.core.spans.take()):
            self.engine.tell(self._spans.write, taken)

    def absorb(self) -> None:
        """Take in what has ended; the step goes on."""
        self.core.absorb(self.engine.take())

    def renew(self) -> None:
        """End the step and begin another."""
        self.hand_over()
        self.begin()

    def end(self) -> None:
        """End the step, where the scheduler says so.

        A step that had nothing to do but wait waits for the next completion, for a moment.
        """
        self.ends_told = True
        if not self.begun:
            self.begin()
        self.hand_over()
        self.begun = False
        now = time.monotonic()
        idle = now - self._ended < IDLE_STEP_SECONDS
        core = self.core
        if idle and core.in_flight and (core.waiting or core.unsaved) and not core.behind:
            self.engine.wait(WAIT_SECONDS)
            now = time.monotonic()
        self._ended = now

    def close(self, seconds: float) -> bool:
        """Finish copies to the tiers, within `seconds`, and close them. Never raises.

        Returns:
            Whether nobody uses host memory any more.
        """
        self._closed = True
        end = time.monotonic() + seconds
        try:
            self._save(end)
        except Exception:
            logger.exception(
                "chunks that were not copied yet are lost", extra=about("store.unsaved")
            )
        try:
            left = max(0.1, end - time.monotonic())
            return self.engine.close(self._assembly.recency(), left)
        except Exception:
            # The memory stays: a tier may still use it.
            logger.exception("the tiers could not be closed", extra=about("tier.not_closed"))
            return False
        finally:
            logger.info(
                "kvstore: closed, %d chunks not copied",
                self.core.unsaved,
                extra=about("store.closed", unsaved=self.core.unsaved),
            )

    def _save(self, end: float) -> None:
        """Copy what is on its way to the tiers, until `end` at most."""
        self.core.save()
        while self.core.unsaved and time.monotonic() < end:
            self.begin()
            self.hand_over()
            if not self.core.behind:
                self.engine.wait(0.01)

    def _poll(self, now: float) -> None:
        self.core.poll(now, self.engine.take())
        self.on_begin(now)

    def _go_on_while_idle(self) -> float:
        """Make a step of upkeep if there was none for a while; returns seconds to the next look."""
        if not self.turn.acquire(blocking=False):
            return IDLE_SECONDS
        try:
            now = time.monotonic()
            if self._closed or self._stepping(now):
                return IDLE_SECONDS
            self._poll(now)
            self.hand_over()
            return UPKEEP_SECONDS if self.core.in_flight or self.core.behind else IDLE_SECONDS
        finally:
            self.turn.release()

    def _stepping(self, now: float) -> bool:
        """Whether the server is at work, or will be if there is something to do."""
        core = self.core
        if self._steady and not (self._compacts or core.prefetches or core.unsaved):
            return True
        if self.begun:
            return self.ends_told or now - self.began < IDLE_SECONDS
        return now - self._ended < IDLE_SECONDS


def _engine_over(assembly: Assembly) -> EngineThread:
    try:
        return EngineThread(assembly.tiers, assembly.beside)
    except BaseException:
        for tier in assembly.tiers:
            tier.abandon()
        raise
