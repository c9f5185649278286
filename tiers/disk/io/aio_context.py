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
from collections.abc import Iterator, Sequence
from itertools import count

from tiers.disk.digest import digests
from tiers.disk.io.base import IORequest

__all__ = ["Batch", "Context"]

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
        depth: most places in a device's queue, a single call excepted.
        call_bytes: most bytes of one call.

    Raises:
        OSError: when the system has none left, or refuses the calls.
    """

    def __init__(self, depth: int, call_bytes: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
        library = ctypes.CDLL(None, use_errno=True)
        setup, destroy, events, submit = numbers
        handle = ctypes.c_ulong(0)
        if library.syscall(ctypes.c_long(setup), ctypes.c_long(depth), ctypes.byref(handle)):
            raise _last_error()
        self._depth = depth
        self._call_bytes = call_bytes
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
        self._flying = 0
        self._batches: dict[int, Batch] = {}

    def begin(self, requests: Sequence[IORequest], load: bool, hashed: int) -> Batch:
        """See `tiers.disk.io.aio.Context`."""
        return Batch(self, self._batches, requests, load, hashed, self._call_bytes)

    @property
    def room(self) -> int:
        """How many places are left; one call that is alone needs none."""
        return self._depth - self._flying

    @property
    def idle(self) -> bool:
        """Whether the kernel has none."""
        return not self._flying

    def submit_all(self) -> None:
        """Hand over what there is room for, of the oldest batch first."""
        for batch in self._batches.values():
            batch.submit()

    def submit(self, pointers: int, places: Sequence[int]) -> int:
        """Hand over the calls behind `pointers`, in order.

        Args:
            places: how many each takes in the queue of a device.

        Returns:
            How many were taken; 0 where there is no room now; the error's number, negated, of the
            first, which is refused.
        """
        taken: int = self._submit(self._submit_number, self._handle, len(places), pointers)
        if taken > 0:
            self._flying += sum(places[:taken])
            return taken
        number = ctypes.get_errno()
        return 0 if number == errno.EAGAIN and self._flying else -(number or errno.EIO)

    def reap(self, enough: int) -> None:
        """Take in the ends of at least `enough` calls, of whichever batch."""
        while True:
            ended: int = self._get(
                self._events_number, self._handle, enough, self._depth, self._events_at, None
            )
            if ended >= 0:
                break
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()
        for at in range(0, ended * _EVENT.size, _EVENT.size):
            number, _, length, _ = _EVENT.unpack_from(self._events, at)
            batch = self._batches[number >> 32]
            self._flying -= batch.ended(number & 0xFFFFFFFF, length)


class Batch:
    """See `tiers.disk.io.aio.Batch`.

    Attributes:
        flying: calls that the kernel has.
    """

    def __init__(
        self,
        context: Context,
        batches: dict[int, Batch],
        requests: Sequence[IORequest],
        load: bool,
        hashed: int,
        call_bytes: int,
    ) -> None:
        self._context = context
        self._batches = batches
        self._requests = requests
        self._load = load
        self._hashed = hashed
        self._number = next(number for number in count() if number not in batches)
        vectors, self._calls, self._left = array("Q"), bytearray(), [0] * len(requests)
        self._request_of: list[int] = []
        self._places: list[int] = []
        places: list[tuple[int, int, int, int]] = []
        for index, request in enumerate(requests):
            for vector, length, offset in _cut(request, vectors, call_bytes):
                places.append((request.fd, vector, length, offset))
                self._request_of.append(index)
                # Of a device's queue: one for each buffer, two for itself.
                self._places.append(length + 2)
                self._left[index] += 1
        at, _ = vectors.buffer_info()
        opcode = _PREADV if load else _PWRITEV
        for call, (fd, vector, length, offset) in enumerate(places, self._number << 32):
            address = at + _VECTOR_BYTES * vector
            self._calls += _CALL.pack(call, 0, 0, opcode, 0, fd, address, length, offset, 0, 0, 0)
        # The kernel reads from them.
        self._vectors = vectors
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._calls)) if places else 0
        self._pointers = array("Q", range(base, base + len(self._calls), _CALL.size))
        self._begun = self._made = 0
        self._moved = [0] * len(requests)
        self._errors = [0] * len(requests)
        self._digests: list[list[bytes]] = [[] for _ in requests]
        self.flying = 0
        # From here on the kernel writes into memory that this keeps alive.
        batches[self._number] = self
        context.submit_all()
        if not load:
            self._make_digests()

    def waits(self) -> bool:
        """See `tiers.disk.io.aio.Batch`."""
        return self.flying > 0 or self._begun < len(self._request_of)

    def end(self) -> list[tuple[int, list[bytes]]]:
        """See `tiers.disk.io.aio.Batch`."""
        try:
            while self.waits():
                self._context.submit_all()
                self._make_digests()
                if self.waits():
                    # Each wake-up costs, where the processors are taken: one, if nothing is left.
                    rest = self._begun < len(self._request_of)
                    self._context.reap((self.flying + 1) // 2 if rest else self.flying)
            self._make_digests()
        finally:
            while self.flying:
                self._context.reap(self.flying)
            del self._batches[self._number]
        outcomes = []
        for index, request in enumerate(self._requests):
            moved = -self._errors[index] or self._moved[index]
            its = self._digests[index] if moved == _size(request) else []
            outcomes.append((moved, its))
        return outcomes

    def ended(self, call: int, length: int) -> int:
        """A call has ended: the bytes that it moved, or the error's number negated.

        Returns:
            How many places it took.
        """
        self.flying -= 1
        self._told(call, length)
        return self._places[call]

    def submit(self) -> None:
        """Hand over what there is room for."""
        total = len(self._request_of)
        first, _ = self._pointers.buffer_info()
        while self._begun < total:
            group = self._group()
            taken = self._context.submit(first + 8 * self._begun, group) if group else 0
            if not taken:
                return
            if taken < 0:
                self._told(self._begun, taken)
                self._begun += 1
            else:
                self._begun += taken
                self.flying += taken

    def _told(self, call: int, length: int) -> None:
        index = self._request_of[call]
        self._left[index] -= 1
        if length >= 0:
            self._moved[index] += length
        else:
            self._errors[index] = self._errors[index] or -length

    def _group(self) -> list[int]:
        """The places of each call to hand over at once.

        They are no neighbours, because the system would join them, and all fit in.
        """
        begun, end, room = self._begun, self._begun, self._context.room
        while end < len(self._places):
            room -= self._places[end]
            neighbours = end > begun and self._request_of[end] == self._request_of[end - 1]
            if room < 0 or neighbours:
                break
            end += 1
        if end == begun and self._context.idle:
            end += 1
        return self._places[begun:end]

    def _make_digests(self) -> None:
        """Those that can be made now: of a store what was handed over, of a load what has come."""
        while self._hashed and self._made < len(self._requests):
            index, request = self._made, self._requests[self._made]
            if self._load:
                if self._left[index]:
                    return
            elif self._begun < len(self._request_of) and self._request_of[self._begun] <= index:
                return
            if not self._load or (not self._errors[index] and self._moved[index] == _size(request)):
                self._digests[index] = digests(request.buffers, self._hashed, _size(request))
            self._made += 1


def _cut(
    request: IORequest, vectors: array[int], call_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Calls of `call_bytes` at most: the first of its vectors, how many, and the offset.

    The addresses and lengths are added to `vectors`.
    """
    begin, room, offset = len(vectors) // 2, call_bytes, request.offset
    for buffer in request.buffers:
        address, left = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)
        while left:
            if not room:
                yield begin, len(vectors) // 2 - begin, offset
                begin, room, offset = len(vectors) // 2, call_bytes, offset + call_bytes
            length = min(left, room)
            vectors.extend((address, length))
            address, left, room = address + length, left - length, room - length
    yield begin, len(vectors) // 2 - begin, offset


def _size(request: IORequest) -> int:
    return sum(map(len, request.buffers))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
