"""Stream: queue the copies of one direction, in any of the ways."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.device.cuda_driver import Copier
from kvstore.device.fragments import Fragments, cut
from kvstore.device.staging import MOST, Lists, Ring
from kvstore.errors import ConfigError, KVStoreError
from kvstore.types import about

__all__ = ["NOT_LAUNCHED", "Direction", "Launch", "Ticket", "launcher"]

logger = logging.getLogger("kvstore")

Launch = Callable[[torch.Tensor, int, int, int], None]
"""The signature of `kvstore.device.kernel.launch`."""

BATCH_STEP = 512
"""Most fragments in a call of the driver."""

FEW = 4
"""Up to this number, fragments are copied one by one."""

LARGE = 256 * 1024
"""Bytes from which a fragment is not staged: the copy engines copy it at full speed anyway."""

PIECE = 64 * 1024
"""Most bytes that one program of the kernel copies at a time: larger fragments are split."""

HOST_PROGRAMS = 16
"""Programs of the kernel if it reads or writes host memory. Each occupies a multiprocessor (of
about 130 on a large device) for as long as the copies last. By calculation, not by measurement,
these suffice: each has up to 16 KiB of reads under way, and a bus of 50 GB/s moves 50 to 100 KB in
the time of a read."""

RING_PROGRAMS = 64
"""Programs of the kernel if it copies within the device. The copies of rows wait for it. By
calculation, with pages of 16 KiB it takes about a tenth of the time."""

HIGH = -1
"""High priority of a stream."""

NOT_LAUNCHED = -1
"""Error of a transfer whose kernel could not be launched. The driver's errors are positive."""


@dataclass(slots=True)
class Ticket:
    """A transfer under way.

    Attributes:
        size: bytes.
        error: why not all copies were queued: the driver's error code, or `NOT_LAUNCHED`; 0 if
            all were queued.
    """

    size: int
    begun: Any
    ended: Any
    error: int = 0

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


