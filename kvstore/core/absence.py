"""Whether a tier whose calls fail is left alone for a while."""

from __future__ import annotations

__all__ = ["FIRST_PAUSE", "LAST_PAUSE", "Absence"]

FIRST_PAUSE = 1.0
LAST_PAUSE = 30.0
"""Seconds for which a tier is left alone whose calls fail: they double with each that fails."""


class Absence:
    """Of one tier, told of calls that failed as a whole, and of those that went well.

    Attributes:
        away: it is left alone at present.

    Args:
        name: the tier's, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.away = False
        self._back_at = 0.0
        # How many calls have failed in a row.
        self._failures = 0

    def failed(self, now: float, error: str | None) -> str | None:
        """A call failed. Returns a line for the log, if there is one."""
        if self.away:
            # It was begun before that was known.
            return None
        self._back_at = now + min(FIRST_PAUSE * 2 ** min(self._failures, 10), LAST_PAUSE)
        self._failures += 1
        self.away = True
        if self._failures > 1:
            return None
        return f"tier {self._name} is away: {error}; its chunks are misses until it answers"

    def ended(self) -> str | None:
        """A call went well. Returns a line for the log, if there is one."""
        if not self._failures:
            return None
        self._failures = 0
        self.away = False
        return f"tier {self._name} is back"

    def watch(self, now: float) -> bool:
        """Whether the pause ends now: whoever comes next tries it."""
        over = self.away and now >= self._back_at
        self.away &= not over
        return over
