"""Queues of candidates for eviction, as several policies use them.

A queue is an `OrderedTable` from key to a value of the policy, coldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvstore.policies.base import HELD, LATER, Protected
from kvstore.policies.table import OrderedTable

__all__ = ["BURST", "Later", "come_first", "let_go", "put_back", "take"]

_V = TypeVar("_V")

BURST = 8
"""Most keys in use that are passed in one queue before another queue is tried: keeps an
eviction O(1) amortised if a whole queue is in use."""


class Later(Exception):  # noqa: N818
    """Raised when `Protected` answers `LATER`."""


def take(
    queue: OrderedTable[bytes, _V],
    protected: Protected,
    in_use: list[tuple[bytes, _V]],
    held: OrderedTable[bytes, _V],
) -> tuple[bytes, _V] | None:
    """Take the coldest key that may be evicted from a queue.

    Protected keys on the way go to `in_use`; the caller appends them to the queue
    when its choice is complete, so that it asks about each only once. Keys that are
    `HELD` go to `held`, where they stay until they are released.

    Returns:
        None if the queue is empty or `BURST` protected keys were passed.

    Raises:
        Later: if the answer is `LATER`; the key is then put back.
    """
    left = BURST
    while queue:
        entry = queue.popitem(last=False)
        answer = protected(entry[0])
        if not answer:
            return entry
        if answer == HELD:
            held[entry[0]] = entry[1]
            continue
        if answer == LATER:
            put_back(queue, [entry])
            raise Later
        in_use.append(entry)
        left -= 1
        if not left:
            break
    return None


def let_go(
    keys: Iterable[bytes],
    places: Sequence[tuple[OrderedTable[bytes, _V], OrderedTable[bytes, _V]]],
) -> None:
    """Return held keys to the ends of their queues; ignore others.

    Args:
        places: each queue with its held keys.
    """
    for key in keys:
        for queue, held in places:
            if key in held:
                queue[key] = held.pop(key)
                break


def come_first(keys: Iterable[bytes], *queues: OrderedTable[bytes, _V]) -> None:
    """Move `keys` to the cold ends of their queues, the first of them first; ignore others."""
    for key in reversed([*keys]):
        for queue in queues:
            if key in queue:
                queue.move_to_end(key, last=False)
                break


def put_back(queue: OrderedTable[bytes, _V], taken: list[tuple[bytes, _V]]) -> None:
    """Undo `take`: put the entries `taken`, coldest first, back at the cold end of the queue."""
    for key, note in reversed(taken):
        queue[key] = note
        queue.move_to_end(key, last=False)
