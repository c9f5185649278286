"""Drive a core by the calls of a scheduler, over an engine thread.

A step of the core begins with the first call that needs one. While the server is idle and takes no
steps, upkeep goes on in the engine's thread. A lock, the `turn`, keeps both from using the core at
once: a call of the scheduler waits for a step of upkeep, a few microseconds; upkeep never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.assembly import Assembly
from kvstore.core import Core
from kvstore.core.residency.index import ColdestFirst
from kvstore.core.tier_only import Jobs
from kvstore.engine.engine import EngineThread
from kvstore.errors import KVStoreError
from kvstore.observe.logs import warn_of_uncleared
from kvstore.types import about

__all__ = [
    "IDLE_SECONDS",
    "IDLE_STEP_SECONDS",
    "UPKEEP_SECONDS",
    "WAIT_SECONDS",
    "Stepper",
    "at_once",
    "close_in",
    "in_turns",
]

logger = logging.getLogger("kvstore")


IDLE_STEP_SECONDS = 0.0005
"""A step shorter than this had nothing to do but wait."""

WAIT_SECONDS = 0.001
"""How long an idle step waits for the next completion, instead of spinning."""

CLOSE_SECONDS = 2.0
"""At most so much of the time for the end, and at most a quarter, is kept for closing the tiers."""

IDLE_SECONDS = 0.25
"""A server that has made no step for this long is idle."""

UPKEEP_SECONDS = 0.02
"""How often upkeep makes a step while the server is idle."""


ACT_SECONDS = 0.002
"""How often `act` looks whether the server is in a step."""

_T = TypeVar("_T")


class Stepper:
    """Drives a core for a scheduler: see the module's text.

    All methods but `close` are called by one thread at a time, while it holds `turn`
    or, between `begin` and `end`, has seen that the step has `begun`.

    Attributes:
        turn: the lock that a thread holds while it uses the core.
        begun: a step has begun and not ended.
        began: when the last step began.
        ends_told: the scheduler says where its steps end.
        on_begin: called with the time when a step has begun.
    """

    def __init__(self, assembly: Assembly, *, steady: bool) -> None:
        """
        Args:
            steady: the scheduler says where its steps end. While it is idle, upkeep continues
                copies to tiers, compaction and prefetches.
        """
        self._assembly = assembly
        self.core = assembly.core
        try:
            self.engine = EngineThread(assembly.tiers, assembly.beside)
        except BaseException:
            assembly.abandon()
            raise
        self._spans = assembly.spans
        self.turn = threading.RLock()
        self.begun = False
        self._steady = self.ends_told = steady
        self.began = self._ended = 0.0
        self.on_begin: Callable[[float], None] = lambda now: None
        self._closed = False
        self._calls: deque[tuple[Callable[[Core, float], Any], Future[Any]]] = deque()
        if self.core.tiers or not steady or assembly.control is not None:
            self.engine.repeat(weakref.WeakMethod(self._go_on_while_idle))

    def begin(self) -> None:
        """Begin a step."""
        self.begun = True
        self.began = time.monotonic()
        self._poll(self.began)
        if self._calls:
            self._make_call(self.began)

    def hand_over(self) -> None:
        """Start the moves that are due; the step continues."""
        self.engine.submit(self.core.flush(time.monotonic()))
        if self._spans is not None and (taken := self.core.take_spans()):
            self.engine.tell(self._spans.write, taken)

    def absorb(self) -> None:
        """Take in moves that have ended; the step continues."""
        self.core.absorb(self.engine.take())

    async def act(self, call: Callable[[Core, float], _T]) -> _T:
        """Make a call on the core, with the time, between two steps of the server.

        It is made at the begin of the server's next step, or now if the server is not in a step.
        Called on the engine's loop, where it never blocks.

        Raises:
            KVStoreError: if the store is closed.
        """
        answering: Future[_T] = Future()
        answer = asyncio.wrap_future(answering)
        self._calls.append((call, answering))
        try:
            while not answer.done():
                if self._closed:
                    raise KVStoreError("the store is closed")
                self._act_between_steps()
                await asyncio.wait({answer}, timeout=ACT_SECONDS)
        except BaseException:
            answer.cancel()
            raise
        return answer.result()

    def _act_between_steps(self) -> None:
        with at_once(self.turn) as mine:
            now = time.monotonic()
            lasts = self.ends_told or now - self.began < IDLE_SECONDS
            if mine and self._calls and not self._closed and not (self.begun and lasts):
                self._poll(now)
                self._make_call(now)
                self.hand_over()

    def _make_call(self, now: float) -> None:
        call, answer = self._calls.popleft()
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(call(self.core, now))
        except Exception as error:
            answer.set_exception(error)

    def renew(self) -> None:
        """End the step and begin another."""
        self.hand_over()
        self.begin()

    def end(self, computes: bool | None = None) -> None:
        """End the step where the scheduler says so.

        A step that had nothing else to do waits briefly for the next completion.

        Args:
            computes: whether the server computes prompts until the next step; None: not known.
        """
        self.ends_told = True
        if not self.begun:
            self.begin()
        if computes is not None:
            self.core.server_computes(computes, time.monotonic())
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
            Whether host memory is not in use any more.
        """
        self._closed = True
        return close_in(seconds, self.core, self._save, self._assembly.recency, self.engine)

    def _save(self, end: float) -> None:
        """Copy chunks that wait for their tiers, and clear these after a reset, until `end`."""
        # Clearing that fails meanwhile is tried once more.
        for _ in range(2):
            self.core.save()
            while self._is_unsaved() and time.monotonic() < end:
                self.begin()
                self.hand_over()
                if not self.core.behind:
                    self.engine.wait(0.01)
        warn_of_uncleared(self.core.uncleared)

    def _is_unsaved(self) -> bool:
        """Whether something is still to be copied to tiers, or to be erased on them."""
        return bool(self.core.unsaved) or self.core.clearing or self.core.erasing

    def _poll(self, now: float) -> None:
        self.core.poll(now, self.engine.take())
        self.on_begin(now)

    def _go_on_while_idle(self) -> float:
        """Make a step of upkeep if there was none for a while; returns seconds to the next look."""
        with at_once(self.turn) as mine:
            now = time.monotonic()
            if not mine or self._closed or self._stepping(now):
                return IDLE_SECONDS
            self._poll(now)
            self.hand_over()
            return UPKEEP_SECONDS if self.core.in_flight or self.core.behind else IDLE_SECONDS

    def _stepping(self, now: float) -> bool:
        """Whether the server is at work, or will be if there is something to do."""
        core = self.core
        at_work = core.needs_steps or core.prefetching or core.unsaved or core.unrecorded
        # Chunks may have to leave host memory, as their keys were forgotten.
        at_work = at_work or core.behind or core.removing or self.engine.ended
        if self._steady and not at_work:
            return True
        if self.begun:
            return self.ends_told or now - self.began < IDLE_SECONDS
        return now - self._ended < IDLE_SECONDS


