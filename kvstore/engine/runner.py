"""Runs the jobs of a server that has host memory of its own, over an engine thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvstore.assembly import open_tiers, recency_of, spans_of
from kvstore.config import Config
from kvstore.core import TierStats
from kvstore.core.tier_only import JobEnd, Jobs
from kvstore.engine.engine import EngineThread
from kvstore.engine.scheduler_steps import IDLE_STEP_SECONDS, WAIT_SECONDS
from kvstore.observe.logs import warn_with
from kvstore.tiers import Tier
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.lent import LentRegion
from kvstore.types import about

__all__ = ["JobRunner"]

logger = logging.getLogger("kvstore")

LOOK_SECONDS = 0.02
"""How often a call that waits for jobs looks after them."""

TELL_SECONDS = 5.0
"""How often it says that it waits."""


class JobRunner:
    """See the module's text; what a job is, and what is guaranteed of it: `kvstore.core.tier_only`.

    A step of the server ends with `end_step`; loads of what `lookup` has found are handed over
    before. Calls are made by one thread at a time. None waits for a tier, but for `drain` and
    `close`; `end_step` waits a millisecond at most.

    Attributes:
        lookup: whether a chunk can be loaded, by its key.
        description: the tiers in a few words.

    Args:
        config: its tiers, of which one is owned; how long a tier may be silent.
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
            self._spans = spans_of(config, views, self._jobs.spans, chunk_bytes)
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
        """These chunks, in the order of the prompt, were used."""
        self._jobs.touch(keys)

    def finished(self, request: str) -> None:
        """The request hands over no more jobs."""
        self._jobs.finished(request)

    def poll(self) -> list[JobEnd]:
        """Jobs that have ended since the last call."""
        self._jobs.poll(time.monotonic(), self._engine.take())
        return self._jobs.take_ended()

    def end_step(self) -> None:
        """Start what is due. A step that had nothing to do but wait waits for a moment."""
        now = time.monotonic()
        self._hand_over(now)
        if len(self._jobs) and self._jobs.in_flight and now - self._ended < IDLE_STEP_SECONDS:
            self._engine.wait(WAIT_SECONDS)
            now = time.monotonic()
        self._ended = now

    def drain(self) -> None:
        """Wait until every job has ended, however long its tier takes to answer.

        Afterwards nobody uses the rows; the ends of the jobs are told by the next `poll`.
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
            Whether nobody uses the rows any more.
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
        """Counters and gauges of each tier."""
        stats = [tier.stats() for tier in self._jobs.tiers]
        for tier in stats:
            tier.complete(0, self._chunk_bytes)
        return stats

    def take_history(self) -> list[tuple[bytes, bool]]:
        """Keys that appeared on the tier, or (True) left it, since the last call, in order."""
        return self._jobs.target.index.history.take()

    def _hand_over(self, now: float) -> None:
        self._engine.submit(self._jobs.flush(now))
        if self._spans is not None and (taken := self._jobs.spans.take()):
            self._engine.tell(self._spans.write, taken)

    def _go_on(self) -> bool:
        """Make a step, and wait for a moment; whether there are jobs left."""
        now = time.monotonic()
        self._jobs.poll(now, self._engine.take())
        if not len(self._jobs):
            return False
        self._hand_over(now)
        self._engine.wait(LOOK_SECONDS)
        return True
