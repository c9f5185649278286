"""A CUDA device that is host memory: what is queued on a stream is done when somebody waits."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvstore.device.fragments import Fragments

__all__ = ["PretendCuda", "PretendDriver"]


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = id(self)
        self.queue: deque[Callable[[], object]] = deque()

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._reached = False
        self._at = 0.0
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.queue.append(self._reach)

    def query(self) -> bool:
        return self._reached

    def synchronize(self) -> None:
        while not self._reached:
            assert self._stream is not None
            self._stream.queue.popleft()()

    def elapsed_time(self, later: Event) -> float:
        assert self._reached
        assert later._reached
        return 1000 * (later._at - self._at)

    def _reach(self) -> None:
        self._reached = True
        self._at = time.perf_counter()


AnyStream = Stream
"""Its name within the class that has a method of the same."""


class PretendCuda:
    """Stands for ``torch.cuda``.

    Attributes:
        compute: the stream that computes. capturing: a graph is captured.
        streams: all of them, by their handles.
    """

    Event = Event

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.compute = self.current = self.Stream()
        self.capturing = False

    def Stream(self, device: Any = None, priority: int = 0) -> AnyStream:  # noqa: N802
        stream = Stream()
        self.streams[stream.cuda_stream] = stream
        return stream

    def current_stream(self, device: Any) -> AnyStream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: Any) -> None:
        self.compute.synchronize()

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: AnyStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class PretendDriver:
    """Stands for the driver.

    Attributes:
        batches: of each transfer whether many fragments were queued in a call.
        fails_after: so many fragments of a call are copied before there is an error; None: all.
    """

    def __init__(self, cuda: PretendCuda, *, has_batch: bool = True) -> None:
        self.has_batch = has_batch
        self.batches: list[bool] = []
        self.fails_after: int | None = None
        self._cuda = cuda

    def copy(self, fragments: Fragments, stream: int, *, store: bool, batch: bool) -> int:
        self.batches.append(batch)
        queue = self._cuda.streams[stream].queue
        columns = (fragments.device, fragments.host, fragments.sizes)
        for number, (device, host, size) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if number == self.fails_after:
                return 700
            target, source = (host, device) if store else (device, host)
            queue.append(partial(ctypes.memmove, target, source, size))
        return 0
