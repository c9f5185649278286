"""A store under mixed load for as long as is asked, watched from outside.

    python benchmarks/soak.py --minutes 30

One process keeps a store open: it asks for chains of chunks, stores what is
missing, evicts all the time, and compares every byte. Beside it others open the
same cache, follow, write and end, every other one by SIGKILL, and the lanes that
nobody owns are compacted. Once a second the first process is looked at in /proc
(resident and proportional memory, descriptors, threads) and its lane on the
disk. Exit status 1 if memory or descriptors grow, a lane is larger than its
capacity, or anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from dry import read_options

CHUNK = 64 * 1024
HOST = 24 * 2**20
CAPACITY = 96 * 2**20
SEGMENT = 8 * 2**20
CHAINS = 400
CHAIN_CHUNKS = 16
"""Four times as many chunks as the lane can hold."""

WARM_UP = 0.25
"""Part of the time after which nothing may grow any more."""

GROWTH_BYTES = 4 * 2**20
GROWTH_PART = 0.03
"""What the second half of the rest may have more than the first, before it counts as growth."""
GROWTH_DESCRIPTORS = 2

GROWTH_SAMPLES = 20
"""Looks at a settled process, one a second, below which nothing is said about growth."""

HERE = Path(__file__).resolve().parent


def config_of(path: Path) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": HOST,
        "chunk_bytes": CHUNK,
        "identity": {"model": "soak"},
        "tiers": [
            {
                "type": "disk",
                "path": str(path),
                "capacity_bytes": CAPACITY,
                "segment_bytes": SEGMENT,
            }
        ],
    }


def chain(number: int) -> list[bytes]:
    return [
        hashlib.blake2b(b"%d/%d" % (number, place), digest_size=32).digest() + b"\0\0\0\0"
        for place in range(CHAIN_CHUNKS)
    ]


def payload(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest() * (CHUNK // 64)


# -- the processes that are watched ----------------------------------------------------------


async def load(path: Path, seed: int) -> None:
    """Ask, compare and store until standard input ends; says how much, every few seconds."""
    import kvstore

    chance = random.Random(seed)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    done = dict.fromkeys(("asked", "hits", "stored", "wrong", "resets"), 0)
    said = time.monotonic()
    async with kvstore.open(config_of(path)) as store:
        print(json.dumps({"ready": store.description}), flush=True)
        while not ended.is_set():
            # A few chains are asked for often, most of them seldom.
            keys = chain(int(CHAINS * chance.random() ** 3))
            keys = keys[: chance.randint(1, CHAIN_CHUNKS)]
            done["asked"] += len(keys)
            async with store.get(keys) as chunks:
                held = len(chunks)
                done["hits"] += held
                done["wrong"] += sum(
                    chunk != payload(key) for key, chunk in zip(chunks.keys, chunks, strict=True)
                )
            if held < len(keys):
                rest = keys[held:]
                done["stored"] += await store.put(rest, [payload(key) for key in rest])
            if chance.random() < 0.0002:
                await store.reset()
                done["resets"] += 1
            await asyncio.sleep(0.002)
            if time.monotonic() - said > 2:
                said = time.monotonic()
                print(json.dumps(done), flush=True)
    tier = store.stats().tiers[0]
    done |= {"failed_reads": tier.failed_reads, "failed_writes": tier.failed_writes}
    done |= {"evicted": tier.evicted, "errors": tier.errors}
    print(json.dumps(done), flush=True)


class Process:
    """A process under load, and the last that it said."""

    def __init__(self, path: Path, seed: int, errors: TextIO) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--load", str(path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.pid = self._process.pid
        self.said: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said = json.loads(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Let it close its store; returns its exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._finish(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._finish(60)

    def _finish(self, seconds: float) -> int:
        status = self._process.wait(seconds)
        self._reader.join(5)
        return status


# -- watching --------------------------------------------------------------------------------


def look(pid: int, lane: Path, lanes: Sequence[Path]) -> dict[str, int]:
    """One sample of a process and its lane, in bytes where not counted."""
    memory = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            memory[name.lower()] = int(value.split()[0]) * 1024
    descriptors, segments = 0, 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            file = Path(os.readlink(f"/proc/{pid}/fd/{name}"))
            descriptors += 1
            segments += file.name.startswith("segment-")
    # Two for each segment of its own lane and of those that it follows: they come and go.
    followed = sum(2 for each in lanes for _ in each.glob("segment-*"))
    return {
        **memory,
        "descriptors": descriptors,
        "own_descriptors": descriptors - segments,
        "stray_descriptors": max(0, segments - followed),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "lane": used(lane),
        "largest_lane": max(map(used, lanes), default=0),
    }


def used(folder: Path) -> int:
    """The larger of what the files of a lane claim and what they occupy."""
    claimed = occupied = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            # A page that whoever looks for a lane writes for an instant.
            if file.name == "lock" or file.name.startswith(".probe-"):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = file.lstat()
                claimed += stat.st_size
                occupied += stat.st_blocks * 512 - 4096  # The map of a scattered file.
    return max(claimed, occupied)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Least squares, per hour."""
    if len(set(times)) < 2:
        return 0.0
    return statistics.linear_regression(times, values).slope * 3600


