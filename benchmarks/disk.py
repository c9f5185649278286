"""The disk tier beside fio and vLLM's own file system tier, in the same run.

    python benchmarks/disk.py FOLDER [--sizes 64KiB,256KiB,2MiB,8MiB] [--json rows.json]
    python benchmarks/disk.py FOLDER --quick

FOLDER lies on the disk that is meant; a few GB are used there and removed at the
end. One JSON row for each case, then a table with the budgets.

Cases, each with one request alone (a job of a quarter of the footprint) and with
16 requests at once (jobs of a sixteenth each, begun at the same time):

    write         over slots that held something: the steady state
    first write   into fresh segments
    read          of chains: the slots of a job are neighbours
    random read   no slot has a neighbour in its job
    mixed         70 % of the chunks are read and 30 % written at the same time

What is driven is `DiskTier` itself over a private `PinnedRegion`, by `await tier.read`
and `await tier.write` on the loop that the engine uses. Payloads are random bytes,
digests are made and checked, the rows of a job lie anywhere in the region, and
O_DIRECT keeps the page cache out. The peers and how they are treated: see `fio.py`,
`plain.py` (the same calls on the same memory, without digests) and `peer_fs.py`. `write`
of vLLM's tier, which cannot overwrite, stands beside both of our kinds of write.

The contestants take turns, round by round, in another order each time. Figures are
medians over the rounds, and ratios are medians of the ratio within a round, so that a
disk that is shared with others moves them less. /fio is against fio with the same memory
footprint, /warm against fio with a few buffers that stay in the processor's cache, /later
a first write against a later one. p50 and p99 are of the time from the beginning until a
job's caller knows; in a mixed case of the reads. `loop us` is the processor time of the
event loop's thread per job; a bare sleep of that loop, told at the end, is what waking up
costs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dry import read_options
from fio import Fio, FioResult, Way
from meter import Batch, Job, Sample, filled_region, median, meter, percentile, size_text, sizes
from peer_fs import VllmFs
from plain import Plain

from kvstore.concurrency import new_event_loop
from kvstore.sizes import parse_size
from kvstore.tiers.codec import Codec
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.pinned import PinnedRegion, round_to_page

CASES = ("write", "first write", "read", "random read", "mixed")
REQUESTS = (1, 16)
LARGE = 2 * 2**20
LARGE_WAY = Way("libaio", 32)
SEGMENTS = 2


class Ours:
    """The disk tier over `region`, on as many paths below `folder`; `fill` writes all its slots."""

    def __init__(
        self,
        folder: Path,
        region: PinnedRegion,
        loop: Any,
        io: str,
        *,
        fill: bool,
        paths: int = 1,
        keys: KeyRing | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.chunk_bytes = region.row_bytes
        self._folder = folder
        self._loop = loop
        segments = max(SEGMENTS, paths)
        size = region.row_bytes if codec is None else codec.coded_bytes(region.row_bytes)
        geometry = Geometry(-(-region.rows // segments), round_to_page(size), size)
        self.tier = DiskTier(
            [folder / str(path) for path in range(paths)],
            Namespace.of("bench", {"chunk": region.row_bytes}),
            region.row_bytes,
            segments * geometry.file_bytes,
            segment_bytes=geometry.file_bytes,
            io=io,
            keys=keys,
            codec=codec,
        )
        opening = self.tier.open(region)
        assert opening.segment_slots == geometry.slots
        while loop.run_until_complete(self.tier.grow())[0] is not None:
            pass
        self.description = self.tier.description
        self.direct = self.tier.backend.name in ("aio", "direct")
        self.keys = [b""] * segments * geometry.slots
        if fill:
            rows = list(range(region.rows))
            self.run([Job(False, rows, rows)])

    def run(self, jobs: Sequence[Job]) -> Batch:
        """Run jobs that begin at the same time; what is written has new keys."""
        for job in jobs:
            for slot in [] if job.load else job.slots:
                self.keys[slot] = os.urandom(32) + b"\0\0\0\0"
        named = [(job, [self.keys[slot] for slot in job.slots]) for job in jobs]
        return self._loop.run_until_complete(self._run(named))

    def settle(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        self._loop.run_until_complete(self.tier.close([]))
        shutil.rmtree(self._folder)

    async def _run(self, named: list[tuple[Job, list[bytes]]]) -> Batch:
        async def one(job: Job, keys: list[bytes]) -> float:
            move = self.tier.read if job.load else self.tier.write
            done = await move(keys, job.slots, job.rows)
            if not all(done.ok):
                raise RuntimeError(f"the disk tier failed: {done.error}")
            return time.perf_counter() - began

        batch = Batch()
        began = time.perf_counter()
        with meter(batch):
            if len(named) == 1:
                batch.seconds = [await one(*named[0])]
            else:
                batch.seconds = await asyncio.gather(*(one(*each) for each in named))
        return batch


class Plan:
    """An endless supply of the batches of one case, the same for every contestant."""

    def __init__(self, chunks: int, seed: int) -> None:
        self._chunks = chunks
        self._rng = random.Random(seed)
        self._rows = list(range(chunks))
        self._rng.shuffle(self._rows)
        self._next = 0

    def batches(self, case: str, requests: int) -> Iterator[list[Job]]:
        """For a first write as many as cover every slot once; else without end."""
        count = self._chunks // (4 if requests == 1 else 1)
        rounds = range(self._chunks // count) if case == "first write" else itertools.count()
        if case == "first write":
            self._next = 0
        for _ in rounds:
            slots = [(self._next + i) % self._chunks for i in range(count)]
            self._next = (self._next + count) % self._chunks
            start = self._rng.randrange(self._chunks)
            rows = [self._rows[(start + i) % self._chunks] for i in range(count)]
            if case == "mixed" and requests == 1:
                cut = max(1, count * 7 // 10)
                yield [Job(True, slots[:cut], rows[:cut]), Job(False, slots[cut:], rows[cut:])]
                continue
            share = count // requests
            jobs = []
            for number in range(requests):
                part = slice(number * share, (number + 1) * share)
                load = "read" in case or (case == "mixed" and number % 10 not in (3, 6, 9))
                its_slots = slots[part]
                if case == "random read":
                    its_slots = self._rng.sample(range(0, self._chunks, 2), share)
                jobs.append(Job(load, its_slots, rows[part]))
            yield jobs


def measure(contestant: Any, batches: Iterator[list[Job]], seconds: float) -> Sample:
    """Run batches until they have taken `seconds`, or end."""
    sample = Sample()
    for jobs in batches:
        sample.add(contestant.run(jobs), jobs, contestant.chunk_bytes)
        contestant.settle()
        if sample.wall >= seconds:
            break
    return sample


class Column:
    """All that is measured at one chunk size."""

    def __init__(self, options: argparse.Namespace, folder: Path, chunk_bytes: int) -> None:
        self._options = options
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._chunks = options.footprint // chunk_bytes
        self._loop = new_event_loop()
        self._plan = Plan(self._chunks, chunk_bytes)
        self._seconds = options.seconds / options.rounds
        self._ours: dict[tuple[str, int], list[Sample]] = {}
        self._peer: dict[tuple[str, int], list[Sample]] = {}
        self._calls: dict[tuple[str, int], list[Sample]] = {}
        self._fio: dict[tuple[str, str], list[FioResult]] = {}
        self._sleeps: list[float] = []

    def rows(self, fio: Fio | None, with_vllm: bool) -> list[dict[str, Any]]:
        """Measure and report."""
        region = filled_region(self._chunks, self._chunk_bytes)
        ours = Ours(self._folder / "ours", region, self._loop, self._options.io, fill=True)
        print(f"# {size_text(self._chunk_bytes)}: {ours.description}; {region.description}")
        if not ours.direct:
            print("# without O_DIRECT: the page cache is in play")
        peer = None
        if with_vllm:
            memory = None
            if self._options.peer_memory == "huge":
                memory = region.view.cast("B", [self._chunks, self._chunk_bytes])
            peer = VllmFs(
                self._folder / f"vllm-{self._chunk_bytes}", self._chunk_bytes, self._chunks, memory
            )
            if not peer.direct:
                print("# vllm: no O_DIRECT here; files are dropped from the page cache")
        ways = self._choose(fio) if fio else {}
        # As vLLM does once it has started: what is there now is not garbage, and need not be
        # looked at by every full collection that a measurement happens to cause.
        gc.collect()
        gc.freeze()
        plain = Plain(self._folder, region)
        order = random.Random(0)
        for _ in range(self._options.rounds):
            self._sleeps += [self._sleep() for _ in range(8)]
            for case in CASES:
                turns: list[Callable[[], None]] = [partial(self._measure_fio, case, fio, ways)]
                for requests in REQUESTS:
                    turns.append(partial(self._measure_ours, case, requests, ours, region))
                    turns.append(partial(self._measure_calls, case, requests, plain, region))
                    if peer and case != "first write":
                        turns.append(partial(self._measure_peer, case, requests, peer))
                # Who comes after whom must not make a difference.
                order.shuffle(turns)
                for turn in turns:
                    turn()
        gc.unfreeze()
        plain.close()
        if peer:
            peer.close()
        ours.close()
        region.close()
        self._loop.close()
        return [self._row(case, requests, ways) for case in CASES for requests in REQUESTS]

    def _measure_ours(self, case: str, requests: int, ours: Ours, region: PinnedRegion) -> None:
        batches = self._plan.batches(case, requests)
        if case == "first write":
            fresh = Ours(self._folder / "fresh", region, self._loop, self._options.io, fill=False)
            sample = measure(fresh, batches, math.inf)
            fresh.close()
        else:
            sample = measure(ours, batches, self._seconds)
        self._ours.setdefault((case, requests), []).append(sample)

    def _measure_calls(self, case: str, requests: int, plain: Plain, region: PinnedRegion) -> None:
        batches = self._plan.batches(case, requests)
        if case == "first write":
            fresh = Plain(self._folder, region, fill=False)
            sample = measure(fresh, batches, math.inf)
            fresh.close()
        else:
            sample = measure(plain, batches, self._seconds)
        self._calls.setdefault((case, requests), []).append(sample)

    def _measure_peer(self, case: str, requests: int, peer: VllmFs) -> None:
        sample = measure(peer, self._plan.batches(case, requests), self._seconds)
        self._peer.setdefault((case, requests), []).append(sample)

    def _sleep(self) -> float:
        """Seconds of processor time that the loop's thread takes for a sleep of 20 ms."""
        batch = Batch()

        async def sleep() -> None:
            with meter(batch):
                await asyncio.sleep(0.02)

        self._loop.run_until_complete(sleep())
        caller: float = batch.caller
        return caller

    def _choose(self, fio: Fio) -> dict[str, dict[str, Way]]:
        """For each way of moving the best pooled and the best warm one, by a short run of each."""
        chosen: dict[str, dict[str, Way]] = {}
        for workload in ("write", "read", "random read"):
            chosen[workload] = {"large": LARGE_WAY}
            for kind, ways in (
                ("pooled", fio.pooled(self._chunk_bytes)),
                ("warm", fio.warm(self._chunk_bytes)),
            ):
                found = fio.sweep(ways, workload, self._chunk_bytes)
                told = ", ".join(f"{way} {gbps:.2f}" for way, gbps in found.items())
                print(f"# fio {workload} {kind}: {told or 'does not work'} GB/s", flush=True)
                if found:
                    chosen[workload][kind] = next(iter(found))
        return chosen

    def _measure_fio(self, case: str, fio: Fio | None, ways: dict[str, dict[str, Way]]) -> None:
        if fio is None:
            return
        runs = {"pooled": self._chunk_bytes, "warm": self._chunk_bytes}
        if case in ("read", "write"):
            # Neighbours that move together are held against what large blocks give.
            runs["large"] = LARGE
        for kind, block in runs.items():
            way = ways[_workload(case)].get(kind)
            if way is not None:
                result = fio.run(way, case, block)
                self._fio.setdefault((case, kind), []).append(result)

    def _row(self, case: str, requests: int, ways: dict[str, dict[str, Way]]) -> dict[str, Any]:
        ours = self._ours[case, requests]
        times = [seconds for sample in ours for seconds in sample.seconds]
        row: dict[str, Any] = {
            "case": case,
            "requests": requests,
            "chunk": size_text(self._chunk_bytes),
            "jobs": sum(sample.jobs for sample in ours),
            "GBps": _round(median([sample.gbps for sample in ours])),
            "p50_s": _round(percentile(times, 0.5)),
            "p99_s": _round(percentile(times, 0.99)),
            "cpu_s_per_gb": _round(median([sample.cpu_per_gb for sample in ours])),
            "loop_us": round(median([sample.caller_us for sample in ours]), 1),
            "digests": True,
        }
        speeds = [sample.gbps for sample in ours]
        for kind, name in (
            ("pooled", "ratio_to_fio"),
            ("warm", "ratio_to_fio_warm"),
            ("large", "ratio_to_fio_large"),
        ):
            results = self._fio.get((case, kind))
            if results:
                row[name] = _ratio(speeds, [result.gbps for result in results])
        pooled = self._fio.get((case, "pooled"))
        if pooled:
            row["fio_GBps"] = _round(median([result.gbps for result in pooled]))
            row["fio_cpu_s_per_gb"] = _round(median([result.cpu_per_gb for result in pooled]))
            row["fio_way"] = str(ways[_workload(case)]["pooled"])
        if case == "first write":
            later = [sample.gbps for sample in self._ours["write", requests]]
            row["ratio_to_later"] = _ratio(speeds, later)
        row["sleep_us"] = round(median(self._sleeps) * 1e6, 1)
        calls = self._calls[case, requests]
        row["plain_GBps"] = _round(median([sample.gbps for sample in calls]))
        row["ratio_to_plain"] = _ratio(speeds, [s.gbps for s in calls])
        peer = self._peer.get(("write" if case == "first write" else case, requests))
        if peer:
            row["ratio_to_vllm"] = _ratio(speeds, [s.gbps for s in peer])
            row["cpu_ratio_to_vllm"] = _ratio(
                [s.cpu_per_gb for s in ours], [s.cpu_per_gb for s in peer]
            )
            times = [seconds for sample in peer for seconds in sample.seconds]
            row["vllm_GBps"] = _round(median([sample.gbps for sample in peer]))
            row["vllm_p50_s"] = _round(percentile(times, 0.5))
            row["vllm_p99_s"] = _round(percentile(times, 0.99))
            row["vllm_cpu_s_per_gb"] = _round(median([sample.cpu_per_gb for sample in peer]))
            row["vllm_caller_us"] = round(median([sample.caller_us for sample in peer]), 1)
        return row


