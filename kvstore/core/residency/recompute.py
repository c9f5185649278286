"""Compare the measured speed of computing with that of reading.

A server reports how long it took to compute chunks, and reads from a tier are timed. While reading
from a tier is slower it is *outpaced*: its chunks are misses, and no request waits for it.

An outpaced tier is not read, so its speed would never be measured again. After a pause one
request is let through. If its read takes longer than computing, the tier is given up at once and
the next pause is twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.residency.breaker import Breaker, State

__all__ = ["Average", "Recompute"]

WINDOW = 512
"""An average forgets about half of what is older than this many chunks."""

AGAIN = 0.8
"""An outpaced tier is worth waiting for once reading takes at most this share of computing time."""

FIRST_PAUSE, LAST_PAUSE = 5.0, 300.0
"""Seconds between two tries of an outpaced tier: they double with each try that fails."""

LEAST_EVIDENCE = 0.25
"""Seconds of reading below which a measured pace may be chance, and has cost little."""

LEAST_PATIENCE = 0.1
"""Seconds that reads may always take before they count as late: a server's steps take time, too."""


@dataclass(slots=True)
class Average:
    """Average time per chunk over the last few hundred chunks."""

    chunks: float = 0.0
    seconds: float = 0.0

    @property
    def per_chunk(self) -> float:
        """Seconds per chunk; 0 while nothing was measured."""
        return self.seconds / self.chunks if self.chunks else 0.0

    def add(self, chunks: int, seconds: float) -> None:
        """Add `chunks` that took `seconds` in all."""
        kept = WINDOW / (WINDOW + chunks)
        self.chunks = kept * self.chunks + chunks
        self.seconds = kept * self.seconds + seconds

    def replace(self, chunks: int, seconds: float) -> None:
        """Discard earlier measurements and start from `chunks` that took `seconds` in all."""
        self.chunks, self.seconds = float(chunks), seconds


class Recompute:
    """The comparison for one tier: see the module's text."""

    def __init__(self) -> None:
        # Half-open while one request may wait for the tier.
        self._reading = Breaker(FIRST_PAUSE, LAST_PAUSE)
        # The try has begun to read.
        self._reads = False

    @property
    def outpaced(self) -> bool:
        """Whether computing is faster."""
        return self._reading.state is not State.CLOSED

    @property
    def hopeless(self) -> bool:
        """Whether even chunks that are being read are not worth waiting for."""
        return self._reading.state is State.OPEN

    @property
    def avoided(self) -> bool:
        """Whether no request is to begin to wait for the tier."""
        state = self._reading.state
        return state is State.OPEN or (state is State.HALF_OPEN and self._reads)

    def watch(
        self, now: float, read: Average, compute: float, reading: int, since: float | None
    ) -> bool:
        """Update the comparison, once a step.

        Args:
            read: how long reads took. compute: seconds to compute a chunk; 0 if not known.
            reading: chunks that are being read. since: when the first move that reads them was
                begun, or when another before it has ended.

        Returns:
            Whether requests that wait for the tier are to stop waiting.
        """
        breaker = self._reading
        if compute <= 0:
            breaker.close()
            return False
        late = since is not None and now - since > max(LEAST_PATIENCE, reading * compute)
        if breaker.state is State.CLOSED:
            slower = read.per_chunk > compute and read.seconds >= LEAST_EVIDENCE
            gives_up = late or slower
        elif 0 < read.per_chunk <= AGAIN * compute and not late:
            breaker.close()
            return False
        elif breaker.state is State.HALF_OPEN:
            self._reads |= reading > 0
            gives_up = late or (self._reads and not reading)
        else:
            gives_up = False
            if not reading and breaker.probe(now):
                self._reads = False
        if gives_up:
            breaker.trip(now)
        return gives_up
