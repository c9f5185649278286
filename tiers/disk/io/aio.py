"""Linux native AIO over O_DIRECT: many extents of one batch in flight by one system call.

A batch of runs, wherever they lie, is one ``io_submit`` and a few
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
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from tiers.disk.io.base import Run
from tiers.disk.io.direct import DirectIO

__all__ = ["AioIO"]

logger = logging.getLogger("kvstore.disk")

DEPTH = 128
"""Most calls of one thread that are in flight."""

LONG_BYTES = 1024 * 1024
"""Runs of neighbours as long as this are moved by plain calls, which are a little faster then."""

_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("count", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_PREADV, _PWRITEV = 7, 8

_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)

_NUMBERS = {
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit."""


class AioIO(DirectIO):
    """O_DIRECT with every run of a batch in flight at once.

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

    def read_all(self, runs: Sequence[Run]) -> list[int | OSError]:
        context = None if _long(runs) else self._context()
        return self._move(context, runs, _PREADV) if context else super().read_all(runs)

    def write_all(self, runs: Sequence[Run]) -> list[int | OSError]:
        context = None if _long(runs) else self._context()
        return self._move(context, runs, _PWRITEV) if context else super().write_all(runs)

    def _move(self, context: _Context, runs: Sequence[Run], opcode: int) -> list[int | OSError]:
        places: list[tuple[int, int, int, int]] = []  # descriptor, offset, first vector, vectors
        vectors: list[int] = []
        for run in runs:
            places.append((run.fd, run.offset, len(vectors) // 2, len(run.buffers)))
            for buffer in run.buffers:
                vectors.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
                vectors.append(len(buffer))
        outcomes: list[int | OSError] = []
        finish = super().read_all if opcode == _PREADV else super().write_all
        for run, moved in zip(runs, context.move(opcode, places, vectors), strict=True):
            if moved < 0:
                outcomes.append(OSError(-moved, os.strerror(-moved)))
            elif moved < sum(len(buffer) for buffer in run.buffers):
                # A short transfer: plain calls tell the end of the file from a fault.
                outcomes += finish([run])
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
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._numbers = numbers
        handle = ctypes.c_ulong(0)
        self._call(_SETUP, ctypes.c_long(DEPTH), ctypes.byref(handle))
        self._handle = ctypes.c_ulong(handle.value)
        weakref.finalize(
            self, self._syscall, ctypes.c_long(numbers[_DESTROY]), ctypes.c_ulong(handle.value)
        )
        self._events = np.zeros(DEPTH, _EVENT)

    def move(
        self, opcode: int, places: Sequence[tuple[int, int, int, int]], vectors: Sequence[int]
    ) -> list[int]:
        """Run all calls; returns the bytes moved of each, or the error's number negated.

        Returns when none is in flight any more: the kernel has let go of the memory.
        """
        total = len(places)
        table = np.array(places, np.int64).reshape(total, 4)
        iovecs = np.array(vectors, np.uint64)
        calls = np.zeros(total, _IOCB)
        calls["data"] = np.arange(total)
        calls["opcode"] = opcode
        calls["fd"] = table[:, 0]
        calls["offset"] = table[:, 1]
        calls["buffer"] = iovecs.ctypes.data + 16 * table[:, 2].astype(np.uint64)
        calls["count"] = table[:, 3]
        pointers = calls.ctypes.data + _IOCB.itemsize * np.arange(total, dtype=np.uint64)
        first_pointer = pointers.ctypes.data
        moved = [0] * total
        begun = ended = 0
        while ended < total:
            room = min(total - begun, DEPTH - (begun - ended))
            if room:
                try:
                    begun += self._call(
                        _SUBMIT,
                        self._handle,
                        ctypes.c_long(room),
                        ctypes.c_void_p(first_pointer + 8 * begun),
                    )
                except OSError as error:
                    if error.errno != errno.EAGAIN or begun == ended:
                        # The first of those that were handed over is refused, alone.
                        moved[begun] = -(error.errno or errno.EIO)
                        begun += 1
                        ended += 1
            if begun > ended:
                # As many as leave half the depth in flight, or all at the end.
                enough = begun - ended if begun == total else max(1, (begun - ended) // 2)
                for index, result in self._wait(enough):
                    moved[index] = result
                    ended += 1
        return moved

    def _wait(self, enough: int) -> list[tuple[int, int]]:
        while True:
            try:
                count = self._call(
                    _GETEVENTS,
                    self._handle,
                    ctypes.c_long(enough),
                    ctypes.c_long(DEPTH),
                    ctypes.c_void_p(self._events.ctypes.data),
                    None,
                )
            except InterruptedError:
                continue
            done = self._events[:count]
            return list(zip(done["data"].tolist(), done["result"].tolist(), strict=True))

    def _call(self, which: int, *arguments: object) -> int:
        result: int = self._syscall(ctypes.c_long(self._numbers[which]), *arguments)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _long(runs: Sequence[Run]) -> bool:
    """Whether each run is long enough to keep the device busy by itself."""
    size = sum(len(run.buffers) * len(run.buffers[0]) for run in runs if run.buffers)
    return len(runs) < 2 or size >= len(runs) * LONG_BYTES
