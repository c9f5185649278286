"""Tuning: measure how fast each way is on this machine, and check that it copies correctly.

Only scratch memory is used, on the device and in the host: no KV cache and no row is touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.device.fragments import Fragments
from kvstore.device.layout import Layout
from kvstore.device.stream import Direction
from kvstore.device.ways import WAYS, Rate, in_words
from kvstore.errors import ConfigError
from kvstore.types import about

__all__ = ["Measurement", "sizes_of"]

logger = logging.getLogger("kvstore")

SAMPLE = 8 * 2**20
"""Most bytes of a timed transfer."""

FRAGMENTS = 2048
"""Most fragments of a timed transfer: with one call for each, more would take long."""

LARGEST = 2**20
"""Largest fragment that is measured; it stands for larger ones."""

SIZES = 4
"""Most sizes of fragments that are measured."""

ROUNDS = 3
"""Transfers that are timed; the fastest counts, because others may have been disturbed."""

HOPELESS = 3.0
"""A way that takes this many times as long as the best so far is timed only once."""


class Measurement:
    """Times transfers of scratch memory.

    Fragments are separate and in random order on the device, and adjacent in rows of host memory.
    """

    def __init__(
        self,
        device: torch.device,
        row_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            row_bytes: bytes of a row.
            clock: returns seconds, for the time limit.

        Raises:
            RuntimeError: if there is not enough memory.
        """
        self._clock = clock
        self._row_bytes = row_bytes
        self._host = torch.empty(SAMPLE, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty(2 * SAMPLE, dtype=torch.uint8, device=device)
        self._dice = np.random.default_rng(0)
        self._host.numpy()[:] = self._dice.integers(0, 256, SAMPLE, np.uint8)
        self._random = self._host.to(device, copy=True)

    def rates(
        self, directions: Sequence[Direction], sizes: Sequence[int], seconds: float
    ) -> list[Rate]:
        """Measure each available way of each direction that copies correctly.

        Preparing the ways does not count towards the time limit.

        Args:
            seconds: time limit after which no transfer begins, except the first of each size.
        """
        ways = {
            direction: [way for way in WAYS if _is_available(direction, way)]
            for direction in directions
        }
        end = self._clock() + seconds
        found: list[Rate] = []
        for size in sizes:
            for direction in directions:
                best = float("inf")
                for way in ways[direction]:
                    if best < float("inf") and self._clock() > end:
                        break
                    taken = self._seconds(direction, way, size, best)
                    if taken is not None:
                        moved = _count(size) * size
                        found.append(Rate(size, direction.store, way, moved / max(taken, 1e-9)))
                        best = min(best, taken)
        return found

    def _seconds(self, direction: Direction, way: str, size: int, best: float) -> float | None:
        """Return the seconds of the fastest transfer; None if the way copies incorrectly."""
        slots = self._dice.permutation(_count(size))
        if not self._is_right(direction, way, size, slots):
            name = "store" if direction.store else "load"
            logger.error(
                "%s by %s of %s copies incorrectly and is not used",
                name,
                way,
                in_words(size),
                extra=about("device.copies_wrong", direction=name, way=way),
            )
            return None
        fragments = self._fragments(size, slots)
        taken = float("inf")
        for _ in range(ROUNDS):
            ticket = direction.begin(fragments, way)
            ticket.wait()
            # Includes the time to queue the fragments: the ticket begins before that.
            taken = min(taken, ticket.seconds)
            if taken > HOPELESS * best:
                break
        return taken

    def _is_right(self, direction: Direction, way: str, size: int, slots: Any) -> bool:
        """Whether a transfer copies all of its bytes and changes no others."""
        count = len(slots)
        at = torch.from_numpy(2 * slots).to(self._there.device)
        used = count * size
        full = torch.zeros_like(self._there)
        full[: 2 * used].view(-1, size)[at] = self._random[:used].view(-1, size)
        if direction.store:
            self._there.copy_(full)
            self._host.zero_()
        else:
            self._there.zero_()
            self._host.copy_(self._random)
        ticket = direction.begin(self._fragments(size, slots), way)
        ticket.wait()
        if ticket.error:
            return False
        if direction.store:
            random = self._random.cpu()
            rest = self._host[used:]
            right = torch.equal(self._host[:used], random[:used]) and not rest.any()
        else:
            right = torch.equal(self._there, full)
        return bool(right)

    def _fragments(self, size: int, slots: Any) -> Fragments:
        begin = np.arange(len(slots)) * size
        return Fragments(
            self._there.data_ptr() + 2 * slots * size,
            self._host.data_ptr() + begin,
            np.full(len(slots), size),
            begin // self._row_bytes,
        )


def _count(size: int) -> int:
    """Return the number of fragments of a timed transfer."""
    return min(SAMPLE // size, FRAGMENTS)


def _is_available(direction: Direction, way: str) -> bool:
    try:
        direction.prepare(way)
    except ConfigError as error:
        logger.info(
            "%s: %s",
            "store" if direction.store else "load",
            error,
            extra=about("device.not_measured", error=error),
        )
        return False
    return True


def sizes_of(layout: Layout) -> list[int]:
    """List the sizes of fragments in transfers of a layout, the most frequent first.

    These are single pages, and all pages of a row that are adjacent on both sides.
    """
    found: dict[int, int] = {}
    for tables, places in zip(layout.groups, layout.places, strict=True):
        for pages, (_, step) in zip(tables, places, strict=True):
            merged = pages.stride == step == pages.size
            for count in {1, layout.blocks_per_chunk if merged else 1}:
                size = min(pages.size * count, LARGEST)
                found[size] = found.get(size, 0) + 1
    return sorted(found, key=lambda size: -found[size])[:SIZES]
