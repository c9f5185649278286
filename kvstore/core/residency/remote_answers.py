"""Answers of a store: which keys it has, and how long an answer is worth waiting for.

Other hosts write to a store, and it evicts chunks. Whether it has a key is known only after it was
asked, and only for a while (`Answers`).

`Patience` bounds the wait for an answer. With the share of chunks that the store had lately,
and the measured seconds to read and to compute a chunk, the bound is

    max(10 ms, max(share * (1 - read / compute), 5 %) * chunks * compute)

While answers usually take longer than that, no request begins to wait. The question is still
asked, and a later request finds the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvstore.policies.table import OrderedTable

__all__ = ["ANSWERS_LAST", "LEAST_PATIENCE", "MOST_ANSWERS", "RISKED", "Answers", "Patience"]

ANSWERS_LAST = 60.0
"""Seconds for which an answer counts."""

MOST_ANSWERS = 2**18
"""Most keys that the store is known to have, and most that it is known to lack. New answers
replace the oldest ones."""

MOST_EXPIRED = 512
"""Most answers that one step forgets because their time is over."""


class Answers:
    """Answers by key, and the questions under way.

    Attributes:
        absent: keys that the store does not have.
        asked: keys that it is being asked about, with the time of the question.

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

    def is_absent(self, key: bytes, now: float) -> bool:
        """Whether the store does not have it, as of an answer that still counts."""
        return self.absent.get(key, -math.inf) > now

    def ask(self, keys: Sequence[bytes], now: float) -> None:
        """Note that the store is being asked about these."""
        self.asked.update(dict.fromkeys(keys, now))

    def has(self, keys: Sequence[bytes], now: float) -> list[bytes]:
        """Note that the store has these; returns older keys that are forgotten to make room."""
        _renew(self._present, keys, now + self._lasts)
        for key in keys:
            self.absent.pop(key, None)
        return self._shorten(self._present, self._most)

    def ending(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        """Return those that the store has, by answers of whose time less than half is left."""
        soon, end = now + self._lasts / 2, self._present.get
        return [key for key in keys if end(key, math.inf) < soon]

    def lacks(self, keys: Sequence[bytes], now: float) -> None:
        """Note that the store does not have these."""
        _renew(self.absent, keys, now + self._lasts)
        for key in keys:
            self._present.pop(key, None)
        self._shorten(self.absent, self._most)

    def end(self, keys: Sequence[bytes]) -> None:
        """Note that the question about these has ended, answered or not."""
        for key in keys:
            self.asked.pop(key, None)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget whether the store has these."""
        for key in keys:
            self._present.pop(key, None)
            self.absent.pop(key, None)

    def overdue(self, before: float) -> list[bytes]:
        """End the questions asked before that time; returns their keys."""
        late = []
        for key, since in self.asked.items():
            if since >= before:
                # The others were asked about later.
                break
            late.append(key)
        self.end(late)
        return late

    def expire(self, now: float) -> list[bytes]:
        """Forget expired answers, some in each step; returns those keys that the store had."""
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
        """Forget all answers and questions."""
        self._present.clear()
        self.absent.clear()
        self.asked.clear()

    def _shorten(self, answers: OrderedTable[bytes, float], most: int) -> list[bytes]:
        return [answers.popitem(last=False)[0] for _ in range(len(answers) - most)]


def _renew(answers: OrderedTable[bytes, float], keys: Sequence[bytes], until: float) -> None:
    # Tail first, so that the head is kept if there is no room for all.
    for key in reversed(keys):
        answers.pop(key, None)
        answers[key] = until


RISKED = 0.05
"""The share of a request's computing time that it waits for an answer even if the store had
nothing lately."""

LEAST_PATIENCE = 0.01
"""Seconds to wait in any case: a step of a server takes as long."""

WINDOW = 64
"""The share of found chunks is taken over about this many questions, the last ones."""

TRUSTED = 4
"""A newly opened store is treated as if it had answered this many questions with all chunks."""

NEWEST = 0.25
"""The weight of the newest answer in the average time of answers."""


class Patience:
    """The time that an answer of one store is worth waiting for.

    Attributes:
        share: recent share of the chunks asked about that the store had: over many questions,
            as a single prompt says little, whether its chunks are large or small.
        seconds: how long its answers took recently; 0 while there was none.
    """

    def __init__(self) -> None:
        self._asked = self._found = 0.0
        self.seconds = 0.0

    @property
    def share(self) -> float:
        return self._found / self._asked if self._asked else 1.0

    def answered(self, asked: int, found: int, seconds: float) -> None:
        """Take in an answer: of `asked` chunks `found` were there, and it took `seconds`."""
        if not self._asked:
            self._asked = self._found = float(TRUSTED * asked)
        kept = WINDOW / (WINDOW + 1)
        self._asked = kept * self._asked + asked
        self._found = kept * self._found + found
        self.took(seconds)

    def took(self, seconds: float) -> None:
        """Take in how long a question took, answered or given up."""
        weight = NEWEST if self.seconds else 1.0
        self.seconds += weight * (seconds - self.seconds)

    def lasts(self, chunks: int, compute: float, read: float) -> float:
        """Return how many seconds a request waits that lacks `chunks`; infinite for no limit here.

        Args:
            compute: seconds that the server takes to compute a chunk; 0 if not known.
            read: seconds that the store takes to read one; 0 if not known.
        """
        if compute <= 0:
            return math.inf
        saved = self.share * max(0.0, 1.0 - read / compute)
        limit = max(LEAST_PATIENCE, max(saved, RISKED) * chunks * compute)
        return limit if self.seconds <= limit else 0.0