def _workload(case: str) -> str:
    """Of those whose ways are chosen."""
    if case == "random read":
        return case
    return "write" if "write" in case else "read"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return _round(median([a / b for a, b in zip(ours, theirs, strict=True)]))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


# -- budgets -------------------------------------------------------------------------


def verdicts(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The budgets that apply to a row, in words, and whether they are kept."""
    found: list[tuple[str, bool]] = []

    def least(name: str, budget: float, told: str) -> None:
        if name in row:
            found.append((f"{told} {row[name]:g} (>= {budget:g})", row[name] >= budget))

    def most(name: str, budget: float, told: str) -> None:
        if name in row:
            found.append((f"{told} {row[name]:g} (<= {budget:g})", row[name] <= budget))

    case, chunk = row["case"], parse_size(row["chunk"])
    least("ratio_to_fio", 0.95 if chunk >= 2 * 2**20 else 0.9, "of fio")
    least("ratio_to_vllm", 1.2, "x vLLM")
    if "vllm_p99_s" in row:
        most("p99_s", row["vllm_p99_s"], "p99 s")
    least("ratio_to_later", 0.9, "of later writes")
    if case in ("read", "write") and chunk < 2**20:
        large = [
            other["ratio_to_fio_large"]
            for other in rows
            if (other["case"], other["requests"]) == (case, row["requests"])
            and "ratio_to_fio_large" in other
            and parse_size(other["chunk"]) == LARGE
        ]
        if large:
            share = _round(row["ratio_to_fio_large"] / large[0])
            found.append((f"of the speed of large chunks {share:g} (>= 0.95)", share >= 0.95))
    most("cpu_s_per_gb", 0.2, "CPU s/GB")
    most("loop_us", 100.0, "loop us/job")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    columns = (
        ("case", "case", 12),
        ("requests", "req", 4),
        ("chunk", "chunk", 7),
        ("GBps", "GB/s", 6),
        ("ratio_to_fio", "/fio", 6),
        ("ratio_to_fio_warm", "/warm", 6),
        ("ratio_to_fio_large", "/2MiB", 6),
        ("ratio_to_plain", "/plain", 6),
        ("ratio_to_vllm", "/vllm", 6),
        ("ratio_to_later", "/later", 6),
        ("p50_s", "p50 s", 8),
        ("p99_s", "p99 s", 8),
        ("cpu_s_per_gb", "cpu/GB", 7),
        ("cpu_ratio_to_vllm", "/vllm", 6),
        ("loop_us", "loop us", 8),
    )
    lines = [" ".join(f"{title:>{width}}" for _, title, width in columns) + "  missed budgets"]
    kept = total = 0
    for row in rows:
        cells = [f"{row.get(name, '-')!s:>{width}}" for name, _, width in columns]
        outcome = verdicts(row, rows)
        missed = [told for told, fine in outcome if not fine]
        kept += len(outcome) - len(missed)
        total += len(outcome)
        lines.append(" ".join(cells) + "  " + ("; ".join(missed) or "pass"))
    sleep = median([row["sleep_us"] for row in rows])
    lines.append(f"{kept} of {total} budgets kept; a bare sleep of the event loop: {sleep:g} us")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="The disk tier beside fio and vLLM's own.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=sizes, default=None, help="64KiB,256KiB,2MiB,8MiB")
    parser.add_argument("--footprint", type=parse_size, default=None, help="512MiB")
    parser.add_argument("--seconds", type=float, default=None, help="per case and contestant: 1.2")
    parser.add_argument("--rounds", type=int, default=None, help="4")
    parser.add_argument(
        "--peer-memory",
        choices=("own", "huge"),
        default="own",
        help="vLLM's tier over its own region, or over ours",
    )
    parser.add_argument("--io", default="auto", help="I/O backend of the disk tier")
    parser.add_argument("--quick", action="store_true", help="two sizes, in a minute")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = read_options(parser, sizes=[2**16], footprint=2**23, seconds=0.02, rounds=1)
    quick = options.quick
    options.sizes = options.sizes or sizes("256KiB,2MiB" if quick else "64KiB,256KiB,2MiB,8MiB")
    options.footprint = options.footprint or (256 if quick else 512) * 2**20
    options.seconds = options.seconds or (0.4 if quick else 1.2)
    options.rounds = options.rounds or (2 if quick else 4)
    for chunk_bytes in options.sizes:
        if chunk_bytes % 4096 or options.footprint % (chunk_bytes * 64):
            parser.error("the footprint must be a multiple of 64 chunks, a chunk one of 4096 bytes")
    needed = 8 * options.footprint
    if shutil.disk_usage(options.folder).free < needed:
        parser.error(f"{options.folder} has less than {size_text(needed)} free")

    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as name:
        folder = Path(name)
        fio = None
        reason = Fio.missing()
        if reason is None:
            fio = Fio(folder, options.footprint)
            huge = fio.prepare()
            print(f"# fio: {100 * huge // options.footprint} % of its pool in huge pages")
        else:
            print(f"# no ratio to fio: {reason}")
        reason = VllmFs.missing()
        if reason is not None:
            print(f"# no ratio to vLLM: {reason}")
        for chunk_bytes in options.sizes:
            column = Column(options, folder, chunk_bytes)
            for row in column.rows(fio, reason is None):
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(table(rows))
    print(f"took {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