def judge(times: Sequence[float], samples: Sequence[dict[str, int]]) -> tuple[Any, list[str]]:
    """The figures of a run, and what is wrong with them."""
    figures: dict[str, dict[str, float]] = {}
    wrong = []
    settled = [index for index, at in enumerate(times) if at >= WARM_UP * times[-1]]
    middle = len(settled) // 2
    long = len(settled) >= GROWTH_SAMPLES
    for name in samples[0]:
        values = [samples[index][name] for index in settled]
        # Of a short run on a busy machine there may be one alone.
        first = statistics.median(values[:middle] or values)
        last = statistics.median(values[middle:])
        figures[name] = {
            "min": min(values),
            "median": statistics.median(values),
            "max": max(values),
            "first_half": first,
            "second_half": last,
            "per_hour": round(slope([times[index] for index in settled], values), 1),
        }
        more = last - first
        if long and name in ("rss", "pss") and more > GROWTH_BYTES + GROWTH_PART * first:
            wrong.append(f"{name} grows: {first:.0f} to {last:.0f} bytes")
        if (
            long
            and name in ("own_descriptors", "stray_descriptors", "threads")
            and more > GROWTH_DESCRIPTORS
        ):
            wrong.append(f"{name} grow: {first:.0f} to {last:.0f}")
        # Over the budget is over the budget, also at the beginning.
        most = max(sample[name] for sample in samples)
        if name in ("lane", "largest_lane") and most > CAPACITY:
            wrong.append(f"{name} has {most} bytes of {CAPACITY}")
    return figures, wrong


def soak(folder: Path, minutes: float, seed: int) -> int:
    chance = random.Random(seed)
    cache = folder / "cache"
    errors = (folder / "errors").open("w+")
    main = Process(cache, seed, errors)
    begun = time.monotonic()
    while "asked" not in main.said:
        if not main.alive or time.monotonic() - begun > 60:
            main.kill()
            print((folder / "errors").read_text()[-4000:])
            return 1
        time.sleep(0.05)
    begun = time.monotonic()
    times: list[float] = []
    samples: list[dict[str, int]] = []
    counts = dict.fromkeys(("killed", "ended", "compactions"), 0)
    wrong: list[str] = []
    beside: list[tuple[Process, float, bool]] = []
    told = compacted = begun
    lives = 0
    while time.monotonic() - begun < 60 * minutes and main.alive and not main.said["wrong"]:
        now = time.monotonic()
        for one in [one for one in beside if one[1] <= now]:
            process, _, by_force = one
            beside.remove(one)
            if by_force:
                process.kill()
            elif status := process.end():
                wrong.append(f"a neighbour ended with status {status}")
            if process.said.get("wrong"):
                wrong.append("a neighbour was served wrong bytes")
            counts["killed" if by_force else "ended"] += 1
        while len(beside) < 2:
            lives += 1
            process = Process(cache, 1000 * seed + lives, errors)
            beside.append((process, now + chance.uniform(1, 8), lives % 2 == 0))
        if now - compacted > 20:
            compacted = now
            command = [sys.executable, "-m", "kvstore.tools", "compact", str(cache), "--json"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
            if done.returncode > 1:
                wrong.append(f"compact: {done.stderr.strip()}")
            counts["compactions"] += 1
        lanes = list(cache.glob("*/lane-*"))
        own = next(lane for lane in lanes if lane.name == "lane-0")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            samples.append(look(main.pid, own, lanes))
            times.append(time.monotonic() - begun)
        if now - told >= 60:
            told = now
            last = samples[-1]
            print(
                f"{(now - begun) / 60:5.1f} min: rss {last['rss'] / 2**20:.1f} MiB, "
                f"pss {last['pss'] / 2**20:.1f} MiB, {last['descriptors']} descriptors, "
                f"lane {last['lane'] / 2**20:.1f} of {CAPACITY / 2**20:.0f} MiB; {main.said}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(max(0.0, now + 1 - time.monotonic()))
    for process, _, _ in beside:
        process.kill()
    if status := main.end():
        wrong.append(f"the store ended with status {status}: {errors_of(folder)}")
    if main.said.get("wrong"):
        wrong.append(f"{main.said['wrong']} chunks were wrong")
    if main.said.get("failed_reads") or main.said.get("failed_writes"):
        wrong.append("a sound disk failed")
    verified = subprocess.run(
        [sys.executable, "-m", "kvstore.tools", "verify", str(cache), "--json"],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    if verified.returncode:
        wrong.append(f"verify: {verified.stdout.strip()[-1000:]}")
    figures, grown = judge(times, samples)
    wrong += grown
    result = {
        "minutes": round(times[-1] / 60, 2),
        "samples": len(samples),
        "seed": seed,
        "load": main.said,
        "neighbours": counts,
        "figures": figures,
        "wrong": wrong,
    }
    print(json.dumps(result, indent=2))
    return 1 if wrong else 0


def errors_of(folder: Path) -> str:
    return (folder / "errors").read_text()[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="where the cache is made; a temporary folder")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--load", nargs=2, metavar=("PATH", "SEED"), help=argparse.SUPPRESS)
    options = read_options(parser, minutes=0.1)
    if options.load:
        sys.path.insert(0, str(HERE.parent))
        asyncio.run(load(Path(options.load[0]), int(options.load[1])))
        return 0
    if options.minutes < 0.5 and not options.dry:
        parser.error("--minutes: at least 0.5, or there is nothing to judge")
    folder = Path(tempfile.mkdtemp(prefix="kvstore-soak-", dir=options.folder))
    try:
        return soak(folder, options.minutes, options.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
