"""``kvstore inspect``: what a cache on disk holds."""

from __future__ import annotations

import argparse
import dataclasses
import json

from kvstore.maintenance.survey import LaneSurvey, NamespaceSurvey, survey
from kvstore.sizes import format_size
from kvstore.tools.output import age, print_json, print_table

__all__ = ["inspect"]


def inspect(options: argparse.Namespace) -> int:
    """Print the survey; return 1 if it found a fault."""
    namespaces = survey(options.path)
    faults = [fault for namespace in namespaces for fault in namespace.faults]
    if options.json:
        print_json({"namespaces": [dataclasses.asdict(namespace) for namespace in namespaces]})
    else:
        for namespace in namespaces:
            _print(namespace, segments=options.segments)
    return 1 if faults else 0


def _print(namespace: NamespaceSurvey, *, segments: bool) -> None:
    epoch = f", epoch {namespace.epoch}" if namespace.epoch else ""
    print(f"namespace {namespace.name}{epoch}")
    for name, value in sorted(namespace.identity.items()):
        print(f"  {name}: {json.dumps(value)[:100]}")
    outdated = any(segment.outdated for lane in namespace.lanes for segment in lane.segments)
    columns = [">lane", ">process", ">chunks", ">bytes", ">files", ">segments", ">reads"]
    columns += [">outdated"] * outdated
    print_table(
        [*columns, ">stored", ">used"],
        [_row(lane, outdated=outdated) for lane in namespace.lanes],
        indent=2,
    )
    if segments:
        for lane in namespace.lanes:
            _print_segments(lane)
    for fault in namespace.faults:
        print(f"  WRONG {fault}")


def _row(lane: LaneSurvey, *, outdated: bool) -> list[object]:
    its = lane.segments
    row: list[object] = [lane.number, lane.owner or "-"]
    row.append(f"{sum(segment.live for segment in its):,}")
    row.append(format_size(sum(segment.live_bytes for segment in its)))
    row.append(format_size(sum(segment.file_bytes for segment in its)))
    row += [f"{len(its):,}", f"{sum(segment.reads for segment in its):,}"]
    if outdated:
        row.append(f"{sum(segment.outdated for segment in its):,}")
    held = [segment for segment in its if segment.live]
    row.append(age(max((segment.newest_ms for segment in held), default=0)))
    row.append(age(max((segment.used_ms for segment in held), default=0)))
    return row


def _print_segments(lane: LaneSurvey) -> None:
    if not lane.segments:
        return
    print(f"  lane {lane.number}")
    print_table(
        ["segment", ">live", ">slots", ">bytes", ">reads", ">oldest", ">newest", ">used"],
        [
            (
                segment.path.rsplit("/", 1)[-1],
                segment.live,
                segment.slots,
                format_size(segment.live_bytes),
                segment.reads,
                age(segment.oldest_ms),
                age(segment.newest_ms),
                age(segment.used_ms),
            )
            for segment in lane.segments
        ],
        indent=4,
    )
