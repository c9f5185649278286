"""``kvstore inspect``: what a cache on disk holds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

from kvstore.maintenance.survey import LaneSurvey, NamespaceSurvey, survey
from kvstore.sizes import format_size

__all__ = ["inspect"]


def inspect(options: argparse.Namespace) -> int:
    """Print the survey; return 1 if it found a fault."""
    namespaces = survey(options.path)
    faults = [fault for namespace in namespaces for fault in namespace.faults]
    if options.json:
        report = {"namespaces": [dataclasses.asdict(namespace) for namespace in namespaces]}
        print(json.dumps(report, indent=2))
    else:
        for namespace in namespaces:
            _print(namespace)
    return 1 if faults else 0


def _print(namespace: NamespaceSurvey) -> None:
    epoch = f", epoch {namespace.epoch}" if namespace.epoch else ""
    print(f"namespace {namespace.name}{epoch}")
    for name, value in sorted(namespace.identity.items()):
        print(f"  {name}: {json.dumps(value)[:100]}")
    for lane in namespace.lanes:
        owner = f"in use by process {lane.owner}" if lane.owner else "not in use"
        live = sum(segment.live for segment in lane.segments)
        size = sum(segment.file_bytes for segment in lane.segments)
        outdated = sum(segment.outdated for segment in lane.segments)
        held = sum(segment.live_bytes for segment in lane.segments)
        print(
            f"  lane {lane.number}, {owner}: {live} chunks, {format_size(held)} "
            f"in {format_size(size)}"
            + (f", {outdated} of them from before a reset" if outdated else "")
        )
        _print_segments(lane)
    for fault in namespace.faults:
        print(f"  WRONG {fault}")


def _print_segments(lane: LaneSurvey) -> None:
    if not lane.segments:
        return
    print(f"    {'segment':<28}{'live':>8}{'slots':>8}{'bytes':>12}{'reads':>8}  oldest .. newest")
    for segment in lane.segments:
        name = segment.path.rsplit("/", 1)[-1]
        print(
            f"    {name:<28}{segment.live:>8}{segment.slots:>8}"
            f"{format_size(segment.live_bytes):>12}{segment.reads:>8}  "
            f"{_when(segment.oldest_ms)} .. {_when(segment.newest_ms)}"
        )


def _when(milliseconds: int) -> str:
    if not milliseconds:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))
