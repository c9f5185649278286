"""How long things took: counts by length, as monitors read them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["AGES", "BOUNDS", "Durations"]

BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
)
"""Seconds up to which each bucket counts; one bucket more counts what is longer."""

AGES = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1200.0),
    *(3600.0, 7200.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0),
)
"""The same for ages, up to a week."""


@dataclass(slots=True)
class Durations:
    """So many things took so long.

    Attributes:
        seconds: all together.
        buckets: how many took longer than the bound before, and no longer than that of
            the bucket.
        bounds: see `BOUNDS`.
    """

    seconds: float = 0.0
    buckets: list[int] = field(default_factory=list)
    bounds: tuple[float, ...] = BOUNDS

    def __post_init__(self) -> None:
        if not self.buckets:
            self.buckets = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        """Seconds of one, on average; 0 where there was none."""
        return self.seconds / max(self.count, 1)

    def quantile(self, share: float) -> float:
        """Seconds that no more than the rest, beyond this share of them, exceeded.

        A bound of a bucket, so too long by its width at most; infinite for the last, and 0 where
        there was none.

        Raises:
            ValueError: if `share` is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share!r}: must be from 0 to 1")
        count = self.count
        if not count:
            return 0.0
        seen = 0
        for bound, number in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += number
            if seen >= share * count and seen:
                return bound
        raise AssertionError("the buckets hold all")

    def add(self, seconds: float) -> None:
        """One more took so long."""
        self.seconds += seconds
        self.buckets[bisect_left(self.bounds, seconds)] += 1

    def copy(self) -> Durations:
        """As it is now."""
        return Durations(self.seconds, self.buckets.copy(), self.bounds)
