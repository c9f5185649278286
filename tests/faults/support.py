"""A small store over one disk tier, and a caller that checks all it is promised."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kvstore
from kvstore.api.store import Store
from kvstore.core import CoreStats
from kvstore.core.statistics import TierStats
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.disk.volume import Volume
from tests.patience import PATIENCE

CHUNK = 64 * 1024
SLOTS = 16
GEOMETRY = Geometry(SLOTS, CHUNK, CHUNK)
SEGMENT = GEOMETRY.file_bytes
SEGMENTS = 4
CAPACITY = SEGMENTS * SEGMENT
HOST = 24

DEADLINE = 0.4
CEILING = 2.0
DRAIN = 1.5

IDENTITY = {"model": "faults"}
NAMESPACE = Namespace.of("faults", {**IDENTITY, "chunk_bytes": CHUNK, "slot_bytes": CHUNK})


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [b"chunk-%06d" % number + b"\0\0\0\0" for number in numbers]


def payload_of(key: bytes) -> bytes:
    """What is stored under `key`: every 64 bytes of it tell the key and their place."""
    head = random.Random(key).randbytes(56)
    return b"".join(head + place.to_bytes(8, "little") for place in range(CHUNK // 64))


def config_of(path: Path, **changes: Any) -> dict[str, Any]:
    """A configuration over `path`; `changes` go to the tier where it has such a key."""
    tier: dict[str, Any] = {
        "type": "disk",
        "path": str(path),
        "capacity_bytes": CAPACITY,
        "segment_bytes": SEGMENT,
    }
    whole: dict[str, Any] = {
        "cpu_bytes_to_use": HOST * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": IDENTITY,
        "deadline_s": DEADLINE,
        "max_wait_s": CEILING,
        "shutdown_timeout_s": DRAIN,
        "keep_events": True,
        "recompute_s": 0,
    }
    for key, value in changes.items():
        (whole if key in whole else tier)[key] = value
    return {**whole, "tiers": [tier]}


def lane_of(path: Path, number: int = 0) -> Path:
    return path / NAMESPACE.name / f"lane-{number}"


def segment_of(path: Path, number: int = 0) -> Path:
    return lane_of(path) / f"segment-{number}.safetensors"


def slot_offset(slot: int) -> int:
    return GEOMETRY.blocks_offset + slot * CHUNK


def lane_bytes(lane: Path) -> int:
    """The larger of what the files of a lane claim and what they occupy.

    Probes of a page, which whoever opens the lane makes for an instant, do not count, nor
    does the page in which a file system keeps the map of a scattered file.
    """
    found = [
        file.lstat()
        for file in lane.iterdir()
        if file.name != "lock" and not file.name.startswith(".probe-")
    ]
    return max(
        sum(stat.st_size for stat in found), sum(512 * stat.st_blocks - 4096 for stat in found)
    )


class Caller:
    """Uses a store as a server does, and fails the test when a promise is broken.

    No call may raise or take longer than PATIENCE, many times what any deadline allows;
    every byte that is served is compared.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.store = store
        self.path = path
        self.capacity = CAPACITY
        self.on_disk: set[bytes] = set()
        """What the store says is on disk."""

    async def put(self, numbers: Iterable[int]) -> int:
        """Store chunks; returns how many the store took."""
        keys = keys_of(numbers)
        payloads = [payload_of(key) for key in keys]
        async with asyncio.timeout(PATIENCE):
            count = await self.store.put(keys, payloads)
        self.within_budget()
        return count

    async def save(self, numbers: Iterable[int]) -> set[int]:
        """Store chunks and wait for their copies; returns which of them are on disk then."""
        numbers = list(numbers)
        await self.put(numbers)
        async with asyncio.timeout(PATIENCE):
            assert await self.store.flush(PATIENCE - 1), "copies to the disk never end"
        self.look()
        return {n for n, key in zip(numbers, keys_of(numbers), strict=True) if key in self.on_disk}

    async def get(self, numbers: Iterable[int]) -> int:
        """How long a prefix is served; all of it must be right."""
        keys = keys_of(numbers)
        async with asyncio.timeout(PATIENCE), self.store.get(keys) as chunks:
            for key, chunk in zip(chunks.keys, chunks, strict=True):
                assert chunk == payload_of(key), f"wrong bytes were served for {key!r}"
            return len(chunks)

    async def each(self, numbers: Iterable[int], *, times: int = 1) -> set[int]:
        """Ask for chunks one by one; which of them are served.

        Args:
            times: how often each may be asked for. On a busy machine an answer may take longer
                than anybody waits here, and that loses no chunk.
        """
        left, served = list(numbers), set[int]()
        for _ in range(times):
            served |= {number for number in left if await self.get([number])}
            left = [number for number in left if number not in served]
        return served

    def forget_host(self) -> None:
        """Let all chunks leave host memory, so that only the disk can serve them.

        A server gets there by storing others; here the disk is to be left as it is.
        """
        pool = self.store._core._pool
        pool.begin_step()
        self.store._core._room.make(pool.rows, 0.0, shed_unsaved=False)

    def look(self) -> None:
        """Take in what the store says has come to the disk and left it."""
        for event in self.store.take_events():
            if event.medium == "disk":
                if event.removed:
                    self.on_disk -= set(event.keys)
                else:
                    self.on_disk |= set(event.keys)

    @property
    def stats(self) -> CoreStats:
        return self.store.stats()

    @property
    def disk(self) -> TierStats:
        return self.store.stats().tiers[0]

    def asked(self) -> TierStats:
        """The disk's counters, after a question that makes the store look at its tiers."""
        self.store.lookup_prefix(keys_of([10**6 - 1]))
        return self.disk

    def within_budget(self) -> None:
        """The files of the lane are within the capacity, and the rows within theirs."""
        with contextlib.suppress(OSError):
            # A lane that is gone, or a disk that does not answer, is over nothing.
            size = lane_bytes(lane_of(self.path, self.lane))
            assert size <= self.capacity, "the lane is larger than its capacity"

    @property
    def _volume(self) -> Volume:
        tier = self.store._assembly.tiers[0]
        assert isinstance(tier, DiskTier)
        return tier.volumes[0]

    @property
    def lane(self) -> int:
        return self._volume.lane.number

    @property
    def segments(self) -> list[int]:
        """The numbers of the segments that the store itself has."""
        return list(self._volume.segments)


