"""How long the answer of a store is worth waiting for.

Who waits for an answer hopes to compute less. What a request lacks would take so long to compute;
of that the store has had a certain part of late, and to read it takes time, too. So long an answer
may take, and no longer; but a small part of the computing is always risked, or a store that has
nothing for a while would never be waited for again. Where answers take longer than that as a rule,
nobody begins to wait: the question is asked all the same, and who comes later finds what it found.
"""

from __future__ import annotations

import math

__all__ = ["LEAST_PATIENCE", "RISKED", "Patience"]

RISKED = 0.05
"""The part of a request's computing that it waits for an answer whatever the store had of late."""

LEAST_PATIENCE = 0.01
"""Seconds that are waited in any case: the steps of a server take as long."""

WINDOW = 64
"""The part that a store has is that of about so many questions, the last ones."""

TRUSTED = 4
"""A store that was just opened is taken for one that had all of so many questions."""

NEWEST = 0.25
"""The weight of an answer in how long answers take."""


class Patience:
    """Of those who ask one store; told of the answers to its questions.

    Attributes:
        share: part of the chunks it was asked about that the store had, of late: of many questions,
            as a single prompt says little, whether its chunks are large or small.
        seconds: how long its answers take, of late; 0 while there was none.
    """

    def __init__(self) -> None:
        self._asked = self._found = 0.0
        self.seconds = 0.0

    @property
    def share(self) -> float:
        return self._found / self._asked if self._asked else 1.0

    def answered(self, asked: int, found: int, seconds: float) -> None:
        """A question about so many chunks took so long; so many were there."""
        if not self._asked:
            self._asked = self._found = float(TRUSTED * asked)
        kept = WINDOW / (WINDOW + 1)
        self._asked = kept * self._asked + asked
        self._found = kept * self._found + found
        self.took(seconds)

    def took(self, seconds: float) -> None:
        """A question took so long, answered or given up."""
        weight = NEWEST if self.seconds else 1.0
        self.seconds += weight * (seconds - self.seconds)

    def lasts(self, chunks: int, compute: float, read: float) -> float:
        """Seconds for which a request waits that lacks so many chunks; infinite: as others do.

        Args:
            compute: seconds in which the server computes a chunk; 0 where nobody knows.
            read: seconds in which the store reads one; 0 where nobody knows.
        """
        if compute <= 0:
            return math.inf
        saved = self.share * max(0.0, 1.0 - read / compute)
        limit = max(LEAST_PATIENCE, max(saved, RISKED) * chunks * compute)
        return limit if self.seconds <= limit else 0.0
