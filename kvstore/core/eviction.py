"""Eviction: choose the chunks that leave host memory, and make their rows free.

* `Victims` asks the policy for chunks. A chunk in use is met only once: the policy sets it
  aside (`HELD`) and is told, tail of the prompt first, when it may leave again. A search that has
  asked too often ends (`LATER`) and goes on in the next step.
* `Room` makes rows free. It decides which chunks are evicted at once and which are copied first.
* `Demotions` are chunks that a server asked to leave. A chunk that a slower tier has leaves at
  once; one that no tier has is first copied to the first tier. A use or a pin keeps it. A weaker
  form only makes chunks the first to leave when others need the room.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from kvstore.core.cascade import Cascades
from kvstore.core.chunk import FILLING, LEAVING, READY, Chunk
from kvstore.core.host import HostPool
from kvstore.core.pins import Pins
from kvstore.core.residency.base import TierView
from kvstore.core.step_budget import Budget
from kvstore.policies.base import HELD, LATER, Protected

__all__ = ["Demotions", "Room", "Victims"]


class Victims:
    """Searches for chunks that may leave host memory; those it finds are left to its callers.

    Args:
        budget: bounds the questions of one step that find no chunk.
    """

    def __init__(self, pool: HostPool, budget: Budget) -> None:
        self._pool = pool
        self._budget = budget
        # Chunks that the policy has set aside: those that may have become free to leave, those
        # that will once the step in which they were met has ended, and those that only wait for
        # a copy, coldest first.
        self._loose: list[Chunk] = []
        self._until_next_step: list[Chunk] = []
        self._met_step = -1
        self._parked: OrderedDict[bytes, Chunk] = OrderedDict()
        # A search that found nothing is not repeated until something has changed.
        self._vain = (-1, False, b"")

    def reset(self) -> None:
        """Forget everything, as the policy has."""
        for each in (self._loose, self._until_next_step, self._parked):
            each.clear()

    def choose(
        self, count: int, *, shed_unsaved: bool, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Let the policy give up and forget up to `count` chunks; returns their keys.

        Filling and pinned chunks are never among them, nor those that are kept until the
        step ends. Chunks that wait for a copy to a slower tier are given up only when
        `shed_unsaved`, and only after all others.

        Args:
            incoming: the keys that the rows are for, tail first.
        """
        pool = self._pool
        may_leave = len(pool.chunks) - pool.busy - (0 if shed_unsaved else pool.unsaved)
        count = min(count, may_leave, len(pool.chunks) - pool.leaving)
        # A policy of several parts may find for one what it does not find for another.
        asker = incoming[0] if incoming and pool.policy.shared else b""
        if count <= 0 or self._vain == (pool.changes, shed_unsaved, asker):
            return []
        self.let_loose()
        if shed_unsaved:
            self._unpark(count)
        protected = self.protection(shed_unsaved=shed_unsaved, bounded=self._budget.bounded)
        victims = self._pool.policy.evict_up_to(count, protected, incoming)
        if len(victims) < count:
            self._vain = (pool.changes, shed_unsaved, asker)
        self.given_up(victims)
        return victims

    def trim(self, count: int) -> list[bytes]:
        """Let the policy give up and forget up to `count` chunks that it has in excess."""
        self.let_loose()
        protected = self.protection(shed_unsaved=False, bounded=self._budget.bounded)
        victims = self._pool.policy.trim(count, protected)
        self.given_up(victims)
        return victims

    def find_one(self) -> bool:
        """Look for a chunk that may leave for a store; False if the search goes on next step.

        Nothing leaves here. Chunks in use that come first are set aside now, so that the
        search that follows, which must not be cut short, does not meet them.
        """
        if self._pool.free or not self._budget.bounded or not self._sets_aside:
            return True
        self.let_loose()
        protected = self.protection(shed_unsaved=False, bounded=True)
        found = False

        def first(key: bytes) -> int:
            nonlocal found
            answer = protected(key)
            found = not answer
            return answer or LATER

        self._pool.policy.evict(1, first)
        return found or not self._budget.cut_short

    def protection(
        self, *, shed_unsaved: bool, bounded: bool, staying: Collection[bytes] = ()
    ) -> Protected:
        """Return the callback that tells the policy whether a chunk may leave.

        Args:
            bounded: whether the step's budget limits how often it may ask.
            staying: keys that may not leave now in any case.
        """
        chunk_of, step = self._pool.chunks.get, self._pool.step
        sets_aside = self._sets_aside

        def protected(key: bytes) -> int:
            if key in staying:
                return True
            chunk = chunk_of(key)
            # Without one it is about to enter; it may be refused.
            if chunk is None or (
                chunk.state == READY and chunk.step != step and (shed_unsaved or not chunk.unsaved)
            ):
                return False
            # Some policies ask twice about what they set aside.
            met = chunk.aside and sets_aside
            if bounded and not met and not self._budget.ask():
                return LATER
            chunk.set_aside(True)
            if chunk.state == READY:
                if chunk.unsaved and not shed_unsaved:
                    self._parked[key] = chunk
                else:
                    self._end_of_step()
                    self._met_step = step
                    self._until_next_step.append(chunk)
            return HELD

        return protected

    @property
    def _sets_aside(self) -> bool:
        return self._pool.policy.overrides("release")

    def let_loose(self) -> None:
        """Tell the policy which of the chunks that it has set aside may leave again.

        To be called before the policy is told of a use: chunks used now are hotter than these.
        """
        self._end_of_step()
        loose = [*self._loose, *self._pool.take_released()]
        if not loose:
            return
        self._loose.clear()
        # Tail first, in whatever order loads and copies have ended.
        loose.sort(key=operator.attrgetter("order"), reverse=True)
        free: list[bytes] = []
        for chunk in loose:
            here = self._pool.chunks.get(chunk.key) is chunk and chunk.state == READY
            if not chunk.aside or not here:
                continue
            if chunk.unsaved:
                self._parked[chunk.key] = chunk
            elif chunk.step == self._pool.step:
                # Kept once more: a search that was cut short goes on beyond it.
                self._met_step = chunk.step
                self._until_next_step.append(chunk)
            else:
                chunk.set_aside(False)
                self._parked.pop(chunk.key, None)
                free.append(chunk.key)
        self._pool.policy.release(free)

    def given_up(self, keys: Sequence[bytes]) -> None:
        """Note that the policy has forgotten these chunks."""
        chunks = self._pool.chunks
        for key in keys:
            chunk = chunks[key]
            if chunk.aside:
                chunk.set_aside(False)
                self._parked.pop(key, None)

    def take_away(self, chunk: Chunk) -> bool:
        """Remove a chunk that is asked to leave; False if it may not leave now."""
        free = chunk.state in (READY, LEAVING) and not chunk.unsaved
        if not free or chunk.step == self._pool.step:
            return False
        self._parked.pop(chunk.key, None)
        self._pool.take_away(chunk)
        return True

    def _end_of_step(self) -> None:
        """Let chunks leave that were kept until the end of an earlier step."""
        if self._until_next_step and self._met_step != self._pool.step:
            self._loose += self._until_next_step
            self._until_next_step.clear()

    def _unpark(self, count: int) -> None:
        """Let up to `count` chunks leave without the copy that they wait for."""
        free: list[bytes] = []
        while self._parked and len(free) < count:
            key, chunk = self._parked.popitem(last=False)
            if chunk.state == READY:
                chunk.set_aside(False)
                free.append(key)
        self._pool.policy.release(free)


