"""Stream: the copies of one direction, and what its ways need."""

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
"""As `kvstore.device.kernel.launch`."""

BATCH_STEP = 512
"""Fragments in a call of the driver."""

FEW = 4
"""So few fragments are handed over one by one."""

LARGE = 256 * 1024
"""Fragments of so many bytes are not staged: the copy engines are at full speed without."""

PIECE = 64 * 1024
"""Bytes that one program of the kernel copies at a time: larger fragments are shared out."""

HOST_PROGRAMS = 16
"""Of the kernel, where it reads or writes host memory. That lasts as long as the copies do, and
each takes a multiprocessor, of about 130 on a large device, from the compute beside it. By
calculation, not by measurement, so few suffice: each has up to 16 KiB of reads under way, and a
bus of 50 GB/s moves 50 to 100 KB in the time of a read."""

RING_PROGRAMS = 64
"""Of the kernel, where it copies within the device. That is a small part of the time, and the
copies of rows wait for it. By calculation, too: with pages of 16 KiB it is about a tenth."""

HIGH = -1
"""Priority of a stream."""

NOT_LAUNCHED = -1
"""The error of a transfer whose kernel could not be launched. The driver's are positive."""


@dataclass(slots=True)
class Ticket:
    """A transfer under way.

    Attributes:
        size: bytes.
        error: why not all of it was handed over, as the driver's code, or -1 where a kernel
            could not be launched; 0 if it was.
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


class Direction:
    """Begins transfers of one direction. They are done in the order in which they began."""

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
            store: whether from the device to host memory.
            word: of which all addresses and sizes are multiples; see `kvstore.device.kernel`.
            launch: gives what launches the kernel; it may raise ConfigError.
            kernels_read: whether kernels may use the addresses of host memory.
        """
        self.store = store
        # The kernel's few programs do not wait for the many of the compute.
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
        """Get what a way needs. Compiles the kernel, and waits for the device, at the first call
        for a way that has one.

        Raises:
            ConfigError: if there is no such way here; it says why.
        """
        if way == "batch" and not self._calls.has_batch:
            raise ConfigError("way = 'batch': this CUDA driver copies one fragment in a call")
        if way == "kernel" and not self._kernels_read:
            raise ConfigError("way = 'kernel': kernels cannot read this host memory")
        try:
            if way in ("kernel", "staged") and self._launch is None:
                self._prepare_launch()
            if way == "staged" and self._ring is None:
                # Memory of this stream: nothing queued on another still uses it.
                with self._cuda.device(self._device), self._cuda.stream(self.stream):
                    self._ring = Ring(self._device, self._ring_bytes)
        except ConfigError as error:
            raise ConfigError(f"way = {way!r}: {error}") from error

    def keep(self, ways: set[str]) -> None:
        """Give back what no way of these needs, when all transfers have ended."""
        self.stream.synchronize()
        if "staged" not in ways:
            self._ring = None
        if not ways & {"staged", "kernel"}:
            self._launch = self._lists = None

    def begin(self, fragments: Fragments, way: str) -> Ticket:
        """Begin a transfer in a way that was prepared, after what the current stream was given
        before.

        The device's memory and the host's must stay until it has ended.

        Raises:
            KVStoreError: while a CUDA graph is captured: the copy would become a part of it.
                Nothing was begun.
        """
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            raise KVStoreError("no copy can begin while a CUDA graph is captured")
        # Who waits for a blocking event sleeps.
        begun, ended = (cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with cuda.device(self._device):
            self.stream.wait_stream(cuda.current_stream(self._device))
            begun.record(self.stream)
            try:
                error = self._move(fragments, way)
            except Exception:
                # Part of it may be under way: its memory is free only once the ticket says so.
                logger.exception(
                    "a kernel that copies cannot be launched", extra=about("device.kernel_failed")
                )
                error = NOT_LAUNCHED
            ended.record(self.stream)
        return Ticket(fragments.bytes, begun, ended, error)

    def _move(self, fragments: Fragments, way: str) -> int:
        """Queue a transfer; returns the first error, 0 for none."""
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
                # Compiles it now rather than amid the first transfer.
                try:
                    there, error = lists.send(nothing, nothing, nothing, self.stream)
                    if not error:
                        launch(there, 1, self._word, 1)
                finally:
                    # Also after an error: the list must stay until it was fetched.
                    self.stream.synchronize()
        except Exception as failure:
            raise ConfigError(f"Triton's kernel does not run here: {failure}") from failure
        if error:
            raise ConfigError(f"the CUDA driver refuses a copy (error {error})")
        self._launch, self._lists = launch, lists


def launcher() -> Launch:
    """Triton's kernel.

    Raises:
        ConfigError: if there is no Triton.
    """
    try:
        from kvstore.device.kernel import launch
    except ImportError as error:
        raise ConfigError("Triton is not installed") from error
    return launch
