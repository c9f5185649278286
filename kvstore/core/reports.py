"""Reports: single occurrences for traces, events and the log.

* `Spans`: waits and moves that have begun and ended, for traces. Off by default.
* `History`: keys that appeared on a medium or left it, for event consumers.
* `Complaints`: faults in few log lines: the first, a count at intervals, and the end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvstore.types import Completion, LogLine, Move, Op

__all__ = [
    "EVERY",
    "MOST_SPANS",
    "Complaints",
    "History",
    "Outcome",
    "SpanBegin",
    "SpanEnd",
    "SpanKind",
    "Spans",
]

MOST_SPANS = 2**16
"""Most beginnings and ends that are kept until they are taken."""


class SpanKind(enum.Enum):
    """The kind of a span.

    DEFERRAL: a request waits for its answer. QUESTION: a store is asked whether it has chunks.
    PROMOTION: chunks are read into host memory. CASCADE: chunks are copied to a slower tier.
    """

    DEFERRAL = "deferral"
    QUESTION = "question"
    PROMOTION = "promotion"
    CASCADE = "cascade"


class Outcome(enum.Enum):
    """The outcome of a deferral.

    COMPLETE: everything that could arrive has arrived. DEADLINE: nothing moved for too long, or it
    took too long in all. GIVEN_UP: its tier is not worth waiting for any more. GONE: no answer is
    needed: the request has ended, or everything was reset.
    """

    COMPLETE = "complete"
    DEADLINE = "deadline"
    GIVEN_UP = "given up"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class SpanBegin:
    """The beginning of a span.

    Attributes:
        kind: its kind. id: the id of the request that waits, or the number of the move.
        at: its time, by the core's clock. chunks: number of chunks concerned.
        request: the request it is for; None where there is none. tier: its tier; -1 for a wait.
    """

    kind: SpanKind
    id: str | int
    at: float
    chunks: int
    request: str | None = None
    tier: int = -1


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """The end of a span.

    Attributes:
        kind, id: as in its `SpanBegin`. at: its time, by the core's clock.
        chunks: how many are there, were found or were moved.
        outcome: that of a wait. error: that of a move that failed.
    """

    kind: SpanKind
    id: str | int
    at: float
    chunks: int
    outcome: Outcome | None = None
    error: str | None = None


_KINDS = {
    Op.ASK: SpanKind.QUESTION,
    Op.PROMOTE: SpanKind.PROMOTION,
    Op.CASCADE: SpanKind.CASCADE,
}


class Spans:
    """Beginnings and ends since they were last taken, in order.

    When there are too many, the older half is dropped.

    Attributes:
        wanted: whether anything is kept.
        lost: how many were dropped.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self.wanted = False
        self.lost = 0
        self._most = most
        self._now = 0.0
        self._kept: list[SpanBegin | SpanEnd] = []

    def want(self) -> None:
        """Keep spans from now on, as `take` will be called."""
        self.wanted = True

    def take(self) -> list[SpanBegin | SpanEnd]:
        """Take the beginnings and ends since the last call, in order."""
        kept, self._kept = self._kept, []
        return kept

    def set_time(self, now: float) -> None:
        """Set the time of waits that begin and end from now on."""
        self._now = now

    def wait_began(self, request: str, chunks: int) -> None:
        """Note that a request waits for `chunks` chunks."""
        if self.wanted:
            self._keep(SpanBegin(SpanKind.DEFERRAL, request, self._now, chunks, request))

    def wait_ended(self, request: str, chunks: int, outcome: Outcome) -> None:
        """Note that a request stopped waiting and has `chunks` chunks."""
        if self.wanted:
            self._keep(SpanEnd(SpanKind.DEFERRAL, request, self._now, chunks, outcome))

    def move_began(self, move: Move, request: str | None, now: float) -> None:
        """Note that a move is handed out, for this request."""
        if self.wanted and move.op in _KINDS:
            begin = SpanBegin(_KINDS[move.op], move.id, now, len(move.keys), request, move.tier)
            self._keep(begin)

    def move_ended(self, move: Move, completion: Completion, now: float) -> None:
        """Note that a move has ended; `now` is when its completion was taken in."""
        if self.wanted and move.op in _KINDS:
            at, done = completion.ended_by(now), completion.ok.count(True)
            self._keep(SpanEnd(_KINDS[move.op], move.id, at, done, error=completion.error))

    def _keep(self, one: SpanBegin | SpanEnd) -> None:
        self._kept.append(one)
        if len(self._kept) > self._most:
            dropped = self._most // 2
            del self._kept[:dropped]
            self.lost += dropped


