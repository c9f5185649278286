"""Copies between a KV cache on a CUDA device and rows of host memory.

A transfer becomes a list of fragments, which the device's copy engines move: many in a call of the
driver where it has such a call (CUDA 12.8), else one. Stores and loads have a stream each. A
transfer waits for the work that was queued on the compute stream before it, so that a store copies
what was computed, and a load does not overwrite what is still being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.device.cuda_driver import Copier, driver
from kvstore.device.fragments import Addresses, Fragments
from kvstore.device.layout import BlockPlaces, Layout, Pages, Places, RowPlaces
from kvstore.errors import ConfigError, KVStoreError

__all__ = ["CudaCopies", "Ticket"]

FEW = 4
"""Up to this number, fragments are copied one by one."""


@dataclass(slots=True)
class Ticket:
    """A transfer under way.

    Attributes:
        size: bytes.
        error: the driver's error, if it refused some of the copies; 0 if all were queued.
    """

    size: int
    begun: Any
    ended: Any
    error: int

    @property
    def done(self) -> bool:
        """Whether the transfer has ended. Never waits."""
        return bool(self.ended.query())

    def wait(self) -> None:
        """Wait until the transfer has ended."""
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        """How long the transfer took, once it has ended."""
        return float(self.begun.elapsed_time(self.ended)) / 1000


class CudaCopies:
    """Queues copies of blocks to rows, and back. For rows see `kvstore.device.layout`.

    Transfers of one direction run one after the other. No block may be named twice in a load, and
    no place of a row twice in a store. The memory on both sides must stay allocated until a
    transfer has ended.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
        places: Places | None = None,
        *,
        cuda: Any = None,
        calls: Copier | None = None,
    ) -> None:
        """
        Args:
            groups: for each KV cache group the tables of its blocks, all on one device.
            rows: host memory, of shape (rows, bytes of a row). The device copies at full speed
                only if it is registered: see `PinnedRegion.register_with_cuda`.
            cuda: ``torch.cuda``.
            calls: the driver.

        Raises:
            ConfigError: if a chunk is larger than a row, or tables lie on several devices.
        """
        devices = {pages.tensor.device for tables in groups for pages in tables}
        if len(devices) != 1:
            raise ConfigError(f"the KV cache is on {len(devices)} devices: must be on one")
        (self._device,) = devices
        self._cuda = cuda or torch.cuda
        # Creates this thread's context, which the driver's calls need.
        self._cuda.synchronize(self._device)
        self._calls = calls or driver()
        layout = Layout(groups, len(rows), rows.shape[1], blocks_per_chunk, places)
        self._addresses = Addresses(layout, int(rows.ctypes.data), rows.strides[0])
        self._stores, self._loads = (self._cuda.Stream(self._device) for _ in range(2))

    def store(self, blocks: BlockPlaces, rows: RowPlaces) -> Ticket:
        """Begin to copy blocks to rows.

        Nothing is begun if it raises.

        Raises:
            IndexError: for a block or a row that does not exist.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups.
            KVStoreError: while a CUDA graph is captured, which would include the copy.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._stores, store=True)

    def load(self, rows: RowPlaces, blocks: BlockPlaces) -> Ticket:
        """Begin to copy rows to blocks.

        Raises:
            IndexError, ValueError, KVStoreError: as `store`.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._loads, store=False)

    def shutdown(self) -> None:
        """Wait for all copies."""
        for stream in (self._stores, self._loads):
            stream.synchronize()

    def _begin(self, fragments: Fragments, stream: Any, *, store: bool) -> Ticket:
        """Queue a transfer after the work already queued on the current stream."""
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            raise KVStoreError("no copy can begin while a CUDA graph is captured")
        # With `blocking`, a thread that waits for the event sleeps instead of spinning.
        begun, ended = (cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        batch = self._calls.has_batch and len(fragments) > FEW
        with cuda.device(self._device):
            stream.wait_stream(cuda.current_stream(self._device))
            begun.record(stream)
            error = self._calls.copy(fragments, stream.cuda_stream, store=store, batch=batch)
            ended.record(stream)
        return Ticket(fragments.bytes, begun, ended, error)
