"""First in, first out."""

from __future__ import annotations

from kvstore.policies.base import EvictionPolicy
from kvstore.policies.lru import LRU

__all__ = ["FIFO"]


class FIFO(LRU):
    """Evicts the key that entered first, regardless of uses.

    A key that was found in use at eviction counts as having just entered.
    """

    name = "fifo"
    # The key that was used last may be the one that entered first.
    spares_latest = False

    settle = EvictionPolicy.settle

    def touch(self, key: bytes) -> None:
        pass
