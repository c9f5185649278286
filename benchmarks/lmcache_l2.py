"""`lmcache bench l2`, LMCache's own benchmark of adapters, over kvstore and over its own.

    python benchmarks/lmcache_l2.py FOLDER [--sizes 256,2048] [--rounds 3] [--json rows.json]

FOLDER lies on the disk that is meant. LMCache 0.5.6 is fetched once to `.lmcache-0.5.6` beside this
folder. The contestants take turns, each in a process of LMCache's command, which stores objects in
rounds of 32, looks them up and loads them, and says how fast each was:

    kvstore        room for 48 objects in host memory: most of what is loaded comes from the disk
    fs             files, through the page cache, which keeps all of them
    fs direct      files with O_DIRECT
    native         files, by LMCache's threads in C++, through the page cache
    native direct  the same with O_DIRECT

Its `raw_block` needs an extension in Rust that no package brings.

A store ends when an adapter says so: for kvstore when its disk has the object, for `fs` when the
page cache has it. None of them waits for the medium. Figures are medians over the rounds of turns,
ratios medians of the ratio within one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.dry import read_options

ROOT = Path(__file__).resolve().parents[1]
KEYS = 32
OWN = "kvstore"


def contestants(folder: Path, size: int, rounds: int) -> dict[str, dict[str, Any]]:
    """What each is given, for objects of `size` bytes."""
    whole = (rounds + 2) * KEYS * size
    segment = min(256 * 2**20, whole)
    disk = {"type": "disk", "path": str(folder / "kvstore"), "capacity_bytes": 2 * segment + whole}
    return {
        OWN: {
            "type": "plugin",
            "module_path": "kvstore.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {
                "host": 48 * size,
                "chunk_bytes": size,
                "tiers": [{**disk, "segment_bytes": segment}],
            },
        },
        "fs": {"type": "fs", "base_path": str(folder / "fs")},
        "fs direct": {"type": "fs", "base_path": str(folder / "direct"), "use_odirect": True},
        "native": {"type": "fs_native", "base_path": str(folder / "native")},
        "native direct": {
            "type": "fs_native",
            "base_path": str(folder / "native-direct"),
            "use_odirect": True,
        },
    }


def bench(given: dict[str, Any], size: int, rounds: int) -> dict[str, float] | None:
    """MB/s of stores and loads and thousands of lookups a second; None if it does not run here."""
    from tests.unpacked import folder_of

    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--format", "json"]
    command += ["--l2-adapter", json.dumps(given), "--num-keys", str(KEYS)]
    command += ["--rounds", str(rounds), "--data-size-kb", str(size // 1024)]
    command += ["--l1-align-bytes", "4096", "--lookup-max-hit-rate", "1"]
    paths = [str(ROOT), str(folder_of("lmcache"))]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LMCACHE_DISABLE_BANNER": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    start = done.stdout.rfind("\n{")
    if done.returncode or start < 0:
        print((done.stderr or done.stdout)[-600:], file=sys.stderr)
        return None
    told = json.loads(done.stdout[start : done.stdout.rindex("}") + 1])["metrics"]
    metrics = {one["operation"].lower(): one for one in told.values() if "operation" in one}
    for name, one in metrics.items():
        asked, got = one["total_keys"], one["total_success"]
        assert asked == got, f"{given['type']}: {got} of {asked} in {name}"
    return {
        "store": metrics["store"]["throughput_avg_mbps"],
        "load": metrics["load"]["throughput_avg_mbps"],
        "lookup": metrics["lookup"]["ops_per_sec_avg"] / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--sizes", default="256,2048", help="of an object, in KiB")
    parser.add_argument("--bench-rounds", type=int, default=6, help="of LMCache's command")
    parser.add_argument("--rounds", type=int, default=3, help="of turns")
    parser.add_argument("--json", type=Path)
    options = read_options(parser, sizes="64", bench_rounds=1, rounds=1)
    from tests.unpacked import make

    make("lmcache")
    rows = []
    for size in (1024 * int(text) for text in options.sizes.split(",")):
        figures: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(options.rounds):
            base = Path(tempfile.mkdtemp(dir=options.folder, prefix="lmcache-"))
            try:
                those = contestants(base, size, options.bench_rounds)
                for name in sorted(those, reverse=bool(number % 2)):
                    if one := bench(those[name], size, options.bench_rounds):
                        figures[name].append(one)
            finally:
                shutil.rmtree(base)
        print(f"objects of {size // 1024} KiB: MB/s, thousands of keys a second; ratios to kvstore")
        print("                 store    load  lookup    kvstore/store    kvstore/load")
        for name, each in figures.items():
            medians = {key: statistics.median(one[key] for one in each) for key in each[0]}
            ratio = {
                key: statistics.median(
                    ours[key] / theirs[key]
                    for ours, theirs in zip(figures[OWN], each, strict=False)
                )
                for key in ("store", "load")
            }
            print(
                f"{name:14} {medians['store']:7.0f} {medians['load']:7.0f} {medians['lookup']:7.1f}"
                f" {ratio['store']:16.2f} {ratio['load']:15.2f}"
            )
            rows.append({"size": size, "name": name, "medians": medians, "kvstore/it": ratio})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
