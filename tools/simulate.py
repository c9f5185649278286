"""``kvstore simulate``: hit ratios for other sizes, policies and flows."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.core import Flow
from kvstore.errors import ConfigError
from kvstore.plugins import Choice, build_filters, build_policy
from kvstore.simulation import (
    ROUTERS,
    Costs,
    LRUCurve,
    Outcome,
    Setup,
    Trace,
    check_picture,
    draw,
    optimum,
    read_trace,
    replay,
    sizes_between,
)
from kvstore.simulation.replay import DEFAULT_CHUNK_BYTES
from kvstore.sizes import format_size
from kvstore.tools.fleets import replay_fleets
from kvstore.tools.output import parse_bytes, print_json, print_table, whole_number
from kvstore.tools.replays import (
    DEFAULT_PART,
    about,
    add_costs,
    chunks_of,
    costs_of,
    note,
    part_of,
    print_trace,
    progress_of,
    sampled,
    scaled,
    shown_bytes,
    split,
)

__all__ = ["add_simulate_arguments", "run_simulate"]

NOTED_BYTES = 8 * 2**20
"""Size of a trace from which the progress of reading it is shown."""

CURVE_POINTS = 12
CURVE_ACCESSES = 2_000_000
"""Approximate number of accesses that a curve replays, unless --sample is given."""

HEADER = (
    "host", "policy", "admission", "disk", "policy", "admission", "flow", "hints",
    "hits %", "host %", "disk %", "disk writes", "written/hit", "evicted host", "disk", "s",
)  # fmt: skip

SAVED = ("s saved", "saved %")
"""More columns, where it is known what a chunk costs."""


def add_simulate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    several = "tries each of a comma-separated list"
    command.add_argument("trace", type=Path, help="Mooncake, packed, or kvstore's own recording")
    command.add_argument(
        "--host",
        help=f"chunks, percent of the trace's chunks, or bytes; {several}; 10%% by default",
    )
    command.add_argument("--disk", default="0", help="the same for disk; 0 means none")
    command.add_argument("--policy", default="lru", help=f"for host memory; {several}")
    command.add_argument("--disk-policy", default="lru", help=f"for disk; {several}")
    command.add_argument(
        "--admission", default="", help="filters for host memory, joined by +; none by default"
    )
    command.add_argument("--disk-admission", default="", help="the same for disk")
    flows = ", ".join(flow.value for flow in Flow)
    command.add_argument("--flow", default="write-through", help=f"{flows}; {several}")
    command.add_argument(
        "--hints", action="store_true",
        help="also replay with clients that announce when their conversations go on",
    )  # fmt: skip
    command.add_argument(
        "--replicas", type=int,
        help="servers behind a router; sizes are per server, and --store is shared",
    )  # fmt: skip
    command.add_argument("--store", default="0", help="chunks of a store that replicas share")
    command.add_argument(
        "--router", default=ROUTERS[0], help=f"of replicas: {', '.join(ROUTERS)}; {several}"
    )
    command.add_argument(
        "--chunk-bytes", type=parse_bytes,
        help="size of a chunk, such as 2MiB; sizes in bytes need it if the trace does not give it",
    )  # fmt: skip
    add_costs(command)
    command.add_argument("--limit", type=whole_number, help="replay the first N requests only")
    command.add_argument("--sample", type=float, help="replay this part of the conversations")
    command.add_argument("--seed", type=int, default=0, help="seed of the sample")
    command.add_argument("--optimum", action="store_true", help="add Belady's upper bound")
    command.add_argument(
        "--curve", action="store_true", help="hit ratio of each policy over sizes, host memory only"
    )
    command.add_argument("--picture", type=Path, help="draw hit ratios over sizes: PNG or SVG")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_simulate(options: argparse.Namespace) -> int:
    """Replay a trace with every combination of the options."""
    if options.picture is not None:
        check_picture(options.picture)
    if options.sample is not None and not 0 < options.sample <= 1:
        raise ConfigError(f"--sample {options.sample}: must be above 0 and at most 1")
    policies = _choices("--policy", options.policy)
    if options.curve:
        _check_plain(options, NOT_OF_CURVES, "--curve is of all sizes of one server's host memory")
    elif options.replicas is None and (options.store, options.router) != ("0", ROUTERS[0]):
        raise ConfigError("--store and --router are for --replicas")
    trace = read_trace(options.trace, limit=options.limit, progress=_reading)
    if not trace.accesses:
        raise ConfigError(f"{trace.name}: no request asks for a chunk")
    size = options.chunk_bytes or trace.chunk_bytes
    costs = costs_of(options)
    if options.read_ms is not None and costs.compute is None:
        raise ConfigError("--read-ms says what is saved only with --compute-ms")
    if costs.compute is not None and options.replicas is not None:
        raise ConfigError("--compute-ms cannot be combined with --replicas")
    if options.curve:
        return _curve(options, trace, policies)
    setups = _setups(options, trace, policies, size)
    if options.replicas is not None:
        return replay_fleets(options, trace, setups, size)
    part = part_of(trace, options)
    scale = part.unique / trace.unique
    outcomes = []
    for number, setup in enumerate(setups, 1):
        show = progress_of(f"replay {number} of {len(setups)}", part)
        outcomes.append(replay(part, scaled(setup, scale), chunk_bytes=size, progress=show))
    best = []
    for capacity in dict.fromkeys(setup.host + setup.disk for setup in setups):
        if options.optimum:
            bound = optimum(part, max(1, round(capacity * scale)))
            its = {"hits": bound.hits, "hit_ratio": bound.hit_ratio, "inserts": bound.inserts}
            best.append({"chunks": capacity, **its})
    note("")
    rows = [_row(setup, outcome, costs) for setup, outcome in zip(setups, outcomes, strict=True)]
    if options.picture is not None:
        _draw_rows(options.picture, trace, rows, best)
    if options.json:
        report = {
            "trace": about(trace, part),
            "chunk_bytes": size,
            "compute_s": costs.compute,
            "deeper_s": costs.deeper,
            "read_s": costs.read,
            "replays": rows,
        }
        if options.optimum:
            report["optimum"] = best
        print_json(report)
        return 0
    print_trace(trace, part)
    header = HEADER if costs.compute is None else HEADER + SAVED
    print_table([f">{name}" for name in header], (_shown(row, size) for row in rows))
    for told in best:
        print(
            f"optimum with {told['chunks']} chunks: {100 * told['hit_ratio']:.2f} %, "
            f"{told['inserts']} inserts"
        )
    return 0


NOT_OF_CURVES = (
    "--compute-ms", "--admission", "--disk", "--disk-admission", "--disk-policy", "--flow",
    "--hints", "--host", "--replicas", "--router", "--store",
)  # fmt: skip


def _check_plain(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse those of `names` that were given.

    Raises:
        ConfigError: with `why`.
    """
    plain = {
        "--admission": "",
        "--disk": "0",
        "--disk-admission": "",
        "--disk-policy": "lru",
        "--flow": Flow.WRITE_THROUGH.value,
        "--hints": False,
        "--router": ROUTERS[0],
        "--store": "0",
    }
    said = {name: vars(options)[name[2:].replace("-", "_")] for name in names}
    given = ", ".join(name for name in names if said[name] != plain.get(name))
    if given:
        raise ConfigError(f"{why}: without {given}")


