"""Linux native AIO over O_DIRECT: many extents of one batch in flight by one system call.

A batch of requests, wherever they lie, is one ``io_submit`` and a few
``io_getevents``, so a thread keeps as much in flight as the device likes and
random slots cost hardly more of the processor than neighbours. Digests are made
while the device moves the rest of the batch. Containers that refuse io_uring allow
these calls.

Where the package was installed with a C compiler, a whole batch is one call without
the GIL (``_aio.c``): threads that move bytes do not wait for each other, nor for
the server's own. Elsewhere `aio_context` does the same in Python.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tiers.disk.digest import address
from tiers.disk.io import aio_context
from tiers.disk.io.base import IORequest, Moved
from tiers.disk.io.direct import DirectIO

try:
    from tiers.disk.io import _aio as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

__all__ = ["AioIO"]

logger = logging.getLogger("kvstore.disk")

DEPTH = 128
"""Most calls of one thread that are in flight."""


class Context(Protocol):
    """The AIO context of one thread: the kernel moves what it is told to."""

    def move(
        self, requests: Sequence[IORequest], load: bool, hashed: int, /
    ) -> list[tuple[int, list[bytes]]]:
        """Run all requests: for each the bytes moved, or the error's number negated, and digests.

        The digests are those of the first `hashed` bytes of each buffer, if that is not 0,
        and only of a request that was moved whole. Returns when no request is in flight any
        more: the kernel has let go of the memory.
        """


class AioIO(DirectIO):
    """O_DIRECT with every request of a batch in flight at once.

    Raises:
        OSError: at construction, when the kernel or a filter refuses the calls.
    """

    name = "aio"

    def __init__(self) -> None:
        self._local = threading.local()
        self._make: Callable[[], Context] = partial(aio_context.Context, DEPTH)
        function = address() if compiled is not None else None
        if function is not None:
            self._make = partial(compiled.Context, DEPTH, function)
        self._make()

    def read_all(self, requests: Sequence[IORequest], hashed: int = 0) -> list[Moved | OSError]:
        context = self._context()
        if context is None:
            return super().read_all(requests, hashed)
        return [
            # Of a short transfer plain calls tell the end of the file from a fault.
            _told(request, moved, hashed) or self._read_one(request, hashed)
            for request, moved in zip(requests, context.move(requests, True, hashed), strict=True)
        ]

    def write_all(self, requests: Sequence[IORequest], hashed: int = 0) -> list[Moved | OSError]:
        context = self._context()
        if context is None:
            return super().write_all(requests, hashed)
        return [
            # FUSE says EIO of a short write, too.
            (_told(request, moved, hashed) if moved[0] != -errno.EIO else None)
            or self._write_one(request, hashed)
            for request, moved in zip(requests, context.move(requests, False, hashed), strict=True)
        ]

    def _context(self) -> Context | None:
        """The context of this thread; None where the system has none left for it."""
        try:
            context: Context | None = self._local.context
        except AttributeError:
            try:
                context = self._make()
            except OSError as error:
                # All processes together may have `fs.aio-max-nr` calls in flight.
                logger.info("a thread goes on without native AIO: %s", error.strerror)
                context = None
            self._local.context = context
        return context


def _told(
    request: IORequest, moved: tuple[int, list[bytes]], hashed: int
) -> Moved | OSError | None:
    """What became of a request, or None where it was moved in part."""
    length, digests = moved
    if digests:
        return Moved(length, digests)
    if length < 0:
        return OSError(-length, os.strerror(-length))
    return Moved(length) if length == sum(map(len, request.buffers)) else None
