"""Servers of stores on this machine, to try them: what is installed, until Ctrl-C.

    python benchmarks/store_servers.py

Each is told as the line that a configuration's `tiers` would have. Nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.ceph_gateway import CephGateway, is_installed
from benchmarks.dry import read_options
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer

ROOM = 2**30


def main() -> int:
    """Start them, print how they are used, wait; 1 if there is none to start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options = read_options(parser)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-servers-")))
        told: list[tuple[dict[str, Any], str]] = []
        if shutil.which("redis-server"):
            limits = ("--maxmemory", str(ROOM), "--maxmemory-policy", "allkeys-lru")
            server = RedisServer(folder, *limits)
            stack.callback(server.stop)
            told.append(({"type": "redis", "url": server.url}, "1 GiB, LRU"))
        if find_spec("mooncake"):
            master = MooncakeMaster(folder)
            stack.callback(master.stop)
            tier = {"type": "mooncake", "master": master.address, "contribute_bytes": ROOM}
            told.append((tier, "the pool is what its users contribute"))
        if is_installed():
            gateway = CephGateway(folder, ROOM)
            stack.callback(gateway.end)
            keys = " ".join(f"{name}={value}" for name, value in gateway.environment.items())
            tier = {"type": "object", "url": gateway.url, "endpoint": gateway.endpoint}
            told.append((tier, f"with {keys} in the environment"))
        if not told:
            print("neither redis-server, nor Mooncake, nor Ceph is installed", file=sys.stderr)
            return 1
        for tier, remark in told:
            print(f"{json.dumps(tier)}  # {remark}", flush=True)
        if options.dry:
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
