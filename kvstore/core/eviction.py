"""Who may leave host memory: what the policy is asked, and what it may ask.

Chunks that are in use are met once: the policy sets them aside (`HELD`) and hears,
tail first, when they may leave again. A search that asks too much is broken off
(`LATER`) and goes on in the next step.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvstore.core.chunk import READY, Chunk
from kvstore.core.host import HostPool
from kvstore.core.step_budget import Budget
from kvstore.policies.base import HELD, LATER, EvictionPolicy, Protected

__all__ = ["Victims"]


class Victims:
    """Searches for chunks that host memory can do without. It moves none of them.

    Args:
        budget: how much a step may ask in vain.
    """

    def __init__(self, pool: HostPool, budget: Budget) -> None:
        self._pool = pool
        self._policy = pool.policy
        self._budget = budget
        self._sets_aside = type(pool.policy).release is not EvictionPolicy.release
        # Chunks that the policy has set aside: those that may have become free to leave, those
        # that will when the step ends in which they were met, and those that only wait for a
        # copy, coldest first.
        self._loose: list[Chunk] = []
        self._until_next_step: list[Chunk] = []
        self._met_step = -1
        self._parked: OrderedDict[bytes, Chunk] = OrderedDict()
        # A vain search is not repeated until something has changed.
        self._vain: tuple[int, bool] = (-1, False)

    def reset(self) -> None:
        """The policy has forgotten everything."""
        for each in (self._loose, self._until_next_step, self._parked):
            each.clear()

    def choose(
        self, count: int, *, shed_unsaved: bool, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Let the policy give up `count` chunks, as far as possible; it has forgotten them.

        Filling and pinned chunks are never among them, nor those that are kept until the
        step ends. Chunks that wait for a copy to a slower tier are only when
        `shed_unsaved`, and only after all others.

        Args:
            incoming: the keys that the rows are for, tail first.
        """
        pool = self._pool
        may_leave = len(pool.chunks) - pool.busy - (0 if shed_unsaved else pool.unsaved)
        count = min(count, may_leave, len(pool.chunks) - pool.leaving)
        if count <= 0 or self._vain == (pool.changes, shed_unsaved):
            return []
        self.let_loose()
        if shed_unsaved:
            self._unpark(count)
        protected = self.protection(shed_unsaved=shed_unsaved, bounded=self._budget.bounded)
        victims = self._policy.evict(count, protected, incoming)
        if victims is None:
            victims = []
            while len(victims) < count:
                one = self._policy.evict(1, protected, incoming)
                if one is None:
                    self._vain = (pool.changes, shed_unsaved)
                    break
                victims += one
        self.given_up(victims)
        return victims

    def find_one(self) -> bool:
        """Look for a chunk that may leave for a store; False if that goes on in the next step.

        Nothing leaves here. Chunks in use that come first are set aside now, so that the
        search that follows, which may not be broken off, does not meet them.
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

        self._policy.evict(1, first)
        return found or not self._budget.cut_short

    def protection(
        self, *, shed_unsaved: bool, bounded: bool, staying: Collection[bytes] = ()
    ) -> Protected:
        """What the policy may ask; when `bounded`, not more often than the step allows.

        Args:
            staying: keys that may not leave now, whatever else is true of them.
        """
        chunk_of, step = self._pool.chunks.get, self._pool.step

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
            met = chunk.aside and self._sets_aside
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

    def let_loose(self) -> None:
        """Tell the policy which of the chunks that it has set aside may leave again.

        To be called before it hears of a use: what is used now is hotter than they are.
        """
        self._end_of_step()
        loose = [*self._loose, *self._pool.take_released()]
        if not loose:
            return
        self._loose.clear()
        # Tail first, whatever the order in which loads and copies have ended.
        loose.sort(key=operator.attrgetter("order"), reverse=True)
        free: list[bytes] = []
        for chunk in loose:
            if not chunk.aside or chunk.state != READY:
                continue
            if self._pool.chunks.get(chunk.key) is not chunk:
                continue
            if chunk.unsaved:
                self._parked[chunk.key] = chunk
            else:
                chunk.set_aside(False)
                self._parked.pop(chunk.key, None)
                free.append(chunk.key)
        self._policy.release(free)

    def given_up(self, keys: Sequence[bytes]) -> None:
        """The policy has forgotten these chunks."""
        if self._sets_aside:
            return  # What it has set aside it does not give up.
        chunks = self._pool.chunks
        for key in keys:
            chunk = chunks[key]
            if chunk.aside:
                chunk.set_aside(False)
                self._parked.pop(key, None)

    def forget(self, chunk: Chunk) -> None:
        """The chunk is about to go without having been given up, and its policy forgets it."""
        self._parked.pop(chunk.key, None)

    def _end_of_step(self) -> None:
        """What was kept until the end of a step that is over may leave."""
        if self._until_next_step and self._met_step != self._pool.step:
            self._loose += self._until_next_step
            self._until_next_step.clear()

    def _unpark(self, count: int) -> None:
        """Up to `count` chunks that wait for a copy may leave without it."""
        free: list[bytes] = []
        while self._parked and len(free) < count:
            key, chunk = self._parked.popitem(last=False)
            if chunk.state == READY:
                chunk.set_aside(False)
                free.append(key)
        self._policy.release(free)
