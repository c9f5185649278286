"""Rates of copies between a KV cache on a CUDA device and rows of host memory.

    python benchmarks/gpu_copy.py [--json FILE] [--megabytes 512]

For pages of 4 KiB to 2 MiB, in random blocks, in each way that the driver has: to the device, from
it and both at once, as shares of one large copy of pinned memory in the same run; and how much a
matrix product slows down beside them. Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.device import WAYS, CudaCopies, pages_of
from kvstore.errors import ConfigError
from tiers.pinned import PinnedRegion

KIB, MIB = 2**10, 2**20
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
ROW_BYTES = 4 * MIB
REPEAT = 5


class Bed:
    """Layers with pages of one size, and jobs that copy rows of them."""

    def __init__(
        self, region: PinnedRegion, page: int, total: int, way: str, **pretend: Any
    ) -> None:
        layers = min(32, ROW_BYTES // page)
        self._per_chunk = ROW_BYTES // page // layers
        self._rows = total // ROW_BYTES
        self._blocks = 2 * self._rows * self._per_chunk
        device = "cpu" if pretend else "cuda"
        tensors = [
            torch.zeros(self._blocks, page, dtype=torch.uint8, device=device) for _ in range(layers)
        ]
        tables = [pages_of(tensor)[0] for tensor in tensors]
        self.copies = CudaCopies([tables], region.array, self._per_chunk, way=way, **pretend)
        self._dice = np.random.default_rng(0)

    def job(self) -> tuple[DeviceLoadStoreSpec, HostLoadStoreSpec]:
        """Random blocks and rows."""
        count = self._rows * self._per_chunk
        blocks = self._dice.permutation(self._blocks)[:count]
        rows = self._dice.permutation(2 * self._rows)[: self._rows]
        return DeviceLoadStoreSpec(blocks.tolist()), HostLoadStoreSpec(rows.tolist())

    def rate(self, directions: str) -> float:
        """GB/s from the call to the end, of all directions together: median of some rounds."""
        rates = []
        for _ in range(REPEAT + 1):
            jobs = [(direction, *self.job()) for direction in directions.split("+")]
            started = time.perf_counter()
            tickets = [
                self.copies.store(blocks, rows)
                if direction == "store"
                else self.copies.load(rows, blocks)
                for direction, blocks, rows in jobs
            ]
            for ticket in tickets:
                ticket.wait()
            seconds = time.perf_counter() - started
            rates.append(sum(ticket.size for ticket in tickets) / seconds / 1e9)
        return statistics.median(rates[1:])


def one_copy(size: int) -> dict[str, float]:
    """GB/s of one copy of pinned memory, in each direction."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, target, source in (("load", device, host), ("store", host, device)):
        seconds = []
        for _ in range(REPEAT + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rates[name] = size / statistics.median(seconds[1:]) / 1e9
    return rates


def slowdown(bed: Bed, direction: str) -> float:
    """How many times as long a chain of matrix products takes while copies run."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def products() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(40):
            torch.mm(matrix, matrix)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    products()
    alone = products()
    tickets = []
    for _ in range(4):
        blocks, rows = bed.job()
        store = direction == "store"
        tickets.append(bed.copies.store(blocks, rows) if store else bed.copies.load(rows, blocks))
    beside = products()
    for ticket in tickets:
        ticket.wait()
    return beside / alone


def main() -> int:
    """Print the rates; 0 also where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512, help="of each transfer")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: no rate was measured")
        return 0
    total = arguments.megabytes * MIB
    region = PinnedRegion.private(2 * total // ROW_BYTES, ROW_BYTES)
    region.register_with_cuda()
    limit = one_copy(total)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "one_copy": limit}
    print(
        f"{result['device']}: one copy {limit['load']:.1f} GB/s to it, {limit['store']:.1f} from it"
    )
    print("| page | way | to the device | from it | both at once | product beside |")
    print("|---|---|---|---|---|---|")
    for page in PAGES:
        for way in WAYS:
            try:
                bed = Bed(region, page, total, way)
            except ConfigError as error:
                print(f"| {page // KIB} KiB | {way} | {error} |")
                continue
            rates = {name: bed.rate(name) for name in ("load", "store", "load+store")}
            slow = slowdown(bed, "load")
            result[f"{page // KIB} KiB {way}"] = {**rates, "slowdown": slow}
            cells = [f"{rates[name]:.1f} ({rates[name] / limit[name]:.2f})" for name in limit]
            cells += [f"{rates['load+store']:.1f}", f"x{slow:.2f}"]
            print(f"| {page // KIB} KiB | {way} | {' | '.join(cells)} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    region.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
