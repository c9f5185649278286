"""A process over a store whose server comes and goes, for so long, watched from outside.

    python benchmarks/flapping.py --minutes 30 [--store redis]

One process keeps kvstore open over a little host memory, a disk and the store. It asks for chains
of chunks, stores what is missing, forgets everything now and then, and compares every byte.
Meanwhile the server is killed, frozen, let go on and started, every few seconds. Once a second the
process is looked at in /proc. Exit status 1 if memory, descriptors or threads grow, a byte was
wrong, or a call took longer than is promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.dry import read_options
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer
from benchmarks.soak import CHAIN_CHUNKS, CHUNK, chain, judge, look, payload

HOST = 16 * 2**20
DISK = 32 * 2**20
CHAINS = 200
DEADLINE_S = 1.0

SLACK_S = 1.0
"""What a call may take beyond the deadline where others keep the processor busy."""


async def load(config: dict[str, Any], seed: int) -> None:
    """Ask, compare and store until standard input ends; says how much, every few seconds."""
    import kvstore

    chance = random.Random(seed)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    done: dict[str, Any] = dict.fromkeys(("asked", "hits", "remote", "wrong", "resets"), 0)
    done["longest_s"] = 0.0
    said = time.monotonic()
    async with kvstore.open(config) as store:
        while not ended.is_set():
            keys = chain(int(CHAINS * chance.random() ** 2))[: chance.randint(1, CHAIN_CHUNKS)]
            done["asked"] += len(keys)
            began = time.monotonic()
            async with store.get(keys) as chunks:
                done["longest_s"] = max(done["longest_s"], time.monotonic() - began)
                held = len(chunks)
                done["hits"] += held
                done["remote"] += list(chunks.sources).count("remote")
                done["wrong"] += sum(
                    chunk != payload(key) for key, chunk in zip(chunks.keys, chunks, strict=True)
                )
            rest = keys[held:]
            if rest:
                await store.put(rest, [payload(key) for key in rest], wait=False)
            if chance.random() < 0.0005:
                await store.reset()
                done["resets"] += 1
            await asyncio.sleep(0.01)
            if time.monotonic() - said > 2:
                said = time.monotonic()
                print(json.dumps(done), flush=True)
        tier = store.stats().tiers[-1]
    done |= {"asks": tier.asks.count, "found": tier.found, "unanswered": tier.unanswered}
    done |= {"written": tier.written, "failed_reads": tier.failed_reads, "corrupt": tier.corrupt}
    print(json.dumps(done), flush=True)


def flap(minutes: float, store: str, seed: int, folder: Path) -> int:
    """Let the server come and go while a process uses it; 1 if anything was wrong."""
    chance = random.Random(seed)
    server: RedisServer | MooncakeMaster
    if store == "redis":
        limit = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
        server = RedisServer(folder, *limit)
        tier: dict[str, Any] = {"type": "redis", "url": server.url}
    else:
        server = MooncakeMaster(folder)
        tier = {"type": "mooncake", "master": server.address, "contribute_bytes": 64 * 2**20}
    disk = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": DISK}
    config = {
        "cpu_bytes_to_use": HOST,
        "chunk_bytes": CHUNK,
        "identity": {"model": "flapping"},
        "deadline_s": DEADLINE_S,
        "tiers": [{**disk, "segment_bytes": 8 * 2**20}, tier],
    }
    command = [sys.executable, __file__, "--load", json.dumps(config), "--seed", str(seed)]
    said: dict[str, Any] = {}
    with (folder / "errors").open("w") as errors:
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, text=True)

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                said.update(json.loads(line))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    times: list[float] = []
    samples: list[dict[str, int]] = []
    counts = {"killed": 0, "frozen": 0}
    began = told = time.monotonic()
    changes = began + 5
    serves = True
    while (now := time.monotonic()) - began < 60 * minutes and process.poll() is None:
        if now >= changes:
            changes = now + chance.uniform(1, 10)
            if not serves:
                server.start()
            elif chance.random() < 0.5:
                server.stop()
                counts["killed"] += 1
            else:
                server.freeze()
                counts["frozen"] += 1
            serves = not serves
        with suppress(FileNotFoundError, ProcessLookupError):
            lanes = list((folder / "cache").glob("*/lane-*"))
            samples.append(look(process.pid, lanes[0] if lanes else folder / "none", lanes))
            times.append(now - began)
        if now - told >= 60:
            told = now
            rss = samples[-1]["rss"] / 2**20
            print(f"{(now - began) / 60:5.1f} min: rss {rss:.1f} MiB; {said}", file=sys.stderr)
        time.sleep(1)
    server.start()
    assert process.stdin is not None
    process.stdin.close()
    status = process.wait(120)
    listener.join(5)
    server.stop()
    figures, wrong = judge(times, samples)
    if status:
        wrong.append(f"it ended with {status}: {(folder / 'errors').read_text()[-2000:]}")
    if said.get("wrong"):
        wrong.append(f"{said['wrong']} chunks were wrong")
    if said["longest_s"] > DEADLINE_S + SLACK_S:
        wrong.append(f"a call took {said['longest_s']:.1f} s")
    result = {"store": store, "minutes": minutes, "server": counts, "load": said}
    kept = {name: figures[name] for name in ("rss", "own_descriptors", "threads")}
    print(json.dumps({**result, "figures": kept, "wrong": wrong}, indent=2))
    return 1 if wrong else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--store", choices=("redis", "mooncake"), default="redis")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = read_options(parser, minutes=0.2)
    if options.load:
        asyncio.run(load(json.loads(options.load), options.seed))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstore-flapping-") as folder:
        return flap(options.minutes, options.store, options.seed, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
