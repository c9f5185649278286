"""What a flood by one tenant costs another: hit ratios, over each policy and flow.

    python benchmarks/flood.py replay
    python benchmarks/flood.py replay --trace agent --attack again --policies lru --guaranteed 0.9
    python benchmarks/flood.py live --policies lru hit-density

Prints one JSON row per case with the victim's hit ratio: `alone`, beside the attacker `without`
tenants, and `with` tenants.

`replay` sends a trace of the victim through the real core, with host memory and a disk that takes
no time. For each request of the victim there are several of the attacker, each as long as the
victim's are on average: "new" are prompts that never come again, "again" are those of a set twice
as large as the cache, in turn, each asked for twice. `share` is the hit ratio of the victim alone
in a cache of the size that it is guaranteed or due beside the attacker.

`live` is a store over a real disk. The victim asks for 16 prompts of 16 chunks, one at a time;
eight tasks of the attacker ask for new prompts and for some of their last ones, as fast as
computing them takes (0.5 ms a chunk). Together with the hit ratio it prints how long the victim's
calls of `get` took, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kvstore
from benchmarks.dry import read_options
from benchmarks.eviction import FILES, POLICIES, trace
from kvstore.core import Flow
from kvstore.plugins import Choice
from kvstore.policies.shares import Share, Shares, tenant_keys
from kvstore.simulation import Trace
from kvstore.simulation.replay import Server, Setup

CHUNK = 256 * 1024
"""Bytes of a live chunk."""


def attack(kind: str, length: int, cache: int) -> Iterator[list[bytes]]:
    """The attacker's prompts, endlessly."""
    prompts = max(1, 2 * cache // length)
    for number in itertools.count():
        name = number if kind == "new" else number // 2 % prompts
        yield tenant_keys("attacker", [b"%d-%06d" % (name, at) for at in range(length)])


def hit_ratio(requests: Trace, setup: Setup, floods: int, kind: str, length: int) -> float:
    """The victim's hits per chunk that it looks up, beside so many requests of the attacker."""
    server = Server(setup.core(2**20), setup.reserve)
    attacker = attack(kind, length, setup.host + setup.disk)
    hits = looked_up = 0
    victims = tenant_keys("victim", requests.keys())
    for number, (server.now, request) in enumerate(
        zip(requests.times, requests.requests, strict=True)
    ):
        keys = [victims[chunk] for chunk in request]
        hits += server.serve(keys, f"victim-{number}")
        looked_up += len(keys)
        for flood in range(floods):
            server.serve(next(attacker), f"attacker-{number}-{flood}")
    return hits / looked_up


class Live:
    """A real store with a victim, and perhaps an attacker."""

    def __init__(self, store: kvstore.Store, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._chunk = bytes(CHUNK)
        self.stop = False

    async def serve(self, keys: Sequence[bytes], compute: float) -> tuple[int, float]:
        """Get a prompt, compute and store what is missing; returns hits and seconds of `get`."""
        begun = time.perf_counter()
        async with self._store.get(keys) as chunks:
            count = len(chunks)
        seconds = time.perf_counter() - begun
        if count < len(keys):
            await asyncio.sleep(compute * (len(keys) - count))
            await self._store.put(keys, [self._chunk] * len(keys))
        return count, seconds

    async def attack(self, name: str) -> None:
        """Ask for new prompts, and for some of the last ones."""
        for number in itertools.count():
            if self.stop:
                return
            again = self._rng.randrange(max(0, number - 20), number + 1)
            prompt = number if self._rng.random() < 0.5 else again
            keys = [b"%s-%d-%d" % (name.encode(), prompt, at) for at in range(24)]
            await self.serve(tenant_keys("attacker", keys), 0.0005)

    async def victim(self, seconds: float) -> dict[str, float]:
        """Ask for some prompts again and again."""
        prompts = [
            tenant_keys("victim", [b"%d-%d" % (prompt, at) for at in range(16)])
            for prompt in range(16)
        ]
        for keys in prompts:
            await self.serve(keys, 0.002)
        hits, waits, end = 0, [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            count, took = await self.serve(self._rng.choice(prompts), 0.002)
            hits += count
            waits.append(took * 1e3)
            await asyncio.sleep(0.005)
        self.stop = True
        return {
            "hits": round(hits / (16 * len(waits)), 3),
            "p50": round(statistics.median(waits), 2),
            "p99": round(sorted(waits)[len(waits) * 99 // 100], 2),
        }


async def live(
    policy: str, flow: str, tenants: dict[str, Any] | None, attackers: int, seconds: float
) -> dict[str, float]:
    """What the victim gets of a store whose host memory just holds its prompts."""
    with tempfile.TemporaryDirectory(prefix="kvstore-flood-") as folder:
        disk = {
            "type": "disk",
            "path": folder,
            "capacity_bytes": 600 * CHUNK,
            "segment_bytes": 64 * CHUNK,
            "eviction_policy": policy,
            "flow": flow,
        }
        config = {
            "chunk_bytes": CHUNK,
            "cpu_bytes_to_use": 256 * CHUNK,
            "identity": {},
            "eviction_policy": policy,
            "tenants": tenants,
            "tiers": [disk],
        }
        async with kvstore.open(config) as store:
            beside = Live(store, random.Random(1))
            tasks = [asyncio.create_task(beside.attack(f"{n}")) for n in range(attackers)]
            told = await beside.victim(seconds)
            await asyncio.gather(*tasks)
    return told


def run_live(options: argparse.Namespace) -> None:
    """One store after the other."""
    tenants = {"victim": {"guaranteed": 0.5}, "attacker": {}}
    for policy, flow in itertools.product(options.policies, options.flows):
        cases: dict[str, tuple[dict[str, Any] | None, int]] = {
            "alone": (None, 0),
            "without": (None, 8),
            "with": (tenants, 8),
        }
        row = {
            name: asyncio.run(live(policy, flow, shares, attackers, options.seconds))
            for name, (shares, attackers) in cases.items()
        }
        print(json.dumps({"policy": policy, "flow": flow, **row}), flush=True)


def main() -> None:
    """Run each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["replay", "live"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each live store")
    parser.add_argument("--trace", choices=FILES, default="conversation")
    parser.add_argument("--requests", type=int, default=2000, help="of the victim")
    parser.add_argument("--floods", type=int, default=5, help="requests for each of the victim's")
    parser.add_argument("--attack", choices=["new", "again"], default="new")
    parser.add_argument("--host", type=float, default=0.05, help="part of the victim's chunks")
    parser.add_argument("--disk", type=float, default=0.5, help="part of the victim's chunks")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--flows", nargs="*", default=[flow.value for flow in Flow], metavar="FLOW")
    parser.add_argument("--guaranteed", type=float, default=0.0, help="the victim's part")
    options = read_options(
        parser, requests=60, policies=["lru"], flows=["write-through"], floods=2, seconds=0.5
    )
    (run_live if options.what == "live" else run_replay)(options)


def run_replay(options: argparse.Namespace) -> None:
    """One replay after the other."""
    requests = trace(options.trace, options.requests)
    length = max(1, requests.accesses // len(requests.requests))
    host, disk = (max(1, int(requests.unique * part)) for part in (options.host, options.disk))
    shares = Shares({"victim": Share(options.guaranteed), "attacker": Share()}, partitions=1)
    due = options.guaranteed + (1 - options.guaranteed) / 2
    for policy, flow in itertools.product(options.policies, options.flows):
        parts = Choice.parse(policy), Choice.parse(policy)
        # As in a store: `demote_ahead`.
        reserve = 0 if Flow(flow) is Flow.WRITE_THROUGH else length
        whole = Setup(host, disk, *parts, flow=Flow(flow), reserve=reserve)
        part = Setup(int(host * due), int(disk * due), *parts, flow=Flow(flow), reserve=reserve)
        shared = Setup(
            host, disk, *parts, flow=Flow(flow), reserve=reserve, tenants=shares
        )  # fmt: skip
        cases = {
            "alone": (whole, 0),
            "share": (part, 0),
            "without": (whole, options.floods),
            "with": (shared, options.floods),
        }
        row = {
            name: round(hit_ratio(requests, setup, floods, options.attack, length), 4)
            for name, (setup, floods) in cases.items()
        }
        print(json.dumps({"policy": policy, "flow": flow, **row}), flush=True)


if __name__ == "__main__":
    main()
