"""What a store has said of keys, for a while.

A store is a remote engine that others write to and evict from: what it has is known
only as far as it was asked, and not for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.table import OrderedTable

__all__ = ["ANSWERS_LAST", "MOST_ANSWERS", "Answers"]

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
