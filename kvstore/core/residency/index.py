"""Index: the keys that a tier holds, in memory, so that a lookup costs no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from kvstore.core.chunk import TIER, Life
from kvstore.core.recency import Recency
from kvstore.core.reports import History
from kvstore.core.statistics import Ages
from kvstore.policies.base import HELD, LATER, EvictionPolicy
from kvstore.policies.table import OrderedTable

__all__ = ["MOST_FAILURES", "ColdestFirst", "Index"]

MOST_FAILURES = 3
"""A chunk is forgotten after this many failed reads in a row."""

NO_SLOT = -1
"""The slot of a chunk that is not here: reading it fails."""

MOST_ORDERS = 5
"""How often to try to read the order of a policy while it is still told of uses."""

QUESTIONS = 500
"""Keys that may not leave about which the policy may ask in one search for victims. After that the
search goes on with the next copies, which wait meanwhile."""


class Index:
    """The chunks of one tier, by key, and the policy that orders their eviction.

    An entry that is being read or pinned is not evicted: its slot is not rewritten.

    Attributes:
        entries: the slot of each chunk that can be read.
        writing: the slot of each chunk that is being written.
        reading: for each chunk that is being read, how many moves read it.
        pinned: those of `entries` that are not evicted, oldest pin first.
        most_pinned: limit of `pinned`.
        evicted: chunks that were evicted. ages: their ages.
        history: keys that appeared and left. recency: uses that are to be recorded.
    """

    def __init__(self, entries: Iterable[tuple[bytes, int]], policy: EvictionPolicy) -> None:
        self.policy = policy
        self.entries: OrderedTable[bytes, int] = OrderedTable()
        self.entries.update(entries)
        policy.restore(self.entries)
        self.writing: dict[bytes, int] = {}
        self.reading: dict[bytes, int] = {}
        # How often in a row entries could not be read.
        self._unread: dict[bytes, int] = {}
        self.pinned: dict[bytes, None] = {}
        self.most_pinned = self._may_pin = 0
        # Keys that are to be pinned, here or not.
        self._wanted: set[bytes] = set()
        # Those of `reading` and `pinned` that the policy has set aside until it is told of them.
        self._aside: set[bytes] = set()
        self.history = History()
        self.ages = Ages()
        self.recency = Recency()
        self.life = Life(TIER)
        self.evicted = 0

    def follow(self, policy: EvictionPolicy) -> None:
        """Follow another policy, which knows the same keys."""
        self.policy = policy

    def lacks(self, key: bytes) -> bool:
        """Whether the chunk is neither here nor being written."""
        return key not in self.entries and key not in self.writing

    def state_of(self, key: bytes) -> str:
        """Return the state of the chunk on this tier: see `kvstore.core.chunk.TIER`."""
        if key in self.reading:
            if key in self.entries:
                return "reading"
            return "rewriting" if key in self.writing else "forgotten"
        if key in self.entries:
            return "resident"
        return "writing" if key in self.writing else "absent"

    def touch(self, keys: Iterable[bytes]) -> None:
        """Tell the policy that those of `keys` (tail first) that are here were used."""
        here = [*filter(self.entries.__contains__, keys)]
        self.ages.use(here)
        self.recency.use(here)
        touch = self.policy.touch
        for key in here:
            touch(key)

    def cool(self, keys: Iterable[bytes]) -> None:
        """Tell the policy that those of `keys` (tail first) that are here will not be used soon."""
        entries, aside = self.entries, self._aside
        self.policy.cool([key for key in keys if key in entries and key not in aside])

    # -- writing ---------------------------------------------------------------------

    def begin_writes(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Note that these chunks are being written to these slots."""
        known, writing = map(self.entries.__contains__, keys), self.writing
        if not any(known) and writing.keys().isdisjoint(keys):
            writing.update(zip(keys, slots, strict=True))
            return
        places = dict(zip(keys, slots, strict=True))
        writing.update((key, places[key]) for key in self._may("write", keys, False))

    def written(self, keys: Sequence[bytes]) -> None:
        """Make entries of these chunks, tail first, whose writes have succeeded."""
        slots = list(map(self.writing.pop, keys, repeat(NO_SLOT)))
        if NO_SLOT in slots:
            known = [key for key, slot in zip(keys, slots, strict=True) if slot != NO_SLOT]
            self._may("written", [key for key in keys if key not in known], False)
            keys, slots = known, [slot for slot in slots if slot != NO_SLOT]
        self.entries.update(zip(keys, slots, strict=True))
        insert = self.policy.insert
        for key in keys:
            insert(key)
        self.history.came(keys)
        self.ages.come(keys)
        if self._wanted:
            # Head first: they came tail first.
            self._pin_wanted(reversed(keys))

    def not_written(self, key: bytes) -> None:
        """Forget a write that failed."""
        if self._may("not written", (key,), key in self.writing):
            del self.writing[key]

    # -- reading ---------------------------------------------------------------------

    def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
        """Protect the entries from eviction during one more read; returns their slots."""
        reading, entries = self.reading, self.entries
        for key in self._may("read", keys, all(map(entries.__contains__, keys))):
            reading[key] = reading.get(key, 0) + 1
        return [entries.get(key, NO_SLOT) for key in keys]

    def end_reads(self, keys: Sequence[bytes]) -> None:
        """Undo one `begin_reads` of each key."""
        reading, aside = self.reading, self._aside
        for key in self._may("last read ended", keys, all(map(reading.__contains__, keys))):
            count = reading[key] - 1
            if count:
                reading[key] = count
                continue
            del reading[key]
            if key in aside and key not in self.pinned:
                aside.discard(key)
                if key in self.entries:
                    self.policy.release((key,))

    def read_well(self, keys: Iterable[bytes]) -> None:
        """Forget earlier failed reads of these entries, which were read now, or are gone."""
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def unread(self, key: bytes) -> bool:
        """Count a failed read of the entry; returns whether to try again."""
        failures = self._unread[key] = self._unread.get(key, 0) + 1
        return failures < MOST_FAILURES

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Let these entries be forgotten with the next read that fails."""
        self._unread.update(dict.fromkeys(keys, MOST_FAILURES))

    # -- pins --------------------------------------------------------------------------

    def limit_pins(self, most: int) -> None:
        """Set how many entries may ever be pinned."""
        self.most_pinned = most
        self.keep_pinned(most)

    def keep_pinned(self, most: int) -> None:
        """Set how many entries may be pinned for now, and unpin the last ones beyond that."""
        self._may_pin = most
        if len(self.pinned) <= most:
            return
        excess = list(self.pinned)[most:]
        for key in excess:
            del self.pinned[key]
        self._let_go(excess)

    def pin(self, keys: Collection[bytes]) -> None:
        """Pin the entries of these keys, those that are added later included."""
        self._wanted.update(keys)
        self._pin_wanted(keys)

    def unpin(self, keys: Collection[bytes]) -> None:
        """End the pins of these keys."""
        self._wanted.difference_update(keys)
        ended = [key for key in reversed(list(keys)) if key in self.pinned]
        for key in ended:
            del self.pinned[key]
        self._let_go(ended)

    def _pin_wanted(self, keys: Iterable[bytes]) -> None:
        pinned, wanted, entries = self.pinned, self._wanted, self.entries
        for key in keys:
            if len(pinned) >= self._may_pin:
                break
            if key in wanted and key in entries:
                pinned[key] = None

    def _let_go(self, keys: Iterable[bytes]) -> None:
        """Tell the policy which of these it had set aside and may evict again."""
        free = [key for key in keys if key in self._aside and key not in self.reading]
        self._aside.difference_update(free)
        self.policy.release(free)

    # -- coming and going --------------------------------------------------------------

    def relocate(self, key: bytes, slot: int) -> None:
        """Note that the chunk has moved to another slot."""
        if self._may("relocate", (key,), key in self.entries):
            self.entries[key] = slot

    def forget(self, keys: Sequence[bytes]) -> list[int]:
        """Remove these entries; returns the slots that become free."""
        pop, remove = self.entries.pop, self.policy.remove
        keys = self._may("forget", keys, all(map(self.entries.__contains__, keys)))
        slots = [pop(key) for key in keys]
        for key in keys:
            remove(key)
            self.pinned.pop(key, None)
            self._aside.discard(key)
        self.read_well(keys)
        self.history.left(keys)
        self.ages.forget(keys)
        return slots

    def evict(
        self, count: int, incoming: Sequence[bytes] = (), *, trims: bool = False
    ) -> list[int]:
        """Let the policy give up up to `count` entries; returns the slots that become free.

        Args:
            incoming: the keys that the slots are for, tail first.
            trims: only those that the policy has in excess.
        """
        reading, pinned, aside = self.reading, self.pinned, self._aside
        left = QUESTIONS + 2 * count

        def protected(key: bytes) -> int:
            nonlocal left
            if left <= 0:
                return LATER
            left -= 1
            if key in reading or key in pinned:
                aside.add(key)
                return HELD
            return False

        asked = protected if reading or pinned else _nobody
        policy = self.policy
        victims = policy.trim(count, asked) if trims else policy.evict_up_to(count, asked, incoming)
        self.read_well(victims)
        self.history.left(victims)
        self.ages.leave(victims)
        self.evicted += len(victims)
        pop = self.entries.pop
        return [pop(key) for key in victims]

    def reset(self) -> None:
        """Forget everything."""
        self.history.all_left(self.entries)
        places = (self._unread, self.reading, self._aside, self.writing, self.pinned, self._wanted)
        for each in (self.entries, self.policy, self.recency, *places):
            each.clear()
        self.ages.reset()

    # -- changes by other processes ------------------------------------------------------

    def appear(self, appeared: Iterable[tuple[bytes, int]]) -> None:
        """Add chunks that others have put into these slots."""
        entries, writing = self.entries, self.writing
        places = dict(appeared)
        for key in writing.keys() & places if writing else ():
            if not self._may("appear", (key,), False):
                del places[key]
        self.history.came([key for key in places if key not in entries])
        entries.update(places)

    def disappear(self, keys: Iterable[bytes]) -> None:
        """Remove chunks that others have removed, or whose entries were out of date."""
        pop = self.entries.pop
        gone = [key for key in keys if pop(key, None) is not None]
        self.read_well(gone)
        self.history.left(gone)
        self.ages.forget(gone)

    def coldest_first(self) -> ColdestFirst:
        """Return the entries, coldest first."""
        return ColdestFirst(self)

    def count_evicted(self, count: int) -> None:
        """Count chunks that a store has evicted by itself."""
        self.evicted += count

    def counts(self) -> dict[str, Any]:
        """Return its part of `TierStats`."""
        lengths = {name: len(getattr(self, name)) for name in ("reading", "writing", "pinned")}
        told = {"evicted": self.evicted, "ages": self.ages.left.copy()}
        return {"chunks": len(self.entries), **told, **lengths}

    # -- inside --------------------------------------------------------------------------

    def _may(self, event: str, keys: Sequence[bytes], plain: bool) -> Sequence[bytes]:
        """Return those of `keys` that the event may happen to, by the table.

        Args:
            plain: whether it is known that it may happen to all of them.
        """
        if plain:
            return keys
        after, states = self.life.after, self.life.states
        return [key for key in keys if after(states[self.state_of(key)], event) >= 0]


class ColdestFirst(Sequence[tuple[bytes, int]]):
    """The (key, slot) pairs of a tier, coldest first, once its core makes no more decisions.

    They are computed on the first iteration, in a thread of the tier: with a million
    chunks that takes long. The sequence is empty if the core is told of uses all the time.
    """

    def __init__(self, index: Index) -> None:
        self._order = index.policy.order
        self._entries = index.entries

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        entries = self._entries
        for _ in range(MOST_ORDERS):
            # A use told meanwhile, at the end of a lease, makes the iteration raise.
            with contextlib.suppress(RuntimeError, KeyError):
                return iter([(key, entries[key]) for key in self._order() if key in entries])
        return iter(())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]


def _nobody(key: bytes) -> int:
    """Answer a policy that the key may leave, where no key is being read or pinned."""
    return False
