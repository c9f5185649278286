"""Ends vLLM's scan of a request that waits after a few keys.

vLLM asks again for the keys of a deferred request in each step, one KV cache group after the other:
those of a group that attends to everything from the first on, until one is a miss, and those of a
group with a window from the last on, until as many as the window has chunks are hits. Any answer
"ask again" defers the request; how the scan ends does not matter then.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.kv_offload.base import LookupResult

__all__ = ["Scans"]

MISS, PENDING, RETRY = LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY

GROUP_BYTES = 4
"""The end of a key, which names its group."""


class Scans:
    """Answers for the keys of requests that wait, within one step."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[bytes, int | None]] = {}
        """The group that is scanned of each request, and where in the prompt the scan began."""

    def answer(
        self, key: bytes, request: str, place_of: Callable[[bytes], int | None] | None
    ) -> LookupResult:
        """What is said of a key, so that the scan of its group soon ends.

        Args:
            place_of: where in the prompt a key ends; None where nobody can tell.
        """
        group = key[-GROUP_BYTES:]
        first = self._first.get(request)
        if first is None or first[0] != group:
            self._first[request] = group, None if place_of is None else place_of(key)
            return RETRY
        before = first[1]
        place = None if before is None or place_of is None else place_of(key)
        if before is None or place is None:
            # Nobody knows which kind of group it is. A miss ends the scan of the one; of the
            # other it only costs time.
            return MISS
        return MISS if place >= before else PENDING

    def end_step(self) -> None:
        """All scans have ended."""
        self._first.clear()
