"""Cost of a lookup through vLLM's manager interface, beside vLLM's own managers.

    python benchmarks/lookup.py [--resident 1000,10000,100000] [--rounds N] [--against HEAD~5]

For each number of resident chunks one JSON row per case: microseconds per key, and how many times
as long vLLM's native tiering manager (host memory and files) takes in the same run; for hits and
misses the same for its host-only manager, which looks nowhere else. Of all rounds, which take
turns, each manager's fastest counts: that leaves out what neighbours on the machine have taken.

* hit, miss: keys in host memory, and nowhere. The tiering manager says "ask again" to a miss first,
  while a thread looks for the file; its row counts both calls.
* first deferral: the first scan of a request whose keys are all on disk.
* asked again: each later scan of that request while nothing has come, by the rules of vLLM's
  scheduler: it stops at a miss.

With --against the rows of that revision come first, then those of this one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.layout import worker_region

sys.path.insert(0, str(Path(__file__).parent))
from dry import read_options
from revision import ROOT, checked_out
from specs import offloading_config

PER_REQUEST = 500
BLOCK = 4096
SCANS = 100
"""Of a request that is asked again."""

FIND_SECONDS = 0.2
"""What a thread of vLLM's file tier gets to look for the files of one request."""


def keys_of(prefix: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prefix}{i}".encode()).digest() + b"\0\0\0\0" for i in range(count)]


def end_step(manager: Any) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


def fill(manager: Any, keys: list[bytes]) -> None:
    """Store the keys, and let the manager copy all of them to the disk."""
    for start in range(0, len(keys), PER_REQUEST):
        context = ReqContext(f"fill-{start}")
        manager.on_new_request(context)
        out = None
        while out is None:
            out = manager.prepare_store(keys[start : start + PER_REQUEST], context)
            end_step(manager)
        manager.complete_store(set(out.keys_to_store), context)
        manager.on_request_finished(context)
        end_step(manager)
        while manager.has_pending_work():
            # The tiering manager takes in what has ended with the first lookup of a step.
            manager.lookup(b"nothing" + b"\0\0\0\0", context)
            end_step(manager)
            time.sleep(0.001)


def scan(manager: Any, keys: Sequence[bytes], context: Any) -> float:
    """Seconds of one scan by the rules of vLLM's scheduler."""
    lookup, miss = manager.lookup, LookupResult.MISS
    began = time.perf_counter()
    for key in keys:
        if lookup(key, context) is miss:
            break
    return time.perf_counter() - began


def hits(manager: Any, keys: list[bytes]) -> float:
    """Median microseconds per key that is in host memory, over requests of their own steps."""
    times = []
    for number, start in enumerate(range(0, len(keys), PER_REQUEST)):
        its = keys[start : start + PER_REQUEST]
        context = ReqContext(f"hit-{number}")
        manager.on_new_request(context)
        times.append(scan(manager, its, context) / len(its) * 1e6)
        manager.on_request_finished(context)
        end_step(manager)
    return statistics.median(times)


def misses(manager: Any, prompts: list[list[bytes]]) -> float:
    """Median microseconds per key that is nowhere, until the answer is "miss"."""
    times = []
    for number, keys in enumerate(prompts):
        context = ReqContext(f"miss-{number}")
        manager.on_new_request(context)
        spent, asked = 0.0, keys
        while asked:
            answers = []
            began = time.perf_counter()
            for key in asked:
                answers.append(manager.lookup(key, context))
            spent += time.perf_counter() - began
            asked = [
                key
                for key, answer in zip(asked, answers, strict=True)
                if answer is not LookupResult.MISS
            ]
            end_step(manager)
            if asked:
                time.sleep(FIND_SECONDS)
        times.append(spent / len(keys) * 1e6)
        manager.on_request_finished(context)
    return statistics.median(times)


def deferred(manager: Any, keys: list[bytes], name: str) -> tuple[float, float]:
    """Microseconds per key of the first scan, and of each later one while nothing comes."""
    context = ReqContext(name)
    manager.on_new_request(context)
    first = scan(manager, keys, context)
    end_step(manager)
    time.sleep(FIND_SECONDS)
    # vLLM's finds its files now, and begins to fetch them.
    scan(manager, keys, context)
    end_step(manager)
    times = []
    for _ in range(SCANS):
        times.append(scan(manager, keys, context))
        end_step(manager)
    manager.on_request_finished(context)
    return first / len(keys) * 1e6, statistics.median(times) / len(keys) * 1e6


