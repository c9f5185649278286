"""``kvstore simulate --replicas``: several servers behind a router."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvstore.errors import ConfigError
from kvstore.simulation import ROUTERS, Fleet, FleetOutcome, Setup, Trace, replay_fleet
from kvstore.tools.output import print_json, print_table
from kvstore.tools.replays import (
    about,
    chunks_of,
    note,
    part_of,
    print_trace,
    progress_of,
    scaled,
    shown_bytes,
    split,
)

__all__ = ["replay_fleets"]

MOST_REPLICAS = 10_000

HEADER = (
    "host", "disk", "store", "router", "busiest", "hits %", "host %", "disk %", "store %",
    "asked", "read", "written", "wire/hit", "s",
)  # fmt: skip


def replay_fleets(
    options: argparse.Namespace, trace: Trace, setups: Sequence[Setup], size: int | None
) -> int:
    """Replay over several servers, for each combination of setup, store and router."""
    if not 1 <= options.replicas <= MOST_REPLICAS:
        raise ConfigError(f"--replicas {options.replicas}: must be from 1 to {MOST_REPLICAS}")
    if options.hints or options.optimum or options.picture is not None:
        raise ConfigError("--replicas cannot be combined with --hints, --optimum or --picture")
    routers = options.router and split(options.router)
    if not routers:
        raise ConfigError("--router: name at least one")
    for router in routers:
        if router not in ROUTERS:
            raise ConfigError(f"--router {router}: must be one of: {', '.join(ROUTERS)}")
    stores = [chunks_of("--store", text, trace, size) for text in split(options.store)]
    part = part_of(trace, options)
    scale = part.unique / trace.unique
    rows = []
    for setup, store, router in itertools.product(setups, stores, routers):
        shared = max(1, round(store * scale)) if store else 0
        fleet = Fleet(options.replicas, scaled(setup, scale), shared, router)
        told = progress_of(f"{router}, a store of {store} chunks", part)
        rows.append((setup, store, replay_fleet(part, fleet, chunk_bytes=size, progress=told)))
    note("")
    if options.json:
        replays = [_row_of_fleet(*row) for row in rows]
        print_json({"trace": about(trace, part), "replays": replays})
        return 0
    print_trace(trace, part)
    print(f"{options.replicas} servers; sizes are per server")
    shown = [_shown_fleet(*row, size) for row in rows]
    print_table([f">{name}" for name in HEADER], shown)
    return 0


def _row_of_fleet(setup: Setup, store: int, outcome: FleetOutcome) -> dict[str, Any]:
    counts = asdict(outcome)
    del counts["fleet"]
    return {
        "replicas": outcome.fleet.replicas,
        "router": outcome.fleet.router,
        "host_chunks": setup.host,
        "disk_chunks": setup.disk,
        "store_chunks": store,
        "hit_ratio": outcome.hit_ratio,
        "bytes_on_the_wire_per_hit": outcome.wire_per_hit,
        **counts,
    }


def _shown_fleet(
    setup: Setup, store: int, outcome: FleetOutcome, size: int | None
) -> tuple[str, ...]:
    accesses = max(1, outcome.accesses)
    return (
        str(setup.host),
        str(setup.disk or "-"),
        str(store or "-"),
        outcome.fleet.router,
        f"{outcome.busiest:.2f}",
        f"{100 * outcome.hit_ratio:.2f}",
        *(
            f"{100 * hits / accesses:.2f}"
            for hits in (outcome.host_hits, outcome.disk_hits, outcome.store_hits)
        ),
        str(outcome.store_questions),
        str(outcome.store_read),
        str(outcome.store_written),
        shown_bytes(outcome.wire_per_hit, size),
        f"{outcome.seconds:.1f}",
    )
