"""Linux native AIO over O_DIRECT: many extents of one batch in flight by one system call.

A batch of requests, wherever they lie, is one ``io_submit`` and a few
``io_getevents``, so a thread keeps as much in flight as the device likes and
random slots cost hardly more of the processor than neighbours. Containers that
refuse io_uring allow these calls. They are made by number, without libaio.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
import threading
import weakref
from array import array
from collections.abc import Sequence

from tiers.disk.io.base import IORequest
from tiers.disk.io.direct import DirectIO

__all__ = ["AioIO"]

logger = logging.getLogger("kvstore.disk")

DEPTH = 128
"""Most calls of one thread that are in flight."""

_CALL = struct.Struct("<QIIHhIQQqQII")
"""``iocb``: data, key, rw_flags, opcode, priority, fd, buffer, count, offset, and the rest."""

_EVENT = struct.Struct("<QQqq")
"""``io_event``: data, iocb, result and a second one."""

_VECTOR_BYTES = 16
"""``iovec``: address and length."""

_PREADV, _PWRITEV = 7, 8

_NUMBERS = {
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit."""


class AioIO(DirectIO):
    """O_DIRECT with every request of a batch in flight at once.

    Raises:
        OSError: at construction, when the kernel or a filter refuses the calls.
    """

    name = "aio"

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
        self._numbers = numbers
        self._local = threading.local()
        _Context(numbers)

    def read_all(self, requests: Sequence[IORequest]) -> list[int | OSError]:
        context = self._context()
        return self._move(context, requests, _PREADV) if context else super().read_all(requests)

    def write_all(self, requests: Sequence[IORequest]) -> list[int | OSError]:
        context = self._context()
        return self._move(context, requests, _PWRITEV) if context else super().write_all(requests)

    def _move(
        self, context: _Context, requests: Sequence[IORequest], opcode: int
    ) -> list[int | OSError]:
        addressof, from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
        places: list[tuple[int, int, int, int]] = []  # descriptor, offset, first vector, vectors
        vectors = array("Q")
        for request in requests:
            places.append((request.fd, request.offset, len(vectors) // 2, len(request.buffers)))
            for buffer in request.buffers:
                vectors.append(addressof(from_buffer(buffer)))
                vectors.append(len(buffer))
        outcomes: list[int | OSError] = []
        finish = super().read_all if opcode == _PREADV else super().write_all
        for request, moved in zip(requests, context.move(opcode, places, vectors), strict=True):
            if moved == -errno.EIO and opcode == _PWRITEV:
                # What FUSE says of a short write, too: plain calls tell it from a fault.
                outcomes += finish([request])
            elif moved < 0:
                outcomes.append(OSError(-moved, os.strerror(-moved)))
            elif moved < sum(len(buffer) for buffer in request.buffers):
                # A short transfer: plain calls tell the end of the file from a fault.
                outcomes += finish([request])
            else:
                outcomes.append(moved)
        return outcomes

    def _context(self) -> _Context | None:
        """The context of this thread; None where the system has none left for it."""
        try:
            context: _Context | None = self._local.context
        except AttributeError:
            try:
                context = _Context(self._numbers)
            except OSError as error:
                # All processes together may have `fs.aio-max-nr` calls in flight.
                logger.info("a thread goes on without native AIO: %s", error.strerror)
                context = None
            self._local.context = context
        return context


class _Context:
    """The AIO context of one thread."""

    def __init__(self, numbers: Sequence[int]) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        setup, destroy, events, submit = numbers
        handle = ctypes.c_ulong(0)
        if library.syscall(ctypes.c_long(setup), ctypes.c_long(DEPTH), ctypes.byref(handle)):
            raise _last_error()
        self._handle = handle.value
        weakref.finalize(self, library.syscall, ctypes.c_long(destroy), handle)
        # Functions of their own, with types declared: calls are converted faster.
        self._submit_number, self._events_number = submit, events
        self._submit = library["syscall"]
        self._submit.argtypes = (
            ctypes.c_long,
            ctypes.c_ulong,
            ctypes.c_long,
            ctypes.c_void_p,
        )
        self._submit.restype = ctypes.c_long
        self._get = library["syscall"]
        self._get.argtypes = (
            ctypes.c_long,
            ctypes.c_ulong,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self._get.restype = ctypes.c_long
        self._events = ctypes.create_string_buffer(DEPTH * _EVENT.size)
        self._events_at = ctypes.addressof(self._events)

    def move(
        self, opcode: int, places: Sequence[tuple[int, int, int, int]], vectors: array[int]
    ) -> list[int]:
        """Run all calls; returns the bytes moved of each, or the error's number negated.

        Returns when none is in flight any more: the kernel has let go of the memory.
        """
        total = len(places)
        if not total:
            return []
        iovecs, _ = vectors.buffer_info()
        calls = bytearray()
        for index, (fd, offset, first, count) in enumerate(places):
            at = iovecs + _VECTOR_BYTES * first
            calls += _CALL.pack(index, 0, 0, opcode, 0, fd, at, count, offset, 0, 0, 0)
        base = ctypes.addressof(ctypes.c_char.from_buffer(calls))
        pointers = array("Q", range(base, base + len(calls), _CALL.size))
        first_pointer, _ = pointers.buffer_info()
        moved = [0] * total
        begun = ended = 0
        while ended < total:
            room = min(total - begun, DEPTH - (begun - ended))
            if room:
                taken = self._submit(
                    self._submit_number, self._handle, room, first_pointer + 8 * begun
                )
                if taken >= 0:
                    begun += taken
                else:
                    number = ctypes.get_errno()
                    if number != errno.EAGAIN or begun == ended:
                        # The first of those that were handed over is refused, alone.
                        moved[begun] = -(number or errno.EIO)
                        begun += 1
                        ended += 1
            if begun > ended:
                # As many as leave half the depth in flight, or all at the end.
                enough = begun - ended if begun == total else max(1, (begun - ended) // 2)
                count = self._wait(enough)
                for at in range(0, count * _EVENT.size, _EVENT.size):
                    index, _, result, _ = _EVENT.unpack_from(self._events, at)
                    moved[index] = result
                ended += count
        return moved

    def _wait(self, enough: int) -> int:
        while True:
            count: int = self._get(
                self._events_number, self._handle, enough, DEPTH, self._events_at, None
            )
            if count >= 0:
                return count
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
