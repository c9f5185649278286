"""How fast the disk tier is where no disk holds it up: over files in memory, on 1 to 4 paths.

    python benchmarks/ceiling.py [FOLDER] [--sizes 64KiB,256KiB,2MiB] [--paths 1,2,4] [--json FILE]

FOLDER is a file system in memory, /dev/shm by default. It is what the software
could do with faster devices: an operator with many drives finds here where the
processors, and not the drives, become the limit. A drive moves its bytes itself; here
the processors copy them as well, so a real ceiling lies higher. What that costs is
told by `plain`: the same calls without the tier, its digests and records.

16 requests at once, cases as in `disk.py`. The tiers and `plain` take turns, round by
round; figures are medians. `cores` is the processor time of the process per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from disk import Ours, Plan, Sample, measure
from dry import read_options
from meter import filled_region, median, size_text, sizes
from plain import Plain

from kvstore.concurrency import new_event_loop
from kvstore.sizes import parse_size

CASES = ("write", "read", "random read")
REQUESTS = 16


def column(
    options: argparse.Namespace, folder: Path, chunk_bytes: int, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """All that is measured at one chunk size."""
    chunks = options.footprint // chunk_bytes
    loop = new_event_loop()
    region = filled_region(chunks, chunk_bytes)
    contestants: dict[str, Any] = {"plain": Plain(folder, region)}
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
        plain = [sample.gbps for sample in found[case, "plain"]]
        rows.append(
            {
                "chunk": size_text(chunk_bytes),
                "case": case,
                "over": name,
                "GBps": round(median(speeds), 2),
                "cores": round(median([s.cpu / s.wall for s in samples]), 2),
                "cpu_s_per_gb": round(median([s.cpu_per_gb for s in samples]), 3),
                "of_plain": round(median([a / b for a, b in zip(speeds, plain, strict=True)]), 2),
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
    options = read_options(
        parser, sizes=[2**16], paths="1,2", footprint=2**23, seconds=0.02, rounds=1
    )
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
