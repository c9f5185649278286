"""What others keep where this process can read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.directory import TierDirectory
from kvstore.types import News, TierOpening
from policies.base import EvictionPolicy, Protected

__all__ = ["FollowedDirectory"]


class FollowedDirectory(TierDirectory):
    """A tier that is only read: chunks are promoted from it, never copied to it.

    What it holds comes and goes by `learn`, at the will of its owners. An entry
    may be out of date: then its promotion fails, which is a miss.
    """

    def __init__(self, index: int, opening: TierOpening, max_rows_in_flight: int) -> None:
        super().__init__(index, opening, _Unordered(1), max_rows_in_flight)

    def accepts(self, now: float) -> bool:
        """Never: it belongs to others."""
        return False

    def forget(self, key: bytes) -> None:
        """The entry was out of date."""
        if self.entries.pop(key, None) is not None and self.keeps_history:
            self.history.append((key, True))

    def learn(self, news: News) -> None:
        """Take in what the owners have done."""
        if self.clearing:
            return
        for key in news.gone:
            self.forget(key)
        for key, slot in news.appeared:
            if self.keeps_history and key not in self.entries:
                self.history.append((key, False))
            self.entries[key] = slot


class _Unordered(EvictionPolicy):
    """Stands where a policy is asked for and nobody is ever evicted."""

    name = "none"

    def insert(self, key: bytes) -> None:
        return

    def touch(self, key: bytes) -> None:
        return

    def remove(self, key: bytes) -> None:
        return

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        return None

    def clear(self) -> None:
        return

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        return False

    def restore(self, keys: Iterable[bytes]) -> None:
        return
