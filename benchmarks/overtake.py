"""How long a load takes while others store without end.

    python benchmarks/overtake.py FOLDER [--sizes 64KiB,2MiB] [--load 8MiB] [--rounds 6]

Four requests store 16 MiB each, again and again; meanwhile one loads, every 30 ms. Then the
same loads are made alone. Prints the speed of the stores and percentiles of the loads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from disk import Ours
from dry import read_options
from meter import filled_region, percentile, size_text, sizes

from kvstore.concurrency import new_event_loop
from kvstore.sizes import parse_size
from kvstore.tiers.disk import DiskTier

STORES, STORE_BYTES, LOADS = 4, 16 * 2**20, 12


class Slots:
    """The chunks of one region and one tier: stores use the first half, loads the second."""

    def __init__(
        self, tier: DiskTier, keys: list[bytes], chunk_bytes: int, load_bytes: int
    ) -> None:
        self._tier = tier
        self._keys = keys
        self._half = len(keys) // 2
        self._stored = STORE_BYTES // chunk_bytes
        self._loaded = load_bytes // chunk_bytes
        self._chunk_bytes = chunk_bytes
        self._stop = False

    async def beside_stores(self) -> tuple[float, list[float]]:
        """GB/s of the stores, and the seconds of each load."""
        self._stop = False
        began = time.perf_counter()
        stores = [asyncio.ensure_future(self._store(first)) for first in range(STORES)]
        await asyncio.sleep(0.05)
        seconds = await self.loads()
        self._stop = True
        moved = sum(await asyncio.gather(*stores))
        return moved / (time.perf_counter() - began) / 1e9, seconds

    async def loads(self) -> list[float]:
        """The seconds of each load."""
        seconds: list[float] = []
        for _ in range(LOADS):
            first = self._half + random.randrange(self._half - self._loaded + 1)
            slots = list(range(first, first + self._loaded))
            began = time.perf_counter()
            done = await self._tier.read([self._keys[slot] for slot in slots], slots, slots)
            seconds.append(time.perf_counter() - began)
            assert all(done.ok), done.error
            await asyncio.sleep(0.03)
        return seconds

    async def _store(self, number: int) -> int:
        moved = 0
        while not self._stop:
            first = number * self._stored % self._half
            slots = list(range(first, min(first + self._stored, self._half)))
            keys = [os.urandom(32) + b"\0\0\0\0" for _ in slots]
            done = await self._tier.write(keys, slots, slots)
            assert all(done.ok), done.error
            moved += len(slots) * self._chunk_bytes
            number += STORES
        return moved


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=sizes, default=sizes("64KiB,2MiB"))
    parser.add_argument("--load", type=parse_size, default=8 * 2**20)
    parser.add_argument("--footprint", type=parse_size, default=512 * 2**20)
    parser.add_argument("--rounds", type=int, default=6)
    options = read_options(parser, sizes=[2**18], load=2**20, footprint=2**25, rounds=1)
    if not max(options.sizes) <= options.load < options.footprint // 2:
        parser.error(
            "--load: must be a chunk of --sizes at least, and less than half of --footprint"
        )
    for chunk_bytes in options.sizes:
        region = filled_region(options.footprint // chunk_bytes, chunk_bytes)
        loop = new_event_loop()
        speeds: list[float] = []
        beside: list[float] = []
        alone: list[float] = []
        with tempfile.TemporaryDirectory(prefix="kvstore-load-", dir=options.folder) as folder:
            ours = Ours(Path(folder) / "ours", region, loop, "auto", fill=True)
            slots = Slots(ours.tier, ours.keys, chunk_bytes, options.load)
            for _ in range(options.rounds):
                speed, seconds = loop.run_until_complete(slots.beside_stores())
                speeds.append(speed)
                beside += seconds
                alone += loop.run_until_complete(slots.loads())
            ours.close()
        print(
            f"{size_text(chunk_bytes)}: stores {percentile(speeds, 0.5):.2f} GB/s; a load of "
            f"{size_text(options.load)} beside them p50 {1000 * percentile(beside, 0.5):.1f} ms, "
            f"p90 {1000 * percentile(beside, 0.9):.1f}; alone "
            f"p50 {1000 * percentile(alone, 0.5):.1f}, p90 {1000 * percentile(alone, 0.9):.1f}"
        )
        region.close()
        loop.close()


if __name__ == "__main__":
    main()