def close_in(
    seconds: float,
    core: Core | Jobs,
    save: Callable[[float], None],
    recency: Callable[[], Sequence[ColdestFirst]],
    engine: EngineThread,
) -> bool:
    """Finish copies to the tiers, within `seconds`, and close them. Never raises.

    Args:
        save: copies what is not copied yet, until the time that it is given. The rest of the
            seconds is for moves under way to end, and for closing the tiers.

    Returns:
        Whether host memory is not in use any more.
    """
    begun = time.monotonic()
    try:
        save(begun + seconds - min(CLOSE_SECONDS, seconds / 4))
    except Exception:
        logger.exception("chunks that were not copied yet are lost", extra=about("store.unsaved"))
    try:
        return engine.close(recency(), max(0.1, begun + seconds - time.monotonic()))
    except Exception:
        # The memory stays: a tier may still use it.
        logger.exception("the tiers could not be closed", extra=about("tier.not_closed"))
        return False
    finally:
        logger.info(
            "kvstore: closed, %d chunks not copied",
            core.unsaved,
            extra=about("store.closed", unsaved=core.unsaved),
        )


@contextlib.contextmanager
def at_once(lock: threading.RLock) -> Iterator[bool]:
    """Hold a lock if it is free; tells whether it was."""
    mine = lock.acquire(blocking=False)
    try:
        yield mine
    finally:
        if mine:
            lock.release()


_C = TypeVar("_C", bound=type)


def in_turns(but: Collection[str]) -> Callable[[_C], _C]:
    """Make a class's own public methods, `but` those, hold the lock in its `_turn`."""

    def decorate(cls: _C) -> _C:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_") and name not in but:
                setattr(cls, name, _in_turn(method))
        return cls

    return decorate


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def taking_turns(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return taking_turns
