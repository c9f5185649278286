"""Native AIO in Python: what ``_aio.c`` does, where that is not compiled.

The calls are made by number, without libaio.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import weakref
from array import array
from collections.abc import Sequence

from tiers.disk.digest import digests
from tiers.disk.io.base import IORequest

__all__ = ["Context"]

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


class Context:
    """The AIO context of one thread: see `tiers.disk.io.aio.Context`.

    Args:
        depth: most calls in flight.

    Raises:
        OSError: when the system has none left, or refuses the calls.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
        library = ctypes.CDLL(None, use_errno=True)
        setup, destroy, events, submit = numbers
        handle = ctypes.c_ulong(0)
        if library.syscall(ctypes.c_long(setup), ctypes.c_long(depth), ctypes.byref(handle)):
            raise _last_error()
        self._depth = depth
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
        self._events = ctypes.create_string_buffer(depth * _EVENT.size)
        self._events_at = ctypes.addressof(self._events)

    def move(
        self, requests: Sequence[IORequest], load: bool, hashed: int
    ) -> list[tuple[int, list[bytes]]]:
        """See `tiers.disk.io.aio.Context`."""
        total = len(requests)
        calls, vectors = _calls(requests, _PREADV if load else _PWRITEV)
        base = ctypes.addressof(ctypes.c_char.from_buffer(calls)) if calls else 0
        pointers = array("Q", range(base, base + len(calls), _CALL.size))
        first_pointer, _ = pointers.buffer_info()
        lengths = [0] * total
        found: list[list[bytes]] = [[] for _ in requests]
        begun = ended = made = 0
        try:
            while ended < total:
                room = min(total - begun, self._depth - (begun - ended))
                if room:
                    taken = self._submit(
                        self._submit_number, self._handle, room, first_pointer + 8 * begun
                    )
                    if taken > 0:
                        begun += taken
                    else:
                        number = ctypes.get_errno()
                        if number != errno.EAGAIN or begun == ended:
                            # The first of those that were handed over is refused, alone.
                            lengths[begun] = -(number or errno.EIO)
                            begun += 1
                            ended += 1
                while hashed and not load and made < begun:
                    # While the device takes the bytes.
                    found[made] = digests(requests[made].buffers, hashed, _size(requests[made]))
                    made += 1
                if begun > ended:
                    moved = self._wait(max(1, (begun - ended) // 2))
                    ended += len(moved)
                    for index, length in moved:
                        lengths[index] = length
                        if hashed and load and length == _size(requests[index]):
                            # While the device moves the rest.
                            found[index] = digests(requests[index].buffers, hashed, length)
        finally:
            while begun > ended:
                ended += len(self._wait(begun - ended))
        # Until here the kernel has read from them.
        del vectors
        return [
            (length, its if length == _size(request) else [])
            for request, length, its in zip(requests, lengths, found, strict=True)
        ]

    def _wait(self, enough: int) -> list[tuple[int, int]]:
        """At least `enough` requests that have ended: their numbers, and what the kernel says."""
        while True:
            count: int = self._get(
                self._events_number, self._handle, enough, self._depth, self._events_at, None
            )
            if count >= 0:
                ends = range(0, count * _EVENT.size, _EVENT.size)
                events = [_EVENT.unpack_from(self._events, at) for at in ends]
                return [(event[0], event[2]) for event in events]
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()


def _calls(requests: Sequence[IORequest], opcode: int) -> tuple[bytearray, array[int]]:
    """The ``iocb`` of each request, and the addresses and lengths that they refer to."""
    addressof, from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
    vectors = array("Q")
    for request in requests:
        for buffer in request.buffers:
            vectors.append(addressof(from_buffer(buffer)))
            vectors.append(len(buffer))
    at, _ = vectors.buffer_info()
    calls = bytearray()
    for index, (fd, buffers, offset) in enumerate(requests):
        count = len(buffers)
        calls += _CALL.pack(index, 0, 0, opcode, 0, fd, at, count, offset, 0, 0, 0)
        at += _VECTOR_BYTES * count
    return calls, vectors


def _size(request: IORequest) -> int:
    return sum(map(len, request.buffers))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
