"""What is used is written down as it goes: a kill -9 costs a minute of recency and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.maintenance.offline import purge
from kvstore.tiers.disk.index import read_index
from tests.patience import PATIENCE

CHUNK = 64 * 1024
CHUNKS = 40
HOT = [33, 5, 21, 2, 17, 38, 9, 26]
"""In the order of their use."""

SERVER = """
import asyncio, json, sys, time
import kvstore
try:
    from kvstore.core import recency
    recency.NOTE_SECONDS = 0.1
except ImportError:
    pass

async def main():
    config, host, hot = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    config["cpu_bytes_to_use"] = host * config["chunk_bytes"]
    async with kvstore.open(config) as store:
        keys = [b"chunk %d" % number for number in range(40)]
        for key in keys:
            await store.put([key], [bytes(store.chunk_bytes)], durable=True)
        await asyncio.sleep(2)
        began = time.time()
        for number in hot:
            async with store.get([keys[number]]) as chunks:
                assert len(chunks) == 1
            # Each is written down before the next is used.
            await asyncio.sleep(0.25)
        print(began, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def config_of(path: Path) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": 64 * CHUNK,
        "chunk_bytes": CHUNK,
        "identity": {"model": "killed"},
        "deadline_s": PATIENCE,
        "max_wait_s": PATIENCE,
        "tiers": [
            {
                "type": "disk",
                "path": str(path),
                "capacity_bytes": 64 * (CHUNK + 4096),
                "segment_bytes": 16 * (CHUNK + 512),
            }
        ],
    }


def use_and_die(path: Path, host_chunks: int) -> float:
    """Let a process store and use chunks, and kill it; returns when the first was used."""
    arguments = [json.dumps(config_of(path)), str(host_chunks), json.dumps(HOT)]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        return float(server.stdout.readline())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def chunks_on(path: Path) -> list[tuple[int, int, bytes]]:
    """Sequence, reads and key of the chunks on disk, as the next process would take them."""
    found: list[tuple[int, int, bytes]] = []
    for segment in path.rglob("segment-*.safetensors"):
        _, live, _ = read_index(segment)
        columns = live.records["sequence"].tolist(), live.records["reads"].tolist(), live.keys()
        found += zip(*columns, strict=True)
    return sorted(found)


@pytest.mark.parametrize("host_chunks", [64, 4], ids=["in host memory", "on disk"])
async def test_what_was_used_before_a_kill_is_hot_for_a_purge_and_for_the_next_process(
    tmp_path: Path, host_chunks: int
) -> None:
    began = use_and_die(tmp_path, host_chunks)
    hot = [b"chunk %d" % number for number in HOT]
    left = chunks_on(tmp_path)
    assert len(left) == CHUNKS
    order = [key for *_, key in left]
    # The last one may not have been written down.
    assert [key for key in order if key in hot[:-1]] == hot[:-1]
    assert {*hot[:-1]} <= {*order[-len(hot) :]}
    if host_chunks < len(HOT):
        assert sum(reads for _, reads, _ in left) >= len(hot) - 2
    # Everything was stored two seconds before that.
    purge(tmp_path, unused_since_ms=1000 * (began - 1))
    assert {key for *_, key in chunks_on(tmp_path)} >= set(hot[:-1])
    assert len(chunks_on(tmp_path)) <= len(hot)