MOST_CHANGES = 2**18
"""Most changes that are kept until they are taken."""

PORTION = 2048
"""Chunks from before the start that are reported at once, in some tenths of a millisecond."""


class History:
    """Keys that appeared or left since they were last taken, in order; nothing unless wanted.

    When there are too many, the older half is dropped. Chunks that a medium held at the start are
    reported in portions, most recently used first, and are reported to leave only after that.

    Attributes:
        lost: changes that were dropped.
    """

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self.lost = 0
        self._most = most
        self._wanted = True
        self._changes: list[tuple[bytes, bool]] = []
        self._untold: list[bytes] = []
        """Keys from the start that were not reported yet; they are reported from the end on."""
        self._gone: set[bytes] = set()
        """Keys that have left since the start, while some keys are still unreported."""

    def want(self, wanted: bool, here: Iterable[bytes] = ()) -> None:
        """Set whether `take` will be called.

        Args:
            here: keys that are there already, coldest first.
        """
        self._wanted = wanted
        self._untold = list(here) if wanted else []

    def tell_again(self, here: Iterable[bytes]) -> None:
        """Report all that is there once more, in portions: who takes it has forgotten it.

        Args:
            here: keys that are there, coldest first.
        """
        self._changes.clear()
        self._gone.clear()
        self.want(self._wanted, here)

    def came(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks have appeared."""
        if self._wanted:
            self._changes += [(key, False) for key in keys]
            self._drop_old()

    def left(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks have left."""
        if self._wanted:
            keys = list(keys)
            if self._untold:
                # They may not be reported yet: consumers must know of them before they leave.
                self._changes += [(key, False) for key in keys]
                self._gone.update(keys)
                if len(self._gone) > self._most:
                    # Nobody takes them.
                    self.lost += len(self._untold)
                    self._untold.clear()
                    self._gone.clear()
            self._changes += [(key, True) for key in keys]
            self._drop_old()

    def all_left(self, keys: Iterable[bytes]) -> None:
        """Note that everything, which is `keys`, has left."""
        # Those that left were told of then, whether they have come back or not.
        untold, self._untold = set(self._untold) - self._gone, []
        self._gone.clear()
        self.left(key for key in keys if key not in untold)

    def take(self) -> list[tuple[bytes, bool]]:
        """Take the keys that appeared or (True) left since the last call, in order."""
        changes, self._changes = self._changes, []
        if self._untold:
            portion = self._untold[-PORTION:]
            del self._untold[-PORTION:]
            changes[:0] = [(key, False) for key in reversed(portion) if key not in self._gone]
            if not self._untold:
                self._gone.clear()
        return changes

    def _drop_old(self) -> None:
        excess = len(self._changes) - self._most
        if excess > 0:
            dropped = max(excess, self._most // 2)
            del self._changes[:dropped]
            self.lost += dropped


EVERY = 60.0
"""Least seconds between two log lines of one fault, its end excepted."""


@dataclass(slots=True)
class _Fault:
    """One fault.

    Attributes:
        since: when it began. logged: when it was last logged. last: when it last occurred.
        count: how often it occurred since that line. total: how often since it began.
        over: its end was logged.
    """

    since: float
    logged: float
    last: float
    count: int
    total: int
    over: bool = False


class Complaints:
    """Logs a fault that occurs thousands of times in one line a minute. Counters carry the rest.

    Args:
        write: where lines go.
        quiet: seconds without the fault after which a success ends it.
    """

    def __init__(self, write: Callable[[LogLine], object], quiet: float = EVERY) -> None:
        self.write = write
        self._quiet = quiet
        self._faults: dict[str, _Fault] = {}

    def failed(
        self, what: str, error: str | None, now: float, count: int = 1, **about: Any
    ) -> bool:
        """Note that `what` failed `count` times; returns whether its beginning was logged.

        Args:
            about: further fields of the line's record.
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
        """Note that `what` did not fail this time; logs `instead` if that ends the fault."""
        fault = self._faults.get(what)
        if fault is not None and not fault.over and now - fault.last >= self._quiet:
            fault.over, fault.logged, fault.count = True, now, 0
            lasted = fault.last - fault.since
            text = f"{instead}; it had failed {fault.total} times in {lasted:.0f} s"
            named = {"what": what, "failures": fault.total, "seconds": lasted, **about}
            self.write(LogLine("fault.over", text, named))
