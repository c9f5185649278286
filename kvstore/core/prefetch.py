"""Prefetch: read chunks from slower tiers that no request has asked for yet.

They are read while no request waits, in portions, in the order in which they were named. They
displace chunks that the policy gives up, but none that waits for a copy. Prefetched chunks are
ordinary chunks: they are not leased. Where there are tenants each has a line of its own, and a
portion is of one of them, in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import count, islice

from kvstore.core.chunk import READY
from kvstore.core.host import HostPool
from kvstore.core.promotion import Grant, Grants
from kvstore.core.request import Request
from kvstore.core.residency.base import TierView
from kvstore.core.usage import link
from kvstore.core.wait_queue import WaitQueue

__all__ = ["MOST_PORTION", "MOST_SHARE", "PORTION_SHARE", "Prefetches"]

PORTION_SHARE = 8
"""A portion fills at most one in this many rows of host memory."""

MOST_PORTION = 256
"""Most chunks of a portion."""

MOST_SHARE = 2
"""At most one in this many rows of host memory may be waited for at once."""

MOST_TRIED = 4
"""Most tenants of which a step tries to fetch a portion."""

MOST_LOOKED_AT = 2048
"""Most keys of a line that are looked at in a step while a tier does not answer."""

MOST_PLANNED = 2**20
"""Most keys that may be planned to be fetched later."""

_NAME = "\0prefetch"


class Prefetches:
    """Chunks to be fetched ahead of requests: see the module's text.

    Args:
        keep: told of chunks that are in host memory already: they shall stay there.

    Attributes:
        begun: chunks whose fetch was begun.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        queue: WaitQueue,
        grants: Grants,
        keep: Callable[[Collection[bytes]], None],
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._grants = grants
        self._keep = keep
        self.begun = 0
        # Keys that wait for a portion, by tenant, oldest first, those whose turn is next first;
        # since when a tenant gets no row; and the portion under way.
        self._lines: dict[int, dict[bytes, None]] = {}
        self._since: dict[int, float] = {}
        self._portion: Request | None = None
        # Keys to be fetched later, by time, and how many they are.
        self._plans: list[tuple[float, int, list[bytes]]] = []
        self._planned = 0
        self._numbers = count()

    def __bool__(self) -> bool:
        """Whether anything waits, is planned or is under way."""
        return bool(self._lines) or self._portion is not None or bool(self._plans)

    def begin(self, keys: Sequence[bytes], *, prefix: bool = True, waits: bool = False) -> int:
        """Fetch those of the leading `keys` that only a slower tier has, when no request waits.

        Args:
            prefix: stop at the first chunk that is nowhere; else pass over it, as where keys of
                several KV cache groups are named together.
            waits: take those of tiers, too, that are not read just now.

        Returns:
            How many are on their way or will be: for each tenant at most as many as half of host
            memory holds.
        """
        most = max(1, self._pool.rows // MOST_SHARE)
        read = [
            tier for tier in self._tiers if tier.health.alive or (waits and _will_be_read(tier))
        ]
        coming = 0
        for key in keys:
            chunk = self._pool.chunks.get(key)
            if chunk is not None:
                coming += chunk.state < READY
                self._keep((key,))
                continue
            if not any(key in tier.entries for tier in read):
                if prefix:
                    break
                continue
            line = self._lines.setdefault(self._pool.owner((key,)), {})
            if key not in line and len(line) >= most:
                break
            line[key] = None
            coming += 1
        return coming

    def plan(self, keys: Sequence[bytes], when: float) -> bool:
        """Plan to fetch these keys at that time; False if too many are planned already."""
        if self._planned + len(keys) > MOST_PLANNED:
            return False
        heapq.heappush(self._plans, (when, next(self._numbers), list(keys)))
        self._planned += len(keys)
        return True

    def is_fetching(self, keys: Iterable[bytes] | None = None) -> bool:
        """Whether any of `keys`, or of all, waits for a portion, or is in the one under way."""
        if keys is None:
            return bool(self._lines) or self._portion is not None
        coming: Collection[bytes] = self._portion.keys if self._portion is not None else ()
        lines = [coming, *self._lines.values()]
        return any(key in line for key in keys for line in lines)

    def drop(self, keys: Collection[bytes]) -> None:
        """Forget these keys, which are not wanted any more; moves under way go on."""
        for owner, line in list(self._lines.items()):
            for key in keys:
                line.pop(key, None)
            if not line:
                del self._lines[owner]
                self._since.pop(owner, None)

    def go_on(self, now: float) -> list[Grant]:
        """Fetch the next portion, if its turn has come."""
        while self._plans and self._plans[0][0] <= now:
            keys = heapq.heappop(self._plans)[2]
            self._planned -= len(keys)
            self.begin(keys, prefix=False, waits=True)
        portion = self._portion
        if portion is not None:
            stalled = [tier.number for tier in self._tiers if tier.health.stalled]
            if portion.pending and not self._queue.waits_for(portion, stalled):
                return []
            self._queue.remove(portion)
            self._portion = None
        if not self._lines:
            return []
        wishful = self._queue.wishful()
        for owner in wishful:
            self._since.pop(owner, None)
        if wishful and not self._pool.policy.shared:
            return []
        for owner in [each for each in self._lines if each not in wishful][:MOST_TRIED]:
            grants = self._try(owner, now)
            if self._portion is not None:
                return grants
        return []

    def _try(self, owner: int, now: float) -> list[Grant]:
        """Fetch the next portion of a tenant, whose turn comes again after all others."""
        line = self._lines.pop(owner)
        self._lines[owner] = line
        size = max(1, min(self._pool.rows // PORTION_SHARE, MOST_PORTION))
        portion = Request(_NAME)
        portion.ask(now)
        portion.name_keys(islice(self._of_answering(line), size))
        link(self._pool.policy, portion.keys)
        grants = self._grants.ahead(portion, now, most=size)
        self.begun += sum(len(chunks) for _, chunks, _ in grants)
        if portion.granted:
            self._since.pop(owner, None)
            self.drop(portion.keys[: portion.granted])
            self._portion = portion
            return grants
        # Nothing comes: its chunks that are here are held by nobody.
        self._queue.release(portion)
        if not portion.short_of_rows:
            self._since.pop(owner, None)
        elif (
            self._pool.policy.shared
            and now - self._since.setdefault(owner, now) >= self._queue.lease
        ):
            # Others have theirs, and may have it for good.
            del self._since[owner]
            self.drop(portion.keys)
        return grants

    def _of_answering(self, line: dict[bytes, None]) -> Iterable[bytes]:
        """Leave out, for now, keys that only tiers have which are not read at present."""
        silent = [tier.entries for tier in self._tiers if _will_be_read(tier)]
        if not silent:
            return line
        places: list[Container[bytes]] = [self._pool.chunks]
        places += [tier.entries for tier in self._tiers if tier.health.alive]
        answering: list[bytes] = []
        for key in list(islice(line, MOST_LOOKED_AT)):
            if any(key in held for held in places) or not any(key in held for held in silent):
                answering.append(key)
            else:
                # Others have their turn meanwhile.
                del line[key]
                line[key] = None
        return answering

    def reset(self) -> None:
        """Forget everything that is to be fetched."""
        self._lines.clear()
        self._since.clear()
        self._plans.clear()
        self._planned = 0
        if self._portion is not None:
            self._queue.remove(self._portion)
            self._portion = None


def _will_be_read(tier: TierView) -> bool:
    """Whether the tier is not read just now, but before long: not when its server is away."""
    return tier.health.stalled or tier.health.congested
