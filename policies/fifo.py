"""First in, first out."""

from __future__ import annotations

from kvstore.policies.base import EvictionPolicy
from kvstore.policies.lru import LRU

__all__ = ["FIFO"]


class FIFO(LRU):
    """Evicts the key that entered first, whatever its use.

    A use costs nothing. A key that was found in use at eviction enters anew.
    """

    name = "fifo"
    # What was used last may be what has entered first.
    spares_latest = False

    settle = EvictionPolicy.settle

    def touch(self, key: bytes) -> None:
        pass
