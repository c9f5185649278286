"""Copies between a KV cache on a CUDA device and rows of host memory.

A transfer becomes a list of fragments, which is handed to the device in one of several ways: see
`kvstore.device.ways`. Stores and loads have a stream each. A transfer waits for the work that was
queued on the compute stream before it, so that a store copies what was computed, and a load does
not overwrite what is still being read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.device.cuda_driver import Copier, driver
from kvstore.device.fragments import Addresses, Fragments
from kvstore.device.layout import BlockPlaces, Layout, Pages, Places, RowPlaces
from kvstore.device.staging import RING_BYTES
from kvstore.device.stream import Direction, Launch, Ticket, launcher
from kvstore.device.tuning import Measurement, sizes_of
from kvstore.device.ways import WAYS, Ways
from kvstore.errors import ConfigError, KVStoreError
from kvstore.types import about

__all__ = ["CudaCopies"]

logger = logging.getLogger("kvstore")

MEASURE_SECONDS = 0.5


class CudaCopies:
    """Queues copies of blocks to rows, and back. For rows see `kvstore.device.layout`.

    Transfers of one direction run one after the other. No block may be named twice in a load, and
    no place of a row twice in a store.

    Attributes:
        ways: which way transfers take.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
        places: Places | None = None,
        *,
        way: str | None = None,
        kernels_read: bool = False,
        ring_bytes: int = RING_BYTES,
        cuda: Any = None,
        calls: Copier | None = None,
        launch: Callable[[], Launch] = launcher,
    ) -> None:
        """
        Args:
            groups: for each KV cache group the tables of its blocks, all on one device.
            rows: host memory, of shape (rows, bytes of a row). The device copies at full speed
                only if it is registered: see `PinnedRegion.register_with_cuda`.
            way: one of `WAYS`, for all transfers; by default ``batch`` if the driver has it, else
                ``each``, until `measure` finds a faster one.
            kernels_read: whether kernels of the device may use the addresses of `rows`: what
                `register_with_cuda` returned. If True is wrong, a kernel makes an illegal access,
                after which the process can no longer use the device.
            ring_bytes: device memory that each direction uses for ``staged``: a multiple of
                64 KiB.
            cuda: ``torch.cuda``.
            calls: the driver.
            launch: returns the function that launches the kernel.

        Raises:
            ConfigError: if a chunk is larger than a row, tables lie on several devices, or the
                way is not available.
        """
        devices = {pages.tensor.device for tables in groups for pages in tables}
        if len(devices) != 1:
            raise ConfigError(f"the KV cache is on {len(devices)} devices: must be on one")
        (self._device,) = devices
        self._cuda = cuda or torch.cuda
        # Creates this thread's context, which the driver's calls need.
        self._cuda.synchronize(self._device)
        calls = calls or driver()
        self._layout = Layout(groups, len(rows), rows.shape[1], blocks_per_chunk, places)
        self._addresses = Addresses(self._layout, int(rows.ctypes.data), rows.strides[0])
        self._memory = rows
        self._stores, self._loads = self._directions = tuple(
            Direction(
                self._device,
                self._cuda,
                calls,
                store=store,
                word=self._addresses.word,
                ring_bytes=ring_bytes,
                launch=launch,
                kernels_read=kernels_read,
            )
            for store in (True, False)
        )
        self.ways = Ways("batch" if calls.has_batch else "each")
        if way is not None:
            self.use(way)

    def use(self, way: str) -> None:
        """Use one way for all transfers from now on. Waits for transfers under way.

        Raises:
            ConfigError: if the way is not available, with the reason. Nothing changes then.
        """
        if way not in WAYS:
            raise ConfigError(f"way = {way!r}: must be one of {', '.join(WAYS)}")
        for direction in self._directions:
            direction.prepare(way)
        self._take(Ways(way))

    def measure(
        self,
        seconds: float = MEASURE_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time all available ways for fragments of this layout, and use the fastest from now on.

        Copies scratch memory only: 8 MiB of pinned host memory and about 50 MiB of the device,
        which torch gets back. A way that copies incorrectly is not used. If measuring fails, the
        ways stay as they are, and the log says why. Waits for transfers under way.

        Args:
            seconds: how long measuring takes, approximately. Compiling the kernel takes some
                seconds more if Triton has not compiled it on this machine before.
        """
        ways = self.ways
        try:
            measurement = Measurement(self._device, self._memory.shape[1], clock)
            rates = measurement.rates(self._directions, sizes_of(self._layout), seconds)
            if not rates:
                raise KVStoreError("no way copies correctly")
            ways = Ways(ways.default, rates)
            logger.info("kvstore: copies of %s", ways, extra=about("device.measured", ways=ways))
        except Exception as error:
            logger.warning(
                "device copies could not be measured; the way of copying stays as it was: %s",
                error,
                extra=about("device.not_measured", error=error),
            )
        self._take(ways)

    def _take(self, ways: Ways) -> None:
        for direction in self._directions:
            direction.keep(ways.used(store=direction.store))
        self.ways = ways

    def store(self, blocks: BlockPlaces, rows: RowPlaces) -> Ticket:
        """Begin to copy blocks to rows.

        Nothing is begun if it raises.

        Raises:
            IndexError: for a block or a row that does not exist.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups.
            KVStoreError: while a CUDA graph is captured, which would include the copy.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._stores)

    def load(self, rows: RowPlaces, blocks: BlockPlaces) -> Ticket:
        """Begin to copy rows to blocks.

        Raises:
            IndexError, ValueError, KVStoreError: as `store`.
        """
        return self._begin(self._addresses.fragments(blocks, rows), self._loads)

    def _begin(self, fragments: Fragments, direction: Direction) -> Ticket:
        size = fragments.bytes / max(1, len(fragments))
        return direction.begin(fragments, self.ways.way(max(1.0, size), store=direction.store))

    def shutdown(self) -> None:
        """Wait for all copies."""
        for direction in self._directions:
            direction.stream.synchronize()