@asynccontextmanager
async def calling(
    path: Path, *, seen_at: Path | None = None, **changes: Any
) -> AsyncIterator[Caller]:
    """A store in `path` and its caller. Opening and closing are watched as all calls are.

    Args:
        seen_at: another way to the same files, that can be walked while `path` hangs.
    """
    opened = kvstore.open(config_of(path, **changes))
    async with asyncio.timeout(PATIENCE):
        store = await opened.__aenter__()
    caller = Caller(store, seen_at or path)
    caller.look()
    caller.on_disk = set(store._core.tiers[0].entries)
    try:
        yield caller
    finally:
        async with asyncio.timeout(PATIENCE):
            await opened.__aexit__(None, None, None)


@asynccontextmanager
async def running_loop(limit: float = 1.0) -> AsyncIterator[None]:
    """Fails if the loop stood still for longer than `limit` seconds."""
    worst = 0.0
    ended = False

    async def tick() -> None:
        nonlocal worst
        while not ended:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - before)

    ticking = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        ended = True
        await ticking
    assert worst < limit, f"the loop stood still for {worst:.2f} s"


def warned(records: Sequence[logging.LogRecord], *words: str) -> bool:
    """Whether one warning of kvstore has all these words in it."""
    told = [r.getMessage() for r in records if r.name.startswith("kvstore")]
    return any(all(word in line for word in words) for line in told)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
