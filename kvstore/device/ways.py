"""Ways: choose how a transfer is copied, by its direction and the size of its fragments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["WAYS", "Rate", "Ways", "in_words"]

WAYS = ("batch", "each", "staged", "kernel")
"""How a transfer is handed to the device.

- ``batch``: the copy engines get many fragments in a call of the driver.
- ``each``: the copy engines get one fragment in a call.
- ``staged``: the copy engines move rows in few large copies to or from a buffer on the device,
  where a kernel gathers or scatters fragments.
- ``kernel``: a kernel reads or writes host memory itself.
"""

TAKES_MULTIPROCESSORS = {"batch": 0, "each": 0, "staged": 1, "kernel": 2}
"""Order of the ways by how much of the device they take from computing."""

WORTH_IT = 1.05
"""How many times as fast a way must be to be preferred although it takes more multiprocessors."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The measured rate of a way.

    Attributes:
        size: bytes of a fragment.
        store: True from the device to host memory, False for the other direction.
        rate: bytes per second.
    """

    size: int
    store: bool
    way: str
    rate: float


class Ways:
    """The way for each direction and size of fragments.

    Attributes:
        default: the way of a direction that was not measured.
        best: the rate of the chosen way for each (size, store) that was measured.
    """

    def __init__(self, default: str, rates: Iterable[Rate] = ()) -> None:
        """
        Args:
            default: the way of a direction that is not in `rates`.
            rates: all measured rates.
        """
        self.default = default
        self.best: dict[tuple[int, bool], Rate] = {}
        for rate in sorted(rates, key=lambda rate: TAKES_MULTIPROCESSORS[rate.way]):
            place = rate.size, rate.store
            best = self.best.get(place)
            if best is None or rate.rate > best.rate * _margin(best.way, rate.way):
                self.best[place] = rate

    def way(self, size: float, *, store: bool) -> str:
        """Return the way for fragments of about `size` bytes.

        It is that of the nearest measured size by ratio; of two equally near, that of the larger.
        """
        sizes = [measured for measured, direction in self.best if direction == store]
        if not sizes:
            return self.default
        nearest = min(sizes, key=lambda measured: (abs(math.log(measured / size)), -measured))
        return self.best[nearest, store].way

    def used(self, *, store: bool) -> set[str]:
        """Return all ways that `way` may return."""
        found = {rate.way for (_, direction), rate in self.best.items() if direction == store}
        return found or {self.default}

    def __str__(self) -> str:
        """Describe the ways: ``64 KiB: store batch 21.3 GB/s, load staged 22.8 GB/s``."""
        lines = []
        for size in sorted({size for size, _ in self.best}):
            its = [
                f"{name} {self.best[size, store].way} {self.best[size, store].rate / 1e9:.1f} GB/s"
                for name, store in (("store", True), ("load", False))
                if (size, store) in self.best
            ]
            lines.append(f"{in_words(size)}: {', '.join(its)}")
        return "; ".join(lines)


def in_words(size: int) -> str:
    """Format a number of bytes, in MiB or KiB if it is a whole number of them."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _margin(one: str, other: str) -> float:
    return WORTH_IT if TAKES_MULTIPROCESSORS[other] > TAKES_MULTIPROCESSORS[one] else 1.0
