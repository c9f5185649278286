"""First in, first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from policies.base import EvictionPolicy, Protected

__all__ = ["FIFO"]


class FIFO(EvictionPolicy):
    """Evicts the key that entered first, whatever its use.

    A use costs nothing. A key that was found in use at eviction enters anew.
    """

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        pass

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        keys = self._keys
        if count > len(keys):
            return None
        victims: list[bytes] = []
        in_use: list[bytes] = []
        while keys and len(victims) < count:
            key, _ = keys.popitem(last=False)
            (in_use if protected(key) else victims).append(key)
        chosen = victims if len(victims) == count else None
        if chosen is None:
            in_use = victims + in_use
        for key in in_use:
            keys[key] = None
        return chosen

    def clear(self) -> None:
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def order(self) -> Iterable[bytes]:
        return iter(self._keys)
