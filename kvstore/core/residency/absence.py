"""Whether a tier whose calls fail is left alone for a while."""

from __future__ import annotations

from kvstore.types import LogLine

__all__ = ["FIRST_PAUSE", "LAST_PAUSE", "Absence"]

FIRST_PAUSE = 1.0
LAST_PAUSE = 30.0
"""Seconds before a tier whose calls fail is tried again: they double with each try that fails."""


class Absence:
    """Of one tier, told of calls that failed as a whole, and of those that went well.

    After a pause one call tries whether the tier is back. Nobody waits for it.

    Attributes:
        away: calls fail, but for that one nobody uses the tier.

    Args:
        name: the tier's, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.away = False
        self._back_at = 0.0
        # How many tries have failed in a row.
        self._failures = 0
        self._trying = False

    def failed(self, now: float, error: str | None) -> LogLine | None:
        """A call failed. Returns a line for the log, if there is one."""
        if self.away and not self._trying:
            # It was begun before that was known.
            return None
        known, self.away, self._trying = self.away, True, False
        self._back_at = now + min(FIRST_PAUSE * 2 ** min(self._failures, 10), LAST_PAUSE)
        self._failures += 1
        if known:
            return None
        text = f"tier {self._name} is away: {error}; its chunks are misses until it answers"
        return LogLine("tier.away", text, {"tier": self._name, "error": error})

    def ended(self) -> LogLine | None:
        """A call went well. Returns a line for the log, if there is one."""
        if not self.away:
            return None
        self._failures = 0
        self.away = self._trying = False
        return LogLine("tier.back", f"tier {self._name} is back", {"tier": self._name})

    def try_now(self, now: float) -> bool:
        """Whether a call is to be made now that tries it; then none besides until it has ended."""
        if not self.away or self._trying or now < self._back_at:
            return False
        self._trying = True
        return True

    def forget_try(self) -> None:
        """Nobody will hear how the try has ended."""
        self._trying = False
