"""What offload brings to clients of a real vLLM server, kvstore beside vLLM's own tiering.

    python -m benchmarks.serving [--quick] [--json FILE] [--folder FOLDER] [--only WORDS]

Three servers live side by side: without offload, with vLLM's tiering (host memory and
files), and with kvstore over as much host memory and disk. Clients hold conversations whose
prompts grow with every turn. In each round all three answer the same prompts, one server at
a time, in changing order; a server's own work is over before the next one begins. The table
gives ratios to no offload and to vLLM's own tiering; of each server the faster half of its rounds
counts, which leaves out most of what else a shared machine did. Ends with status 1 if an answer
differs from that of the server without offload.

`--quick` takes about 3 minutes, the whole sweep about 30. Where the processor computes the
model, computing is slow beside copies and disk: ratios between the two caches travel
further than those to no offload. The setting with a slow disk needs root and a control
group of version 1; where it cannot be had it is left out, with a word.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.dry import read_options
from benchmarks.serving.clients import Talk, hold
from benchmarks.serving.figures import Figures, Round, grown, rows, table
from benchmarks.serving.servers import NAMES, Server, cached_by_source, counters, offload
from benchmarks.serving.settings import Setting, quick, smallest, sweep
from benchmarks.serving.throttle import Throttle
from examples.tiny_model import kv_bytes_per_token, write_model

DEVICE_BLOCKS = 128
MAX_TOKENS = 3584
DISK_BYTES = 8 * 2**30
"""More than one start writes: vLLM's file tier never removes anything."""

WARM_UP = Talk(1, conversations=2, turns=2, first=128, grows=128)


@contextmanager
def started(folder: Path, host_tokens: int, throttle: Throttle | None) -> Iterator[list[Server]]:
    """The three servers; their disks are removed afterwards."""
    host = host_tokens * kv_bytes_per_token()
    servers: list[Server] = []
    with ExitStack() as stack:
        for name in NAMES:
            disk = folder / f"{name}-{host_tokens}"
            server = Server(
                name,
                folder / "model",
                folder / f"{name}-{host_tokens}.log",
                offload(name, host, DISK_BYTES, disk),
                device_blocks=DEVICE_BLOCKS,
                max_tokens=MAX_TOKENS,
                wrap=throttle.command([]) if throttle is not None else (),
            )
            stack.callback(shutil.rmtree, disk, ignore_errors=True)
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_until_up()
        for server in servers:
            asyncio.run(hold(server.url, WARM_UP, 0))
            server.wait_until_idle()
        yield servers


def one_round(server: Server, talk: Talk, seed: int) -> Round:
    """A round on one server, until that has done all that follows from it."""
    before, (processor, _) = server.metrics(), server.activity()
    turn = asyncio.run(hold(server.url, talk, seed))
    after = server.wait_until_idle()
    cpu, now = server.activity()[0] - processor, server.metrics()
    return Round(
        turn,
        after,
        cpu,
        grown(cached_by_source(before), cached_by_source(now)),
        grown(counters(before), counters(now)),
    )


def compare(servers: list[Server], setting: Setting, rounds: int, seed: int) -> dict[str, Figures]:
    """All rounds of a setting; each begins with another server."""
    figures = {server.name: Figures() for server in servers}
    for number in range(rounds):
        first = (seed + number) % len(servers)
        answered = {
            server.name: one_round(server, setting.talk, 1000 * seed + number + 1)
            for server in servers[first:] + servers[:first]
        }
        for name, found in answered.items():
            figures[name].add(found, answered["none"])
    return figures


def run(settings: list[Setting], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """All settings; a line for each server as soon as it is there."""
    write_model(folder / "model")
    throttle = None
    if any(setting.disk_limit for setting in settings):
        try:
            throttle = Throttle(folder)
        except OSError as error:
            print(f"no slow disk: {error}", flush=True)
    listed: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    try:
        for host, group in itertools.groupby(settings, key=lambda setting: setting.host):
            with started(folder, host, throttle) as servers:
                for setting in group:
                    if setting.disk_limit and throttle is None:
                        continue
                    if throttle is not None:
                        throttle.set(setting.disk_limit)
                    found = rows(setting.name, compare(servers, setting, rounds, next(numbers)))
                    if throttle is not None:
                        throttle.set(0)
                    listed += found
                    print(table(found), flush=True)
    finally:
        if throttle is not None:
            throttle.remove()
    return listed


def main() -> int:
    """Read the command line and run; 1 if an answer is not that without offload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one start, few and short prompts")
    parser.add_argument("--rounds", type=int, help="of each setting (4)")
    parser.add_argument("--only", metavar="WORDS", help="settings whose name has these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", type=Path, help="where model, logs and disks go for a while")
    options = read_options(parser, rounds=1, only="")
    settings = smallest() if options.dry else quick() if options.quick else sweep()
    settings = [one for one in settings if (options.only or "") in one.name]
    if not settings:
        parser.error(f"no setting has {options.only!r} in its name")
    rounds = options.rounds or 4
    # Servers are in groups of their own: whoever ends this process must not leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begun, load = time.monotonic(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvstore-serving-", dir=options.folder) as folder:
        listed = run(settings, rounds, Path(folder))
    print(f"\n{table(listed)}\n")
    print(
        f"{time.monotonic() - begun:.0f} s; {os.cpu_count()} cores, load {load[0]:.1f} before and "
        f"{os.getloadavg()[0]:.1f} at the end"
    )
    if options.json:
        options.json.write_text(json.dumps({"load_before": load, "rows": listed}, indent=1))
    return int(any(row["different"] for row in listed))


if __name__ == "__main__":
    sys.exit(main())