class Direction:
    """Queues the transfers of one direction on a stream, which runs them in order."""

    def __init__(
        self,
        device: torch.device,
        cuda: Any,
        calls: Copier,
        *,
        store: bool,
        word: int,
        ring_bytes: int,
        launch: Callable[[], Launch],
        kernels_read: bool,
    ) -> None:
        """
        Args:
            store: True to copy from the device to host memory, False for the other direction.
            word: divides all addresses and sizes: see `kvstore.device.kernel`.
            launch: returns the function that launches the kernel; may raise ConfigError.
            kernels_read: whether kernels may use the addresses of host memory.
        """
        self.store = store
        # So that the kernel's few programs do not wait for the many of the compute stream.
        self.stream = cuda.Stream(device, priority=HIGH)
        self._device = device
        self._cuda = cuda
        self._calls = calls
        self._word = word
        self._ring_bytes = ring_bytes
        self._get_launch = launch
        self._kernels_read = kernels_read
        self._launch: Launch | None = None
        self._lists: Lists | None = None
        self._ring: Ring | None = None

    def prepare(self, way: str) -> None:
        """Allocate what a way needs.

        The first call for a way that uses a kernel compiles it and waits for the device.

        Raises:
            ConfigError: if the way is not available, with the reason.
        """
        if way == "batch" and not self._calls.has_batch:
            raise ConfigError("way = 'batch': this CUDA driver copies one fragment in a call")
        if way == "kernel" and not self._kernels_read:
            raise ConfigError("way = 'kernel': kernels cannot read this host memory")
        try:
            if way in ("kernel", "staged") and self._launch is None:
                self._prepare_launch()
            if way == "staged" and self._ring is None:
                # Allocated on this stream, so that no other stream still uses the memory.
                with self._cuda.device(self._device), self._cuda.stream(self.stream):
                    self._ring = Ring(self._device, self._ring_bytes)
        except ConfigError as error:
            raise ConfigError(f"way = {way!r}: {error}") from error

    def keep(self, ways: set[str]) -> None:
        """Wait for all transfers, then release what none of these ways needs."""
        self.stream.synchronize()
        if "staged" not in ways:
            self._ring = None
        if not ways & {"staged", "kernel"}:
            self._launch = self._lists = None

    def begin(self, fragments: Fragments, way: str) -> Ticket:
        """Begin a transfer in a prepared way, after the work already queued on the current stream.

        The memory on both sides must stay allocated until the transfer has ended.

        Raises:
            KVStoreError: while a CUDA graph is captured, which would include the copy. Nothing is
                begun then.
        """
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            raise KVStoreError("no copy can begin while a CUDA graph is captured")
        # With `blocking`, a thread that waits for the event sleeps instead of spinning.
        begun, ended = (cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with cuda.device(self._device):
            self.stream.wait_stream(cuda.current_stream(self._device))
            begun.record(self.stream)
            try:
                error = self._move(fragments, way)
            except Exception:
                # Some copies may be under way: the memory is in use until the ticket is done.
                logger.exception(
                    "the copy kernel cannot be launched", extra=about("device.kernel_failed")
                )
                error = NOT_LAUNCHED
            ended.record(self.stream)
        return Ticket(fragments.bytes, begun, ended, error)

    def _move(self, fragments: Fragments, way: str) -> int:
        """Queue a transfer; return the first error, 0 for none."""
        if len(fragments) <= FEW:
            return self._copy(fragments, "each")
        if way == "kernel":
            return self._kernel(fragments, HOST_PROGRAMS)
        if way == "staged":
            return self._stage(fragments)
        return self._copy(fragments, way)

    def _copy(self, fragments: Fragments, way: str) -> int:
        return self._calls.copy(
            fragments, self.stream.cuda_stream, store=self.store, way=way, step=BATCH_STEP
        )

    def _copy_rows(self, fragments: Fragments) -> int:
        few = len(fragments) <= FEW or not self._calls.has_batch
        return self._copy(fragments, "each" if few else "batch")

    def _stage(self, fragments: Fragments) -> int:
        assert self._ring is not None, "the way was not prepared"
        large = fragments.sizes >= LARGE
        error = self._copy_rows(fragments.take(large))
        fragments = fragments.take(~large)
        if error or not len(fragments):
            return error
        for fill in self._ring.fills(fragments):
            if self.store:
                error = self._kernel(fill.pages, RING_PROGRAMS) or self._copy_rows(fill.rows)
            else:
                error = self._copy_rows(fill.rows) or self._kernel(fill.pages, RING_PROGRAMS)
            if error:
                break
        return error

    def _kernel(self, fragments: Fragments, programs: int) -> int:
        assert self._launch is not None, "the way was not prepared"
        assert self._lists is not None
        pieces, _ = cut(fragments, np.zeros(len(fragments), np.int64), PIECE)
        targets, sources = pieces.device, pieces.host
        if self.store:
            targets, sources = sources, targets
        with self._cuda.stream(self.stream):
            for begin in range(0, len(pieces), MOST):
                part = slice(begin, begin + MOST)
                sizes = pieces.sizes[part]
                lists, error = self._lists.send(targets[part], sources[part], sizes, self.stream)
                if error:
                    return error
                self._launch(lists, len(sizes), self._word, programs)
        return 0

    def _prepare_launch(self) -> None:
        launch = self._get_launch()
        nothing = np.zeros(1, np.int64)
        try:
            with self._cuda.device(self._device), self._cuda.stream(self.stream):
                lists = Lists(self._device, self._cuda, self._calls)
                # Compile the kernel now, not during the first transfer.
                try:
                    there, error = lists.send(nothing, nothing, nothing, self.stream)
                    if not error:
                        launch(there, 1, self._word, 1)
                finally:
                    # Even after an error, the list must stay until the device has copied it.
                    self.stream.synchronize()
        except Exception as failure:
            raise ConfigError(f"the copy kernel does not run: {failure}") from failure
        if error:
            raise ConfigError(f"the CUDA driver refused a copy (error {error})")
        self._launch, self._lists = launch, lists


def launcher() -> Launch:
    """Return the function that launches the Triton kernel.

    Raises:
        ConfigError: if Triton is not installed.
    """
    try:
        from kvstore.device.kernel import launch
    except ImportError as error:
        raise ConfigError("Triton is not installed") from error
    return launch
