"""Measure how fast the server computes chunks, from its calls.

The chunks that a step computes of a request are those that it offers to be stored, from the token
on at which the server begins to compute. A server that does not tell begins with its first miss.
Earlier chunks were loaded, or the device had them. Computing begins when the step is handed to the
workers, or when they report the step before, whichever is later. It ends when they report the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.types import group_of

__all__ = ["Computing"]

LEAST_CHUNKS = 2
"""Fewest chunks of one KV cache group, of a request in a step, that are counted: fewer is not a
prompt."""

MOST_STEPS = 16
"""Most steps under way at once; a server with more does not report its steps."""


class Computing:
    """Measures the chunks computed and the seconds taken.

    Args:
        tell: called with a number of chunks and the seconds in which they were computed.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell
        # Request -> where it begins to compute: the first token, or the first key that was a miss.
        # None once a chunk from there on was offered.
        self._starts: dict[str, int | bytes | None] = {}
        # Request -> where in its prompt a key ends, in tokens, if the server says so.
        self._places: dict[str, Callable[[bytes], int]] = {}
        # Chunks offered since the last step ended.
        self._chunks = 0
        # Steps under way: when each was handed to the workers, and its chunks.
        self._steps: deque[tuple[float, int]] = deque()
        self._reported = 0.0

    def opened(self, request: str, place: Callable[[bytes], int] | None) -> None:
        """Note where in a new request's prompt its keys end, in tokens; None if not known."""
        if place is not None:
            self._places[request] = place

    def missed(self, request: str, key: bytes) -> None:
        """Note that the request computes this chunk and those after it."""
        self._starts[request] = key

    def decided(self, request: str, start: int) -> None:
        """Note that the request computes its prompt from token `start` on."""
        if request in self._places:
            self._starts[request] = start

    def offered(self, request: str, keys: Sequence[bytes]) -> None:
        """Count chunks offered to be stored; `keys` are in prompt order within each group."""
        if request not in self._starts:
            return
        start = self._starts[request]
        place = self._places.get(request)
        if place is not None and start is not None:
            begin = start if isinstance(start, int) else place(start) - 1
            own = Counter(group_of(key) for key in keys if place(key) > begin)
        elif isinstance(start, bytes):
            own = _from(start, keys)
        else:
            own = Counter(map(group_of, keys))
        if own and place is None:
            self._starts[request] = None
        if max(own.values(), default=0) >= LEAST_CHUNKS:
            self._chunks += own.total()

    def finished(self, request: str) -> None:
        """Forget a request that computes nothing more."""
        self._starts.pop(request, None)
        self._places.pop(request, None)

    def step_began(self) -> None:
        """Begin a step: chunks offered so far belong to the step before."""
        if self._chunks and self._steps:
            ended, chunks = self._steps[-1]
            self._steps[-1] = ended, chunks + self._chunks
        self._chunks = 0

    def step_ended(self, now: float) -> None:
        """Note that a step is handed to the workers."""
        self._steps.append((now, 0))
        if len(self._steps) > MOST_STEPS:
            self._steps.clear()

    def step_reported(self, now: float) -> None:
        """Note that the workers have computed the oldest step under way."""
        self.step_began()
        if not self._steps:
            return
        ended, chunks = self._steps.popleft()
        if chunks:
            self._tell(chunks, now - max(ended, self._reported))
        self._reported = now


def _from(first: bytes, keys: Sequence[bytes]) -> Counter[bytes]:
    """Count the chunks from `first` on by group; of no group more than of its own."""
    if first not in keys:
        return Counter()
    group = group_of(first)
    offered = Counter(map(group_of, keys))
    before = sum(group_of(key) == group for key in keys[: keys.index(first)])
    own = offered[group] - before
    return Counter({each: min(count, own) for each, count in offered.items()})
