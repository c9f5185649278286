"""Requests that came with hints, and what becomes of their chunks when they end."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core import Core
from kvstore.core.hints import Hints, follow, read_hints

__all__ = ["HintedRequests"]

MOST_REQUESTS = 2**14
"""Requests with hints that are remembered; hints of others are ignored."""


class _Hinted:
    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        # In the order in which they were first named, which is that of the prompt, nearly.
        self.keys: dict[bytes, None] = {}


class HintedRequests:
    """See the module's text.

    Attributes:
        taken: hints that were followed, or will be.
        ignored: hints that were malformed, not known or too many.
        refused: chunks that were to be retained or fetched, beyond what may be.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._requests: dict[str, _Hinted] = {}
        self.taken = self.ignored = self.refused = 0

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: str, params: object, envelope: object = None) -> None:
        """A request has come, perhaps with hints: see `read_hints`."""
        hints, taken, ignored = read_hints(params, envelope)
        self._requests.pop(request, None)
        if taken and len(self._requests) >= MOST_REQUESTS:
            taken, ignored = 0, ignored + taken
        self.taken += taken
        self.ignored += ignored
        if taken:
            self._requests[request] = _Hinted(hints)

    def wants_all(self, request: str) -> bool:
        """Whether all of its prompt is to be named, also what the device has itself."""
        hinted = self._requests.get(request)
        return hinted is not None and hinted.hints.at_end

    def stores(self, request: str) -> bool:
        """Whether what the request computes may be stored."""
        hinted = self._requests.get(request)
        return hinted is None or hinted.hints.store

    def named(self, request: str, keys: Iterable[bytes]) -> None:
        """The request loads these, or offers to store them."""
        hinted = self._requests.get(request)
        if hinted is not None and hinted.hints.at_end:
            hinted.keys.update(dict.fromkeys(keys))

    def end(self, request: str, now: float) -> None:
        """The request has ended: what its hints say of its chunks is done."""
        hinted = self._requests.pop(request, None)
        if hinted is not None and hinted.keys:
            self.refused += follow(hinted.hints, self._core, list(hinted.keys), now)
