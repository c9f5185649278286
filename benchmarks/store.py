"""Stores beside their own clients: the same payloads, in one run, in turns.

    python benchmarks/store.py [--stores redis,mooncake,object] [--rounds N] [--sizes 256KiB,2MiB]
    python benchmarks/store.py --codec [--stores redis,object]
    python benchmarks/store.py --link 1000 [--stores redis,object]

Engines run on this machine, on the loopback: what is measured is what kvstore adds (records,
digests, checks, hops between threads), not a network. One JSON row for each store, size and
direction: GB/s of the store tier, of the native client, and the ratio; medians of the rounds.
The native clients move payloads alone: Mooncake's between registered memory, Redis's by pipelined
SET and GET of bytes, which it makes and hands over itself, obstore's by one PUT or GET of each
payload, 32 at once, to Ceph's gateway.

With --codec kvstore encodes the chunks; the clients move them as they are.

With --link there are so many Mbit/s between kvstore and the engine, and one process stores eight
prompts of 32 MiB at once, which another one loads at once: one row for each store and direction
tells how many chunks arrived, in how many seconds, how many the link needs for their bytes, and by
how much the process grew beside its host memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kvstore
from benchmarks.ceph_gateway import CephGateway
from benchmarks.dry import read_options
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer
from benchmarks.throttled_link import ThrottledLink
from kvstore.assembly import TAIL_SHARE, rows_for
from kvstore.config import Config, TierConfig
from kvstore.sizes import parse_size
from kvstore.tiers.base import Tier
from kvstore.tiers.codec import Codec
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import TierPlace

BATCH_BYTES = 64 * 2**20
"""Moved by each call."""

POOL_BYTES = 2**31

HOST = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host = MooncakeDistributedStore()
pool = int(sys.argv[2])
print(host.setup("127.0.0.1", "P2PHANDSHAKE", pool, 2**24, "tcp", "", sys.argv[1]), flush=True)
time.sleep(3600)
"""

Native = Callable[[Sequence[str], bool], Awaitable[None]]
"""Moves all rows under these names, to the store or back (True)."""


@contextmanager
def redis(place: TierPlace, region: PinnedRegion, folder: Path) -> Iterator[tuple[Tier, Native]]:
    from redis.asyncio import Redis

    from kvstore.tiers.remote.redis import RedisTier

    server = RedisServer(
        folder, "--maxmemory", str(POOL_BYTES), "--maxmemory-policy", "allkeys-lru"
    )
    client = Redis(port=server.port)

    async def native(names: Sequence[str], load: bool) -> None:
        pipe = client.pipeline(transaction=False)
        for row, name in enumerate(names):
            if load:
                pipe.get(name)
            else:
                pipe.set(name, bytes(region.row(row)))
        for row, value in enumerate(await pipe.execute()):
            if load:
                region.row(row)[:] = value

    try:
        yield RedisTier(place, url=server.url, timeout_s=30), native
    finally:
        server.stop()


@contextmanager
def mooncake(place: TierPlace, region: PinnedRegion, folder: Path) -> Iterator[tuple[Tier, Native]]:
    from mooncake.store import MooncakeDistributedStore

    from kvstore.tiers.remote.mooncake import MooncakeTier

    master = MooncakeMaster(folder)
    # Its memory is another process's, as another host's would be.
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, master.address, str(POOL_BYTES)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"0\n"
    engine = MooncakeDistributedStore()
    failed = engine.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", master.address)
    assert not failed, failed
    assert not engine.register_buffer(region.address, region.size)
    sizes = [region.row_bytes] * region.rows
    addresses = [region.address + row * region.stride for row in range(region.rows)]

    async def native(names: Sequence[str], load: bool) -> None:
        move: Any = engine.batch_get_into if load else engine.batch_put_from
        told = await asyncio.to_thread(move, list(names), addresses, sizes)
        assert min(told) >= 0, told

    try:
        yield MooncakeTier(place, master=master.address, timeout_s=30), native
    finally:
        engine.close()
        host.kill()
        host.wait()
        master.stop()


