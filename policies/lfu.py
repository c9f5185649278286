"""Least frequently used.

Ketan Shah, Anirban Mitra and Dhruv Matani, "An O(1) algorithm for implementing the
LFU cache eviction scheme", 2010.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.policies.base import EvictionPolicy, Protected
from kvstore.policies.queues import sift
from kvstore.policies.table import OrderedTable

__all__ = ["LFU"]


class _Uses:
    """A group of keys with equal numbers of uses, linked to the next lower and higher group."""

    __slots__ = ("count", "fewer", "held", "keys", "more")

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys: OrderedTable[bytes, None] = OrderedTable()
        self.held: OrderedTable[bytes, None] = OrderedTable()
        self.fewer = self.more = self


class LFU(EvictionPolicy):
    """Evicts the key with the fewest uses; of equals, the least recently used.

    Uses are never forgotten while a key is resident, so keys that were popular once
    stay: see docs/policies.md before choosing it.
    """

    name = "lfu"
    effort = 1.4

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Head of a ring of groups with rising counts; the head has count 0 and stays empty.
        self._head = _Uses(0)
        self._groups: OrderedTable[bytes, _Uses] = OrderedTable()
        self._held = 0

    def insert(self, key: bytes) -> None:
        self._add(key, self._head)

    def touch(self, key: bytes) -> None:
        group = self._groups[key]
        alone = len(group.keys) == 1 and not group.held
        if alone and group.more.count != group.count + 1:
            group.count += 1
            return
        self._add(key, group)
        self._drop(key, group)

    def remove(self, key: bytes) -> None:
        self._drop(key, self._groups.pop(key))

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        if count > len(self._groups) - self._held:
            return None
        coldest = self._head.more.keys
        if count == 1 and coldest and not protected(key := next(iter(coldest))):
            # Fast path: stores evict one key at a time.
            self.remove(key)
            return [key]
        victims, in_use, held = sift(self._rising(), count, protected)
        for key in held:
            group = self._groups[key]
            group.held[key] = group.keys.pop(key)
        self._held += len(held)
        for key in in_use:
            self.touch(key)
        if len(victims) < count:
            return None
        for key in victims:
            self.remove(key)
        return victims

    def release(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            group = self._groups.get(key)
            if group is not None and key in group.held:
                group.keys[key] = group.held.pop(key)
                self._held -= 1

    def cool(self, keys: Iterable[bytes]) -> None:
        for key in reversed([*keys]):
            group = self._groups[key]
            if key in group.held:
                continue
            if group.count > 1:
                # Treat it as used once.
                self._add(key, self._head)
                self._drop(key, group)
            self._head.more.keys.move_to_end(key, last=False)

    def clear(self) -> None:
        self._head = _Uses(0)
        self._groups.clear()
        self._held = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def order(self) -> Iterable[bytes]:
        group = self._head.more
        while group is not self._head:
            yield from group.keys
            yield from group.held
            group = group.more

    def _rising(self) -> Iterator[bytes]:
        group = self._head.more
        while group is not self._head:
            yield from group.keys
            group = group.more

    def _add(self, key: bytes, before: _Uses) -> None:
        """Put `key` into the group with one more use than `before`."""
        group = before.more
        if group.count != before.count + 1:
            group = _Uses(before.count + 1)
            group.fewer, group.more = before, before.more
            group.fewer.more = group.more.fewer = group
        group.keys[key] = None
        self._groups[key] = group

    def _drop(self, key: bytes, group: _Uses) -> None:
        """Remove `key` from this group, and the group if it is then empty."""
        if key in group.held:
            del group.held[key]
            self._held -= 1
        else:
            del group.keys[key]
        if not group.keys and not group.held:
            group.fewer.more, group.more.fewer = group.more, group.fewer
