"""After kill -9 every chunk whose store was reported complete on disk is found, and right.

A real process stores through the real engine without end and says which keys
were reported on disk. It is killed at a random moment, again and again over the
same folder (twenty times in `make kill`); the next process has to find what any
of them had reported.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvstore
from kvstore.testing.bench import payload_of
from tests.patience import PATIENCE

LIVES = int(os.environ.get("KVSTORE_KILLS", "8"))
CHUNK = 64 * 1024
SEGMENT_CHUNKS = 24

WRITER = """
import asyncio, itertools, json, os, sys
import kvstore
from kvstore.testing.bench import payload_of

async def main():
    config, life = json.loads(sys.argv[1]), int(sys.argv[2])
    async with kvstore.open(config) as store:
        for round_ in itertools.count():
            keys = [b"life %d chunk %d" % (life, 8 * round_ + n) for n in range(8)]
            await store.put(keys, [payload_of(key, store.chunk_bytes) for key in keys])
            for event in store.take_events():
                if event.medium == "disk":
                    word = "gone" if event.removed else "kept"
                    lines = [f"{word} {key.hex()}\\n" for key in event.keys]
                    os.write(1, "".join(lines).encode())

asyncio.run(main())
"""


def config_of(path: Path, capacity_chunks: int) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": 64 * CHUNK,
        "chunk_bytes": CHUNK,
        "keep_events": True,
        "identity": {"model": "killed"},
        # A slow disk makes no misses.
        "deadline_s": PATIENCE,
        "max_wait_s": PATIENCE,
        "shutdown_timeout_s": PATIENCE,
        "tiers": [
            {
                "type": "disk",
                "path": str(path),
                "capacity_bytes": capacity_chunks * (CHUNK + 4096),
                "segment_bytes": SEGMENT_CHUNKS * (CHUNK + 512),
            }
        ],
    }


def live_and_die(config: dict[str, Any], life: int, chance: random.Random) -> list[tuple[str, str]]:
    """Let a process store until it is killed; returns what it said."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps(config), str(life)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    try:
        if life % 5 != 4:
            # Wait for the first word, so that most lives have something to lose.
            ready, _, _ = select.select([writer.stdout], [], [], PATIENCE)
            assert ready, "the writer stores nothing"
        time.sleep(chance.uniform(0.0, 0.15))
    finally:
        writer.kill()
        said = writer.stdout.read().decode()
        writer.wait()
        writer.stdout.close()
    lines = said.split("\n")[:-1]
    return [(line.split()[0], line.split()[1]) for line in lines]


async def found_and_right(config: dict[str, Any], keys: list[bytes]) -> set[bytes]:
    """Which of `keys` a new process finds. Fails if one of them has other bytes."""
    found: set[bytes] = set()
    async with kvstore.open(config) as store:
        at = 0
        while at < len(keys):
            async with store.get(keys[at : at + 16]) as chunks:
                for key, chunk in zip(chunks.keys, chunks, strict=True):
                    assert bytes(chunk) == payload_of(key, CHUNK), f"wrong bytes for {key!r}"
                found.update(chunks.keys)
                # What ended the prefix is not there.
                at += len(chunks) + (len(chunks) < 16)
    return found


async def test_what_was_reported_on_disk_survives_every_kill(tmp_path: Path) -> None:
    chance = random.Random(20)
    config = config_of(tmp_path, 200_000)
    reported: list[bytes] = []
    for life in range(LIVES):
        said = live_and_die(config, life, chance)
        assert all(word == "kept" for word, _ in said), "something was evicted"
        new = [bytes.fromhex(key) for _, key in said]
        reported += new
        # All of this life, and some of each life before it.
        asked = new + chance.sample(reported, min(len(reported), 50))
        assert await found_and_right(config, asked) == set(asked)
    assert len(reported) > LIVES * 10, "the writers stored too little to prove anything"
    assert await found_and_right(config, reported) == set(reported)


async def test_kills_amid_evictions_never_leave_wrong_bytes(tmp_path: Path) -> None:
    chance = random.Random(6)
    config = config_of(tmp_path, 3 * SEGMENT_CHUNKS)
    reported: list[bytes] = []
    for life in range(6):
        said = live_and_die(config, life, chance)
        reported += [bytes.fromhex(key) for word, key in said if word == "kept"]
        # Most of them were evicted: here it counts that what is found is right.
        await found_and_right(config, reported)
        segments = list(tmp_path.rglob("segment-*"))
        size = sum(file.stat().st_size for file in segments)
        assert size <= config["tiers"][0]["capacity_bytes"]
    assert len(reported) > 3 * SEGMENT_CHUNKS, "nothing was evicted"
