"""``kvstore inspect``: what a cache on disk holds."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError, ForeignFileError
from kvstore.maintenance.survey import LaneSurvey, NamespaceSurvey, survey
from kvstore.policies.shares import OTHERS, TAG_BYTES, tag_of
from kvstore.sizes import format_size
from kvstore.tiers.disk.index import read_index
from kvstore.tools.output import age, print_json, print_table

__all__ = ["run_inspect"]

FEW = 8
"""Parts of an identity up to which all are shown."""

TOLD = (
    "model", "revision", "weights", "engine", "vllm", "pool", "dtype", "kv_cache_layout", "layout",
    "parallel", "chunk_bytes", "code",
)  # fmt: skip
"""Parts that are shown of a longer one."""


def run_inspect(options: argparse.Namespace) -> int:
    """Print the survey; return 1 if it found a fault."""
    if OTHERS in (options.tenant or ()):
        raise ConfigError(f"--tenant {OTHERS}: so all that are not named are told")
    namespaces = survey(options.path)
    faults = [fault for namespace in namespaces for fault in namespace.faults]
    if options.json:
        told = [dataclasses.asdict(namespace) for namespace in namespaces]
        if options.tenant:
            for namespace, its in zip(namespaces, told, strict=True):
                its["tenants"] = _chunks_by_tenant(namespace, options.tenant)
        print_json({"namespaces": told})
        return 1 if faults else 0
    for namespace in namespaces:
        _print(namespace, segments=options.segments, settings=options.settings)
        if options.tenant:
            counts = _chunks_by_tenant(namespace, options.tenant)
            rows = [[name, f"{count:,}"] for name, count in counts.items()]
            print_table([">tenant", ">chunks"], rows, indent=2)
    return 1 if faults else 0


def _chunks_by_tenant(namespace: NamespaceSurvey, names: Sequence[str]) -> dict[str, int]:
    """Count the chunks that somebody may find, for each of these tenants and for all others.

    The names of tenants are not on disk: of other tenants it cannot be said who they are.
    """
    tags = {tag_of(name): name for name in names}
    found = Counter(dict.fromkeys([*names, OTHERS], 0))
    for segment in namespace.segments:
        with contextlib.suppress(ForeignFileError, OSError):
            keys = read_index(Path(segment.path))[1].of_epoch(*namespace.epochs).keys()
            found.update(tags.get(key[:TAG_BYTES], OTHERS) for key in keys)
    return dict(found)


def _print(namespace: NamespaceSurvey, *, segments: bool, settings: bool) -> None:
    epoch = f", epoch {namespace.epoch}" if namespace.epoch else ""
    print(f"namespace {namespace.name}{epoch}")
    names = sorted(namespace.identity)
    shown = names
    if not settings and len(names) > FEW:
        # What a person would call it; the rest are a server's settings.
        shown = [name for name in TOLD if name in namespace.identity] or names[:FEW]
    for name in shown:
        value = json.dumps(namespace.identity[name])
        print(f"  {name}: {value if settings or len(value) <= 100 else value[:97] + '...'}")
    if len(shown) < len(names):
        print(f"  and {len(names) - len(shown)} settings more: --settings lists them")
    outdated = any(segment.outdated for segment in namespace.segments)
    columns = [">lane", ">process", ">chunks", ">bytes", ">files", ">segments", ">reads"]
    columns += [">outdated"] * outdated
    print_table(
        [*columns, ">stored", ">used"],
        [_row(lane, outdated=outdated) for lane in namespace.lanes],
        indent=2,
    )
    ids: Counter[str] = Counter()
    for segment in namespace.segments:
        ids.update(segment.key_ids)
    if ids:
        rows = [[key_id, f"{count:,}"] for key_id, count in sorted(ids.items())]
        print_table(["key", ">chunks"], rows, indent=2)
    if segments:
        for lane in namespace.lanes:
            _print_segments(lane, outdated=outdated)
    for fault in namespace.faults:
        print(f"  WRONG {fault}")


def _row(lane: LaneSurvey, *, outdated: bool) -> list[object]:
    its = lane.segments
    row: list[object] = [lane.number, "-" if lane.owner is None else lane.owner or "?"]
    row.append(f"{sum(segment.counted for segment in its):,}")
    row.append(format_size(sum(segment.counted * segment.chunk_bytes for segment in its)))
    row.append(format_size(sum(segment.file_bytes for segment in its)))
    row += [f"{len(its):,}", f"{sum(segment.reads for segment in its):,}"]
    if outdated:
        row.append(f"{sum(segment.outdated for segment in its):,}")
    held = [segment for segment in its if segment.live]
    row.append(age(max((segment.newest_ms for segment in held), default=0)))
    row.append(age(max((segment.used_ms for segment in held), default=0)))
    return row


def _print_segments(lane: LaneSurvey, *, outdated: bool) -> None:
    if not lane.segments:
        return
    print(f"  lane {lane.number}")
    print_table(
        [
            *("segment", ">chunks", *[">outdated"] * outdated),
            *(">slots", ">bytes", ">reads", ">oldest", ">newest", ">used"),
        ],
        [
            (
                segment.path.rsplit("/", 1)[-1],
                segment.counted,
                *[segment.outdated] * outdated,
                segment.slots,
                format_size(segment.counted * segment.chunk_bytes),
                segment.reads,
                age(segment.oldest_ms),
                age(segment.newest_ms),
                age(segment.used_ms),
            )
            for segment in lane.segments
        ],
        indent=4,
    )
