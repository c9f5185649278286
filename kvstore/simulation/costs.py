"""Costs: the seconds that it takes to compute and to read chunks, and those that hits save."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvstore.simulation.replay import Outcome

__all__ = ["Costs"]

MOST_MS = 1e9
"""More than a chunk takes."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a chunk takes; None where nobody knows.

    Attributes:
        compute: to compute the first chunk of a prompt.
        deeper: how much longer a chunk takes to compute for each one that comes before it, since
            attention looks at all of them.
        read: to read a chunk from disk, wherever it lies.
    """

    compute: float | None = None
    deeper: float = 0.0
    read: float | None = None

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Parse milliseconds of the first chunk, and those of a deeper one: ``12,30@60``.

        The second part says that a chunk which follows 60 others takes 30 ms. In between, and
        beyond, the time grows with the number of chunks before.

        Raises:
            ValueError: if `text` is neither that nor a number above 0.
        """
        found = re.fullmatch(r"\s*([\d.e+-]+)\s*(?:,\s*([\d.e+-]+)\s*@\s*(\d{1,9})\s*)?", text)
        try:
            first, later, depth = found.groups() if found else ("", None, None)
            compute, then = float(first), float(first if later is None else later)
            chunks = 1 if depth is None else int(depth)
        except ValueError:
            compute = then = chunks = 0
        if not (0 < compute <= then < MOST_MS and chunks):
            raise ValueError(
                "must be milliseconds, a number above 0, or such as 12,30@60: 12 ms for the first "
                "chunk of a prompt and 30 ms, no less, for one that follows 60 others"
            )
        return cls(compute / 1000, (then - compute) / 1000 / chunks)

    def computing(self, chunks: int, depths: float) -> float | None:
        """Seconds to compute `chunks` chunks; `depths` come before each of them, added up."""
        return None if self.compute is None else self.compute * chunks + self.deeper * depths

    def saved(self, outcome: Outcome) -> float | None:
        """Seconds of computing that the hits save, less those that reads from disk take.

        None where one of these is not known.
        """
        computing = self.computing(outcome.hits, outcome.hit_depths)
        if computing is None or (self.read is None and outcome.disk_hits):
            return None
        return computing - (self.read or 0.0) * outcome.disk_hits

    def share_saved(self, outcome: Outcome) -> float:
        """The part of all computing that the hits save; of all chunks, where no cost is known."""
        saved, whole = self.saved(outcome), self.computing(outcome.accesses, outcome.depths)
        return outcome.hit_ratio if saved is None or not whole else saved / whole

    @property
    def pays_from(self) -> float | None:
        """How many chunks have to come before one that is read sooner than it is computed.

        None where that is not known, infinite where no chunk is.
        """
        if self.compute is None or self.read is None:
            return None
        if self.read < self.compute:
            return 0.0
        return (self.read - self.compute) / self.deeper if self.deeper else math.inf
