"""Drive jobs by the calls of a server that has host memory of its own, over an engine thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

from kvstore.assembly import open_tiers, spans_of
from kvstore.config import Config
from kvstore.core import TierStats
from kvstore.core.residency.index import ColdestFirst
from kvstore.core.tier_only import Job, Jobs
from kvstore.engine.engine import EngineThread
from kvstore.engine.scheduler_steps import (
    IDLE_SECONDS,
    IDLE_STEP_SECONDS,
    UPKEEP_SECONDS,
    WAIT_SECONDS,
    at_once,
    close_in,
    in_turns,
)
from kvstore.observe.logs import warn_with
from kvstore.plugins import abandon_tiers
from kvstore.tiers import Tier
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.lent import LentRegion
from kvstore.types import about

__all__ = ["JobRunner"]

logger = logging.getLogger("kvstore")


LOOK_SECONDS = 0.02
"""How often a call that waits for jobs makes a step."""

TELL_SECONDS = 5.0
"""How often it logs that it waits."""


@in_turns(but=("lookup",))
class JobRunner:
    """Runs jobs for a server with its own host memory; for jobs see `kvstore.core.tier_only`.

    A step of the server ends with `end_step`; loads of chunks that `lookup` has found are handed
    over before. Calls are made by one thread at a time. Only `drain` and `close` wait for a tier;
    `end_step` waits a millisecond at most. While the server makes no steps, uses of chunks are
    recorded and segments compacted from the engine's thread, in turns with these calls.

    Attributes:
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
            abandon_tiers(tiers)
            raise
        self.description = "; ".join([f"host memory of {region.description}", *parts])
        self._closed = self._begun = False
        self._ended = 0.0
        self._turn = threading.RLock()
        self._engine.repeat(weakref.WeakMethod(self._go_on_while_idle))

    def lookup(self, key: bytes) -> bool:
        """Whether a chunk can be loaded, in this step."""
        if not self._begun:
            with self._turn:
                self._begun = True
        return self._jobs.lookup(key)

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

    def poll(self) -> list[Job]:
        """Make a step; returns the jobs that have ended since the last call."""
        self._begun = True
        self._jobs.poll(time.monotonic(), self._engine.take())
        return self._jobs.take_ended()

    def end_step(self) -> None:
        """Start the moves that are due. A step that had nothing else to do waits briefly."""
        now = time.monotonic()
        self._hand_over(now)
        if len(self._jobs) and self._jobs.in_flight and now - self._ended < IDLE_STEP_SECONDS:
            self._engine.wait(WAIT_SECONDS)
            now = time.monotonic()
        self._ended, self._begun = now, False

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

        def save(end: float) -> None:
            while time.monotonic() < end and self._go_on():
                pass

        def recency() -> list[ColdestFirst]:
            return [tier.index.coldest_first() for tier in self._jobs.tiers]

        try:
            return close_in(seconds, self._jobs, save, recency, self._engine)
        finally:
            self._region.close()

    def stats(self) -> list[TierStats]:
        """Return the counters and gauges of each tier."""
        stats = [tier.stats() for tier in self._jobs.tiers]
        for tier in stats:
            tier.complete(0, 0.0, self._chunk_bytes)
        return stats

    def take_history(self) -> list[tuple[bytes, bool]]:
        """Take the keys that appeared on the tier or (True) left it since the last call."""
        return self._jobs.target.index.history.take()

    def _hand_over(self, now: float) -> None:
        self._engine.submit(self._jobs.flush(now))
        if self._spans is not None and (taken := self._jobs.spans.take()):
            self._engine.tell(self._spans.write, taken)

    def _go_on_while_idle(self) -> float:
        """Make a step of upkeep if there was none for a while; returns seconds to the next look."""
        with at_once(self._turn) as mine:
            now, jobs = time.monotonic(), self._jobs
            at_work = self._closed or self._begun or now - self._ended < IDLE_SECONDS
            if not mine or at_work or not (jobs.upkeep or jobs.in_flight):
                return IDLE_SECONDS
            jobs.poll(now, self._engine.take())
            self._hand_over(now)
            return UPKEEP_SECONDS if jobs.in_flight else IDLE_SECONDS

    def _go_on(self) -> bool:
        """Make a step, and wait briefly; returns whether jobs are left."""
        now = time.monotonic()
        self._jobs.poll(now, self._engine.take())
        if not len(self._jobs):
            return False
        self._hand_over(now)
        self._engine.wait(LOOK_SECONDS)
        return True
