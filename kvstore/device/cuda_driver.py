"""CUDA driver calls that torch does not offer.

Errors come back as codes: unlike those of the runtime they leave nothing pending that a later call
of torch would take for its own.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import numpy as np

from kvstore.device.fragments import Fragments, Longs

__all__ = ["Copier", "Driver", "driver"]

BATCH_VERSION = 12080
"""Of ``cuMemcpyBatchAsync``: 13000 has one argument fewer."""

STREAM_ORDER = 1
"""The source is read in the order of the stream: what a store copies may still be being written."""


class Copier(Protocol):
    """What copies need of a driver; see `Driver`."""

    has_batch: bool

    def copy(
        self, fragments: Fragments, stream: int, *, store: bool, way: str, step: int
    ) -> int: ...


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """``libcuda``, as far as copies need it. The calling thread must have a context.

    Attributes:
        has_batch: it copies many fragments in one call.
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

    def copy_each(self, targets: Longs, sources: Longs, sizes: Longs, stream: int) -> int:
        """Queue one copy for each fragment; returns the first error, 0 for none."""
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            error = int(self._copy(target, source, size, stream))
            if error:
                return error
        return 0

    def copy_batch(self, targets: Longs, sources: Longs, sizes: Longs, stream: int) -> int:
        """Queue all fragments in one call; returns the error, 0 for none."""
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

    def copy(self, fragments: Fragments, stream: int, *, store: bool, way: str, step: int) -> int:
        """Queue a transfer; returns the first error, 0 for none. What came before it is queued.

        Args:
            way: ``each``, or ``batch`` with `step` fragments in a call.
        """
        targets, sources = fragments.device, fragments.host
        if store:
            targets, sources = sources, targets
        if way == "each":
            return self.copy_each(targets, sources, fragments.sizes, stream)
        for begin in range(0, len(fragments), step):
            part = slice(begin, begin + step)
            error = self.copy_batch(targets[part], sources[part], fragments.sizes[part], stream)
            if error:
                return error
        return 0


@functools.cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()
