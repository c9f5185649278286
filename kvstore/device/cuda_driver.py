"""CUDA driver calls that torch does not offer.

Errors are returned as codes. Unlike errors of the runtime, they do not stay pending for a later
call of torch to report.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import numpy as np

from kvstore.device.fragments import Fragments, Longs

__all__ = ["Copier", "Driver", "driver"]

BATCH_VERSION = 12080
"""Version of ``cuMemcpyBatchAsync``; that of 13000 has one argument fewer."""

BATCH_STEP = 512
"""Most fragments in a call."""

STREAM_ORDER = 1
"""Read the source in stream order: the source of a store may still be being written."""


class Copier(Protocol):
    """The part of a driver that copies need: see `Driver`."""

    has_batch: bool

    def copy(self, fragments: Fragments, stream: int, *, store: bool, batch: bool) -> int: ...


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The copy functions of ``libcuda``. The calling thread must have a context.

    Attributes:
        has_batch: whether it can copy many fragments in one call.
    """

    def __init__(self) -> None:
        """
        Raises:
            OSError: if there is no driver.
        """
        library = ctypes.CDLL("libcuda.so.1")
        pointer, size, address = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        self._copy = library.cuMemcpyAsync
        self._copy.argtypes = [address, address, size, pointer]
        self._copy.restype = ctypes.c_int
        find = library.cuGetProcAddress_v2
        find.argtypes = [ctypes.c_char_p, pointer, ctypes.c_int, address, pointer]
        find.restype = ctypes.c_int
        entry, status = ctypes.c_void_p(), ctypes.c_int()
        error = find(
            b"cuMemcpyBatchAsync", ctypes.byref(entry), BATCH_VERSION, 0, ctypes.byref(status)
        )
        self.has_batch = error == 0 and bool(entry.value)
        if entry.value and self.has_batch:
            call = ctypes.CFUNCTYPE(
                ctypes.c_int, *(pointer,) * 3, size, *(pointer,) * 2, size, *(pointer,) * 2
            )
            self._batch = call(entry.value)

    def copy_batch(self, targets: Longs, sources: Longs, sizes: Longs, stream: int) -> int:
        """Queue all fragments in one call; return the error, 0 for none."""
        attributes = _Attributes(source_order=STREAM_ORDER)
        first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(some, np.uint64) for some in (targets, sources, sizes)]
        return int(
            self._batch(
                *(array.ctypes.data for array in arrays),
                len(sizes),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                ctypes.byref(failed),
                stream,
            )
        )

    def copy(self, fragments: Fragments, stream: int, *, store: bool, batch: bool) -> int:
        """Queue a transfer; return the first error, 0 for none. Copies before the error are queued.

        Args:
            store: True to copy from the device to host memory, False for the other direction.
            batch: whether many fragments are queued in one call, which needs `has_batch`.
        """
        targets, sources = fragments.device, fragments.host
        if store:
            targets, sources = sources, targets
        if not batch:
            each = zip(targets.tolist(), sources.tolist(), fragments.sizes.tolist(), strict=True)
            for one in each:
                if error := int(self._copy(*one, stream)):
                    return error
            return 0
        for begin in range(0, len(fragments), BATCH_STEP):
            part = slice(begin, begin + BATCH_STEP)
            its = targets[part], sources[part], fragments.sizes[part]
            if error := self.copy_batch(*its, stream):
                return error
        return 0


@functools.cache
def driver() -> Driver:
    """Return the driver of this process."""
    return Driver()
