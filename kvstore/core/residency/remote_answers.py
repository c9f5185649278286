"""Answers of a store: what it has said of keys, and how long an answer is worth waiting for.

A store is written to and evicted from by others. What it has is known only as far as it was asked,
and only for a while (`Answers`).

`Patience` bounds the wait for an answer. With the share of the chunks that the store had lately,
and the measured seconds for a chunk, the bound is

    max(10 ms, max(share * (1 - read / compute), 5 %) * chunks * compute)

While answers take longer as a rule, nobody begins to wait. The question is asked all the same, and
a later request finds the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.policies.table import OrderedTable

__all__ = ["ANSWERS_LAST", "LEAST_PATIENCE", "MOST_ANSWERS", "RISKED", "Answers", "Patience"]

ANSWERS_LAST = 60.0
"""Seconds for which an answer counts."""

MOST_ANSWERS = 2**18
"""Keys of which it is known that the store has them, and as many of which it is known that it has
them not. The oldest answers are forgotten for new ones."""

MOST_EXPIRED = 512
"""Answers that one step forgets because their time is over."""


class Answers:
    """Answers by key, and the questions under way.

    Attributes:
        absent: keys that the store does not have.
        asked: keys about which it is being asked, with the time when that began.

    Args:
        most: as `MOST_ANSWERS`. lasts: as `ANSWERS_LAST`.
    """

    def __init__(self, most: int = MOST_ANSWERS, lasts: float = ANSWERS_LAST) -> None:
        self._most = most
        self._lasts = lasts
        # Until when each answer counts, the first to end first.
        self._present: OrderedTable[bytes, float] = OrderedTable()
        self.absent: OrderedTable[bytes, float] = OrderedTable()
        self.asked: dict[bytes, float] = {}

    def ask(self, keys: Sequence[bytes], now: float) -> None:
        """The store is being asked about these."""
        self.asked.update(dict.fromkeys(keys, now))

    def has(self, keys: Sequence[bytes], now: float) -> list[bytes]:
        """The store has these; returns keys of which that is forgotten, to have room for them."""
        _renew(self._present, keys, now + self._lasts)
        for key in keys:
            self.absent.pop(key, None)
        return self._shorten(self._present, self._most)

    def lacks(self, keys: Sequence[bytes], now: float) -> None:
        """The store does not have these."""
        _renew(self.absent, keys, now + self._lasts)
        for key in keys:
            self._present.pop(key, None)
        self._shorten(self.absent, self._most)

    def end(self, keys: Sequence[bytes]) -> None:
        """The question about these has ended, answered or not."""
        for key in keys:
            self.asked.pop(key, None)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody knows any more whether the store has these."""
        for key in keys:
            self._present.pop(key, None)
            self.absent.pop(key, None)

    def overdue(self, before: float) -> list[bytes]:
        """Keys about which it was asked before that time, without an answer: it is over."""
        late = []
        for key, since in self.asked.items():
            if since >= before:
                # The others were asked about later.
                break
            late.append(key)
        self.end(late)
        return late

    def expire(self, now: float) -> list[bytes]:
        """Forget what has counted long enough, a bit in each step; returns keys that were there."""
        for _ in range(MOST_EXPIRED):
            key = next(iter(self.absent), None)
            if key is None or self.absent[key] > now:
                break
            del self.absent[key]
        gone: list[bytes] = []
        while len(gone) < MOST_EXPIRED:
            key = next(iter(self._present), None)
            if key is None or self._present[key] > now:
                break
            del self._present[key]
            gone.append(key)
        return gone

    def reset(self) -> None:
        """Nothing is known, and nothing was asked."""
        self._present.clear()
        self.absent.clear()
        self.asked.clear()

    def _shorten(self, answers: OrderedTable[bytes, float], most: int) -> list[bytes]:
        return [answers.popitem(last=False)[0] for _ in range(len(answers) - most)]


def _renew(answers: OrderedTable[bytes, float], keys: Sequence[bytes], until: float) -> None:
    # Tail first: should not all of them be kept, the head is.
    for key in reversed(keys):
        answers.pop(key, None)
        answers[key] = until


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
