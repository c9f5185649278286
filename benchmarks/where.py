"""Where the time of the disk tier goes: what the device does while chunks move.

    python benchmarks/where.py FOLDER [--sizes 64KiB,256KiB,2MiB,8MiB] [--rounds 5]

For each case of `disk.py`, with one request alone and 16 at once:

    GB/s            of the tier, digests on
    no digests      the speed with digests of 4 KiB of each chunk only, in turn with the whole: what
                    is above 1 is the part of the digests that does not hide behind the device
    in flight       requests that the device has, on average (its own count of their time)
    at once KiB     of one of them, on average
    nothing         share of the time in which the device had none, seen 2,000 times a second
    cores           used by this process

Figures are medians over the rounds. FOLDER lies on a block device; what the kernel
tells of it includes what others do there meanwhile.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from disk import CASES, REQUESTS, Ours, Plan, measure
from dry import read_options
from meter import Sample, filled_region, median, size_text, sizes

from kvstore.concurrency import new_event_loop
from kvstore.sizes import parse_size
from kvstore.tiers.disk import extents

SAMPLER = """
import mmap, os, struct, sys, time
device, counts = sys.argv[1], mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 16)
fd = os.open(device + "/inflight", os.O_RDONLY)
parent, seen, idle = os.getppid(), 0, 0
while os.getppid() == parent:
    seen += 1
    idle += not sum(map(int, os.pread(fd, 64, 0).split()))
    counts[:] = struct.pack("QQ", seen, idle)
    time.sleep(0.0005)
"""


class Device:
    """What the kernel counts of the block device below `folder`.

    Raises:
        SystemExit: if there is none.
    """

    def __init__(self, folder: Path) -> None:
        number = os.stat(folder).st_dev
        place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        if (place / "partition").exists():
            place = place.parent
        if not (place / "inflight").exists():
            raise SystemExit(f"{folder}: lies on no block device that tells what it does")
        self._place = place
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(16)
            self._counts = mmap.mmap(file.fileno(), 16)
            command = [sys.executable, "-c", SAMPLER, str(place), file.name]
            self._sampler = subprocess.Popen(command)
            while not self._counts[0]:
                if self._sampler.poll() is not None:
                    raise SystemExit(f"{place}: cannot be watched")

    def close(self) -> None:
        """End the process that watches it."""
        self._sampler.terminate()
        self._sampler.wait()

    @contextmanager
    def watch(self, told: dict[str, float]) -> Iterator[None]:
        """Fill in requests, their bytes, the time they took, and how often there was none."""
        before = self._now()
        yield
        after = self._now()
        names = ("requests", "bytes", "ms", "seen", "idle")
        told.update(zip(names, (b - a for a, b in zip(before, after, strict=True)), strict=True))

    def _now(self) -> tuple[float, ...]:
        its = [int(text) for text in (self._place / "stat").read_text().split()]
        seen, idle = struct.unpack("QQ", self._counts[:])
        return its[0] + its[4], 512 * (its[2] + its[6]), its[3] + its[7], seen, idle


@contextmanager
def digests_of(size: int | None) -> Iterator[None]:
    """Digests are made of that many bytes of each chunk only; None for all of them."""
    whole = extents._hashed
    if size is not None:
        part = size
        extents._hashed = lambda extents: part
    try:
        yield
    finally:
        extents._hashed = whole


def column(
    folder: Path, device: Device, chunk_bytes: int, footprint: int, seconds: float, rounds: int
) -> None:
    """Measure and print one chunk size."""
    chunks = footprint // chunk_bytes
    loop = new_event_loop()
    region = filled_region(chunks, chunk_bytes)
    plan = Plan(chunks, chunk_bytes)
    filled: dict[int | None, Ours] = {}
    for size in (None, 4096):
        with digests_of(size):
            filled[size] = Ours(folder / f"{size}", region, loop, "auto", fill=True)

    def run(case: str, requests: int, size: int | None, told: dict[str, float]) -> Sample:
        batches = plan.batches(case, requests)
        with digests_of(size):
            if case != "first write":
                with device.watch(told):
                    return measure(filled[size], batches, seconds)
            fresh = Ours(folder / "fresh", region, loop, "auto", fill=False)
            with device.watch(told):
                sample = measure(fresh, batches, math.inf)
            fresh.close()
            return sample

    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for number in range(rounds):
        for case in CASES:
            for requests in REQUESTS:
                order = (None, 4096) if number % 2 else (4096, None)
                told: dict[int | None, dict[str, float]] = {None: {}, 4096: {}}
                samples = {size: run(case, requests, size, told[size]) for size in order}
                found.setdefault((case, requests), []).append(_figures(samples, told[None]))
    for (case, requests), figures in found.items():
        speed, bare, flying, size, idle, cores = (
            median(each) for each in zip(*figures, strict=True)
        )
        print(
            f"| {size_text(chunk_bytes)} | {case} | {requests} | {speed:.2f} | {bare:.2f} "
            f"| {flying:.0f} | {size:.0f} | {100 * idle:.1f} % | {cores:.2f} |",
            flush=True,
        )
    for ours in filled.values():
        ours.close()
    region.close()
    loop.close()


def _figures(samples: dict[int | None, Sample], told: dict[str, float]) -> tuple[float, ...]:
    whole = samples[None]
    return (
        whole.gbps,
        samples[4096].gbps / whole.gbps,
        told["ms"] / 1000 / whole.wall,
        told["bytes"] / 1024 / max(1, told["requests"]),
        told["idle"] / max(1, told["seen"]),
        whole.cpu / whole.wall,
    )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=sizes, default=sizes("64KiB,256KiB,2MiB,8MiB"))
    parser.add_argument("--footprint", type=parse_size, default=512 * 2**20)
    parser.add_argument("--seconds", type=float, default=0.3, help="per case and round")
    parser.add_argument("--rounds", type=int, default=5)
    options: Any = read_options(parser, sizes=[2**16], footprint=2**23, seconds=0.02, rounds=1)
    with tempfile.TemporaryDirectory(prefix="kvstore-where-", dir=options.folder) as name:
        device = Device(Path(name))
        print(
            "| chunk | case | requests | GB/s | no digests | in flight | at once KiB | nothing |"
            " cores |"
        )
        print("|---" * 9 + "|")
        try:
            for size in options.sizes:
                column(Path(name), device, size, options.footprint, options.seconds, options.rounds)
        finally:
            device.close()


if __name__ == "__main__":
    main()
