"""A lane of another process that appears and goes beside the steps of `step.py`.

    python benchmarks/step.py --neighbour 1000000 [--against REV]

The lane is real: valid records in sparse files, as `opening.py` makes them, moved into the folder
of a cache and out of it. A real engine thread follows it; the disk that the steps use is imagined
as ever. Steps come every 20 ms of wall clock. The loop of the engine is watched by a task that
wakes every 2 ms: how late it wakes is what a load or a caller of that loop would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opening import IDENTITY, LABEL, make_lane

from kvstore.engine.engine import EngineThread
from kvstore.tiers.disk import DiskTier, PeerLanes
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import Completion, Move, Op, RecoveredTier

CHUNK = 4096
OWN_BYTES = 2**20
STEP_SECONDS = 0.02
QUIET_STEPS = 1000
"""Steps of a phase after all is known: both halves of the load, several times."""
WAKE_SECONDS = 0.002
LONGEST = 300.0
ROUND_SECONDS = 3.0
"""Enough to look at all lanes once more."""


class Loop:
    """Watches how late the engine's loop is."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        while not self._stopped.is_set():
            began = time.perf_counter()
            await asyncio.sleep(WAKE_SECONDS)
            self.late.append(max(0.0, time.perf_counter() - began - WAKE_SECONDS))

    def stop(self) -> None:
        self._stopped.set()

    def take(self) -> list[float]:
        late, self.late = self.late, []
        return late


class Neighbour:
    """A lane of `chunks` that can appear and go, and who follows it."""

    def __init__(self, folder: Path, chunks: int) -> None:
        self.chunks = chunks
        make_lane(folder / "cache", chunks, CHUNK)
        (lane,) = folder.glob("cache/*/lane-0")
        self._there, self._aside = lane, folder / "aside"
        self.go()
        namespace = Namespace.of(LABEL, {**IDENTITY, "chunk_bytes": CHUNK, "slot_bytes": CHUNK})
        self.own = DiskTier(
            folder / "cache", namespace, CHUNK, OWN_BYTES, segment_bytes=OWN_BYTES, lane=1
        )
        region = PinnedRegion.private(16, CHUNK)
        self.own.open(region)
        self.peers = PeerLanes(self.own)
        self.recovered: RecoveredTier = self.peers.open(region)
        self.loop = Loop()
        self._engine = EngineThread([self.own, self.peers], [self.loop])

    def appear(self) -> None:
        self._aside.rename(self._there)

    def go(self) -> None:
        self._there.rename(self._aside)

    def take(self) -> list[Completion]:
        return self._engine.take()

    def reset(self) -> float:
        """Processor seconds until the lane has been looked at anew in a new epoch."""
        self.loop.stop()
        time.sleep(10 * WAKE_SECONDS)
        spent, ends = time.process_time(), time.monotonic() + ROUND_SECONDS
        self._engine.submit([Move(0, Op.CLEAR, 0)])
        while time.monotonic() < ends:
            for one in self.take():
                if one.changes is not None:
                    one.changes.end()
                elif one.move_id == 0:
                    self._engine.submit([Move(1, Op.CLEAR, 1)])
            self._engine.wait(STEP_SECONDS)
        return time.process_time() - spent

    def end(self) -> None:
        self._engine.close([[], []])


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def resident() -> int:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def phases(
    neighbour: Neighbour, step: Callable[[], float], known: Callable[[], int]
) -> Iterator[dict[str, Any]]:
    """One row for each: nothing happens, the lane appears, it goes, it comes and is reset.

    Args:
        step: makes one step and returns its seconds.
        known: chunks of the neighbour of which the core knows.
    """
    before = resident()
    acts: list[tuple[str, Callable[[], object], int]] = [
        ("quiet", lambda: None, 0),
        ("appears", neighbour.appear, neighbour.chunks),
        ("goes", neighbour.go, 0),
    ]
    for phase, act, wanted in acts:
        act()
        steps: list[float] = []
        neighbour.loop.take()
        spent, began, done_after = time.process_time(), time.perf_counter(), 0.0
        more = QUIET_STEPS
        while more:
            due = time.perf_counter() + STEP_SECONDS
            steps.append(step())
            if known() == wanted:
                done_after = done_after or time.perf_counter() - began
                more -= 1
            elif time.perf_counter() - began > LONGEST:
                raise RuntimeError(f"{known()} of {wanted} chunks are known")
            time.sleep(max(0.0, due - time.perf_counter()))
        late = neighbour.loop.take()
        row = {
            "phase": phase,
            "steps": len(steps),
            "p50_ms": round(quantile(steps, 0.5) * 1e3, 2),
            "p99_ms": round(quantile(steps, 0.99) * 1e3, 2),
            "max_ms": round(max(steps) * 1e3, 2),
            "loop_late_ms": [round(quantile(late, 0.99) * 1e3, 2), round(max(late) * 1e3, 2)],
            "known_after_s": round(done_after, 2),
            "cpu_s": round(time.process_time() - spent, 2),
        }
        if phase == "appears":
            row["bytes_per_chunk"] = round((resident() - before) / neighbour.chunks)
        yield row
    neighbour.appear()
    yield {"phase": "reset", "cpu_s": round(neighbour.reset(), 2)}
