"""Measure how fast the server computes chunks, from its calls.

The chunks that a step computes of a request are those that it offers to be stored, from the token
on at which the server begins to compute. A server that does not tell begins with its first miss.
Earlier chunks were loaded, or the device had them. A chunk that is offered again does not count
again. Of several KV cache groups the one counts that offers most: of those with windows a load
needs few. Computing begins when the step is handed to the workers, or when they report the step
before, whichever is later. It ends when they report the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.request import MOST_REQUESTS
from kvstore.types import group_of

__all__ = ["Computing"]

LEAST_CHUNKS = 2
"""Fewest chunks of one KV cache group, of a request in a step, that are counted: fewer is not a
prompt."""

MOST_STEPS = 16
"""Most steps under way at once; a server with more does not report its steps."""


@dataclass(slots=True)
class Step:
    """A step of the server that the workers have not reported.

    Attributes:
        ended: when it was handed to them.
        computes: whether it computes tokens of prompts; None: not known.
        chunks: how many chunks it has offered.
    """

    ended: float
    computes: bool | None
    chunks: int = 0


@dataclass(slots=True)
class Prompt:
    """What is known of a request.

    Attributes:
        place: returns where in the prompt a key ends, in tokens, if the server says so.
        start: the token from which on it computes.
        first: the same for a server that does not tell: the first key that was a miss.
        counted: for each KV cache group, where the last chunk ends that was counted.
        last: that chunk, where places are not known.
    """

    place: Callable[[bytes], int] | None = None
    start: int | None = None
    first: bytes | None = None
    counted: dict[bytes, int] = field(default_factory=dict)
    last: bytes | None = None

    def begin(self, start: int | None, first: bytes | None) -> None:
        """Begin to compute from there on."""
        self.start, self.first, self.last = start, first, None
        self.counted.clear()

    def take(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return which of the offered `keys` it has computed, and were not offered before."""
        place = self.place
        if place is None:
            return self._take_in_order(keys)
        if self.start is None and self.first is not None:
            self.start = place(self.first) - 1
        if self.start is None:
            return []
        own: list[bytes] = []
        for key in keys:
            group, end = group_of(key), place(key)
            if end > self.counted.get(group, self.start):
                self.counted[group] = end
                own.append(key)
        return own

    def _take_in_order(self, keys: Sequence[bytes]) -> list[bytes]:
        """Do so by their order, for the group of the first that was a miss."""
        if self.first is None:
            return []
        group = group_of(self.first)
        its = [key for key in keys if group_of(key) == group]
        if self.last in its:
            own = its[its.index(self.last) + 1 :]
        elif self.last is None:
            own = its[its.index(self.first) :] if self.first in its else []
        else:
            own = its
        self.last = own[-1] if own else self.last
        return own


class Computing:
    """Measures the chunks computed and the seconds taken.

    Args:
        tell: called with a number of chunks and the seconds in which they were computed.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell
        self._prompts: dict[str, Prompt] = {}
        # What requests have computed of each KV cache group and offered since the last step ended.
        self._offered: dict[str, Counter[bytes]] = {}
        self._steps: deque[Step] = deque()
        self._reported = 0.0

    @property
    def under_way(self) -> bool | None:
        """Whether a step that was not reported computes tokens of prompts; None: not known."""
        computes = [step.computes for step in self._steps]
        return None if None in computes else any(computes)

    def opened(self, request: str, place: Callable[[bytes], int] | None) -> None:
        """Note where in a new request's prompt its keys end, in tokens; None if not known."""
        self._prompts.pop(request, None)
        self._prompts[request] = Prompt(place)
        if len(self._prompts) > MOST_REQUESTS:
            del self._prompts[next(iter(self._prompts))]

    def missed(self, request: str, key: bytes) -> None:
        """Note that the request computes this chunk and those after it."""
        if request not in self._prompts:
            self.opened(request, None)
        self._prompts[request].begin(None, key)

    def decided(self, request: str, start: int) -> None:
        """Note that the request computes its prompt from token `start` on."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            prompt.begin(start, prompt.first)

    def offered(self, request: str, keys: Sequence[bytes]) -> None:
        """Count chunks offered to be stored; `keys` are in prompt order within each group."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            self._offered.setdefault(request, Counter()).update(map(group_of, prompt.take(keys)))

    def finished(self, request: str) -> None:
        """Forget a request that computes nothing more."""
        self._prompts.pop(request, None)

    def step_began(self) -> None:
        """Begin a step: chunks offered so far belong to the step before."""
        if not self._offered:
            return
        most = [max(groups.values(), default=0) for groups in self._offered.values()]
        self._offered.clear()
        if self._steps:
            self._steps[-1].chunks += sum(each for each in most if each >= LEAST_CHUNKS)

    def step_ended(self, now: float, computes: bool | None = None) -> None:
        """Note that a step is handed to the workers, and whether it computes tokens of prompts."""
        self._steps.append(Step(now, computes))
        if len(self._steps) > MOST_STEPS:
            self._steps.clear()

    def step_reported(self, now: float) -> None:
        """Note that the workers have computed the oldest step under way."""
        self.step_began()
        if not self._steps:
            return
        step = self._steps.popleft()
        if step.chunks:
            self._tell(step.chunks, now - max(step.ended, self._reported))
        self._reported = now
