"""Prefix hit density: a policy made for chains of blocks.

It estimates, from what similar chunks did before, how many hits per unit of time a
chunk will still bring. It evicts the chunk with the fewest, from the ends of chains
only. The measure is explained in `kvstore.policies.density`.

This module is long because chains, queues, ghosts and pins share the same arrays by slot.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from kvstore.policies.base import HELD, LATER, EvictionPolicy, Protected
from kvstore.policies.density import Densities
from kvstore.policies.queues import BURST
from kvstore.policies.table import OrderedTable

__all__ = ["HitDensity"]

_COUNTED = 4
"""Uses beyond this many make no difference."""

_CLASSES = 2 * _COUNTED
"""The class of a key: 2 x (uses - 1), and one more if it was the last of its request."""

_USED_AGAIN = tuple(min(kind // 2 + 1, _COUNTED - 1) * 2 for kind in range(_CLASSES))
"""The class after one more use, by the class before."""

_SHIFT = (_CLASSES - 1).bit_length()
_CLASS = (1 << _SHIFT) - 1
"""A key's state is one number: the time of its last use, shifted, and its class."""

_SAMPLES = 128
"""Residents, and as many ghosts, whose ages are looked at for each estimate."""

_FEWEST_LINKS = 2**16
"""Links to keys that are not resident, at least: as many chunks as a very long prompt has."""

_SMALL_LINKS, _SMALL_LINKS_EACH = 2**12, 64
"""The same of a small tier, and for each of its chunks: tenants have a policy each."""

_SIBLINGS = 64
"""Keys that wait for one and the same parent to come; more are not linked."""

_SEVERED_AT_ONCE = 64
"""Held ends that are cut off their chains at once when room is found nowhere else."""

_AGED_AT_ONCE = 256
"""Ends of chains that change their bins in one go. With 64 a disk below host memory that demotes to
it would hit 4 points less on the chat trace."""

_NONE = -1


