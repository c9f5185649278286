"""Returns: hints of clients that know when their conversations go on."""

from __future__ import annotations

from kvstore.core.hints import Hints
from kvstore.simulation.trace import Trace

__all__ = ["announced"]

PATIENCE = 1.25
SLACK = 10.0
"""A client retains chunks for `PATIENCE` times its pause, plus `SLACK` seconds."""


def announced(trace: Trace) -> list[Hints]:
    """Return for each request the hints of a client that knows when its conversation goes on.

    It goes on with the next request that has the last chunk of this one. If none has, it has ended.
    """
    nearest: dict[int, float] = {}
    hints: list[Hints] = []
    requests = zip(reversed(trace.times), reversed(trace.requests), strict=True)
    for seconds, request in requests:
        back = nearest.get(request[-1]) if request else None
        hints.append(_hints_for(None if back is None else back - seconds))
        nearest.update(dict.fromkeys(request, seconds))
    hints.reverse()
    return hints


def _hints_for(pause: float | None) -> Hints:
    if pause is None:
        return Hints(release=True)
    return Hints(retain_s=pause * PATIENCE + SLACK)