@contextmanager
def s3(place: TierPlace, region: PinnedRegion, folder: Path) -> Iterator[tuple[Tier, Native]]:
    import obstore
    from obstore.store import S3Store

    from kvstore.tiers.remote.object import CONNECTIONS, ObjectTier

    gateway = CephGateway(folder)
    os.environ.update(gateway.environment)
    client = S3Store(
        gateway.bucket,
        endpoint=gateway.endpoint,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )

    async def native(names: Sequence[str], load: bool) -> None:
        at_once = asyncio.Semaphore(CONNECTIONS)

        async def one(row: int, name: str) -> None:
            async with at_once:
                if load:
                    value = await (await obstore.get_async(client, name)).bytes_async()
                    region.row(row)[:] = memoryview(value)
                else:
                    payload = bytes(region.row(row))
                    await obstore.put_async(client, name, payload, use_multipart=False)

        await asyncio.gather(*(one(*each) for each in enumerate(names)))

    try:
        tier = ObjectTier(place, url=gateway.url, endpoint=gateway.endpoint, timeout_s=30)
        yield tier, native
    finally:
        gateway.end()


STORES = {"redis": redis, "mooncake": mooncake, "object": s3}


async def compare(
    tier: Tier, native: Native, region: PinnedRegion, rounds: int
) -> dict[str, dict[str, float]]:
    """GB/s of both, by direction: medians of all rounds but the first."""
    tier.open(region)
    rows = list(range(region.rows))
    speeds: dict[tuple[str, str], list[float]] = {}

    async def ours(keys: Sequence[bytes], load: bool) -> None:
        move = tier.read if load else tier.write
        done = await move(keys, [0] * len(keys), rows)
        assert all(done.ok), done.error

    for number in range(rounds + 1):
        keys = [b"%d-%d" % (number, row) for row in rows]
        names = [f"native/{number}/{row}" for row in rows]
        for direction in ("write", "read"):
            for who in ("kvstore", "native") if number % 2 else ("native", "kvstore"):
                began = time.perf_counter()
                if who == "kvstore":
                    await ours(keys, direction == "read")
                else:
                    await native(names, direction == "read")
                speed = region.rows * region.row_bytes / (time.perf_counter() - began) / 1e9
                if number:
                    # In the first one connections and pages are made.
                    speeds.setdefault((direction, who), []).append(speed)
        await tier.erase(keys)
    await tier.close([])
    return {
        direction: {who: statistics.median(speeds[direction, who]) for who in ("kvstore", "native")}
        for direction in ("write", "read")
    }


# -- a link that is slower than what is asked of it ------------------------------------------------

PROMPTS, PROMPT_BYTES, CHUNK_BYTES = 8, 32 * 2**20, 2 * 2**20


@contextmanager
def linked(store: str, bytes_per_s: float, folder: Path) -> Iterator[dict[str, Any]]:
    """The line of a configuration's `tiers` that leads to a server over a link."""
    if store == "redis":
        server = RedisServer(folder)
        link = ThrottledLink(folder, server.port, bytes_per_s)
        try:
            yield {"type": "redis", "url": f"redis://127.0.0.1:{link.port}/0"}
        finally:
            link.stop()
            server.stop()
        return
    gateway = CephGateway(folder)
    os.environ.update(gateway.environment)
    link = ThrottledLink(folder, gateway.port, bytes_per_s)
    try:
        near = f"http://127.0.0.1:{link.port}"
        yield {"type": "object", "url": gateway.url, "endpoint": near}
    finally:
        link.stop()
        gateway.end()


