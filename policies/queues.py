"""Queues from which victims are taken, shared by the policies that have several.

A queue is an `OrderedDict` from key to whatever its policy notes, coldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from policies.base import Protected

__all__ = ["BURST", "put_back", "take"]

_V = TypeVar("_V")

BURST = 8
"""Keys in use that are met in one queue before another queue is tried: the bound
that keeps an eviction O(1) amortised where all of one queue is in use."""


def take(
    queue: OrderedDict[bytes, _V],
    protected: Protected,
    in_use: list[tuple[bytes, _V]],
    most: int = BURST,
) -> tuple[bytes, _V] | None:
    """Take the coldest key that may leave from a queue.

    Protected keys that are met go to `in_use`, from where the caller appends
    them to the queue when its choice is complete: so each is asked about once.

    Returns:
        None when the queue is empty or `most` protected keys were met.
    """
    for _ in range(min(most, len(queue))):
        entry = queue.popitem(last=False)
        if not protected(entry[0]):
            return entry
        in_use.append(entry)
    return None


def put_back(queue: OrderedDict[bytes, _V], taken: list[tuple[bytes, _V]]) -> None:
    """Undo `take`: make `taken`, coldest first, the coldest of the queue again."""
    for key, note in reversed(taken):
        queue[key] = note
        queue.move_to_end(key, last=False)
