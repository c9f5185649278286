"""Faults in few lines of the log: when one begins, how often it came at intervals, when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.types import LogLine

__all__ = ["EVERY", "Complaints", "Log"]

EVERY = 60.0
"""Fewest seconds between two lines of one fault, its end excepted."""


class Log:
    """Where lines go: nowhere, until `write_to` is called."""

    def __init__(self) -> None:
        self._write: Callable[[LogLine], None] | None = None

    def write_to(self, write: Callable[[LogLine], None]) -> None:
        """Lines go there from now on."""
        self._write = write

    def __call__(self, line: LogLine) -> None:
        if self._write is not None:
            self._write(line)


@dataclass(slots=True)
class _Fault:
    """One fault.

    Attributes:
        since: when it began. logged: when a line said so. last: when it came last.
        count: how often it came since that line. total: since it began.
        over: its end was logged.
    """

    since: float
    logged: float
    last: float
    count: int
    total: int
    over: bool = False


class Complaints:
    """Turns faults that come in thousands into a line a minute. Counters carry the rest.

    Args:
        write: where lines go.
        quiet: seconds without a fault after which it is over, once something goes well.
    """

    def __init__(self, write: Callable[[LogLine], None], quiet: float = EVERY) -> None:
        self.write = write
        self._quiet = quiet
        self._faults: dict[str, _Fault] = {}

    def failed(
        self, what: str, error: str | None, now: float, count: int = 1, **about: Any
    ) -> bool:
        """`what` went wrong `count` times; whether its beginning was logged.

        Args:
            about: what else the line's record names.
        """
        fault = self._faults.get(what)
        if fault is None or (fault.over and now - fault.logged >= EVERY):
            earlier = 0 if fault is None else fault.count
            self._faults[what] = _Fault(now, now, now, 0, count + earlier)
            named = {"what": what, "error": error, "failures": count + earlier, **about}
            self.write(LogLine("fault.begun", f"{what}: {error}", named))
            return True
        fault.last = now
        fault.count += count
        fault.total += count
        if now - fault.logged >= EVERY:
            text = (
                f"{what}: {fault.count} more in {now - fault.logged:.0f} s, the last one: {error}"
            )
            named = {"what": what, "error": error, "failures": fault.count, **about}
            self.write(LogLine("fault.goes_on", text, named))
            fault.logged, fault.count = now, 0
        return False

    def went_well(self, what: str, instead: str, now: float, **about: Any) -> None:
        """`what` did not go wrong this time; `instead` says so when the fault is over."""
        fault = self._faults.get(what)
        if fault is not None and not fault.over and now - fault.last >= self._quiet:
            fault.over, fault.logged, fault.count = True, now, 0
            lasted = fault.last - fault.since
            text = f"{instead}; it had failed {fault.total} times in {lasted:.0f} s"
            named = {"what": what, "failures": fault.total, "seconds": lasted, **about}
            self.write(LogLine("fault.over", text, named))
