"""Does everything that can be done with a cache, in a process with little memory.

    python -m tests.tiers.fuzz_worker

Reads one path a line and answers one line of JSON each: null, or what went wrong.
Refusing by a `KVStoreError` is right; every other exception is wrong, and so is
a byte that was never stored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.maintenance.offline import compact, purge
from kvstore.maintenance.survey import survey, verify
from kvstore.testing.bench import key_of, payload_of
from kvstore.tiers.disk import PeerLanes
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import MAX_KEY_BYTES
from tests.tiers.support import (
    CHUNK,
    ROWS,
    SEGMENT,
    SLOT,
    SLOTS,
    bench_of,
    disk_tier,
    lane_of,
)

HEADROOM = 192 * 2**20
"""Bytes that may be taken above what the process has when it starts."""

SEGMENTS = 3


async def serve(path: Path) -> None:
    """Open the lane as a server does, compare all it serves, store, and close it."""
    before = size_of(path)
    bench = bench_of(path, lane=0, segments=SEGMENTS)
    try:
        entries = list(bench.opening.entries)
        assert len({slot for _, slot in entries}) == len(entries), "two keys in one slot"
        for start in range(0, len(entries), ROWS):
            part = entries[start : start + ROWS]
            assert all(1 <= len(key) <= MAX_KEY_BYTES for key, _ in part)
            # Fails when something is called good that does not hold what its key says.
            await bench.fetch([key for key, _ in part], [slot for _, slot in part])
        await bench.tier.grow()
        keys = [key_of(500 + n) for n in range(3)]
        if bench.opening.segments:
            first = bench.slots[0]
            slots = [first, first + 1, first + SLOTS - 1]
            if bench.opening.segment_slots == SLOTS and all((await bench.store(keys, slots)).ok):
                assert all(await bench.fetch(keys, slots)), "what was just stored is not served"
        await bench.close(entries)
        # What others put there counts, and may be too much by itself.
        assert size_of(path) <= max(SEGMENTS * SEGMENT, before), "over the capacity"
    finally:
        bench.abandon()


def size_of(path: Path) -> int:
    """Bytes of the disk that lane 0 takes, without the lock and what is called like a probe."""
    lane = lane_of(path)
    files = [file for file in lane.iterdir() if file.is_file()] if lane.is_dir() else []
    skipped = ("lock", ".probe-")
    found = [f.lstat() for f in files if not f.name.startswith(skipped)]
    return sum(min(stat.st_size, 512 * stat.st_blocks) for stat in found)


async def follow(path: Path) -> None:
    """Read lane 0 as a neighbour does who owns another one."""
    tier = disk_tier(path, lane=1, segments=1)
    region = PinnedRegion.private(ROWS, SLOT)
    tier.open(region)
    try:
        others = PeerLanes(tier)
        entries = list(others.open(region).entries)
        for start in range(0, len(entries), ROWS):
            part = entries[start : start + ROWS]
            rows = list(range(len(part)))
            done = await others.read([key for key, _ in part], [slot for _, slot in part], rows)
            for (key, _), row, ok in zip(part, rows, done.ok, strict=True):
                right = bytes(region.row(row)[:CHUNK]) == payload_of(key, CHUNK)
                assert not ok or right, f"wrong bytes for {key.hex()}"
        await others.refresh()
    finally:
        tier.abandon()
        region.close()


STEPS: dict[str, Callable[[Path], Any]] = {
    "survey": survey,
    "verify": lambda path: list(verify(path)),
    "compact, dry": lambda path: compact(path, dry_run=True),
    "follow": lambda path: asyncio.run(follow(path)),
    "serve": lambda path: asyncio.run(serve(path)),
    "compact": compact,
    "serve what was compacted": lambda path: asyncio.run(serve(path)),
    "purge": purge,
    "serve what was purged": lambda path: asyncio.run(serve(path)),
}


def judge(path: Path) -> str | None:
    """Take every step; what went wrong, or None."""
    for name, step in STEPS.items():
        try:
            step(path)
        except KVStoreError as error:
            if not str(error).strip():
                return f"{name}: refused without a word"
        except BaseException:
            return f"{name}: {traceback.format_exc()}"
    return None


def main() -> None:
    logging.disable(logging.CRITICAL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        print(json.dumps(judge(Path(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
