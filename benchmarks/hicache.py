"""kvstore and SGLang's own file backend below SGLang's hierarchical cache, on the CPU.

    python benchmarks/hicache.py FOLDER [--pages 256] [--rounds 5] [--json rows.json]

FOLDER lies on the disk that is meant. Pool, controller, names of pages and the file backend are
those of SGLang 0.5.23, which is fetched once to `.sglang-0.5.23` beside this folder; so are the
threads in which both backends are called. Pages have 2 MiB: 16 tokens of a model with 32 layers and
8 heads of 128, in `page_first`. kvstore has room for 32 of them in host memory, a window that what
it reads passes through, and copies in place (`interface_v1`); the file backend has the page cache.

Cases, for one prompt of all pages:

    write        from the call until the backend says that it has them
    write, disk  until they are on the disk too: kvstore by `flush`, files by fsync of each
    read         into other slots, as a request would that has just been written
    read, cold   the same after the page cache has dropped the files: a prompt of yesterday

The two take turns. Figures are medians over the rounds, ratios medians of the ratio in a round.
Every page that is read is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A folder of benchmarks named as a package would hide it.
from benchmarks.dry import read_options

PAGE_TOKENS = 16
WINDOW_PAGES = 32
CASES = ("write", "write, disk", "read", "read, cold")


class Contestant:
    """One backend under SGLang's controller."""

    def __init__(self, name: str, folder: Path, host: Any, page_bytes: int, pages: int) -> None:
        from tests.sglang.pools import Controller

        self.folder = folder
        if name == "kvstore":
            capacity = 3 * pages * page_bytes
            segment = min(256 * 2**20, capacity // 8)
            disk: dict[str, Any] = {"type": "disk", "path": str(folder), "capacity_bytes": capacity}
            disk["segment_bytes"] = segment
            given = {
                "backend_name": "kvstore",
                "module_path": "kvstore.sglang",
                "class_name": "HiCacheKVStore",
                "interface_v1": 1,
                "kvstore": {"host": WINDOW_PAGES * page_bytes, "tiers": [disk]},
            }
            self.controller = Controller(host, given)
        else:
            self.controller = Controller(host, {"file_storage_path": str(folder)}, "file")

    def sync(self) -> None:
        if hasattr(self.controller.backend, "_pools"):
            for pool in self.controller.backend._pools.values():
                assert pool.store.flush(60)
            return
        for file in self.folder.rglob("*.bin"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def drop(self) -> None:
        """Let the page cache forget the files."""
        for file in self.folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of processor time of all threads."""
    begun, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - cpu


def measure(one: Contestant, seed: int, pages: int) -> dict[str, tuple[float, float]]:
    """Each case once, for a prompt that nobody has seen."""
    import torch

    from tests.sglang.pools import pages as bytes_of

    host = one.controller.host
    count = pages * PAGE_TOKENS
    tokens = list(range(seed * count, (seed + 1) * count))
    here, there = torch.arange(count), torch.arange(count) + count
    wanted = bytes_of(host, here)

    def write() -> None:
        assert one.controller.write(tokens, here) == count

    def read() -> None:
        assert one.controller.fetch(tokens, there) == count

    took = {"write": timed(write)}
    rest = timed(one.sync)
    took["write, disk"] = took["write"][0] + rest[0], took["write"][1] + rest[1]
    for case in ("read", "read, cold"):
        if case == "read, cold":
            one.drop()
        host.kv_buffer[:, count:].zero_()
        took[case] = timed(read)
        assert bytes_of(host, there) == wanted, f"{one.folder}: other bytes"
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = read_options(parser, pages=40, layers=1, rounds=1)
    from tests.sglang.pretend import prepare
    from tests.unpacked import make

    prepare(str(make("sglang")))
    from tests.sglang.pools import Shape, attention

    slots = 2 * options.pages * PAGE_TOKENS
    host = attention("page_first", shape=Shape(PAGE_TOKENS, 8, 128, options.layers, slots))
    page_bytes = PAGE_TOKENS * host.size_per_token
    took: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    base = Path(tempfile.mkdtemp(dir=options.folder, prefix="hicache-"))
    try:
        both = {}
        for name in ("kvstore", "file"):
            (base / name).mkdir()
            both[name] = Contestant(name, base / name, host, page_bytes, options.pages)
        for number in range(options.rounds + 1):
            for name in sorted(both, reverse=bool(number % 2)):
                for case, figures in measure(both[name], number, options.pages).items():
                    if number:  # The first one fills.
                        took[case][name].append(figures)
        for one in both.values():
            one.controller.end()
    finally:
        shutil.rmtree(base)
    rows = []
    gigabytes = options.pages * page_bytes / 1e9
    print(f"pages of {page_bytes / 2**20:g} MiB, {gigabytes:.2f} GB a prompt")
    print("case          kvstore GB/s   file GB/s   kvstore/file   CPU s/GB, kvstore and file")
    for case in CASES:
        ours, theirs = took[case]["kvstore"], took[case]["file"]
        speed = [gigabytes / statistics.median(one[0] for one in each) for each in (ours, theirs)]
        cpu = [statistics.median(one[1] for one in each) / gigabytes for each in (ours, theirs)]
        ratio = statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True))
        text = f"{speed[0]:12.2f} {speed[1]:11.2f} {ratio:14.2f} {cpu[0]:11.2f} {cpu[1]:6.2f}"
        print(f"{case:13} {text}")
        rows.append({"case": case, "GB/s": speed, "ratio": ratio, "CPU s/GB": cpu})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