# -- a curve -------------------------------------------------------------------------------


def _curve(options: argparse.Namespace, trace: Trace, policies: list[Choice]) -> int:
    """Print hit ratios over sizes: exact for plain LRU, from a sample for the others."""
    part = part_of(trace, options)
    if options.sample is None:
        rate = min(1.0, CURVE_ACCESSES / max(1, trace.accesses * len(policies)))
        part = sampled(trace, rate, options.seed) or trace
    sizes = sizes_between(max(1, trace.unique // 200), trace.unique, CURVE_POINTS)
    lines: dict[str, list[tuple[int, float]]] = {}
    for policy in policies:
        if policy == Choice("lru"):
            curve = LRUCurve(trace)
            lines[str(policy)] = [(size, curve.hit_ratio(size)) for size in sizes]
            continue
        points = lines[str(policy)] = []
        for size in sizes:
            show = progress_of(f"{policy}, {size} chunks", part)
            rows = max(1, round(size * part.unique / trace.unique))
            outcome = replay(part, Setup(rows, host_policy=policy), progress=show)
            points.append((size, outcome.hit_ratio))
    if options.optimum:
        lines["optimum"] = []
        for size in sizes:
            note(f"optimum, {size} chunks")
            bound = optimum(part, max(1, round(size * part.unique / trace.unique)))
            lines["optimum"].append((size, bound.hit_ratio))
    note("")
    if options.picture is not None:
        draw(options.picture, trace.name, lines)
    if options.json:
        curves = {
            name: [{"chunks": size, "hit_ratio": ratio} for size, ratio in points]
            for name, points in lines.items()
        }
        print_json({"trace": about(trace, part), "curves": curves})
        return 0
    print_trace(trace, part)
    if part is not trace and Choice("lru") in policies:
        print("lru is for the whole trace")
    table = []
    for index, size in enumerate(sizes):
        ratios = [f"{100 * points[index][1]:.2f}" for points in lines.values()]
        table.append((str(size), f"{100 * size / trace.unique:.1f}", *ratios))
    print_table([">chunks", ">% of all", *(f">{name}" for name in lines)], table)
    return 0


# -- options -------------------------------------------------------------------------------

BUDGET = "bytes_per_day"
"""A parameter of filters."""


def _setups(
    options: argparse.Namespace, trace: Trace, policies: list[Choice], size: int | None
) -> list[Setup]:
    if options.host is None:
        # The default must also work for a trace so short that 10 % is less than a chunk.
        hosts = [max(1, trace.unique // DEFAULT_PART)]
    else:
        hosts = [chunks_of("--host", text, trace, size) for text in split(options.host)]
    disks = [chunks_of("--disk", text, trace, size) for text in split(options.disk)]
    if not hosts or min(hosts) < 1:
        raise ConfigError(f"--host {options.host}: must be at least one chunk")
    disk_policies = _choices("--disk-policy", options.disk_policy)
    given = f"{options.admission} {options.disk_admission}"
    if BUDGET in given and (size is None or options.sample is not None):
        raise ConfigError(
            f"{BUDGET} is of the whole trace, and of chunks of one size: it needs --chunk-bytes, "
            "and goes without --sample"
        )
    admissions = [_filters("--admission", text) for text in split(options.admission) or [""]]
    disk_admissions = [
        _filters("--disk-admission", text) for text in split(options.disk_admission) or [""]
    ]
    flows = []
    for text in split(options.flow):
        try:
            flows.append(Flow(text))
        except ValueError as error:
            allowed = ", ".join(flow.value for flow in Flow)
            raise ConfigError(f"--flow {text}: must be one of: {allowed}") from error
    if not flows or not disks:
        raise ConfigError("--flow and --disk: name at least one")
    if not any(disks):
        _check_plain(options, ("--disk-admission", "--disk-policy", "--flow"), "--disk is 0")
    longest = max(map(len, trace.requests))
    setups = []
    for host, policy, admission, disk in itertools.product(hosts, policies, admissions, disks):
        if not disk:
            setups.append(Setup(host, 0, policy, host_admission=admission))
            continue
        for below, gate, flow in itertools.product(disk_policies, disk_admissions, flows):
            ahead = longest if flow is not Flow.WRITE_THROUGH else 0
            setups.append(Setup(host, disk, policy, below, admission, gate, flow, ahead))
    if options.hints:
        setups = [replace(setup, hints=hints) for setup in setups for hints in (False, True)]
    return list(dict.fromkeys(setups))


def _choices(option: str, text: str) -> list[Choice]:
    choices = []
    for part in split(text):
        try:
            choice = Choice.parse(part)
            build_policy(choice, 1000)
        except ValueError as error:
            raise ConfigError(f"{option} {part}: {error}") from error
        choices.append(choice)
    if not choices:
        raise ConfigError(f"{option}: name at least one")
    return choices


def _filters(option: str, text: str) -> tuple[Choice, ...]:
    try:
        parts = [part for part in re.split(r"\+(?![^()]*\))", text) if part.strip()]
        filters = tuple(Choice.parse(part) for part in parts if part.strip() != "none")
        build_filters(filters, 1000, DEFAULT_CHUNK_BYTES)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
    return filters


# -- output --------------------------------------------------------------------------------


def _row(setup: Setup, outcome: Outcome, costs: Costs) -> dict[str, Any]:
    accesses = outcome.accesses or 1
    computed = costs.computing(outcome.accesses, outcome.depths)
    return {
        "host_chunks": setup.host,
        "host_policy": str(setup.host_policy),
        "host_admission": [str(choice) for choice in setup.host_admission],
        "disk_chunks": setup.disk,
        "disk_policy": str(setup.disk_policy) if setup.disk else None,
        "disk_admission": [str(choice) for choice in setup.disk_admission],
        "flow": setup.flow.value if setup.disk else None,
        "hints": setup.hints,
        "accesses": outcome.accesses,
        "hits": outcome.hits,
        "hit_ratio": outcome.hit_ratio,
        "host_hits": outcome.host_hits,
        "host_hit_ratio": outcome.host_hits / accesses,
        "disk_hits": outcome.disk_hits,
        "disk_hit_ratio": outcome.disk_hits / accesses,
        "host_writes": outcome.host_writes,
        "disk_writes": outcome.disk_writes,
        "bytes_written_per_hit": outcome.written_per_hit,
        "host_evictions": outcome.host_evictions,
        "disk_evictions": outcome.disk_evictions,
        "declined": outcome.declined,
        "saved_s": costs.saved(outcome),
        "computed_without_s": computed,
        "seconds": outcome.seconds,
        "accesses_per_second": outcome.accesses / outcome.seconds if outcome.seconds else 0.0,
    }


def _shown(row: dict[str, Any], size: int | None) -> tuple[str, ...]:
    saved, computed = row["saved_s"], row["computed_without_s"]
    return (
        str(row["host_chunks"]),
        row["host_policy"],
        "+".join(row["host_admission"]) or "-",
        str(row["disk_chunks"] or "-"),
        row["disk_policy"] or "-",
        "+".join(row["disk_admission"]) or "-",
        row["flow"] or "-",
        "yes" if row["hints"] else "-",
        f"{100 * row['hit_ratio']:.2f}",
        f"{100 * row['host_hit_ratio']:.2f}",
        f"{100 * row['disk_hit_ratio']:.2f}",
        str(row["disk_writes"]),
        shown_bytes(row["bytes_written_per_hit"], size),
        str(row["host_evictions"]),
        str(row["disk_evictions"]),
        f"{row['seconds']:.1f}",
        *(() if saved is None else (f"{saved:.0f}", f"{100 * saved / (computed or 1.0):.2f}")),
    )


def _draw_rows(
    path: Path, trace: Trace, rows: list[dict[str, Any]], best: list[dict[str, Any]]
) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        parts = [row["host_policy"], *row["host_admission"]]
        if row["disk_chunks"]:
            parts += [row["flow"], row["disk_policy"], *row["disk_admission"]]
        parts += ["hints"] * row["hints"]
        size = row["host_chunks"] + row["disk_chunks"]
        lines.setdefault(", ".join(parts), []).append((size, row["hit_ratio"]))
    if best:
        lines["optimum"] = [(bound["chunks"], bound["hit_ratio"]) for bound in best]
    draw(path, trace.name, lines)


def _reading(done: int, total: int) -> None:
    if total >= NOTED_BYTES:
        note(f"{format_size(done)} of {format_size(total)} read")
