"""The disk tier with encryption, and with a codec, beside the same without, in the same run.

    python benchmarks/encryption.py FOLDER [--sizes 256KiB,2MiB] [--rounds 6]

FOLDER lies on the disk that is meant. The cases are those of `disk.py`, with one request alone
and with 16 at once; they take turns, in another order each time. Figures are medians over the
rounds, and the ratio is the median of the ratio within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from disk import REQUESTS, Ours, Plan, measure
from dry import read_options
from meter import Sample, filled_region, median, size_text, sizes

from kvstore.concurrency import new_event_loop
from kvstore.sizes import parse_size
from kvstore.tiers.codec import Codec
from kvstore.tiers.keys import ALL, KEY_BYTES, KeyRing, Secret, id_of, write_keys

CASES = ("write", "read", "random read", "mixed")

BUDGET = 0.8
"""Part of the plain throughput that encryption has to reach."""


def column(options: argparse.Namespace, folder: Path, chunk_bytes: int) -> list[dict[str, Any]]:
    """Measure all cases at one chunk size."""
    material = os.urandom(KEY_BYTES)
    write_keys(folder / "keys.toml", {ALL: [Secret(id_of(material), material)]})
    loop = new_event_loop()
    region = filled_region(options.footprint // chunk_bytes, chunk_bytes)
    # As bfloat16 they are finite numbers.
    region.array[:, 1::2] &= 0xBF
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "sealed": {"keys": KeyRing(str(folder / "keys.toml"))},
        "int8": {"codec": Codec("bfloat16")},
    }
    tiers = {
        name: Ours(folder / name, region, loop, options.io, fill=True, **its)
        for name, its in forms.items()
    }
    print(f"# {size_text(chunk_bytes)}: {tiers['plain'].description}")
    plan, order = Plan(options.footprint // chunk_bytes, chunk_bytes), random.Random(0)
    samples: dict[tuple[str, int], dict[str, list[Sample]]] = {}
    gc.collect()
    gc.freeze()
    for _ in range(options.rounds):
        for case in CASES:
            for requests in REQUESTS:
                turns = list(tiers)
                order.shuffle(turns)
                for name in turns:
                    sample = measure(tiers[name], plan.batches(case, requests), options.seconds)
                    its = samples.setdefault((case, requests), {})
                    its.setdefault(name, []).append(sample)
    gc.unfreeze()
    for one in tiers.values():
        one.close()
    region.close()
    loop.close()
    return [_row(case, requests, chunk_bytes, its) for (case, requests), its in samples.items()]


def _row(
    case: str, requests: int, chunk_bytes: int, its: dict[str, list[Sample]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "requests": requests, "chunk": size_text(chunk_bytes)}
    for name, samples in its.items():
        row[f"{name}_GBps"] = round(median([sample.gbps for sample in samples]), 3)
        row[f"{name}_cpu_s_per_gb"] = round(median([sample.cpu_per_gb for sample in samples]), 3)
        pairs = zip(samples, its["plain"], strict=True)
        ratios = [ours.gbps / plain.gbps for ours, plain in pairs]
        row[f"{name}_ratio"] = round(median(ratios), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="The disk tier with encryption and without.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=sizes, default=sizes("256KiB,2MiB"), help="256KiB,2MiB")
    parser.add_argument("--footprint", type=parse_size, default=256 * 2**20, help="256MiB")
    parser.add_argument("--seconds", type=float, default=0.3, help="per case and round: 0.3")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--io", default="auto", help="I/O backend of the disk tier")
    options = read_options(parser, sizes=[2**16], footprint=2**23, seconds=0.02, rounds=1)
    rows = []
    for chunk_bytes in options.sizes:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as name:
            rows += column(options, Path(name), chunk_bytes)
    for row in rows:
        print(json.dumps(row))
    for name in ("sealed", "int8"):
        head = f"{'case':>12} {'req':>4} {'chunk':>7} {'plain':>6} {name:>6} {'ratio':>6}"
        print(f"{head}  CPU s/GB")
        for row in rows:
            ratio, cpu = row[f"{name}_ratio"], f"{name}_cpu_s_per_gb"
            print(
                f"{row['case']:>12} {row['requests']:>4} {row['chunk']:>7} "
                f"{row['plain_GBps']:>6.2f} {row[f'{name}_GBps']:>6.2f} {ratio:>6.2f}  "
                f"{row['plain_cpu_s_per_gb']:.2f} -> {row[cpu]:.2f}"
                f"{'' if ratio >= BUDGET else f'  below {BUDGET}'}"
            )


if __name__ == "__main__":
    main()
