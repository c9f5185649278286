"""Circuit breaker: stop doing what fails, and try again after a pause.

    closed --trip--> open --probe--> half-open --close--> closed
                      ^                  |
                      +------trip--------+    the pause doubles, up to the longest

Time is passed in by the caller: a breaker has no clock.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Breaker", "State"]


class State(Enum):
    """The state of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """One circuit breaker.

    Attributes:
        state: closed while what it guards works, open while it does not, and half-open while one
            attempt tests whether it works again.

    Args:
        first_pause: seconds from the failure that opens it to the next attempt.
        last_pause: the longest pause; as `first_pause` by default.
    """

    __slots__ = ("_first", "_last", "_pause", "_proved", "_retry_at", "state")

    def __init__(self, first_pause: float, last_pause: float | None = None) -> None:
        self._first = self._pause = first_pause
        self._last = first_pause if last_pause is None else last_pause
        self._retry_at = 0.0
        self._proved = True
        self.state = State.CLOSED

    @property
    def closed(self) -> bool:
        """Whether what it guards is in use without limits."""
        return self.state is State.CLOSED

    def ready(self, now: float) -> bool:
        """Whether an attempt may be made: it is closed, or its pause is over."""
        return self.state is State.CLOSED or now >= self._retry_at

    def trip(self, now: float) -> bool:
        """Take in a failure, and open; returns whether it was closed.

        A failure amid a pause changes nothing: that attempt was made before the breaker opened.
        """
        if self.state is State.OPEN and now < self._retry_at:
            return False
        closed = self.state is State.CLOSED
        self._pause = self._first if self._proved else min(2 * self._pause, self._last)
        self._proved = False
        self._retry_at = now + self._pause
        self.state = State.OPEN
        return closed

    def probe(self, now: float) -> bool:
        """Become half-open if the pause is over; returns whether the caller is to try now."""
        if self.state is not State.OPEN or now < self._retry_at:
            return False
        self.state = State.HALF_OPEN
        return True

    def cancel_probe(self) -> None:
        """Forget the attempt under way, whose result will not be known: another may be made."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN

    def close(self, *, proved: bool = True) -> bool:
        """Take in a success, and close; returns whether it was not closed.

        Args:
            proved: whether this success is of the kind that had failed. Until there is one, the
                next failure counts as another try that failed: its pause is twice as long.
        """
        was_open = self.state is not State.CLOSED
        self._proved |= proved
        self.state = State.CLOSED
        return was_open
