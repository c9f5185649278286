"""Rates of copies between a KV cache on a CUDA device and rows of host memory.

    python benchmarks/gpu_copy.py [--json FILE] [--megabytes 512] [--pages 4096 ...] [--dry]

For pages of 4 KiB to 2 MiB, in random blocks: to the device, from it and both at once, as shares of
one large copy of pinned memory in the same run. Then the same beside matrix products: how much
longer these take, and the rate of the copies.

Without a CUDA device it says so and measures nothing. `--dry` runs all of it in host memory that
stands for a device: its rates mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.device import CudaCopies, Ticket, pages_of
from kvstore.tiers.pinned import PinnedRegion

KIB, MIB = 2**10, 2**20
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
ROW_BYTES = 4 * MIB
REPEAT = 5
PRODUCTS = 40


class Machine:
    """A CUDA device, or what stands for one.

    Attributes:
        options: of `CudaCopies`, that it takes one for the other.
    """

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.name = "no device" if dry else torch.cuda.get_device_name()
        self.matrix = torch.randn(
            *(64, 64) if dry else (8192, 8192), device=self.device, dtype=torch.bfloat16
        )
        self.options: dict[str, Any] = {}
        if dry:
            # Not a part of what is installed.
            sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
            from tests.gpu.pretend import PretendCuda, PretendDriver

            cuda = PretendCuda()
            self.options = {"cuda": cuda, "calls": PretendDriver(cuda)}

    def pin(self, region: PinnedRegion) -> None:
        if not self.dry:
            region.register_with_cuda()

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def products(self) -> Callable[[], float]:
        """Begin to multiply matrices; returns what waits for the end, and gives seconds."""
        if self.dry:
            started = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(self.matrix, self.matrix)
            seconds = time.perf_counter() - started
            return lambda: seconds
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Copies wait for what the current stream was given before; these are beside them.
        with torch.cuda.stream(torch.cuda.Stream()):
            begun.record()
            for _ in range(PRODUCTS):
                torch.mm(self.matrix, self.matrix)
            ended.record()

        def end() -> float:
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1000

        return end


class Bed:
    """Layers with pages of one size, and jobs that copy rows of them."""

    def __init__(self, machine: Machine, region: PinnedRegion, page: int) -> None:
        """
        Args:
            region: rows for two jobs.
        """
        layers = min(32, ROW_BYTES // page)
        self._per_chunk = ROW_BYTES // page // layers
        self._rows = region.rows // 2
        self._blocks = 2 * self._rows * self._per_chunk
        tensors = [
            torch.zeros(self._blocks, page, dtype=torch.uint8, device=machine.device)
            for _ in range(layers)
        ]
        tables = [pages_of(tensor)[0] for tensor in tensors]
        self.copies = CudaCopies([tables], region.array, self._per_chunk, **machine.options)
        self._machine = machine
        self._dice = np.random.default_rng(0)

    def job(self, direction: str) -> Callable[[], Ticket]:
        """What begins to copy random blocks and rows."""
        count = self._rows * self._per_chunk
        blocks = DeviceLoadStoreSpec(self._dice.permutation(self._blocks)[:count].tolist())
        rows = HostLoadStoreSpec(self._dice.permutation(2 * self._rows)[: self._rows].tolist())
        if direction == "store":
            return lambda: self.copies.store(blocks, rows)
        return lambda: self.copies.load(rows, blocks)

    def rate(self, directions: str) -> float:
        """GB/s from the call to the end, of all directions together: median of some rounds."""
        rates = []
        for _ in range(REPEAT + 1):
            jobs = [self.job(direction) for direction in directions.split("+")]
            started = time.perf_counter()
            tickets = [begin() for begin in jobs]
            for ticket in tickets:
                ticket.wait()
            seconds = time.perf_counter() - started
            rates.append(sum(ticket.size for ticket in tickets) / seconds / 1e9)
        return statistics.median(rates[1:])

    def beside_products(self, direction: str, alone: float) -> tuple[float, float]:
        """How many times as long as `alone` seconds matrix products take beside copies, and the
        GB/s of the copies that ran meanwhile."""
        first, *others = (self.job(direction) for _ in range(6))
        tickets = [first()]
        end = self._machine.products()
        tickets += [begin() for begin in others]
        seconds = end()
        ended = [ticket for ticket in tickets if ticket.done] or tickets[:1]
        for ticket in tickets:
            ticket.wait()
        rates = [ticket.size / max(ticket.seconds, 1e-9) / 1e9 for ticket in ended]
        return seconds / alone, statistics.median(rates)


def one_copy(machine: Machine, size: int) -> dict[str, float]:
    """GB/s of one copy of pinned memory, in each direction."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not machine.dry)
    device = torch.empty(size, dtype=torch.uint8, device=machine.device)
    rates = {}
    for name, target, source in (("load", device, host), ("store", host, device)):
        seconds = []
        for _ in range(REPEAT + 1):
            machine.wait()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            machine.wait()
            seconds.append(time.perf_counter() - started)
        rates[name] = size / statistics.median(seconds[1:]) / 1e9
    return rates


def measure(machine: Machine, region: PinnedRegion, pages: list[int], end: float) -> dict[str, Any]:
    """Print a line for each page; measure no more when it is `end` o'clock."""
    limit = one_copy(machine, region.size // 2)
    result: dict[str, Any] = {"device": machine.name, "one_copy": limit}
    print(f"{machine.name}: one copy {limit['load']:.1f} GB/s to it, {limit['store']:.1f} from it")
    machine.products()()
    alone = statistics.median(machine.products()() for _ in range(3))
    print("| page | to the device | from it | both at once | product beside loads, stores |")
    print("|---|---|---|---|---|")
    for page in pages:
        line = f"| {page // KIB} KiB |"
        if time.perf_counter() > end:
            print(f"{line} not measured: time is up |")
            continue
        bed = Bed(machine, region, page)
        rates = {name: bed.rate(name) for name in ("load", "store", "load+store")}
        beside = {name: bed.beside_products(name, alone) for name in limit}
        bed.copies.shutdown()
        result[f"{page // KIB} KiB"] = {**rates, "beside": beside}
        cells = [f"{rates[name]:.1f} ({rates[name] / limit[name]:.2f})" for name in limit]
        cells += [f"{rates['load+store']:.1f}"]
        cells += [", ".join(f"x{slow:.2f} at {rate:.1f}" for slow, rate in beside.values())]
        print(f"{line} {' | '.join(cells)} |", flush=True)
    return result


def main(options: list[str] | None = None) -> int:
    """Print the rates; 0 also where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512, help="of each transfer")
    parser.add_argument("--seconds", type=float, default=270, help="no line begins later")
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES, help="in bytes")
    parser.add_argument("--dry", action="store_true", help="in host memory: no rate means much")
    arguments = parser.parse_args(options)
    end = time.perf_counter() + arguments.seconds
    if not arguments.dry and not torch.cuda.is_available():
        print("there is no CUDA device: no rate was measured")
        return 0
    machine = Machine(dry=arguments.dry)
    if arguments.dry:
        arguments.pages = arguments.pages[:2]
        arguments.megabytes = min(arguments.megabytes, 2 * ROW_BYTES // MIB)
    total = arguments.megabytes * MIB
    if total < ROW_BYTES:
        parser.error(f"--megabytes: must be {ROW_BYTES // MIB} at least")
    region = PinnedRegion.private(2 * total // ROW_BYTES, ROW_BYTES)
    machine.pin(region)
    result = measure(machine, region, arguments.pages, end)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    region.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
