"""Chunks that shall leave host memory: somebody knows that they will not be used soon.

What a slower tier has leaves host memory at once; what none has is copied to the first tier
before. Whoever uses a chunk meanwhile keeps it, and so does a pin.

A milder word is that they leave first once others need the room, wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvstore.core.cascade import Cascades
from kvstore.core.chunk import FILLING, LEAVING, READY, Chunk
from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.residency.base import TierView

__all__ = ["Demotions"]

MOST_TRIES = 256
"""Chunks that one step looks at."""


class Demotions:
    """See the module's text.

    Attributes:
        demoted: chunks that have left host memory for it.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[TierView],
        cascades: Cascades,
        victims: Victims,
        pins: Pins,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._cascades = cascades
        self._victims = victims
        self._pins = pins
        self.demoted = 0
        # Those that are to leave, in turn, each with its order: another chunk of that key stays.
        self._leaving: dict[bytes, int] = {}
        self._cut_short = False

    def __bool__(self) -> bool:
        """Whether any are still to leave."""
        return bool(self._leaving)

    @property
    def behind(self) -> bool:
        """Whether the next step has something to do although nothing new will have happened."""
        return self._cut_short

    def begin(self, keys: Iterable[bytes], now: float) -> int:
        """Let the chunks of `keys` go that host memory has; returns how many will."""
        if not self._cascades.targets:
            return 0
        target = self._cascades.targets[0]
        found = [chunk for chunk in map(self._pool.chunks.get, keys) if chunk is not None]
        here = [chunk for chunk in found if not self._pins.holds(chunk.key)]
        whole = [c for c in here if c.state != FILLING and not self._is_coming(c.key)]
        self._cascades.save_to(target, whole, now)
        before = len(self._leaving)
        for chunk in reversed(here):
            # Tail first, as chunks leave. One that is being stored is copied when it is whole.
            if chunk.state == FILLING or chunk.unsaved or self._is_coming(chunk.key):
                self._leaving[chunk.key] = chunk.order
        return len(self._leaving) - before

    def cool(self, keys: Iterable[bytes]) -> None:
        """The chunks of `keys`, in prefix order, leave before others when others need the room.

        Those that are pinned, and those that the policy has set aside, stay as they are.
        """
        tail_first = [key for key in reversed([*keys]) if not self._pins.is_pinned(key)]
        self._victims.let_loose()
        chunks = map(self._pool.chunks.get, tail_first)
        cold = [c.key for c in chunks if c is not None and c.state < LEAVING and not c.aside]
        self._pool.policy.cool(cold)
        for target in self._cascades.targets:
            target.index.cool(tail_first)

    def used(self, keys: Collection[bytes]) -> None:
        """These are used: they stay."""
        for key in keys:
            self._leaving.pop(key, None)

    def go_on(self) -> None:
        """Let go of what is copied. Hits of this step were kept before."""
        moved = 0
        tries = list(self._leaving.items())[:MOST_TRIES]
        for key, order in tries:
            del self._leaving[key]
            chunk = self._pool.chunks.get(key)
            if chunk is None or chunk.order != order or self._pins.holds(key):
                continue
            if self._is_below(key) and self._may_leave(chunk):
                self._victims.forget(chunk)
                self._pool.take_away(chunk)
                self.demoted += 1
                moved += 1
            elif chunk.state == FILLING or chunk.unsaved or self._is_coming(key):
                # It is being written, copied or read; others have their turn meanwhile.
                self._leaving[key] = order
        self._cut_short = moved > 0 and len(self._leaving) > len(tries) - moved

    def reset(self) -> None:
        """Nothing is to leave any more."""
        self._leaving.clear()
        self._cut_short = False

    def _may_leave(self, chunk: Chunk) -> bool:
        free = chunk.state in (READY, LEAVING) and not chunk.unsaved
        return free and chunk.step != self._pool.step

    def _is_below(self, key: bytes) -> bool:
        return any(key in tier.entries for tier in self._tiers)

    def _is_coming(self, key: bytes) -> bool:
        return any(not tier.index.lacks(key) for tier in self._tiers)
