"""What a large lane costs to open and to know, and what writing costs beyond the payload.

    python benchmarks/opening.py FOLDER [--chunks 1000000] [--chunk 4KiB]

Makes a lane of valid records in sparse segment files (the payloads are holes, which nobody
reads at opening; 1,000,000 records are 128 MB on disk) and opens it in a process of its own,
through `kvstore.assembly`, as every face does: once with the index on disk only, once with
the index in the page cache. Then it writes through a `DiskTier` and compares what the
kernel counts as written by this process with the payload. Everything is removed at the end.

Prints one JSON row per case, with its budget:

    opening               chunks per second until the core knows all of them (`tier_s` of
                          `seconds` in the disk tier, the rest in the core's directory)
    index memory          resident bytes per chunk after opening, with what the allocator keeps
                          for later given back (`untrimmed_bytes`: without; `peak_bytes`: at
                          the worst moment of opening)
    write amplification   bytes written per byte of payload, slots overwritten again and
                          again. After every pass over all slots the files are synced, which is
                          much more often than a kernel does it on its own; what the file
                          system writes about its own structures is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dry import read_options
from meter import filled_region

from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.sizes import parse_size
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry, Header, encode_header, encode_records, segment_seed
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import RecoveredTier

LABEL = "bench"
IDENTITY = {"model": "bench"}
SEGMENT_BYTES = 256 * 2**20
BUDGETS = {"opening": 500_000, "index memory": 300, "write amplification": 1.02}


# -- opening -------------------------------------------------------------------------


def make_lane(folder: Path, chunks: int, chunk_bytes: int) -> int:
    """Write a lane of `chunks` records; returns the capacity that it needs."""
    whole = {**IDENTITY, "chunk_bytes": chunk_bytes, "slot_bytes": chunk_bytes}
    namespace = Namespace.of(LABEL, whole)
    lane = namespace.establish(folder) / "lane-0"
    lane.mkdir(mode=0o700)
    geometry = Geometry.fitting(SEGMENT_BYTES, chunk_bytes, chunk_bytes)
    count = -(-chunks // geometry.slots)
    # Segments were not filled in the order of their numbers.
    turns = random.Random(0).sample(range(count), count)
    for number, turn in enumerate(turns):
        its_chunks = min(geometry.slots, chunks - number * geometry.slots)
        keys = [os.urandom(32) + b"\0\0\0\0" for _ in range(its_chunks)]
        header = Header(namespace.digest, secrets.token_hex(16), geometry)
        records = encode_records(
            keys,
            0,
            turn * geometry.slots,
            chunk_bytes,
            [bytes(16)] * its_chunks,
            segment_seed(header.segment_id),
        )
        path = lane / f"segment-{number}.safetensors"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, geometry.file_bytes)
        os.pwrite(fd, encode_header(header), 0)
        os.pwrite(fd, records, geometry.index_offset)
        os.fdatasync(fd)
        os.close(fd)
    return count * geometry.file_bytes


def forget_pages(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def child(folder: Path, capacity: int, chunk_bytes: int) -> None:
    """Open the lane and print what it cost."""
    config = Config.from_mapping(
        {
            "cpu_bytes_to_use": 16 * chunk_bytes,
            "tiers": [
                {
                    "type": "disk",
                    "path": str(folder),
                    "capacity_bytes": capacity,
                    "segment_bytes": SEGMENT_BYTES,
                }
            ],
        }
    )
    region = PinnedRegion.private(16, chunk_bytes)
    took: list[float] = []
    whole_open = DiskTier.open

    def timed_open(tier: DiskTier, its_region: PinnedRegion) -> RecoveredTier:
        began = time.perf_counter()
        try:
            return whole_open(tier, its_region)
        finally:
            took.append(time.perf_counter() - began)

    DiskTier.open = timed_open  # type: ignore[method-assign, assignment]
    gc.collect()
    before = _resident("VmRSS")
    began = time.perf_counter()
    assembly = assemble(config, region, chunk_bytes, LABEL, IDENTITY, events=False)
    seconds = time.perf_counter() - began
    gc.collect()
    untrimmed = _resident("VmRSS")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    after = _resident("VmRSS")
    print(
        json.dumps(
            {
                "chunks": len(assembly.core.tiers[0].entries),
                "seconds": seconds,
                "tier_s": took[0],
                "bytes": after - before,
                "untrimmed": untrimmed - before,
                "peak": _resident("VmHWM") - before,
                "files": len(os.listdir("/proc/self/fd")),
            }
        )
    )


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def opening(folder: Path, chunks: int, chunk_bytes: int) -> list[dict[str, Any]]:
    """Rows about opening a lane and holding its index."""
    capacity = make_lane(folder, chunks, chunk_bytes)
    rows = []
    for state in ("on disk", "in page cache"):
        if state == "on disk":
            forget_pages(folder)
        arguments = [str(folder), str(capacity), str(chunk_bytes)]
        told = json.loads(
            subprocess.run(
                [sys.executable, __file__, "--child", *arguments],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        )
        if told["chunks"] != chunks:
            raise RuntimeError(f"{told['chunks']} of {chunks} chunks were found")
        rows.append(
            _row(
                "opening",
                told["chunks"] / told["seconds"],
                index=state,
                chunks=chunks,
                seconds=round(told["seconds"], 3),
                tier_s=round(told["tier_s"], 3),
                open_files=told["files"],
            )
        )
    rows.append(
        _row(
            "index memory",
            told["bytes"] / chunks,
            chunks=chunks,
            untrimmed_bytes=round(told["untrimmed"] / chunks, 1),
            peak_bytes=round(told["peak"] / chunks, 1),
        )
    )
    return rows


# -- write amplification -------------------------------------------------------------


async def overwrite(folder: Path, chunk_bytes: int, run: int, passes: int) -> dict[str, Any]:
    """A row about writing chains of `run` chunks to random places, all slots in each pass."""
    chunks = 128 * 2**20 // chunk_bytes
    region = filled_region(chunks, chunk_bytes)
    geometry = Geometry(chunks, chunk_bytes, chunk_bytes)
    tier = DiskTier(
        folder,
        Namespace.of(LABEL, {"run": run}),
        chunk_bytes,
        geometry.file_bytes,
        segment_bytes=geometry.file_bytes,
    )
    tier.open(region)
    places = list(range(0, chunks, run))
    written = -1
    for _ in range(passes + 1):
        random.shuffle(places)
        for place in places:
            slots = list(range(place, min(place + run, chunks)))
            keys = [os.urandom(32) + b"\0\0\0\0" for _ in slots]
            done = await tier.write(keys, slots, slots)
            assert all(done.ok), done.error
        _sync(folder)
        if written < 0:
            # The first pass fills fresh space; it is not the steady state.
            written = _written()
    written = _written() - written
    await tier.close([])
    region.close()
    return _row(
        "write amplification",
        written / (passes * chunks * chunk_bytes),
        digits=4,
        chunk_bytes=chunk_bytes,
        chunks_per_job=run,
        passes=passes,
    )


def _sync(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDWR)
        os.fdatasync(fd)
        os.close(fd)


def _written() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise ValueError("write_bytes")


def _row(case: str, value: float, digits: int = 1, **more: Any) -> dict[str, Any]:
    budget = BUDGETS[case]
    kept = value >= budget if case == "opening" else value <= budget
    unit = {"opening": "chunks_per_s", "index memory": "bytes_per_chunk"}.get(case, "ratio")
    rounded = round(value) if case == "opening" else round(value, digits)
    return {"case": case, unit: rounded, "budget": budget, "kept": kept, **more}


def main() -> int:
    parser = argparse.ArgumentParser(description="Opening, index memory, write amplification.")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=parse_size, default=4096, help="size of a chunk: 4KiB")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = read_options(parser, chunks=1000)
    if options.child:
        child(Path(options.child[0]), int(options.child[1]), int(options.child[2]))
        return 0
    if options.folder is None:
        parser.error("the following arguments are required: folder")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as name:
        folder = Path(name) / "lane"
        for row in opening(folder, options.chunks, options.chunk):
            rows.append(row)
            print(json.dumps(row), flush=True)
        shutil.rmtree(folder)
        for chunk_bytes, run in ((65536, 64), (65536, 1), (2 * 2**20, 16), (2 * 2**20, 1)):
            folder = Path(name) / f"writes-{chunk_bytes}-{run}"
            row = asyncio.run(overwrite(folder, chunk_bytes, run, passes=4))
            rows.append(row)
            print(json.dumps(row), flush=True)
            shutil.rmtree(folder)
    missed = sum(not row["kept"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} budgets kept")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
