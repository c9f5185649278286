"""Policy x size x trace, and flow x admission over two tiers, replayed through the real core.

    python benchmarks/simulate.py [--traces conversation,chat,agent] [--json FILE] [--quick]

Prints three tables in Markdown: hits per access in percent with chunks written
per hit, beside the offline optimum; the same in seconds of computing that hits
save; and for two tiers what each flow and a reuse threshold bring and write. The
traces lie in benchmarks/traces; the agent trace takes most of the time, and
`--quick` leaves its larger sizes out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The packages, not the scripts beside this one that have their names.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.dry import read_options  # noqa: E402
from benchmarks.eviction import trace as read  # noqa: E402
from kvstore.core import Flow  # noqa: E402
from kvstore.plugins import Choice  # noqa: E402
from kvstore.policies import policy_names  # noqa: E402
from kvstore.simulation import Costs, Outcome, Setup, Trace, optimum, replay  # noqa: E402

SIZES = {"conversation": (1, 5, 10, 25, 50), "chat": (1, 5, 10, 25), "agent": (1, 5, 10)}
"""For each trace the sizes of the tier, in percent of its chunks."""

CHUNK_TOKENS = {"conversation": 512, "chat": 64, "agent": 256}

TWICE_TOKENS = 30_000
"""Tokens before a chunk at which it takes twice as long to compute as at the beginning. For a
model of 8 billion parameters, 32 layers and a width of 4,096: 16 GFLOP for each token, and
4 x 32 x 4,096 FLOP more for each token before it."""

QUICK = {"agent": (1,)}

HOST_PERCENT, DISK_PERCENT = 2, 8

REUSE = Choice("reuse", (("threshold", 2), ("table", 10**6)))


def one_tier(name: str, trace: Trace, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Every policy at every size, and the optimum."""
    costs = Costs(compute=1.0, deeper=CHUNK_TOKENS[name] / TWICE_TOKENS)
    for percent in sizes:
        capacity = trace.unique * percent // 100
        bound = optimum(trace, capacity)
        yield {
            "trace": name,
            "percent": percent,
            "chunks": capacity,
            "policy": "optimum",
            "hits": bound.hits,
            "hit_ratio": bound.hit_ratio,
            "writes": bound.inserts,
            "writes_per_hit": bound.inserts / bound.hits,
        }
        for policy in policy_names():
            outcome = replay(trace, Setup(capacity, host_policy=Choice(policy)))
            yield {
                "trace": name,
                "percent": percent,
                "chunks": capacity,
                "policy": policy,
                "hits": outcome.hits,
                "hit_ratio": outcome.hit_ratio,
                "saved": costs.share_saved(outcome),
                "writes": outcome.host_writes,
                "writes_per_hit": outcome.host_writes / max(1, outcome.hits),
                "accesses_per_second": outcome.accesses / outcome.seconds,
            }


def two_tiers(name: str, trace: Trace, policies: list[str]) -> Iterator[dict[str, Any]]:
    """Every flow with and without a reuse threshold, for a few policies in both tiers."""
    host, disk = (trace.unique * percent // 100 for percent in (HOST_PERCENT, DISK_PERCENT))
    longest = max(map(len, trace.requests))
    bound = optimum(trace, host + disk)
    for policy in policies:
        for gate in ((), (REUSE,)):
            for flow in Flow:
                ahead = 0 if flow is Flow.WRITE_THROUGH else longest
                choice = Choice(policy)
                setup = Setup(host, disk, choice, choice, (), gate, flow, ahead)
                outcome = replay(trace, setup)
                yield {"trace": name, "optimum": bound.hit_ratio, **told(outcome)}


def told(outcome: Outcome) -> dict[str, Any]:
    setup = outcome.setup
    return {
        "host_chunks": setup.host,
        "disk_chunks": setup.disk,
        "policy": str(setup.host_policy),
        "flow": setup.flow.value,
        "admission": "+".join(map(str, setup.disk_admission)) or None,
        "hits": outcome.hits,
        "hit_ratio": outcome.hit_ratio,
        "host_hit_ratio": outcome.host_hits / outcome.accesses,
        "disk_writes": outcome.disk_writes,
        "writes_per_hit": outcome.disk_writes / max(1, outcome.hits),
        "accesses_per_second": outcome.accesses / outcome.seconds,
    }


def print_one_tier(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> None:
    sizes = sorted({(row["trace"], row["percent"]) for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found = {(row["trace"], row["percent"], row["policy"]): row for row in rows}
    print("| policy | " + " | ".join(f"{name} {percent} %" for name, percent in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for policy in policies:
        cells = []
        for size in sizes:
            cells.append(cell(found[(*size, policy)]))
        print(f"| {policy} | " + " | ".join(cells) + " |")


def print_two_tiers(rows: list[dict[str, Any]]) -> None:
    print("| trace | policy | flow | reuse 2 | hits % | host % | disk writes | per hit | optimum |")
    print("|---" * 9 + "|")
    for row in rows:
        cells = (
            row["trace"],
            row["policy"],
            row["flow"],
            "yes" if row["admission"] else "no",
            f"{100 * row['hit_ratio']:.2f}",
            f"{100 * row['host_hit_ratio']:.2f}",
            row["disk_writes"],
            f"{row['writes_per_hit']:.2f}",
            f"{100 * row['optimum']:.2f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", default=",".join(SIZES), help="some of them, by commas")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--limit", type=int, help="the first requests of each only")
    parser.add_argument("--quick", action="store_true", help="leave the slowest out")
    options = read_options(parser, traces="conversation", limit=200)
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    began = time.monotonic()
    for name in options.traces.split(","):
        if name not in SIZES:
            parser.error(f"unknown trace {name!r}; known are: {', '.join(SIZES)}")
        trace, sizes = read(name, options.limit), SIZES[name]
        for row in one_tier(name, trace, QUICK.get(name, sizes) if options.quick else sizes):
            rows.append(row)
            print(f"{row['trace']} {row['percent']} % {row['policy']}", file=sys.stderr)
        if name != "agent" or not options.quick:
            pairs += two_tiers(name, trace, ["lru", "arc", "hit-density"])
        if options.json:
            options.json.write_text(json.dumps({"one_tier": rows, "two_tiers": pairs}, indent=1))
    print_one_tier(rows, lambda row: f"{100 * row['hit_ratio']:.2f} ({row['writes_per_hit']:.2f})")
    print("\nSeconds of computing that hits save, in percent of all:\n")
    print_one_tier([row for row in rows if "saved" in row], lambda row: f"{100 * row['saved']:.2f}")
    print()
    print_two_tiers(pairs)
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
