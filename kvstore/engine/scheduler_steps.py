"""Drive a core by the calls of a scheduler, over an engine thread.

A step of the core begins with the first call that needs one. While the server is idle and takes no
steps, upkeep goes on in the engine's thread. A lock, the `turn`, keeps both from using the core at
once: a call of the scheduler waits for a step of upkeep, a few microseconds; upkeep never waits.

`JobRunner` does the same for a server that has host memory of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.assembly import Assembly, open_tiers, recency_of, spans_of
from kvstore.config import Config
from kvstore.core import TierStats
from kvstore.core.jobs import JobEnd
from kvstore.core.tier_only import Jobs
from kvstore.engine.engine import EngineThread
from kvstore.observe.logs import warn_with
from kvstore.tiers import Tier
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.lent import LentRegion
from kvstore.types import about

__all__ = ["JobRunner", "Stepper", "in_turns"]

logger = logging.getLogger("kvstore")


IDLE_STEP_SECONDS = 0.0005
"""A step shorter than this had nothing to do but wait."""

WAIT_SECONDS = 0.001
"""How long an idle step waits for the next completion, instead of spinning."""

IDLE_SECONDS = 0.25
"""A server that has made no step for this long is idle."""

UPKEEP_SECONDS = 0.02
"""How often upkeep makes a step while the server is idle."""


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
        """Start the moves that are due; the step continues."""
        self.engine.submit(self.core.flush(time.monotonic()))
        if self._spans is not None and (taken := self.core.take_spans()):
            self.engine.tell(self._spans.write, taken)

    def absorb(self) -> None:
        """Take in moves that have ended; the step continues."""
        self.core.absorb(self.engine.take())

    def renew(self) -> None:
        """End the step and begin another."""
        self.hand_over()
        self.begin()

    def end(self) -> None:
        """End the step where the scheduler says so.

        A step that had nothing else to do waits briefly for the next completion.
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
            Whether host memory is not in use any more.
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
        """Copy chunks that wait for their tiers, until `end` at most."""
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
        if self._steady and not (self._compacts or core.prefetching or core.unsaved):
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


_C = TypeVar("_C", bound=type)


def in_turns(*names: str) -> Callable[[_C], _C]:
    """Make the methods `names` of a class hold the lock in its `_turn`."""

    def decorate(cls: _C) -> _C:
        for name in names:
            setattr(cls, name, _in_turn(getattr(cls, name)))
        return cls

    return decorate


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def taking_turns(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return taking_turns


LOOK_SECONDS = 0.02
"""How often a call that waits for jobs makes a step."""

TELL_SECONDS = 5.0
"""How often it logs that it waits."""


class JobRunner:
    """Runs jobs for a server with its own host memory; for jobs see `kvstore.core.tier_only`.

    A step of the server ends with `end_step`; loads of chunks that `lookup` has found are handed
    over before. Calls are made by one thread at a time. Only `drain` and `close` wait for a tier;
    `end_step` waits a millisecond at most.

    Attributes:
        lookup: whether a chunk can be loaded, by its key.
        description: the tiers in a few words.

    Args:
        config: names the tiers, of which one is owned, and how long a tier may be silent.
        region: the server's rows.

    Raises:
        KVStoreError: if a tier cannot be opened.
    """

    def __init__(
        self,
        config: Config,
        region: LentRegion,
        chunk_bytes: int,
        namespace: Namespace,
        *,
        events: bool,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._region = region
        tiers: list[Tier] = []
        try:
            views, parts = open_tiers(config, region, chunk_bytes, namespace, tiers)
            self._jobs = Jobs(
                views,
                region.rows,
                deadline=config.deadline_s,
                max_wait=config.max_wait_s,
                events=events,
                log=warn_with(logger),
            )
            self._spans = spans_of(config, views, self._jobs.spans.want, chunk_bytes)
            beside = [] if self._spans is None else [self._spans]
            self._engine = EngineThread(tiers, beside)
        except BaseException:
            for tier in tiers:
                tier.abandon()
            raise
        self.lookup = self._jobs.lookup
        self.description = "; ".join([f"host memory of {region.description}", *parts])
        self._closed = False
        self._ended = 0.0

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin a job that fills `rows`, in this step; the keys in the order of the prompt."""
        self._jobs.load(number, keys, rows, time.monotonic())

    def store(self, number: int, keys: Sequence[bytes], rows: Sequence[int], request: str) -> None:
        """Begin a job that copies `rows`, in this step; the keys in the order of the prompt."""
        self._jobs.store(number, keys, rows, request, time.monotonic())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these chunks, in the order of the prompt, as used."""
        self._jobs.touch(keys)

    def finished(self, request: str) -> None:
        """End a request, which hands over no more jobs."""
        self._jobs.finished(request)

    def poll(self) -> list[JobEnd]:
        """Make a step; returns the jobs that have ended since the last call."""
        self._jobs.poll(time.monotonic(), self._engine.take())
        return self._jobs.take_ended()

    def end_step(self) -> None:
        """Start the moves that are due. A step that had nothing else to do waits briefly."""
        now = time.monotonic()
        self._hand_over(now)
        if len(self._jobs) and self._jobs.in_flight and now - self._ended < IDLE_STEP_SECONDS:
            self._engine.wait(WAIT_SECONDS)
            now = time.monotonic()
        self._ended = now

    def drain(self) -> None:
        """Wait until every job has ended, however long its tier takes to answer.

        Afterwards the rows are not in use; the next `poll` returns the jobs' results.
        """
        told = time.monotonic()
        while self._go_on():
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                logger.warning(
                    "%d jobs have not ended: host memory is in use",
                    len(self._jobs),
                    extra=about("store.busy", jobs=len(self._jobs)),
                )

    def close(self, seconds: float) -> bool:
        """Finish the jobs, within `seconds`, and close the tiers.

        Returns:
            Whether the rows are not in use any more.
        """
        if self._closed:
            return True
        self._closed = True
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and self._go_on():
                pass
        except Exception:
            logger.exception(
                "chunks that were not copied yet are lost", extra=about("store.unsaved")
            )
        try:
            left = max(0.1, end - time.monotonic())
            return self._engine.close(recency_of(self._jobs.tiers), left)
        finally:
            self._region.close()
            logger.info(
                "kvstore: closed, %d chunks not copied",
                self._jobs.unsaved,
                extra=about("store.closed", unsaved=self._jobs.unsaved),
            )

    def stats(self) -> list[TierStats]:
        """Return the counters and gauges of each tier."""
        stats = [tier.stats() for tier in self._jobs.tiers]
        for tier in stats:
            tier.complete(0, self._chunk_bytes)
        return stats

    def take_history(self) -> list[tuple[bytes, bool]]:
        """Take the keys that appeared on the tier or (True) left it since the last call."""
        return self._jobs.target.index.history.take()

    def _hand_over(self, now: float) -> None:
        self._engine.submit(self._jobs.flush(now))
        if self._spans is not None and (taken := self._jobs.spans.take()):
            self._engine.tell(self._spans.write, taken)

    def _go_on(self) -> bool:
        """Make a step, and wait briefly; returns whether jobs are left."""
        now = time.monotonic()
        self._jobs.poll(now, self._engine.take())
        if not len(self._jobs):
            return False
        self._hand_over(now)
        self._engine.wait(LOOK_SECONDS)
        return True