class HitDensity(EvictionPolicy):
    """Evicts the end of a chain that is expected to bring the fewest hits for its time.

    Only keys without a resident child may leave, as far as chains are known by
    `link`; a parent whose child is in use leaves when no other key can. So most
    accesses, those inside a chain, cost no queue operation. Ends of chains stand in
    queues by class and bin of age, coldest first; they change bins as they age.

    Evicted keys are remembered for a while, by a hash of 8 bytes, so that the
    policy learns what it cost to evict them and counts their uses on. Of a key that
    was removed the uses are counted on, too: a disk with the exclusive flow removes
    what it hands to host memory, and gets it back.

    Cost: O(1) amortised; figures are in docs/policies.md. Choices are the same in
    every run.

    Args:
        ghosts: how many evicted keys are remembered, and how many removed ones, as a
            multiple of the capacity. Fewer save memory and cost hits where the tier is small
            beside what is in use.
        whole_stores: do not turn away part of a store that would fit. Costs hits
            only where a prompt is a large part of the tier.
    """

    name = "hit-density"
    effort = 3.0

    def __init__(self, capacity: int, *, ghosts: float = 2.0, whole_stores: bool = False) -> None:
        super().__init__(capacity)
        self.declines = not whole_stores
        if not 0 <= ghosts <= 64:
            raise ValueError(f"ghosts must lie between 0 and 64 times the capacity, not {ghosts}")
        self._ghost_room = int(capacity * ghosts)
        self._start()

    def _start(self) -> None:
        self._now = 0
        self._densities = Densities(_CLASSES, self.capacity)
        self._bins, self._edges = self._densities.bins, self._densities.edges
        self._reused, self._ended = self._densities.reused, self._densities.ended
        self._rng = random.Random(self.capacity)
        self._slots: OrderedTable[bytes, int] = OrderedTable()
        # What is known of a resident, by its slot.
        self._keys: list[bytes | None] = []
        self._seen: list[int] = []  # when it was used last, and its class
        self._parent: list[int] = []  # the slot of what it follows
        self._children: list[int] = []  # how many residents follow it
        self._cell: list[int] = []  # the queue in which it stands, if it is an end
        # Free slots. One that was removed from under its children is free when they are gone.
        self._free: list[int] = []
        # Held residents stand in no queue. Where nothing else could leave, some are severed
        # from the key that they follow, which is kept here.
        self._held: set[int] = set()
        # Residents of which no use is expected, until they are used.
        self._cool: OrderedTable[int, None] = OrderedTable()
        self._attached: OrderedTable[int, None] = OrderedTable()
        self._severed: dict[int, bytes] = {}
        # Linked, not yet resident: what they follow.
        self._expected: OrderedTable[bytes, bytes | None] = OrderedTable()
        # Residents by the key that they follow, which is not resident.
        self._waiting: OrderedTable[bytes, list[bytes]] = OrderedTable()
        small = max(_SMALL_LINKS, _SMALL_LINKS_EACH * self.capacity)
        self._links_kept = max(min(_FEWEST_LINKS, small), self.capacity // 8)
        # The last queue is that of cooled ends, which leave before all others.
        self._ends: list[OrderedTable[int, None]] = [
            OrderedTable() for _ in range(self._densities.cells + 1)
        ]
        # A ring of those evicted last: place by hash, and by place what is known.
        self._ghosts: OrderedTable[int, int] = OrderedTable()
        self._ghost_hash = array("q")
        self._ghost_seen = array("q")
        self._ghost_next = 0
        # Keys that were removed, by hash: their classes, for when they come back.
        self._removed: OrderedTable[int, int] = OrderedTable()
        self._estimate_due = self._age_due = 0
        self._halving_due = 32 * self.capacity
        self._order: list[int] = []
        self._rank: list[int] = []
        # All queues before this place in the order are empty.
        self._lowest = 0
        self._estimate()

    # -- what the caller tells -------------------------------------------------------

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        slots, parents = self._slots, self._parent
        above = _NONE if after is None else slots.get(after, _NONE)
        missing = []
        for key in keys:
            slot = slots.get(key, _NONE)
            if slot < 0:
                missing.append((key, after))
            elif above >= 0 and parents[slot] < 0 and above != slot and slot not in self._severed:
                self._attach(slot, above)
            after, above = key, slot
        # Of a prompt that is longer than what is kept, the beginning is worth most.
        for key, follows in reversed(missing):
            self._expect(key, follows)

    def insert(self, key: bytes) -> None:
        now = self._now = self._now + 1
        kind = 0
        place = self._ghosts.pop(hash(key), _NONE)
        if place >= 0:
            self._ghost_hash[place] = 0
            seen = self._ghost_seen[place]
            self._reused[self._cell_of(seen)] += 1
            kind = _USED_AGAIN[seen & _CLASS]
        elif self._removed:
            # What brings it back is no use of it.
            kind = self._removed.pop(hash(key), 0)
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
            self._seen[slot] = now << _SHIFT | kind
        else:
            slot = len(self._keys)
            self._keys.append(key)
            self._seen.append(now << _SHIFT | kind)
            self._parent.append(_NONE)
            self._children.append(0)
            self._cell.append(_NONE)
        self._slots[key] = slot
        if self._waiting:
            for child in self._waiting.pop(key, ()):
                below = self._slots.get(child, _NONE)
                if below >= 0 and self._parent[below] < 0 and below not in self._severed:
                    self._attach(below, slot)
        if not self._children[slot]:
            self._stand(slot, kind * self._bins)
        follows = self._expected.pop(key, None)
        if follows is not None and follows != key:
            self._follow(slot, key, follows)

    def touch(self, key: bytes) -> None:
        slot = self._slots[key]
        now = self._now = self._now + 1
        seen = self._seen[slot]
        self._reused[self._cell_of(seen)] += 1
        kind = _USED_AGAIN[seen & _CLASS]
        self._seen[slot] = now << _SHIFT | kind
        self._cool.pop(slot, None)
        cell = self._cell[slot]
        if cell >= 0:
            del self._ends[cell][slot]
            self._stand(slot, kind * self._bins)

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        for key in keys[-1:] if ends is None else ends:
            slot = self._slots.get(key, _NONE)
            if slot >= 0:
                self._seen[slot] |= 1
                if self._cell[slot] >= 0:
                    self._unqueue(slot)
                    self._queue(slot)

    def cool(self, keys: Iterable[bytes]) -> None:
        # Those that are cooled last leave first, as with other policies.
        for key in reversed([*keys]):
            slot = self._slots[key]
            self._cool[slot] = None
            if self._cell[slot] >= 0:
                self._unqueue(slot)
                self._queue(slot)
                self._ends[self._densities.cells].move_to_end(slot, last=False)

    def remove(self, key: bytes) -> None:
        slot = self._slots.pop(key)
        self._cool.pop(slot, None)
        self._expect_back(slot, key)
        self._removed[hash(key)] = self._seen[slot] & _CLASS
        if len(self._removed) > self._ghost_room:
            self._removed.popitem(last=False)
        if self._cell[slot] >= 0:
            self._unqueue(slot)
        if slot in self._held:
            self._held.discard(slot)
            self._attached.pop(slot, None)
            self._severed.pop(slot, None)
        self._keys[slot] = None
        self._detach(slot)
        self._parent[slot] = _NONE
        if not self._children[slot]:
            self._free.append(slot)

    # -- eviction --------------------------------------------------------------------

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        if count > len(self._slots) - len(self._held):
            return None
        if self._now >= self._age_due:
            if self._now >= self._estimate_due:
                self._estimate()
            self._grow_older()
        keys = self._keys
        if count == 1 and (slot := self._coldest()) >= 0:
            # Written for speed: stores ask for one after the other.
            key = keys[slot]
            assert key is not None
            if not protected(key):
                self._unqueue(slot)
                self._detach(slot)
                self._let_go(slot, key)
                return [key]
        victims: list[int] = []
        in_use: list[int] = []
        detached = 0
        in_a_row, patient = 0, False
        while len(victims) < count:
            slot = self._coldest()
            if slot < 0:
                if not patient:
                    # What was passed over may have to leave after all.
                    self._lowest, patient = 0, True
                elif detached < len(in_use):
                    # Every end is in use: what lies above those may leave.
                    above = in_use[detached:]
                    detached = len(in_use)
                    for slot in above:
                        self._detach(slot)
                elif self._attached:
                    self._sever()
                elif len(victims) + len(in_use) + len(self._held) < len(self._slots):
                    self._unlink_all({*victims, *in_use})
                else:
                    break
                continue
            cell = self._cell[slot]
            key = keys[slot]
            assert key is not None
            answer = protected(key)
            if answer == LATER:
                break
            self._unqueue(slot)
            if answer == HELD:
                self._held.add(slot)
                self._attached[slot] = None
            elif answer:
                in_use.append(slot)
                in_a_row += 1
                if in_a_row >= BURST and not patient:
                    in_a_row = 0
                    self._lowest = self._rank[cell] + 1
            else:
                in_a_row = 0
                victims.append(slot)
                self._detach(slot)
        complete = len(victims) == count
        chosen = [key for slot in victims if (key := keys[slot]) is not None]
        if complete:
            for slot, key in zip(victims, chosen, strict=True):
                self._let_go(slot, key)
        else:
            for slot in reversed(victims):
                self._restore(slot)
        for index, slot in enumerate(in_use):
            # Counts as used just now, so that it is not met again soon.
            self._seen[slot] = self._now << _SHIFT | self._seen[slot] & _CLASS
            self._cool.pop(slot, None)
            if index < detached:
                self._restore(slot)
            elif not self._children[slot]:
                # Otherwise a child that had to stay too was given back to it: it is no end.
                self._queue(slot)
        return chosen if complete else None

    def release(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            slot = self._slots.get(key, _NONE)
            if slot not in self._held:
                continue
            self._held.discard(slot)
            self._attached.pop(slot, None)
            follows = self._severed.pop(slot, None)
            if follows is not None and self._parent[slot] < 0:
                self._follow(slot, key, follows)
            if not self._children[slot]:
                self._queue(slot)

    def _sever(self) -> None:
        """Every end is held: what lies above some of those may leave."""
        attached = self._attached
        for _ in range(min(_SEVERED_AT_ONCE, len(attached))):
            slot, _ = attached.popitem(last=False)
            above = self._parent[slot]
            if above >= 0:
                follows = self._keys[above]
                if follows is not None:
                    self._severed[slot] = follows
                self._detach(slot)
                self._parent[slot] = _NONE

    def _coldest(self) -> int:
        """The end of a chain that is least worth keeping, or none."""
        order, ends = self._order, self._ends
        lowest = self._lowest
        while lowest < len(order):
            queue = ends[order[lowest]]
            if queue:
                self._lowest = lowest
                return next(iter(queue))
            lowest += 1
        self._lowest = lowest
        return _NONE

    def _let_go(self, slot: int, key: bytes) -> None:
        """A victim becomes a ghost, in the place of the ghost that is longest gone."""
        self._expect_back(slot, key)
        del self._slots[key]
        self._cool.pop(slot, None)
        self._keys[slot] = None
        self._parent[slot] = _NONE
        self._free.append(slot)
        seen = self._seen[slot]
        if not self._ghost_room:
            self._ended[self._cell_of(seen)] += 1
            return
        place = self._ghost_next
        hashes, ghosts = self._ghost_hash, self._ghosts
        hashed = hash(key)
        if place == len(hashes):
            hashes.append(hashed)
            self._ghost_seen.append(seen)
        else:
            if ghosts.get(hashes[place]) == place:
                del ghosts[hashes[place]]
                self._ended[self._cell_of(self._ghost_seen[place])] += 1
            hashes[place] = hashed
            self._ghost_seen[place] = seen
        self._ghost_next = (place + 1) % self._ghost_room
        ghosts[hashed] = place

    def _cell_of(self, seen: int) -> int:
        """The cell of a key in this state, at its age of now."""
        age = self._now - (seen >> _SHIFT)
        return (seen & _CLASS) * self._bins + bisect_right(self._edges, age)

    # -- chains ----------------------------------------------------------------------

    def _expect(self, key: bytes, follows: bytes | None) -> None:
        expected = self._expected
        expected[key] = follows
        if len(expected) > self._links_kept:
            expected.popitem(last=False)

    def _expect_back(self, slot: int, key: bytes) -> None:
        """A key that leaves may come back before it is linked again."""
        above = self._parent[slot]
        if above >= 0:
            self._expect(key, self._keys[above])

    def _attach(self, slot: int, above: int) -> None:
        self._parent[slot] = above
        self._children[above] += 1
        if self._cell[above] >= 0:
            self._unqueue(above)

    def _follow(self, slot: int, key: bytes, follows: bytes) -> None:
        """A resident follows another, which may be still to come."""
        above = self._slots.get(follows, _NONE)
        if above >= 0:
            self._attach(slot, above)
            return
        siblings = self._waiting.setdefault(follows, [])
        if len(siblings) < _SIBLINGS:
            siblings.append(key)
        if len(self._waiting) > self._links_kept:
            self._waiting.popitem(last=False)

    def _detach(self, slot: int) -> None:
        """One child less for its parent, which may become an end, or free where it is gone."""
        above = self._parent[slot]
        if above >= 0:
            self._children[above] -= 1
            if not self._children[above]:
                if self._keys[above] is None:
                    self._free.append(above)
                else:
                    self._queue(above)

    def _restore(self, slot: int) -> None:
        """Undo `_detach` and put the end of a chain back into its queue."""
        above = self._parent[slot]
        if above >= 0:
            if self._keys[above] is None:
                self._parent[slot] = _NONE
            else:
                self._attach(slot, above)
        if not self._children[slot]:
            self._queue(slot)

    def _unlink_all(self, but: set[int]) -> None:
        """Forget all chains: they form a ring, so what was told of them was wrong."""
        self._severed.clear()
        for slot, key in enumerate(self._keys):
            self._parent[slot] = _NONE
            if key is None and self._children[slot]:
                self._free.append(slot)
            self._children[slot] = 0
            if key is not None and self._cell[slot] < 0 and slot not in but:
                self._queue(slot)

    def _queue(self, slot: int) -> None:
        """An end of a chain takes its place among those of its class and age."""
        if slot in self._held:
            return
        if slot in self._cool:
            self._stand(slot, self._densities.cells)
            return
        seen = self._seen
        mine = seen[slot]
        cell = self._cell_of(mine)
        queue = self._ends[cell]
        older = bool(queue) and mine < seen[next(iter(queue))]
        self._stand(slot, cell)
        if older:
            queue.move_to_end(slot, last=False)

    def _stand(self, slot: int, cell: int) -> None:
        """Put an end of a chain last in a queue: if just used, that of its class's first bin."""
        self._ends[cell][slot] = None
        self._cell[slot] = cell
        if self._rank[cell] < self._lowest:
            self._lowest = self._rank[cell]

    def _unqueue(self, slot: int) -> None:
        del self._ends[self._cell[slot]][slot]
        self._cell[slot] = _NONE

    # -- estimates -------------------------------------------------------------------

    def _grow_older(self) -> None:
        """Move ends of chains that have left their bin to where their age belongs.

        Of very many at once, as after `restore`, only some: the rest next time.
        """
        now, seen, densities, ends = self._now, self._seen, self._densities, self._ends
        period = min(1024, max(64, self.capacity // 128))
        self._age_due = now + period
        moves = min(8 * period, _AGED_AT_ONCE)
        bins = densities.bins
        # The oldest first, so that no key moves twice.
        for index in range(bins - 2, -1, -1):
            before = now - densities.edges[index]
            for cell in range(index, densities.cells, bins):
                queue = ends[cell]
                while queue:
                    slot = next(iter(queue))
                    if seen[slot] >> _SHIFT > before:
                        break
                    if not moves:
                        self._age_due = now + 64
                        return
                    moves -= 1
                    del queue[slot]
                    self._queue(slot)

    def _estimate(self) -> None:
        """Learn anew what is least worth keeping."""
        self._estimate_due = self._now + max(500, self.capacity // 8)
        if self._now >= self._halving_due:
            self._halving_due = self._now + 32 * self.capacity
            self._densities.halve()
        self._order = [self._densities.cells, *self._densities.ascending(self._sampled())]
        self._rank = [0] * len(self._order)
        for place, cell in enumerate(self._order):
            self._rank[cell] = place
        self._lowest = 0

    def _sampled(self) -> Iterator[tuple[int, float]]:
        """Cells of residents and ghosts drawn at random, each with how many it stands for."""
        for seen, there, total in (
            (self._seen, self._keys, len(self._slots)),
            (self._ghost_seen, self._ghost_hash, len(self._ghosts)),
        ):
            size = len(seen)
            drawn = [int(self._rng.random() * size) for _ in range(_SAMPLES)] if total else ()
            drawn = [place for place in drawn if there[place]]
            for place in drawn:
                yield self._cell_of(seen[place]), total / len(drawn)

    # -- the rest --------------------------------------------------------------------

    def clear(self) -> None:
        self._start()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def order(self) -> Iterable[bytes]:
        seen, cool = self._seen, self._cool

        def place(key: bytes) -> tuple[bool, int]:
            slot = self._slots[key]
            return slot not in cool, seen[slot] >> _SHIFT

        return iter(sorted(self._slots, key=place))
