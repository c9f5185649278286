"""Linux native AIO over O_DIRECT: many extents of one batch in flight by one system call.

A batch of requests, wherever they lie, is one ``io_submit`` and a few
``io_getevents``, so a thread keeps as much in flight as the device likes and
random slots cost hardly more of the processor than neighbours. Digests are made
while the device moves the rest of the batch. Many containers that refuse io_uring allow
these calls.

A whole batch is one call without the GIL (``_aio.c``): threads that move bytes do not
wait for each other, nor for the server's own. It needs a C compiler at installation.

To end a context takes the kernel tens of milliseconds, so a process keeps a few that
its threads have let go of, for those that come (`_aio.c`).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from kvstore.tiers.disk.digest import address
from kvstore.tiers.disk.io.base import IORequest, Later, Moved, UnderWay
from kvstore.tiers.disk.io.buffered import DirectIO
from kvstore.types import about

try:
    from kvstore.tiers.disk.io import _aio as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

__all__ = ["AioIO"]

logger = logging.getLogger("kvstore.disk")

DEPTH = 64
"""Most places in a device's queue that the loads of one thread take, a single call excepted: one
for each buffer and two for each call. A virtual device has 256 of them, and loses up to a fifth
where they are all taken."""

STORE_DEPTH = 32
"""The same for stores: enough to keep a device busy, without a long wait for loads."""

CALL_BYTES = 512 * 1024
"""Most bytes of one call: see docs/decisions/disk.md."""


class Batch(Protocol):
    """Requests that the kernel moves."""

    def waits(self) -> bool:
        """Whether any of them has not ended, as far as is known."""

    def end(self) -> list[tuple[int, list[bytes]]]:
        """Wait for all: the bytes moved of each, or the error's number negated, and digests.

        The digests are those of the first `hashed` bytes of each buffer, if that is not 0,
        and only of a request that was moved completely. When this returns, the kernel does not
        use the memory any more.
        """


class Context(Protocol):
    """An AIO context of one thread, which may have several batches under way."""

    def begin(self, requests: Sequence[IORequest], load: bool, hashed: int, /) -> Batch:
        """Hand over as much as the depth allows; `Batch.end`, of any batch, sees to the rest."""


class AioIO(DirectIO):
    """O_DIRECT with every request of a batch in flight at once.

    Raises:
        OSError: at construction, when the calls were not compiled, or are refused.
    """

    name = "aio"

    def __init__(self) -> None:
        self._loads, self._stores = threading.local(), threading.local()
        function = address()
        if compiled is None or function is None:
            missing = "no C compiler at installation" if compiled is None else "no C digest"
            raise OSError(errno.ENOSYS, f"{missing}, so batches cannot be handed over")
        self._digest = function
        self._make(DEPTH)

    def _make(self, depth: int) -> Context:
        return compiled.Context(depth, CALL_BYTES, self._digest)

    def begin(self, requests: Sequence[IORequest], hashed: int = 0, *, load: bool) -> UnderWay:
        local, depth = (self._loads, DEPTH) if load else (self._stores, STORE_DEPTH)
        context = self._context(local, depth)
        if context is None:
            return Later(partial(super().move_all, requests, hashed, load=load))
        return _UnderWay(self, requests, hashed, context.begin(requests, load, hashed), load)

    def move_all(
        self, requests: Sequence[IORequest], hashed: int = 0, *, load: bool
    ) -> list[Moved | OSError]:
        return self.begin(requests, hashed, load=load).end()

    def _context(self, local: threading.local, depth: int) -> Context | None:
        """Return this thread's context; None if the system has none left for it."""
        try:
            context: Context | None = local.context
        except AttributeError:
            try:
                context = self._make(depth)
            except OSError as error:
                # All processes together may have `fs.aio-max-nr` calls in flight.
                logger.info(
                    "a thread goes on without native AIO: %s",
                    error.strerror,
                    extra=about("disk.no_aio", error=error.strerror),
                )
                context = None
            local.context = context
        return context


class _UnderWay(UnderWay):
    """A batch of `requests`."""

    def __init__(
        self,
        backend: AioIO,
        requests: Sequence[IORequest],
        hashed: int,
        batch: Batch,
        load: bool,
    ) -> None:
        self._backend = backend
        self._requests = requests
        self._hashed = hashed
        self._batch = batch
        self._load = load

    def waits(self) -> bool:
        return self._batch.waits()

    def end(self) -> list[Moved | OSError]:
        return [
            Moved(length, digests)
            if digests or length == sum(map(len, request.buffers))
            else self._again(request, length)
            for request, (length, digests) in zip(self._requests, self._batch.end(), strict=True)
        ]

    def _again(self, request: IORequest, length: int) -> Moved | OSError:
        """Finish a request that was moved in part, or not at all."""
        # Of a short read plain calls tell the end of the file from a fault. FUSE says EIO of a
        # short write, too.
        if length < 0 and (self._load or length != -errno.EIO):
            return OSError(-length, os.strerror(-length))
        return self._backend.move_one(request, self._hashed, load=self._load)
