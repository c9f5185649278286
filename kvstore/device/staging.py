"""Staging: move chunks through a buffer in device memory, in few large copies.

A transfer is cut into *fills*, each of which uses the buffer from its beginning. To load, large
copies bring rows into the buffer and a kernel scatters them. To store, the kernel gathers fragments
and large copies take them to rows. All of it is queued on one stream, so that a fill begins when
the one before has ended. The buffer thus needs no events, but two streams may not share one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvstore.device.cuda_driver import Copier
from kvstore.device.fragments import Fragments, Longs, cut
from kvstore.errors import ConfigError

__all__ = ["MOST", "RING_BYTES", "Fill", "Lists", "Ring"]

RING_BYTES = 32 * 2**20
"""Size of the buffer: large enough to amortize a copy and a launch, small for a device."""

STEP = 64 * 1024
"""The size of a ring is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a transfer.

    Attributes:
        rows: copies between host memory and the ring, which is their `device`.
        pages: copies between the ring, which is their `host`, and the device.
    """

    rows: Fragments
    pages: Fragments


class Ring:
    """The staging buffer of one stream, in device memory."""

    def __init__(self, device: torch.device, size: int) -> None:
        """
        Args:
            size: bytes, a multiple of 64 KiB.

        Raises:
            ConfigError: for another size, or if there is not enough memory.
        """
        if size < STEP or size % STEP:
            raise ConfigError(f"ring_bytes = {size!r}: must be a multiple of {STEP} above 0")
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate a ring of {size} bytes on {device}: {error}"
            ) from error
        self._size = size

    def fills(self, fragments: Fragments) -> Iterator[Fill]:
        """Yield the parts of a transfer, in the order of host memory.

        Adjacent fragments of one row become one copy; a fragment that does not fit a fill is cut.
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


MOST = 16 * 1024
"""Most pieces in a list, which then has 384 KiB."""


class Lists:
    """Sends lists of copies to the kernel on the device, for one stream.

    The device has memory for one list: the stream copies the next list after the kernel has read
    this one. In host memory a list is kept until the device has copied it. It is in pinned memory,
    because a copy from pageable memory would block the caller.
    """

    def __init__(self, device: torch.device, cuda: Any, calls: Copier) -> None:
        self._cuda = cuda
        self._calls = calls
        self._pinned = device.type == "cuda"
        self._there = torch.empty(3 * MOST, dtype=torch.int64, device=device)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(
        self, targets: Longs, sources: Longs, sizes: Longs, stream: Any
    ) -> tuple[torch.Tensor, int]:
        """Queue the copy of a list of at most `MOST` pieces.

        Returns:
            Targets, sources and sizes one after the other, on the device, valid for work queued on
            `stream` until the next call; and the driver's error, 0 for none.
        """
        length = 3 * len(sizes)
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()
        here = torch.empty(length, dtype=torch.int64, pin_memory=self._pinned)
        np.concatenate((targets, sources, sizes), out=here.numpy())
        whole = Fragments(
            *(
                np.array([number], np.int64)
                for number in (self._there.data_ptr(), here.data_ptr(), 8 * length, 0)
            )
        )
        error = self._calls.copy(whole, stream.cuda_stream, store=False, way="each", step=1)
        fetched = self._cuda.Event()
        fetched.record(stream)
        self._sent.append((fetched, here))
        return self._there, error
