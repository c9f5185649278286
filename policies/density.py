"""Hit density by class and age, estimated from past hits and evictions.

The age of a key is the number of accesses since its last one. For each class and
each bin of ages, the histograms count how many keys were used again at that age,
and how much time keys spent in the bin. From these follows the worth of keeping a
key of a given age: the most hits per unit of time that it is expected to bring
over any horizon.

The measure is that of Nathan Beckmann, Haoxian Chen and Asaf Cidon, "LHD:
Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, section 3. With the
best horizon instead of the end of life it is an index in the sense of J. C.
Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Densities"]

_OCTAVES = 9
_PER_OCTAVE = 2


class Densities:
    """Histograms of ages for `classes` classes of keys in a tier of `capacity` chunks.

    A cell is a class and a bin, with the number ``class * bins + bin``. Bins have two
    edges per octave, from 1/16 of the capacity to about 23 times the capacity.
    """

    def __init__(self, classes: int, capacity: int) -> None:
        first = max(8.0, capacity / 16)
        self.edges = [first * 2 ** (i / _PER_OCTAVE) for i in range(_OCTAVES * _PER_OCTAVE)]
        """Upper edges of all bins but the last; `bisect_right` of an age gives its bin."""
        self.bins = len(self.edges) + 1
        self.cells = classes * self.bins
        self.reused = [0.0] * self.cells
        """For each cell the keys that were used again at that age."""
        self.ended = [0.0] * self.cells
        """For each cell the keys that were evicted or forgotten at that age."""
        lower = [0.0, *self.edges]
        self._widths = [high - low for low, high in zip(lower, self.edges, strict=False)]
        self._widths.append(2 * self.edges[-1])
        # Prior of each cell: one key, used again with odds inversely proportional to its age.
        # Without other data this gives the order of LRU.
        self._prior = [2 * max(low, first / 2) for low in lower]

    def halve(self) -> None:
        """Halve the weight of everything counted so far."""
        self.reused[:] = [count / 2 for count in self.reused]
        self.ended[:] = [count / 2 for count in self.ended]

    def ascending(self, alive: Iterable[tuple[int, float]]) -> list[int]:
        """Return all cells, the least worth keeping first.

        Args:
            alive: cells of a sample of the resident keys, each with the number of keys
                that it stands for.
        """
        reused, bins, widths, prior = self.reused, self.bins, self._widths, self._prior
        left = [a + b for a, b in zip(reused, self.ended, strict=True)]
        for cell, weight in alive:
            left[cell] += weight
        worth: list[tuple[float, int]] = []
        for start in range(0, self.cells, bins):
            older = 0.0
            # The best horizon of a bin is the line of greatest slope from there to any later
            # point of (time, hits). Runs of falling density are kept for this.
            runs: list[tuple[float, float]] = []
            for index in range(bins - 1, -1, -1):
                cell = start + index
                hits = reused[cell] + 1
                time = (older + left[cell] / 2) * widths[index] + prior[index]
                older += left[cell]
                while runs and runs[-1][0] * time > hits * runs[-1][1]:
                    more, longer = runs.pop()
                    hits += more
                    time += longer
                runs.append((hits, time))
                worth.append((hits / time, cell))
        # Of equal cells, the older first.
        worth.sort(key=lambda pair: (pair[0], -(pair[1] % bins)))
        return [cell for _, cell in worth]
