"""The tier's calls and nothing else: what the disk gives to chunks in memory of this size.

    python benchmarks/plain.py FOLDER [--footprint 512MiB] [--rounds 8]

The same extents between the same rows and one file, by plain blocking calls of a few
threads: no digests, records, keys or event loop. fio moves a few buffers that nobody
looks at again and again; here every row of the region takes its turn, as it does in a store.

As a command it tells the speed by the size of a call and the number of threads. Each way
takes its turn in each round, in another order each time; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dry import read_options
from meter import Batch, Job, median, meter, size_text

from kvstore.sizes import parse_size
from kvstore.tiers.disk.extents import cut_extents
from kvstore.tiers.pinned import PinnedRegion

__all__ = ["Plain"]

THREADS = 4

_Call = tuple[bool, list[memoryview], int]
"""Whether it reads, into or from where, and the offset."""


class Plain:
    """Plain calls between the rows of `region` and a file of as many slots.

    Args:
        folder: where the file is made, with all its space allocated.
        fill: whether each slot is written once, so that later writes are not the first ones.

    Attributes:
        direct: whether O_DIRECT works there.
    """

    def __init__(self, folder: Path, region: PinnedRegion, *, fill: bool = True) -> None:
        self.chunk_bytes = region.row_bytes
        self._region = region
        self._path = folder / f"plain-{region.row_bytes}-{fill}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._path.unlink(missing_ok=True)
            self._fd = os.open(self._path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._fd, 0, region.rows * region.row_bytes)
        if fill:
            rows = list(range(region.rows))
            self.run([Job(False, rows, rows)])

    def run(self, jobs: Sequence[Job]) -> Batch:
        """Run jobs that begin at the same time."""
        batch = Batch()
        calls = [call for job in jobs for call in self._calls(job)]
        began = time.perf_counter()
        with meter(batch):
            self._make(calls, THREADS)
        batch.seconds = [time.perf_counter() - began] * len(jobs)
        return batch

    def speed(self, load: bool, rows: Sequence[memoryview], size: int, threads: int) -> float:
        """GB/s of one call of `size` bytes for each of `rows`, by so many threads."""
        calls = [(load, [row], index * size) for index, row in enumerate(rows)]
        began = time.perf_counter()
        self._make(calls, threads)
        return len(rows) * size / (time.perf_counter() - began) / 1e9

    def _make(self, calls: Sequence[_Call], count: int) -> None:
        todo, lock = iter(calls), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(todo, None)
                if call is None:
                    return
                load, buffers, offset = call
                (os.preadv if load else os.pwritev)(self._fd, buffers, offset)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _calls(self, job: Job) -> list[_Call]:
        size, row = self.chunk_bytes, self._region.row
        return [
            (job.load, [row(job.rows[index]) for index in extent], job.slots[extent[0]] * size)
            for extent in cut_extents(job.slots, self._region.rows, size, THREADS)
        ]

    def settle(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--footprint", type=parse_size, default=512 * 2**20)
    parser.add_argument("--rounds", type=int, default=8)
    options = read_options(parser, footprint=2**24, rounds=1)
    sizes = [2**power for power in range(17, 23)]
    found: dict[tuple[bool, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-plain-", dir=options.folder) as folder:
        region = PinnedRegion.private(options.footprint // 2**12, 2**12)
        region.array[:] = 1
        whole = region.view.cast("B")
        plain = Plain(Path(folder), region)
        ways = [(load, size, threads) for load in (0, 1) for size in sizes for threads in (1, 4, 8)]
        for _ in range(options.rounds):
            random.shuffle(ways)
            for load, size, threads in ways:
                start = random.randrange(options.footprint // size)
                rows = [
                    whole[at % options.footprint :][:size]
                    for at in range(start * size, start * size + options.footprint // 2, size)
                ]
                speed = plain.speed(bool(load), rows, size, threads)
                found.setdefault((bool(load), size, threads), []).append(speed)
        del rows, whole
        plain.close()
        region.close()
    print("| GB/s | " + " | ".join(map(size_text, sizes)) + " |")
    print("|---" * (1 + len(sizes)) + "|")
    for load in (False, True):
        for threads in (1, 4, 8):
            speeds = [f"{median(found[load, size, threads]):.2f}" for size in sizes]
            name = f"{'read' if load else 'write'}, {threads} in flight"
            print(f"| {name} | " + " | ".join(speeds) + " |")


if __name__ == "__main__":
    main()
