"""Measure how fast the server computes chunks, from its calls.

What a step computes of a request are the chunks that it offers to be stored, from the first
that was a miss on: those before it were loaded, or the device had them. A step takes from its
end, when it is handed to the workers, until they report it; one that is handed over before the
last was reported begins when that was.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.types import group_of

__all__ = ["Computing"]

LEAST_CHUNKS = 2
"""A step in which no request computes as many says nothing of prompts."""

MOST_STEPS = 16
"""Steps that are under way at once; a server with more does not report them."""


class Computing:
    """See the module's text.

    Args:
        tell: told how many chunks were computed, and in how many seconds.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell
        # Of requests that compute: the first key that was missed, None once it was offered.
        self._missed: dict[str, bytes | None] = {}
        # Chunks offered since the last step went; steps under way, when each ended and its chunks.
        self._chunks = 0
        self._steps: deque[tuple[float, int]] = deque()
        self._reported = 0.0

    def missed(self, request: str, key: bytes) -> None:
        """The request will compute this chunk and what follows."""
        self._missed[request] = key

    def offered(self, request: str, keys: Sequence[bytes]) -> None:
        """`keys`, each group's in prompt order, are offered in a step, before or after its end."""
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
        """The request computes nothing more."""
        self._missed.pop(request, None)

    def step_began(self) -> None:
        """What was offered so far belongs to the step before."""
        if self._chunks and self._steps:
            ended, chunks = self._steps[-1]
            self._steps[-1] = ended, chunks + self._chunks
        self._chunks = 0

    def step_ended(self, now: float) -> None:
        """The step is handed to the workers."""
        self._steps.append((now, 0))
        if len(self._steps) > MOST_STEPS:
            self._steps.clear()

    def step_reported(self, now: float) -> None:
        """The workers have reported the first of the steps under way."""
        self.step_began()
        if not self._steps:
            return
        ended, chunks = self._steps.popleft()
        if chunks:
            self._tell(chunks, now - max(ended, self._reported))
        self._reported = now
