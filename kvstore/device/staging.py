"""Transfers through a piece of device memory, in few large copies.

A transfer is cut into *fills*. Each fills the ring from its beginning: rows come in large copies,
and a kernel scatters them; or the kernel gathers fragments, and they leave in large copies. All of
it is queued on one stream, which begins a fill when the one before it has ended. So the ring needs
neither parts nor events, but two streams may not share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvstore.device.fragments import Fragments, cut
from kvstore.errors import ConfigError

__all__ = ["RING_BYTES", "Fill", "Ring"]

RING_BYTES = 32 * 2**20
"""Large beside what a copy and a launch cost, small beside the memory of a device."""

STEP = 64 * 1024
"""Rings are multiples of this."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a transfer.

    Attributes:
        rows: copies between host memory and the ring, which is their device.
        pages: copies between the ring, which is their host, and the device.
    """

    rows: Fragments
    pages: Fragments


class Ring:
    """Device memory for one stream."""

    def __init__(self, device: torch.device, size: int) -> None:
        """
        Args:
            size: bytes, a multiple of 64 KiB.

        Raises:
            ConfigError: for another size, and if there is not so much memory.
        """
        if size < STEP or size % STEP:
            raise ConfigError(f"ring_bytes = {size!r}: must be a multiple of {STEP}, not zero")
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ConfigError(f"no ring of {size} bytes on {device}: {error}") from error
        self._size = size

    def fills(self, fragments: Fragments) -> Iterator[Fill]:
        """The parts of a transfer, in the order of host memory.

        Fragments that are neighbours there, in one row, are one copy; one that does not fit a
        fill is cut.
        """
        fragments = fragments.take(np.argsort(fragments.host, kind="stable"))
        at = np.cumsum(fragments.sizes) - fragments.sizes
        apart = (np.diff(fragments.host) != fragments.sizes[:-1]) | (np.diff(fragments.rows) != 0)
        first = np.flatnonzero(np.concatenate(([True], apart)))
        lengths = np.diff(np.append(at[first], fragments.bytes))
        pieces = replace(fragments.take(first), sizes=lengths)
        rows, rows_at = cut(pieces, at[first], self._size)
        pages, pages_at = cut(fragments, at, self._size)
        base = self._memory.data_ptr()
        rows = replace(rows, device=base + rows_at % self._size)
        pages = replace(pages, host=base + pages_at % self._size)
        for end in range(self._size, fragments.bytes + self._size, self._size):
            yield Fill(
                rows.take(slice(*np.searchsorted(rows_at, (end - self._size, end)))),
                pages.take(slice(*np.searchsorted(pages_at, (end - self._size, end)))),
            )
