"""A program, to be run in a network namespace of its own: reads that Mooncake gives up.

Over a wire so slow that its client gives a transfer up, chunks are read from a store; then others
are put where those would have gone, and watched. It prints how often a wrong byte was seen.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import kvstore
from benchmarks.mooncake_master import MooncakeMaster
from tests.patience import PATIENCE

CHUNK = 4 * 2**20
OLD, NEW = 16, 28

HOST = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host = MooncakeDistributedStore()
assert not host.setup("127.0.0.1", "P2PHANDSHAKE", 2**28, 2**24, "tcp", "", sys.argv[1])
print("there", flush=True)
time.sleep(3600)
"""


async def watch(master: str) -> int:
    """Of all chunks that were served, the wrong ones."""
    pool: dict[str, Any] = {"type": "mooncake", "master": master}
    config: dict[str, Any] = {"cpu_bytes_to_use": 32 * (CHUNK + 4096), "chunk_bytes": CHUNK}
    config["identity"] = {"model": "slow wire"}
    old = [b"old %d" % number for number in range(OLD)]
    new = [b"new %d" % number for number in range(NEW)]
    async with kvstore.open(config | {"tiers": [pool]}) as store:
        assert await store.put(old, [b"\x11" * CHUNK] * OLD) == OLD
        assert await store.flush(PATIENCE)
    wrong = 0
    async with kvstore.open(config | {"tiers": [pool | {"flow": "demote"}]}) as store:
        shaped = "tc qdisc add dev lo root tbf rate 8mbit burst 20k latency 60ms"
        subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
        subprocess.run(shaped.split(), check=True)
        await store.resolve(old)
        while store.stats().tiers[0].reading:
            await asyncio.sleep(0.1)
        assert await store.put(new, [b"\x22" * CHUNK] * NEW) == NEW
        for _ in range(10):
            await asyncio.sleep(0.5)
            async with store.get(new) as chunks:
                wrong += sum(bytes(chunk) != b"\x22" * CHUNK for chunk in chunks)
    return wrong


def main() -> None:
    os.environ["MC_RPC_TIMEOUT_MS"] = "2000"
    with tempfile.TemporaryDirectory() as folder:
        master = MooncakeMaster(Path(folder))
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, master.address], stdout=subprocess.PIPE, text=True
        )
        assert host.stdout is not None
        while "there" not in host.stdout.readline():
            pass
        try:
            print("wrong:", asyncio.run(watch(master.address)), flush=True)
        finally:
            # Whoever ends the program ends all that it has started.
            os._exit(0)


if __name__ == "__main__":
    main()
