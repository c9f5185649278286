"""Transfers between device and host memory that a reset has overtaken.

A reset forgets chunks, but it cannot stop who copies them: a store may still
write its rows, a load may still read its own. Such a row is given to nobody
until each of its transfers was reported, or all are known to have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.host import HostPool

__all__ = ["Overtaken", "Transfer"]


class Transfer(NamedTuple):
    """A copy of one chunk.

    Attributes:
        era: in which it was prepared.
        request: whose it is.
        stores: whether the device writes the row, or reads it.
    """

    era: int
    request: str
    key: bytes
    stores: bool


class Overtaken:
    """Rows that are held for such transfers."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._rows: dict[Transfer, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, transfers: Iterable[tuple[Transfer, int]]) -> None:
        """These go on, each in its row, which the pool holds once for each."""
        for transfer, row in transfers:
            self._rows.setdefault(transfer, []).append(row)

    def eras(self, request: str, *, stores: bool) -> dict[bytes, int]:
        """Keys that a request still stores, or loads, with the era of the first such transfer."""
        found: dict[bytes, int] = {}
        for transfer in self._rows:
            if (transfer.request, transfer.stores) == (request, stores):
                found[transfer.key] = min(transfer.era, found.get(transfer.key, transfer.era))
        return found

    def ended(self, transfer: Transfer) -> bool:
        """One has ended; False if it is not known."""
        rows = self._rows.get(transfer)
        if rows is None:
            return False
        self._pool.release_held((rows.pop(),))
        if not rows:
            del self._rows[transfer]
        return True

    def all_ended(self) -> None:
        """None of them touches a row any more."""
        rows = [row for held in self._rows.values() for row in held]
        self._rows.clear()
        self._pool.release_held(rows)
