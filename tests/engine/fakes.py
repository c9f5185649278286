"""Tiers without a medium, for what a real one does only on a bad day."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.tiers import PinnedRegion, Tier, Transfer
from kvstore.types import Changes, RecoveredTier

__all__ = ["GatedTier", "RaisingTier", "SilentTier"]


class GatedTier(Tier):
    """Every call waits until the gate is opened; then it succeeds.

    Attributes:
        calls: names of the calls, in the order in which they began.
        running: calls that wait at the gate.
        closed_with: calls that were running when it was closed; None before.
    """

    def __init__(self, opened: bool = False) -> None:
        self.gate = asyncio.Event()
        if opened:
            self.gate.set()
        self.calls: list[str] = []
        self.running = 0
        self.closed_with: int | None = None

    def open(self, region: PinnedRegion) -> RecoveredTier:
        return RecoveredTier("gated", "disk", [], 8, [0], 4)

    async def _pass(self, call: str) -> None:
        self.calls.append(call)
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1

    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        await self._pass(f"read {slots[0]}")
        return Transfer([True] * len(keys))

    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        await self._pass(f"write {slots[0]}")
        return Transfer([True] * len(keys))

    async def grow(self) -> tuple[int | None, str | None]:
        await self._pass("grow")
        return 1, None

    async def clear(self) -> list[int] | str:
        await self._pass("clear")
        return [0]

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        self.closed_with = self.running

    def abandon(self) -> None:
        self.closed_with = self.running

    @property
    def description(self) -> str:
        return "gated"


class SilentTier(GatedTier):
    """Never answers, not even to `close`."""

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        await self.gate.wait()


class RaisingTier(GatedTier):
    """Raises from every method, as no tier may."""

    is_peer = refreshes = True

    async def _pass(self, call: str) -> None:
        raise RuntimeError(f"no {call} today")

    async def refresh(self) -> Changes:
        raise RuntimeError("no news today")

    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        raise RuntimeError("no close today")