@contextmanager
def growth() -> Iterator[list[int]]:
    """By how many bytes this process grew meanwhile, at most; told at the end."""
    told: list[int] = []
    ends = threading.Event()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = most = resident()

    def watch() -> None:
        nonlocal most
        while not ends.wait(0.002):
            most = max(most, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield told
    finally:
        ends.set()
        thread.join()
        told.append(most - before)


async def overload(tier: dict[str, Any]) -> dict[str, tuple[int, float, int]]:
    """Chunks that arrived, seconds, and bytes of memory, by direction."""
    each = PROMPT_BYTES // CHUNK_BYTES
    config = {
        "cpu_bytes_to_use": 2 * PROMPTS * PROMPT_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "identity": {"model": "benchmark"},
        "tiers": [tier],
    }
    prompts = [[b"%d-%d" % (n, place) for place in range(each)] for n in range(PROMPTS)]
    payload = np.random.default_rng(0).bytes(CHUNK_BYTES)
    found: dict[str, tuple[int, float, int]] = {}

    async with kvstore.open(config) as store:
        began = time.perf_counter()
        with growth() as grown:
            await asyncio.gather(*(store.put(keys, [payload] * each) for keys in prompts))
            await store.flush(600)
        seconds = time.perf_counter() - began
        stored = store.stats().tiers[0].written
        found["write"] = stored, seconds, grown[0]
    async with kvstore.open(config) as store:

        async def load(keys: Sequence[bytes]) -> int:
            async with store.get(keys) as chunks:
                return len(chunks)

        began = time.perf_counter()
        with growth() as grown:
            arrived = await asyncio.gather(*map(load, prompts))
        found["read"] = sum(arrived), time.perf_counter() - began, grown[0]
    return found


def tell_overload(stores: Sequence[str], mbit_per_s: float) -> None:
    """Print one row for each store and direction."""
    bytes_per_s = mbit_per_s * 1e6 / 8
    for name in stores:
        with (
            tempfile.TemporaryDirectory() as folder,
            linked(name, bytes_per_s, Path(folder)) as tier,
        ):
            found = asyncio.run(overload(tier))
        for direction, (arrived, seconds, grown) in found.items():
            row = {
                "store": name,
                "link_mbit_s": mbit_per_s,
                "direction": direction,
                "chunks": PROMPTS * PROMPT_BYTES // CHUNK_BYTES,
                "arrived": arrived,
                "seconds": round(seconds, 2),
                "link_seconds": round(PROMPTS * PROMPT_BYTES / bytes_per_s, 2),
                "extra_mib": round(grown / 2**20, 1),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stores", default="redis,mooncake,object")
    parser.add_argument("--sizes", default="256KiB,2MiB")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--link", type=float, help="Mbit/s between kvstore and the engine")
    parser.add_argument("--codec", action="store_true", help="encode chunks; not with Mooncake")
    options = read_options(parser, stores="redis", sizes="2MiB", rounds=1)
    if options.link:
        stores = [name for name in options.stores.split(",") if name != "mooncake"]
        tell_overload(stores, options.link)
        return
    names = options.stores.split(",")
    for name in [name for name in names if name != "mooncake" or not options.codec]:
        for text in options.sizes.split(","):
            size = parse_size(text)
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                # As host memory is where such a store is named.
                room = BATCH_BYTES + BATCH_BYTES // TAIL_SHARE
                shape = rows_for(Config(cpu_bytes_to_use=room, tiers=(TierConfig(name),)), size)
                region = PinnedRegion.private(BATCH_BYTES // size, *shape[1:])
                region.array[:] = np.random.default_rng(0).integers(
                    0, 256, region.array.shape, np.uint8
                )
                codec = Codec("bfloat16") if options.codec else None
                place = TierPlace("bench", {}, size, codec=codec)
                tier, native = stack.enter_context(STORES[name](place, region, folder))
                found = asyncio.run(compare(tier, native, region, options.rounds))
            for direction, fast in found.items():
                row = {"store": name, "size": text, "direction": direction}
                row |= {f"{who}_gb_s": round(speed, 2) for who, speed in fast.items()}
                row["ratio"] = round(fast["kvstore"] / fast["native"], 2)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
