"""What tiers have in common that lie where this process decides about no slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.core.residency.health import Health
from kvstore.core.residency.in_flight import InFlight
from kvstore.core.residency.slots import RETRY_PAUSE
from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.types import Completion, Move, Op, RecoveredTier

__all__ = ["SlotlessTier", "Unordered"]


class SlotlessTier:
    """The part of a `TierView` that is the same for tiers of others.

    They are cleared as a whole, never grow and are never compacted.
    """

    compaction_rate = 0.0

    def __init__(self, number: int, recovered: RecoveredTier, max_rows_in_flight: int) -> None:
        self.number = number
        self.name = recovered.name
        self.medium = recovered.medium
        self.max_rows_in_flight = max_rows_in_flight
        self.health = Health(self.name)
        self.in_flight = InFlight()
        self.clearing = False
        self._retry_after = 0.0
        self._counts: Counter[str] = Counter()

    @property
    def gave_up_clearing(self) -> bool:
        """Whether it failed to be cleared, and waits before it is tried again."""
        return self.clearing and self._retry_after > 0

    def clear_ended(self, segments: Iterable[int], error: str | None, now: float) -> None:
        """A move that clears it has ended."""
        if error is None:
            self.clearing = False
        else:
            self._retry_after = now + RETRY_PAUSE

    def growth_ended(self, segments: Sequence[int], now: float, overtaken: bool) -> None:
        """It never grows."""
        raise AssertionError(f"tier {self.name} is not this process's to grow")

    def compaction(self, now: float) -> Move | None:
        """Never: it has no segments of this process's."""
        return None

    def compact_at(self, chunks_per_second: float) -> None:
        """It has no segments of this process's."""

    def compacted(self, move: Move, completion: Completion, now: float, overtaken: bool) -> None:
        """It is never compacted."""
        raise AssertionError(f"tier {self.name} is not this process's to compact")

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of its counters in `TierStats`."""
        self._counts[what] += number

    def _clear(self, now: float) -> Move | None:
        """The move that clears it, unless something is under way or it has just failed."""
        if self.in_flight or now < self._retry_after:
            return None
        return Move(-1, Op.CLEAR, self.number)

    def _begin_clearing(self) -> None:
        """Nothing of it is believed until it is cleared."""
        self.clearing = True
        self._retry_after = 0.0


class Unordered(EvictionPolicy):
    """Stands where a policy is asked for and nobody is ever evicted."""

    name = "none"

    def insert(self, key: bytes) -> None:
        return

    def touch(self, key: bytes) -> None:
        return

    def remove(self, key: bytes) -> None:
        return

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return None

    def clear(self) -> None:
        return

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        return False

    def restore(self, keys: Iterable[bytes]) -> None:
        return
