"""The server of a store, in the namespace that this process was started in.

The first line of the standard input says which; each one behind it is "start" or "stop".
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer


def main() -> None:
    """Serve until the standard input ends; the first line printed is what a tier is told."""
    told = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as folder:
        server: MooncakeMaster | RedisServer
        tier: dict[str, Any]
        if told["store"] == "redis":
            limit = ("--maxmemory", str(told["room"]), "--maxmemory-policy", "noeviction")
            server = RedisServer(Path(folder), *limit, host=told["host"])
            tier = {"type": "redis", "url": server.url}
        else:
            server = MooncakeMaster(Path(folder), host=told["host"])
            tier = {"type": "mooncake", "master": server.address}
        try:
            print(json.dumps(tier), flush=True)
            for line in sys.stdin:
                getattr(server, json.loads(line)["do"])()
                print(json.dumps({}), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