MOST_TRIMMED = 128
"""Most chunks that a step evicts though nobody needs the room, for policies that cost as much as
LRU."""


class Room:
    """Makes rows free for stores and promotions.

    Where chunks are demoted, a chunk that the policy gives up leaves once it is copied; one
    that no tier wants leaves at once.

    Args:
        budget: bounds the chunks that a step gives up ahead of need.
    """

    def __init__(
        self, pool: HostPool, victims: Victims, cascades: Cascades, budget: Budget
    ) -> None:
        self._pool = pool
        self._victims = victims
        self._cascades = cascades
        self._budget = budget
        self.demotes = bool(cascades.demoting)
        self._give_way: Callable[[int, Sequence[bytes]], None] | None = None

    def yield_by(self, give_way: Callable[[int, Sequence[bytes]], None]) -> None:
        """Call this with the number of rows that are missing for keys a server asks for."""
        self._give_way = give_way

    def give_way(self, rows: int, keys: Sequence[bytes]) -> None:
        """Let queued requests give up leases, so that `rows` more may be had for these keys."""
        if rows > 0 and self._give_way is not None:
            self._give_way(rows, keys)

    @property
    def turns_away(self) -> bool:
        """Whether the policy may give up chunks of a store for others of the same store.

        Not where tiers get copies: what has no row would not get to these either. A policy that
        spares what came last does so only where nothing else may leave.
        """
        policy = self._pool.policy
        return policy.declines and (policy.spares_latest or not self._cascades.targets)

    @property
    def sure(self) -> int:
        """Rows that are free, or certain to become free when asked for one by one."""
        pool = self._pool
        return pool.free if self.demotes else pool.free + pool.leavable

    def make(
        self,
        count: int,
        now: float,
        *,
        shed_unsaved: bool,
        incoming: Sequence[bytes] = (),
    ) -> int:
        """Evict until `count` rows are free, as far as possible.

        Filling and pinned chunks never leave, nor do those that answered "hit"
        in this step. Chunks still waiting to be copied to a slower tier leave
        only when `shed_unsaved`, and only after all others.

        Args:
            incoming: the keys that the rows are for, tail first.

        Returns:
            How many of the `count` rows are free now.
        """
        pool = self._pool
        if pool.free < count:
            pool.reclaim(count, uncopied=False)
        if pool.free < count:
            self._evict(count, now, shed_unsaved=False, incoming=incoming)
            if shed_unsaved and pool.free < count:
                pool.reclaim(count, uncopied=True)
                self._evict(count, now, shed_unsaved=True, incoming=incoming)
        return min(count, pool.free)

    @property
    def due(self) -> bool:
        """Whether chunks are to leave though nobody asks for their rows."""
        return self.demotes or self._pool.policy.excess > 0

    def make_ahead(self, now: float) -> None:
        """Let the policy give up chunks until `pool.ahead` rows are free or soon free.

        What it holds in excess leaves, too.
        """
        pool = self._pool
        if pool.policy.excess:
            victims = self._victims.trim(int(MOST_TRIMMED / pool.policy.effort) or 1)
            self._let_go(victims, now)
        short = min(self._budget.given_up, pool.ahead - pool.free - pool.leaving)
        if short > 0:
            self._budget.give_up(short)
            victims = self._victims.choose(short, shed_unsaved=False)
            self._demote(victims, now)
            pool.give_up(victims)

    def _evict(
        self, count: int, now: float, *, shed_unsaved: bool, incoming: Sequence[bytes]
    ) -> None:
        pool = self._pool
        short = count - pool.free
        short -= pool.leaving_soon(short)
        victims = self._victims.choose(short, shed_unsaved=shed_unsaved, incoming=incoming)
        self._let_go(victims, now)

    def _let_go(self, victims: list[bytes], now: float) -> None:
        """Let chunks leave that the policy gave up, at once or when they are copied."""
        pool = self._pool
        if not self.demotes:
            pool.leave(victims)
            return
        demoted = self._demote(victims, now)
        pool.give_up([key for key in victims if key in demoted])
        if len(demoted) < len(victims):
            pool.leave([key for key in victims if key not in demoted])

    def _demote(self, keys: Sequence[bytes], now: float) -> set[bytes]:
        """Queue chunks for the tiers that want them; returns the keys that were queued."""
        chunks = map(self._pool.chunks.__getitem__, keys)
        return self._cascades.demote([chunk for chunk in chunks if not chunk.unsaved], now)


