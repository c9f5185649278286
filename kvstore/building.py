"""Opening what a store needs without holding up its loop."""

from __future__ import annotations

import asyncio
import threading

from kvstore.assembly import Assembly, assemble, rows_for
from kvstore.config import Config
from kvstore.tiers.pinned import PinnedRegion

__all__ = ["build"]


async def build(config: Config) -> Assembly:
    """Host memory and the open tiers of a store.

    When it is cancelled nothing stays open.

    Raises:
        KVStoreError: if a path or a value cannot be used.
    """
    building = _Building(config)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, building.run)
    except asyncio.CancelledError:
        # A thread cannot be stopped: what it opens it lets go of itself.
        building.cancel()
        raise


class _Building:
    """Opens what a store needs, in a thread; the caller may be gone when it is done."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._chunk_bytes = config.given_chunk_bytes
        self._identity = config.given_identity
        self._shape = rows_for(config, self._chunk_bytes)
        self._lock = threading.Lock()
        self._cancelled = False
        self._built: Assembly | None = None

    def run(self) -> Assembly:
        """Open everything; if nobody waits for it any more, let go of it again."""
        assembly = self._build()
        with self._lock:
            self._built = assembly
            left = self._cancelled
        if left:
            _let_go(assembly)
        return assembly

    def cancel(self) -> None:
        """Nobody will take it."""
        with self._lock:
            self._cancelled = True
            built = self._built
        if built is not None:
            _let_go(built)

    def _build(self) -> Assembly:
        config = self._config
        region = PinnedRegion.private(*self._shape)
        try:
            label = str(self._identity.get("model", "kv"))
            return assemble(
                config,
                region,
                self._chunk_bytes,
                label,
                self._identity,
                events=config.keep_events,
            )
        except BaseException:
            region.close()
            raise


def _let_go(assembly: Assembly) -> None:
    for tier in assembly.tiers:
        tier.abandon()
    if assembly.recorder is not None:
        assembly.recorder.abandon()
    assembly.region.close()
