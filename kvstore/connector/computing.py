"""Measure how fast the server computes chunks, from its calls.

The chunks that a step computes of a request are those that it offers to be stored, starting with
the first miss; earlier ones were loaded, or the device had them. Computing begins when the step is
handed to the workers, or when they report the step before, whichever is later. It ends when they
report the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.types import group_of

__all__ = ["Computing"]

LEAST_CHUNKS = 2
"""Fewest chunks of a request in a step that are counted: fewer is not a prompt."""

MOST_STEPS = 16
"""Most steps under way at once; a server with more does not report its steps."""


class Computing:
    """Measures the chunks computed and the seconds taken.

    Args:
        tell: called with a number of chunks and the seconds in which they were computed.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell
        # Request -> the first key that was a miss, or None once it was offered.
        self._missed: dict[str, bytes | None] = {}
        # Chunks offered since the last step ended.
        self._chunks = 0
        # Steps under way: when each was handed to the workers, and its chunks.
        self._steps: deque[tuple[float, int]] = deque()
        self._reported = 0.0

    def missed(self, request: str, key: bytes) -> None:
        """Note that the request computes this chunk and those after it."""
        self._missed[request] = key

    def offered(self, request: str, keys: Sequence[bytes]) -> None:
        """Count chunks offered to be stored; `keys` are in prompt order within each group."""
        if request not in self._missed:
            return
        first = self._missed[request]
        if first is not None:
            if first not in keys:
                return
            self._missed[request] = None
            group = group_of(first)
            offered = Counter(map(group_of, keys))
            before = sum(group_of(key) == group for key in keys[: keys.index(first)])
            own = offered[group] - before
            chunks = sum(min(count, own) for count in offered.values())
        else:
            chunks = len(keys)
        if chunks >= LEAST_CHUNKS:
            self._chunks += chunks

    def finished(self, request: str) -> None:
        """Forget a request that computes nothing more."""
        self._missed.pop(request, None)

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
