"""The moves that one tier has under way."""

from __future__ import annotations

from kvstore.core.durations import Durations
from kvstore.types import Move, Op

__all__ = ["InFlight"]


class InFlight:
    """Moves with the time at which each was handed out.

    Attributes:
        rows: rows of host memory that they read or write.
        asking: questions to a store among them.
        reads, writes, asks: how long promotions, copies and questions took, from when they were
            handed out to when their ends were heard of.
    """

    def __init__(self) -> None:
        self._moves: dict[int, tuple[Move, float]] = {}
        self.rows = self.asking = 0
        self.reads = Durations()
        self.writes = Durations()
        self.asks = Durations()

    def __len__(self) -> int:
        return len(self._moves)

    def begin(self, move: Move, now: float) -> None:
        """The move is handed out."""
        self._moves[move.id] = (move, now)
        self.rows += len(move.rows)
        self.asking += move.op is Op.ASK

    def end(self, move: Move, now: float) -> float:
        """The move has ended; returns when it was handed out."""
        _, started = self._moves.pop(move.id)
        self.rows -= len(move.rows)
        if move.op is Op.PROMOTE:
            self.reads.add(now - started)
        elif move.op is Op.CASCADE:
            self.writes.add(now - started)
        elif move.op is Op.ASK:
            self.asking -= 1
            self.asks.add(now - started)
        return started

    @property
    def reading_since(self) -> float | None:
        """When the first of those that fill host memory was handed out."""
        for move, started in self._moves.values():
            if move.op is Op.PROMOTE:
                return started
        return None

    @property
    def writing_since(self) -> float | None:
        """When the first of those that copy to the tier, or make it grow, was handed out."""
        for move, started in self._moves.values():
            if move.op in (Op.CASCADE, Op.GROW):
                return started
        return None
