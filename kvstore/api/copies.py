"""The copies to slower tiers that are due at one moment."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core import Core
from kvstore.core.residency.base import CopyTarget

__all__ = ["Copies"]


class Copies:
    """The copies that wait or are under way when this is made.

    Those queued later do not count.
    """

    def __init__(self, core: Core, due: Iterable[tuple[CopyTarget, int, set[bytes]]]) -> None:
        self._pool = core.pool
        self._due = list(due)

    @classmethod
    def all(cls, core: Core) -> Copies:
        """Those to every tier."""
        targets = core.cascades.targets
        return cls(core, [(t, t.copies_queued, t.unsaved_keys()) for t in targets])

    @classmethod
    def of(cls, core: Core, target: CopyTarget, keys: Iterable[bytes]) -> Copies:
        """Those of `keys` to one tier."""
        return cls(core, [(target, 0, set(keys))])

    def ended(self) -> bool:
        """Whether all of them have arrived, or will not come."""
        return all(self._arrived(*each) for each in self._due)

    def _arrived(self, tier: CopyTarget, mark: int, keys: set[bytes]) -> bool:
        if tier.copies_ended < mark:
            # Cheap, and so for most of the time.
            return False
        keys.intersection_update([key for key in keys if self._under_way(tier, key)])
        return not keys

    def _under_way(self, tier: CopyTarget, key: bytes) -> bool:
        chunk = self._pool.chunks.get(key)
        waits = chunk is not None and chunk.unsaved >> tier.number & 1
        return bool(waits) or key in tier.index.writing
