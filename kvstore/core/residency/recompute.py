"""Compare the measured speed of computing with that of reading.

A server says how long it took to compute chunks, and reads say how long they take. While a tier is
the slower of both it is *outpaced*: what it holds is a miss, and nobody waits for it.

Nobody reads from such a tier, so its speed would never be measured again. After a pause one
request is let through. If its read takes longer than computing, the tier is given up at once and
the next pause is twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Average", "Recompute"]

WINDOW = 512
"""An average forgets about half of what is older than so many chunks."""

AGAIN = 0.8
"""An outpaced tier is worth waiting for once it takes no more than this share of computing."""

FIRST_PAUSE = 5.0
LAST_PAUSE = 300.0
"""Seconds between two tries of a tier that is outpaced: they double with each that fails."""

LEAST_EVIDENCE = 0.25
"""Seconds of reading without which a pace may be chance, and has cost little."""

LEAST_PATIENCE = 0.1
"""Seconds that reads under way are not held against a tier: steps of a server take time, too."""


@dataclass(slots=True)
class Average:
    """Seconds per chunk, of the last few hundred chunks."""

    chunks: float = 0.0
    seconds: float = 0.0

    @property
    def per_chunk(self) -> float:
        """Seconds of one chunk; 0 while nothing was measured."""
        return self.seconds / self.chunks if self.chunks else 0.0

    def add(self, chunks: int, seconds: float) -> None:
        """So many more took so long together."""
        kept = WINDOW / (WINDOW + chunks)
        self.chunks = kept * self.chunks + chunks
        self.seconds = kept * self.seconds + seconds

    def replace(self, chunks: int, seconds: float) -> None:
        """So many took so long together; what was measured before counts no more."""
        self.chunks, self.seconds = float(chunks), seconds


class Recompute:
    """See the module's text; for one tier.

    Attributes:
        outpaced: computing is sooner. trying: it is, and yet one request may wait for the tier.
    """

    def __init__(self) -> None:
        self.outpaced = self.trying = False
        self._pause = FIRST_PAUSE
        self._again = 0.0
        # The try has begun to read.
        self._reads = False

    @property
    def hopeless(self) -> bool:
        """Whether even what is being read is not worth waiting for."""
        return self.outpaced and not self.trying

    @property
    def avoided(self) -> bool:
        """Whether nobody is to begin to wait for the tier."""
        return self.outpaced and (self._reads or not self.trying)

    def watch(
        self, now: float, read: Average, compute: float, reading: int, since: float | None
    ) -> bool:
        """Bring it up to date, once a step.

        Args:
            read: what reads took. compute: seconds per chunk; 0 where they are not known.
            reading: chunks that are being read. since: when the first of these moves was begun, or
                another before it has ended.

        Returns:
            Whether those who wait for the tier shall wait no longer.
        """
        if compute <= 0:
            self.outpaced = self.trying = False
            return False
        late = since is not None and now - since > max(LEAST_PATIENCE, reading * compute)
        if not self.outpaced:
            slower = read.per_chunk > compute and read.seconds >= LEAST_EVIDENCE
            if not late and not slower:
                return False
            self.outpaced = True
            self._pause = FIRST_PAUSE
            self._give_up(now)
            return True
        if 0 < read.per_chunk <= AGAIN * compute and not late:
            self.outpaced = self.trying = False
            return False
        if self.trying:
            self._reads |= reading > 0
            if not late and (reading or not self._reads):
                return False
            self._pause = min(2 * self._pause, LAST_PAUSE)
            self._give_up(now)
            return True
        self.trying = now >= self._again and not reading
        return False

    def _give_up(self, now: float) -> None:
        self.trying = self._reads = False
        self._again = now + self._pause
