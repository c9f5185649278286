"""What a flood by one tenant costs another: hit ratios of a trace, over each policy and flow.

    python benchmarks/flood.py
    python benchmarks/flood.py --trace agent --attack again --policies lru --guaranteed 0.9

The trace of the victim is replayed through the real core with host memory and a disk. Beside it an
attacker sends several requests for each of the victim's, each as long as the victim's are on
average: "new" are prompts that never come again, "again" are those of a set twice as large as the
cache, in turn, each asked for twice.

Prints one JSON row per case with the victim's hit ratio: `alone` in the whole cache, `share`
alone in a cache of the size that it is guaranteed or due, `without` beside the attacker, and `with`
beside it where each is a tenant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.dry import read_options
from benchmarks.eviction import FILES, POLICIES
from benchmarks.traces import TRACES, Request, key_of, read_trace
from kvstore.core import Flow
from kvstore.plugins import Choice
from kvstore.policies.tenants import Share, Shares, tenant_keys
from kvstore.simulation.replay import Server, Setup


def attack(kind: str, length: int, cache: int) -> Iterator[list[bytes]]:
    """The attacker's prompts, endlessly."""
    prompts = max(1, 2 * cache // length)
    for number in itertools.count():
        name = number if kind == "new" else number // 2 % prompts
        yield tenant_keys("attacker", [b"%d-%06d" % (name, at) for at in range(length)])


def hit_ratio(
    requests: Sequence[Request], setup: Setup, floods: int, kind: str, length: int
) -> float:
    """The victim's hits per chunk that it looks up, beside so many requests of the attacker."""
    server = Server(setup.core(2**20), setup.reserve)
    attacker = attack(kind, length, setup.host + setup.disk)
    hits = looked_up = 0
    for number, request in enumerate(requests):
        server.now = request.timestamp / 1e3
        keys = tenant_keys("victim", map(key_of, request.hash_ids))
        hits += server.serve(keys, f"victim-{number}")
        looked_up += len(keys)
        for flood in range(floods):
            server.serve(next(attacker), f"attacker-{number}-{flood}")
    return hits / looked_up


def main() -> None:
    """Replay each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", choices=FILES, default="conversation")
    parser.add_argument("--requests", type=int, default=2000, help="of the victim")
    parser.add_argument("--floods", type=int, default=5, help="requests for each of the victim's")
    parser.add_argument("--attack", choices=["new", "again"], default="new")
    parser.add_argument("--host", type=float, default=0.05, help="part of the victim's chunks")
    parser.add_argument("--disk", type=float, default=0.5, help="part of the victim's chunks")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--flows", nargs="*", default=[flow.value for flow in Flow], metavar="FLOW")
    parser.add_argument("--guaranteed", type=float, default=0.0, help="the victim's part")
    options = read_options(parser, requests=60, policies=["lru"], floods=2)
    requests = list(itertools.islice(read_trace(TRACES / FILES[options.trace]), options.requests))
    unique = len({chunk for request in requests for chunk in request.hash_ids})
    length = max(1, sum(len(request.hash_ids) for request in requests) // len(requests))
    host, disk = max(1, int(unique * options.host)), max(1, int(unique * options.disk))
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
