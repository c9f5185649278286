"""What has begun and ended, one by one, for those who trace requests; nothing unless wanted.

Counters say how often something happens, and how long it takes. Spans say which request waited,
for what, and which moves it waited for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstore.types import Completion, Move, Op

__all__ = ["MOST_SPANS", "Outcome", "SpanBegin", "SpanEnd", "SpanKind", "Spans"]

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
