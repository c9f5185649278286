"""Reports: what happened, one by one, for traces, events and the log.

* `Spans`: waits and moves that have begun and ended, for traces. Off unless somebody wants them.
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
    "Log",
    "Outcome",
    "SpanBegin",
    "SpanEnd",
    "SpanKind",
    "Spans",
]

MOST_SPANS = 2**16
"""Beginnings and ends that are kept for who does not take them."""


class SpanKind(enum.Enum):
    """What a span tells of.

    DEFERRAL: a request waits for its answer. QUESTION: a store is asked whether it has chunks.
    PROMOTION: chunks are read into host memory. CASCADE: chunks are copied to a slower tier.
    """

    DEFERRAL = "deferral"
    QUESTION = "question"
    PROMOTION = "promotion"
    CASCADE = "cascade"


class Outcome(enum.Enum):
    """How a deferral has ended.

    COMPLETE: all that could come is there. DEADLINE: nothing moved for too long, or it took too
    long in all. GIVEN_UP: its tier is not worth waiting for any more. GONE: nobody waits for the
    answer: the request has ended, or everything was reset.
    """

    COMPLETE = "complete"
    DEADLINE = "deadline"
    GIVEN_UP = "given up"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class SpanBegin:
    """Something has begun.

    Attributes:
        kind: what. id: the name of the request that waits, or the number of the move.
        at: when, by the core's clock. chunks: how many it is about.
        request: for whom; None where it is for nobody in particular. tier: where; -1 for a wait.
    """

    kind: SpanKind
    id: str | int
    at: float
    chunks: int
    request: str | None = None
    tier: int = -1


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """It has ended.

    Attributes:
        kind, id: as in its `SpanBegin`. at: when, by the core's clock.
        chunks: how many are there, were found or were moved.
        outcome: of a wait. error: of a move that went wrong.
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
    """Beginnings and ends since they were taken, in order.

    Of what nobody takes the older half is dropped when there is too much.

    Attributes:
        wanted: whether anything is kept.
        lost: what was dropped.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self.wanted = False
        self.lost = 0
        self._most = most
        self._now = 0.0
        self._kept: list[SpanBegin | SpanEnd] = []

    def want(self) -> None:
        """`take` will be called from now on."""
        self.wanted = True

    def take(self) -> list[SpanBegin | SpanEnd]:
        """What has begun or ended since the last call, in order."""
        kept, self._kept = self._kept, []
        return kept

    def begin_step(self, now: float) -> None:
        """The time for whatever ends without telling it."""
        self._now = now

    def wait_began(self, request: str, chunks: int, now: float) -> None:
        """A request waits for so many chunks."""
        if self.wanted:
            self._keep(SpanBegin(SpanKind.DEFERRAL, request, now, chunks, request))

    def wait_ended(
        self, request: str, chunks: int, outcome: Outcome, now: float | None = None
    ) -> None:
        """A request waits no more, and has so many chunks."""
        if self.wanted:
            at = self._now if now is None else now
            self._keep(SpanEnd(SpanKind.DEFERRAL, request, at, chunks, outcome))

    def move_began(self, move: Move, request: str | None, now: float) -> None:
        """The move is handed out, for this request."""
        if self.wanted and move.op in _KINDS:
            begin = SpanBegin(_KINDS[move.op], move.id, now, len(move.keys), request, move.tier)
            self._keep(begin)

    def move_ended(self, move: Move, completion: Completion, now: float) -> None:
        """The move has ended; `now` is when that was heard of."""
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
"""Changes that are kept for who does not take them."""

PORTION = 2048
"""Chunks of before the start that are told at once: some tenths of a millisecond."""


class History:
    """Keys that came and went since they were taken, in order. Nothing is kept unless wanted.

    Of changes that nobody takes the older half is dropped when there are too many. What a medium
    held at the start is told in portions, most recently used first, and leaves only after that.

    Attributes:
        lost: changes that were dropped.
    """

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self.lost = 0
        self._most = most
        self._wanted = True
        self._changes: list[tuple[bytes, bool]] = []
        self._untold: list[bytes] = []
        """What was there at the start and was not told yet, to be told from the end on."""
        self._gone: set[bytes] = set()
        """Keys that have left since the start, while some are untold."""

    def want(self, wanted: bool, here: Iterable[bytes] = ()) -> None:
        """Whether `take` will be called.

        Args:
            here: what is there already, coldest first.
        """
        self._wanted = wanted
        self._untold = list(here) if wanted else []

    def came(self, keys: Iterable[bytes]) -> None:
        """These chunks have appeared."""
        if self._wanted:
            self._changes += [(key, False) for key in keys]
            self._drop_old()

    def left(self, keys: Iterable[bytes]) -> None:
        """These chunks have left."""
        if self._wanted:
            keys = list(keys)
            if self._untold:
                # They may be among the untold: who hears that they left has to know of them.
                self._changes += [(key, False) for key in keys]
                self._gone.update(keys)
            self._changes += [(key, True) for key in keys]
            self._drop_old()

    def all_left(self, keys: Iterable[bytes]) -> None:
        """Everything there was, `keys`, has left."""
        untold, self._untold = set(self._untold), []
        self._gone.clear()
        self.left(key for key in keys if key not in untold)

    def take(self) -> list[tuple[bytes, bool]]:
        """Keys that came or (True) left since the last call, in order."""
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
