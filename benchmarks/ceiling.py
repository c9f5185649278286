"""How fast the disk tier is where no disk holds it up: over files in memory, on 1 to 4 paths.

    python benchmarks/ceiling.py [FOLDER] [--sizes 64KiB,256KiB,2MiB] [--paths 1,2,4] [--json FILE]

FOLDER is a file system in memory, /dev/shm by default. It is what the software
could do with faster devices: an operator with many drives finds here where the
processors, and not the drives, become the limit. A drive moves its bytes itself; here
the processors copy them as well, so a real ceiling lies higher. What that costs is
told by `copy`: the same calls on the same file, without the tier, its digests and
records, by as many threads.

16 requests at once, cases as in `disk.py`. The tiers and `copy` take turns, round by
round; figures are medians. `cores` is the processor time of the process per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from disk import Ours, Plan, Sample, measure
from meter import Batch, Job, median, meter, size_text, sizes

from kvstore.engine import new_event_loop
from kvstore.sizes import parse_size
from tiers.disk.extents import cut_extents
from tiers.pinned import PinnedRegion

CASES = ("write", "read", "random read")
REQUESTS = 16
THREADS = 4


class Copy:
    """The tier's calls, plain, between one file and the rows, by four threads."""

    def __init__(self, folder: Path, region: PinnedRegion) -> None:
        self.chunk_bytes = region.row_bytes
        self._region = region
        self._path = folder / "copy"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, region.rows * region.row_bytes)

    def run(self, jobs: Sequence[Job]) -> Batch:
        """Run jobs that begin at the same time."""
        batch = Batch()
        calls = [call for job in jobs for call in self._calls(job)]
        todo, lock = iter(calls), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(todo, None)
                if call is None:
                    return
                load, buffers, offset = call
                (os.preadv if load else os.pwritev)(self._fd, buffers, offset)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        began = time.perf_counter()
        with meter(batch):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        batch.seconds = [time.perf_counter() - began] * len(jobs)
        return batch

    def _calls(self, job: Job) -> list[tuple[bool, list[memoryview], int]]:
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


def column(
    options: argparse.Namespace, folder: Path, chunk_bytes: int, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """All that is measured at one chunk size."""
    chunks = options.footprint // chunk_bytes
    loop = new_event_loop()
    region = PinnedRegion.private(chunks, chunk_bytes)
    region.array[:] = np.random.default_rng(0).integers(0, 256, region.array.shape, np.uint8)
    contestants: dict[str, Any] = {"copy": Copy(folder, region)}
    for count in counts:
        name = f"{count} path{'s' if count > 1 else ''}"
        contestants[name] = Ours(folder / name, region, loop, options.io, fill=True, paths=count)
        print(f"# {size_text(chunk_bytes)}: {contestants[name].description}", file=sys.stderr)
    plan = Plan(chunks, chunk_bytes)
    found: dict[tuple[str, str], list[Sample]] = {}
    for _, case in itertools.product(range(options.rounds), CASES):
        for name, contestant in contestants.items():
            seconds = options.seconds / options.rounds
            sample = measure(contestant, plan.batches(case, REQUESTS), seconds)
            found.setdefault((case, name), []).append(sample)
    rows: list[dict[str, Any]] = []
    for (case, name), samples in found.items():
        speeds = [sample.gbps for sample in samples]
        plain = [sample.gbps for sample in found[case, "copy"]]
        rows.append(
            {
                "chunk": size_text(chunk_bytes),
                "case": case,
                "over": name,
                "GBps": round(median(speeds), 2),
                "cores": round(median([s.cpu / s.wall for s in samples]), 2),
                "cpu_s_per_gb": round(median([s.cpu_per_gb for s in samples]), 3),
                "of_copy": round(median([a / b for a, b in zip(speeds, plain, strict=True)]), 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    for contestant in contestants.values():
        contestant.close()
    region.close()
    loop.close()
    return rows


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--sizes", type=sizes, default=sizes("64KiB,256KiB,2MiB"))
    parser.add_argument("--paths", default="1,2,4", help="numbers of paths, by commas")
    parser.add_argument("--footprint", type=parse_size, default=512 * 2**20)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case and contestant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io", default="auto", help="I/O backend of the disk tier")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    counts = [int(each) for each in options.paths.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-ceiling-", dir=options.folder) as folder:
        for size in options.sizes:
            part = Path(folder) / size_text(size)
            part.mkdir()
            rows += column(options, part, size, counts)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print()
    print("| chunk | case | over | GB/s | cores | CPU s/GB | of plain calls |")
    print("|---" * 7 + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
