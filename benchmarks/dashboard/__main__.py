"""The dashboard of docs/grafana over a real vLLM server that Prometheus scrapes, as a picture.

    python -m benchmarks.dashboard FOLDER --minutes 8            # serve, scrape, draw
    python -m benchmarks.dashboard FOLDER --minutes 0            # draw again what was scraped

A server on the CPU (needs vLLM) with a tiny model answers conversations of three turns; a third
of them are held again later. It has host memory for nine of them, a disk for thirty, and behind it
a Redis server (Debian's `redis-server`). Debian's `prometheus` scrapes it. What is drawn is the
answer of that Prometheus to the queries of the panels, read from `docs/grafana/kvstore.json`: a
rendering of our own, not Grafana's.

Besides the picture, the names of all metrics that the server has told are written, by which
the tests know what a dashboard can ask for: `docs/grafana/metrics.txt`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from pathlib import Path

from benchmarks.dashboard.picture import draw
from benchmarks.dashboard.prometheus import Prometheus
from benchmarks.dry import read_options
from benchmarks.redis_server import RedisServer
from benchmarks.serving.clients import Talk, hold
from benchmarks.serving.servers import BLOCK, Server, offload
from benchmarks.serving.settings import room
from examples.tiny_model import kv_bytes_per_token, write_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "grafana"
TALK = Talk(4, conversations=8, turns=3, first=384, grows=256, think=0.4)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--picture", type=Path, default=DOCS / "kvstore.png")
    parser.add_argument("--names", type=Path, default=DOCS / "metrics.txt")
    options = read_options(parser, minutes=0.2)
    folder: Path = options.folder.resolve()
    times = folder / "times.json"
    if options.minutes > 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        times.write_text(json.dumps(scrape(folder, options.minutes * 60, options.names)))
    start, end = json.loads(times.read_text())
    dashboard = json.loads((DOCS / "kvstore.json").read_text())
    with Prometheus(folder / "prometheus") as prometheus:
        draw(dashboard, prometheus, start, end, options.picture)
    print(f"{options.picture}: {end - start:.0f} s")


def scrape(folder: Path, seconds: float, names: Path) -> tuple[float, float]:
    """Let a server answer for so long, scraped by Prometheus; returns from when to when."""
    model = folder / "model"
    model.mkdir()
    write_model(model)
    conversation = room(TALK, 1) * kv_bytes_per_token()
    extra = offload("kvstore", 9 * conversation, 30 * conversation, folder / "cache")
    assert extra is not None
    extra["tiers"][0]["segment_bytes"] = 2 * conversation
    redis = RedisServer(folder, "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
    extra["tiers"].append({"type": "redis", "url": redis.url})
    server = Server(
        "kvstore",
        model,
        folder / "server.log",
        extra,
        device_blocks=room(TALK, TALK.clients) // BLOCK + 1,
        max_tokens=1024,
    )
    try:
        server.wait_until_up()
        target = server.url.removeprefix("http://")
        with Prometheus(folder / "prometheus", target):
            start = time.time()
            turn = 0
            while time.time() - start < seconds:
                # Of three rounds the third is the first once more.
                seed = turn - 2 if turn % 3 == 2 else turn
                asyncio.run(hold(server.url, TALK, seed))
                turn += 1
                print(f"round {turn}, {time.time() - start:.0f} s", flush=True)
            end = time.time()
            time.sleep(4)
        told = server.metrics()
    finally:
        server.stop()
        redis.stop()
    kinds = sorted(line.removeprefix("# TYPE ") for line in told.splitlines() if "# TYPE" in line)
    names.write_text("".join(f"{line}\n" for line in kinds if line.startswith("vllm:")))
    return start, end


if __name__ == "__main__":
    main()