def kvstore_manager(rows: int, folder: str) -> Any:
    disk = {"type": "disk", "path": folder, "capacity_bytes": "2GiB"}
    extra = {"cpu_bytes_to_use": rows * BLOCK, "tiers": [disk], "deadline_s": 60}
    # Engines of one name share their host memory.
    name = f"bench-{rows}"
    spec = KVStoreOffloadingSpec(offloading_config(extra, BLOCK, name))
    worker_region(name, 1, spec.region_shape)
    return spec.get_manager()


def native_manager(rows: int, folder: str) -> Any:
    files = {"type": "fs", "root_dir": folder}
    # Its shared memory has the name, and is left behind by a process that is killed.
    name = f"native-{os.getpid()}-{rows}"
    extra = {"cpu_bytes_to_use": rows * BLOCK, "secondary_tiers": [files]}
    return TieringOffloadingSpec(offloading_config(extra, BLOCK, name)).get_manager()


def hold_back(ours: Any, native: Any) -> None:
    """From now on nothing that is fetched arrives."""
    ours._stepper.engine.submit = lambda moves: None
    for tier in native.secondary_tiers:
        tier.get_finished_jobs = lambda: ()


def compare(resident: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = kvstore_manager(resident, f"{folder}/kvstore")
        native = native_manager(resident, f"{folder}/native")
        host_only = CPUOffloadingManager(resident)
        keys = keys_of("k", resident)
        gone = [keys_of(f"gone{n}-", PER_REQUEST) for n in range(rounds)]
        for manager in (ours, native, host_only):
            # What is stored first leaves host memory for the rest.
            for prompt in gone:
                fill(manager, prompt)
            fill(manager, keys)
        answers = {ours.lookup(key, ReqContext("check")) for key in keys[:PER_REQUEST]}
        assert answers == {LookupResult.HIT}, "host memory is too small for what is to be a hit"
        end_step(ours)
        new = [keys_of(f"new{n}-", PER_REQUEST) for n in range(3)]
        look: list[tuple[str, Callable[[Any], float]]] = [
            ("hit", lambda manager: hits(manager, keys[-50 * PER_REQUEST :])),
            ("miss", lambda manager: misses(manager, new)),
        ]
        for case, measure in look:
            measured = [[measure(one) for one in (ours, native, host_only)] for _ in range(rounds)]
            tell(resident, case, measured, ("tiering", "host_only"))
        hold_back(ours, native)
        scans = [
            (deferred(ours, prompt, f"d{n}"), deferred(native, prompt, f"d{n}"))
            for n, prompt in enumerate(gone)
        ]
        for place, case in enumerate(("first deferral", "asked again")):
            tell(resident, case, [[one[place] for one in both] for both in scans], ("tiering",))
        native.shutdown()


def tell(resident: int, case: str, measured: list[list[float]], peers: Sequence[str]) -> None:
    row: dict[str, Any] = {"resident": resident, "case": case}
    fastest = [min(times) for times in zip(*measured, strict=True)]
    row["us_per_key"] = round(fastest[0], 4)
    for peer, theirs in zip(peers, fastest[1:], strict=True):
        row[f"{peer}_us_per_key"] = round(theirs, 3)
        row[f"{peer}_takes_times"] = round(theirs / fastest[0], 2)
    print(json.dumps(row), flush=True)


def measure_both(revision: str, arguments: list[str]) -> None:
    """Measure that revision, then this one, each in a process of its own."""
    place = tempfile.TemporaryDirectory()
    with place as folder, checked_out(revision, Path(folder) / "tree") as tree:
        for name, code in ((revision, tree), ("this", ROOT)):
            print(f"# {name}", flush=True)
            paths = f"{code}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
            packages = {**os.environ, "PYTHONPATH": paths}
            subprocess.run([sys.executable, __file__, *arguments], env=packages, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--resident", default="1000,10000,100000", help="numbers of chunks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="REV", help="measure this revision, too")
    options = read_options(parser, resident="1000", rounds=1, against=None)
    if options.against:
        arguments = ["--resident", options.resident, "--rounds", str(options.rounds)]
        measure_both(options.against, arguments)
        return
    for resident in map(int, options.resident.split(",")):
        compare(resident, options.rounds)


if __name__ == "__main__":
    main()
