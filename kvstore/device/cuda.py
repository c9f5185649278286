"""Copies between a KV cache on a CUDA device and rows of host memory.

A transfer becomes a list of fragments, which the device's copy engines move: one call for each of
them, or one for many. Stores and loads have a stream each. A transfer begins when what the
compute stream had been given before it is done, so that a store copies what was computed, and
a load does not write what is still being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.device.driver import driver
from kvstore.device.fragments import Addresses, Fragments
from kvstore.device.layout import BlockPlaces, Layout, Places, RowPlaces
from kvstore.device.pages import Pages
from kvstore.errors import ConfigError, KVStoreError

__all__ = ["WAYS", "CudaCopies", "Ticket"]

WAYS = ("batch", "each")
"""How fragments are handed to the device: many in a call, or one."""

BATCH_STEP = 512
"""Fragments in a call."""

FEW = 4
"""So few fragments are handed over one by one."""


class Driver(Protocol):
    has_batch: bool

    def copy(
        self, fragments: Fragments, stream: int, *, store: bool, way: str, step: int
    ) -> int: ...


@dataclass(slots=True)
class Ticket:
    """A transfer under way.

    Attributes:
        size: bytes.
        error: why not all of it was handed over, as the driver's code; 0 if it was.
    """

    size: int
    begun: Any
    ended: Any
    error: int = 0

    @property
    def done(self) -> bool:
        """Whether it has ended. Never waits."""
        return bool(self.ended.query())

    def wait(self) -> None:
        """Wait until it has ended."""
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended."""
        return float(self.begun.elapsed_time(self.ended)) / 1000


class CudaCopies:
    """Queues copies of blocks to rows, and back. See the module's text, and
    `kvstore.device.layout` for how they lie in a row.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
        places: Places | None = None,
        *,
        way: str | None = None,
        cuda: Any = None,
        calls: Driver | None = None,
    ) -> None:
        """
        Args:
            groups: for each KV cache group the tables of its blocks, all on one device.
            rows: host memory, of shape (rows, bytes of a row). The device copies at full speed
                only if it is registered (see `tiers.pinned.PinnedRegion.register_with_cuda`).
            way: one of `WAYS`; by default the first that the driver has.
            cuda: ``torch.cuda``. calls: the driver.

        Raises:
            ConfigError: if a chunk is larger than a row, tables lie on several devices, or
                there is no such way.
        """
        devices = {pages.tensor.device for tables in groups for pages in tables}
        if len(devices) != 1:
            raise ConfigError(f"the KV cache lies on {len(devices)} devices: must be one")
        if way is not None and way not in WAYS:
            raise ConfigError(f"way = {way!r}: must be one of {', '.join(WAYS)}")
        (self._device,) = devices
        self._cuda = cuda or torch.cuda
        # Gives this thread a context, which the driver's calls need.
        self._cuda.synchronize(self._device)
        self._calls: Driver = calls or driver()
        if way == "batch" and not self._calls.has_batch:
            raise ConfigError("way = 'batch': this CUDA driver copies one fragment in a call")
        self._way = way or ("batch" if self._calls.has_batch else "each")
        layout = Layout(groups, len(rows), rows.shape[1], blocks_per_chunk, places)
        self._addresses = Addresses(layout, int(rows.ctypes.data), rows.strides[0])
        self._memory = rows
        self._stores, self._loads = (self._cuda.Stream(self._device) for _ in range(2))

    def store(self, blocks: BlockPlaces, rows: RowPlaces) -> Ticket:
        """Begin to copy blocks to rows.

        Raises:
            IndexError: for a block or a row that is not there.
            ValueError: if blocks or rows are not as many as they say.
            KVStoreError: while a CUDA graph is captured: the copy would become a part of it.
                Nothing was begun in any of these cases.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._stores, store=True)

    def load(self, rows: RowPlaces, blocks: BlockPlaces) -> Ticket:
        """Begin to copy rows to blocks.

        Raises:
            IndexError, ValueError, KVStoreError: as `store`.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._loads, store=False)

    def _begin(self, fragments: Fragments, stream: Any, *, store: bool) -> Ticket:
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            raise KVStoreError("no copy can begin while a CUDA graph is captured")
        begun, ended = (cuda.Event(enable_timing=True) for _ in range(2))
        way = "each" if len(fragments) <= FEW else self._way
        with cuda.device(self._device):
            stream.wait_stream(cuda.current_stream(self._device))
            begun.record(stream)
            error = self._calls.copy(
                fragments, stream.cuda_stream, store=store, way=way, step=BATCH_STEP
            )
            # After an error, too: a part of it may be under way.
            ended.record(stream)
        return Ticket(fragments.bytes, begun, ended, error)

    def shutdown(self) -> None:
        """Wait for all copies."""
        self._stores.synchronize()
        self._loads.synchronize()
