"""A CUDA device that is host memory: what is queued on a stream is done when somebody waits."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.device.fragments import Fragments

__all__ = ["PretendCuda", "PretendDriver"]


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = id(self)
        self.queue: deque[Callable[[], None]] = deque()

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._reached = False
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
        return 1.0

    def _reach(self) -> None:
        self._reached = True


class PretendCuda:
    """Stands for ``torch.cuda``.

    Attributes:
        compute: the stream that computes. capturing: a graph is captured.
    """

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.compute = Stream()
        self.capturing = False

    def current_stream(self, device: Any) -> Stream:
        return self.compute

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: Any) -> None:
        self.compute.synchronize()

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


class PretendDriver:
    """Stands for the driver.

    Attributes:
        ways: how transfers were handed over.
        fails_after: so many fragments are copied before there is an error; None: all.
    """

    def __init__(self, cuda: Any, *, has_batch: bool = True) -> None:
        self.has_batch = has_batch
        self.ways: list[str] = []
        self.fails_after: int | None = None
        self._streams: dict[int, Stream] = {}

    def know(self, *streams: Stream) -> None:
        """Copies on these are queued."""
        self._streams.update({stream.cuda_stream: stream for stream in streams})

    def copy(self, fragments: Fragments, stream: int, *, store: bool, way: str, step: int) -> int:
        self.ways.append(way)
        queue = self._streams[stream].queue
        columns = (fragments.device, fragments.host, fragments.sizes)
        for number, (device, host, size) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if number == self.fails_after:
                return 700
            target, source = (host, device) if store else (device, host)
            queue.append(lambda t=target, s=source, n=size: ctypes.memmove(t, s, n))
        return 0