MOST_TRIES = 256
"""Most chunks that one step looks at."""


class Demotions:
    """Chunks that were asked to leave host memory: see the module's text.

    Attributes:
        demoted: chunks that have left host memory on request.
        behind: whether the next step has work to do even if nothing new happens.
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
        # Chunks that are to leave, in turn, each with its order: a later chunk of that key stays.
        self._leaving: dict[bytes, int] = {}
        self.behind = False

    def __bool__(self) -> bool:
        """Whether chunks are still to leave."""
        return bool(self._leaving)

    def begin(self, keys: Iterable[bytes], now: float) -> int:
        """Let the chunks of `keys` leave host memory; returns how many will."""
        if not self._cascades.targets:
            return 0
        target = self._cascades.targets[0]
        found = [chunk for chunk in map(self._pool.chunks.get, keys) if chunk is not None]
        here = [chunk for chunk in found if not self._pins.holds(chunk.key)]
        whole = [c for c in here if c.state != FILLING and not self._is_coming(c.key)]
        self._cascades.save_to(target, whole, now)
        for chunk in reversed(here):
            # Tail first, as chunks leave. One that is being stored is copied when it is complete.
            if chunk.state == FILLING or chunk.unsaved or self._is_coming(chunk.key):
                self._leaving[chunk.key] = chunk.order
        return len({chunk.key for chunk in here if chunk.key in self._leaving})

    def stored(self, keys: Collection[bytes], now: float) -> None:
        """Copy those of `keys`, which the device has stored by now, that are to leave."""
        chunks = [self._pool.chunks.get(key) for key in keys if key in self._leaving]
        whole = [c for c in chunks if c is not None and not self._is_coming(c.key)]
        self._cascades.save_to(self._cascades.targets[0], whole, now)

    def cool(self, keys: Iterable[bytes]) -> None:
        """Make the chunks of `keys`, in prefix order, the first to leave when room is needed.

        Chunks that are pinned, or that the policy has set aside, stay as they are.
        """
        tail_first = [key for key in reversed([*keys]) if not self._pins.is_pinned(key)]
        self._victims.let_loose()
        chunks = map(self._pool.chunks.get, tail_first)
        cold = [c.key for c in chunks if c is not None and c.state < LEAVING and not c.aside]
        self._pool.policy.cool(cold)
        for target in self._cascades.targets:
            target.index.cool(tail_first)

    def used(self, keys: Collection[bytes]) -> None:
        """Keep the chunks of these keys, as they are used or wanted again."""
        for key in keys:
            self._leaving.pop(key, None)

    def is_leaving(self, key: bytes) -> bool:
        """Whether the chunk is still to leave."""
        return key in self._leaving

    def go_on(self) -> None:
        """Remove the chunks that are copied by now. Hits of this step were kept before."""
        moved = 0
        tries = list(islice(self._leaving.items(), MOST_TRIES))
        for key, order in tries:
            del self._leaving[key]
            chunk = self._pool.chunks.get(key)
            if chunk is None or chunk.order != order or self._pins.holds(key):
                continue
            if self._is_below(key) and self._victims.take_away(chunk):
                self.demoted += 1
                moved += 1
            elif chunk.state == FILLING or chunk.unsaved or self._is_coming(key):
                # It is being written, copied or read; others have their turn meanwhile.
                self._leaving[key] = order
        self.behind = moved > 0 and len(self._leaving) > len(tries) - moved

    def reset(self) -> None:
        """Forget all chunks that were to leave."""
        self._leaving.clear()
        self.behind = False

    def _is_below(self, key: bytes) -> bool:
        return any(key in tier.entries for tier in self._tiers)

    def _is_coming(self, key: bytes) -> bool:
        return any(not tier.index.lacks(key) for tier in self._tiers)
