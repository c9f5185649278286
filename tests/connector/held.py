"""A tier whose moves end when they are told to, and a clock that goes on only while one waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.tiers import PinnedRegion, Tier
from kvstore.types import Completion, Move, Op, RecoveredTier
from tests.engine.fakes import GatedTier

__all__ = ["Clock", "HeldEngine", "Shelf"]

SEGMENTS, SLOTS = 3, 8


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Shelf(GatedTier):
    """Keeps what an engine puts there. Nobody calls it once it is open."""

    def open(self, region: PinnedRegion) -> RecoveredTier:
        self.region = region
        self.held: dict[int, tuple[bytes, bytes]] = {}
        self.segments = [0]
        return RecoveredTier("shelf", "disk", [], SLOTS, list(self.segments), SEGMENTS)


class HeldEngine:
    """Stands in for `kvstore.engine.engine.EngineThread`: moves are made when `end` is called.

    Attributes:
        moves: those that were handed over and have not ended.
        calm: moves end at once, and well.
    """

    def __init__(self, tiers: Sequence[Tier], beside: Sequence[Any] = ()) -> None:
        self.tiers = tiers
        self.moves: list[Move] = []
        self.calm = False
        self.clock = Clock()
        self._done: list[Completion] = []

    def submit(self, moves: Sequence[Move]) -> None:
        self.moves += moves
        if self.calm:
            self.end_all()

    def take(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> bool:
        # Nothing comes meanwhile; but who waits until some time must see it come.
        self.clock.now += seconds
        return bool(self._done)

    def repeat(self, call: Callable[[], object]) -> None:
        """Nothing goes on by itself."""

    def close(self, coldest_first: object, timeout: float = 0.0) -> bool:
        return True

    def end_all(self) -> None:
        while self.moves:
            self.end(0, ())

    def end(self, place: int, failing: Collection[int]) -> None:
        """A move ends; of its chunks those in the places `failing` are not copied."""
        move = self.moves.pop(place)
        tier = self.tiers[move.tier]
        assert isinstance(tier, Shelf)
        ok = [number not in failing for number in range(len(move.keys))]
        segments: list[int] = []
        if move.op is Op.CASCADE:
            for key, row, slot, good in zip(move.keys, move.rows, move.slots, ok, strict=True):
                if good:
                    tier.held[slot] = key, bytes(tier.region.row(row))
        elif move.op is Op.PROMOTE:
            for number, (key, slot) in enumerate(zip(move.keys, move.slots, strict=True)):
                name, payload = tier.held.get(slot, (b"", b""))
                ok[number] &= name == key
                if ok[number]:
                    tier.region.row(move.rows[number])[:] = payload
        elif move.op is Op.GROW:
            tier.segments.append(len(tier.segments))
            segments = tier.segments[-1:]
        elif move.op is Op.CLEAR:
            tier.held.clear()
            segments = list(tier.segments)
        else:
            raise AssertionError(f"{move.op} was not expected")
        self._done.append(Completion(move.id, ok, segments))
