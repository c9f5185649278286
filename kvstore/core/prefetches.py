"""Chunks that are fetched before anybody asks for them, while nobody waits for others.

They come in portions, in the order in which they were named. A portion begins when nobody is
deferred for want of anything, so whoever asks meanwhile waits for one portion at most. It
displaces what the policy gives up, but no chunk that waits for a copy. What has come is a chunk
like any other: nobody holds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import count, islice

from kvstore.core.chunk import READY
from kvstore.core.host import HostPool
from kvstore.core.promotion import Grant, Grants
from kvstore.core.request import Request
from kvstore.core.residency.base import TierView
from kvstore.core.wait_queue import WaitQueue

__all__ = ["Prefetches"]

PORTION_SHARE = 8
"""One in so many rows of host memory is filled by a portion at most."""

MOST_PORTION = 256
"""Chunks of a portion."""

MOST_SHARE = 2
"""One in so many rows of host memory may be waited for at once."""

MOST_PLANNED = 2**20
"""Keys that may be planned to be fetched later."""

_NAME = "\0prefetch"


class Prefetches:
    """See the module's text.

    Attributes:
        begun: chunks whose fetch was begun.
    """

    def __init__(
        self, pool: HostPool, tiers: Sequence[TierView], queue: WaitQueue, grants: Grants
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._grants = grants
        self.begun = 0
        # Keys that wait for a portion, first come first, and the portion under way.
        self._keys: dict[bytes, None] = {}
        self._portion: Request | None = None
        # What is to be fetched later, by time, and how many keys that are.
        self._plans: list[tuple[float, int, list[bytes]]] = []
        self._planned = 0
        self._numbers = count()

    def __bool__(self) -> bool:
        """Whether anything waits, is planned or is under way."""
        return bool(self._keys) or self._portion is not None or bool(self._plans)

    def begin(self, keys: Sequence[bytes], *, prefix: bool = True) -> int:
        """Fetch those of the leading `keys` that are on a slower tier alone, as time allows.

        Args:
            prefix: behind a chunk that is nowhere nothing is of use; else it is passed over, as
                where keys of several KV cache groups are named together.

        Returns:
            How many are on their way now, or will be: at most half of host memory holds.
        """
        most = max(1, self._pool.rows // MOST_SHARE)
        alive = [tier for tier in self._tiers if tier.health.alive]
        coming = 0
        for key in keys:
            chunk = self._pool.chunks.get(key)
            if chunk is not None:
                coming += chunk.state < READY
                continue
            if not any(key in tier.entries for tier in alive):
                if prefix:
                    break
                continue
            if key not in self._keys and len(self._keys) >= most:
                break
            self._keys[key] = None
            coming += 1
        return coming

    def plan(self, keys: Sequence[bytes], when: float) -> bool:
        """Fetch at that time which of these keys there are then; False if too much is planned."""
        if self._planned + len(keys) > MOST_PLANNED:
            return False
        heapq.heappush(self._plans, (when, next(self._numbers), list(keys)))
        self._planned += len(keys)
        return True

    def drop(self, keys: Collection[bytes]) -> None:
        """These are not wanted any more; what is under way goes on."""
        for key in keys:
            self._keys.pop(key, None)

    def go_on(self, now: float) -> list[Grant]:
        """Fetch the next portion, if its turn has come."""
        while self._plans and self._plans[0][0] <= now:
            keys = heapq.heappop(self._plans)[2]
            self._planned -= len(keys)
            self.begin(keys, prefix=False)
        portion = self._portion
        if portion is not None:
            if portion.pending:
                return []
            self._queue.remove(portion)
            self._portion = None
        if not self._keys or self._queue.has_wishes:
            return []
        size = max(1, min(self._pool.rows // PORTION_SHARE, MOST_PORTION))
        portion = Request(_NAME)
        portion.ask(now)
        portion.name_keys(islice(self._keys, size))
        self._pool.policy.link(portion.keys)
        grants = self._grants.ahead(portion, now)
        self.drop(portion.keys[: portion.granted])
        self.begun += sum(len(chunks) for _, chunks, _ in grants)
        self._portion = portion
        return grants

    def reset(self) -> None:
        """Nothing is to be fetched any more."""
        self._keys.clear()
        self._plans.clear()
        self._planned = 0
        if self._portion is not None:
            self._queue.remove(self._portion)
            self._portion = None
