"""Queues of candidates for eviction, shared by the policies that have several.

A queue is an `OrderedTable` from key to whatever its policy notes, coldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvstore.policies.base import HELD, LATER, Protected
from kvstore.policies.table import OrderedTable

__all__ = ["BURST", "Later", "come_first", "let_go", "put_back", "sift", "take"]

_V = TypeVar("_V")

BURST = 8
"""Keys in use that are met in one queue before another queue is tried: the bound
that keeps an eviction O(1) amortised where all of one queue is in use."""


def sift(
    coldest_first: Iterable[bytes], count: int, protected: Protected
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Ask about keys until `count` may leave, all were asked about, or the answer is `LATER`.

    Returns:
        Those that may leave, those that are in use, and those that are `HELD`.
    """
    victims: list[bytes] = []
    in_use: list[bytes] = []
    held: list[bytes] = []
    for key in coldest_first:
        if len(victims) == count:
            break
        answer = protected(key)
        if not answer:
            victims.append(key)
        elif answer == HELD:
            held.append(key)
        elif answer == LATER:
            break
        else:
            in_use.append(key)
    return victims, in_use, held


class Later(Exception):  # noqa: N818
    """The caller of `evict` wants no more questions now."""


def take(
    queue: OrderedTable[bytes, _V],
    protected: Protected,
    in_use: list[tuple[bytes, _V]],
    held: OrderedTable[bytes, _V],
    most: int = BURST,
) -> tuple[bytes, _V] | None:
    """Take the coldest key that may leave from a queue.

    Protected keys that are met go to `in_use`, from where the caller appends
    them to the queue when its choice is complete: so each is asked about once. Those
    that are `HELD` go to `held`, where they stay until they are released.

    Returns:
        None when the queue is empty or `most` protected keys were met.

    Raises:
        Later: if that is the answer; the key is the coldest of the queue again.
    """
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
        most -= 1
        if not most:
            break
    return None


def let_go(
    keys: Iterable[bytes],
    places: Sequence[tuple[OrderedTable[bytes, _V], OrderedTable[bytes, _V]]],
) -> None:
    """Bring those of `keys` that are held back to the ends of their queues.

    Args:
        places: each queue with those of it that are held.
    """
    for key in keys:
        for queue, held in places:
            if key in held:
                queue[key] = held.pop(key)
                break


def come_first(keys: Iterable[bytes], *queues: OrderedTable[bytes, _V]) -> None:
    """Make those of `keys` that are in one of the queues its coldest, the first of them first."""
    for key in reversed([*keys]):
        for queue in queues:
            if key in queue:
                queue.move_to_end(key, last=False)
                break


def put_back(queue: OrderedTable[bytes, _V], taken: list[tuple[bytes, _V]]) -> None:
    """Undo `take`: make `taken`, coldest first, the coldest of the queue again."""
    for key, note in reversed(taken):
        queue[key] = note
        queue.move_to_end(key, last=False)
