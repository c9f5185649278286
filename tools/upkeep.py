"""``kvstore stat``, ``kvstore compact`` and ``kvstore purge``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvstore.errors import BlockKeyError, ConfigError
from kvstore.maintenance.offline import (
    CompactedLane,
    Compaction,
    PurgedLane,
    compact,
    layouts_of,
    purge,
)
from kvstore.maintenance.survey import survey
from kvstore.sizes import format_size
from kvstore.types import check_key

__all__ = ["run_compact", "run_purge", "run_stat"]


def run_stat(options: argparse.Namespace) -> int:
    """Print the layout of every lane; return 1 if there are faults."""
    namespaces = survey(options.path)
    found = layouts_of(namespaces)
    faults = [fault for namespace in namespaces for fault in namespace.faults]
    if options.json:
        lanes = [
            {**dataclasses.asdict(one), "chunks_per_extent": one.layout.chunks_per_extent}
            for one in found
        ]
        report = {"lanes": lanes, "faults": [dataclasses.asdict(fault) for fault in faults]}
        print(json.dumps(report, indent=2))
        return 1 if faults else 0
    for one in found:
        layout = one.layout
        print(one.lane)
        print(
            f"  {layout.live} of {layout.slots} slots in {layout.segments} segments, "
            f"{format_size(layout.file_bytes)}; {layout.needed} segments would do"
        )
        print(
            f"  {layout.extents} extents of neighbours, {layout.chunks_per_extent:.1f} chunks each"
        )
        tenths = "  ".join(f"{count}" for count in one.occupancy)
        print(f"  segments by occupancy, 0-10 % to 90-100 %:  {tenths}")
    for fault in faults:
        print(f"WRONG {fault}")
    return 1 if faults else 0


def run_compact(options: argparse.Namespace) -> int:
    """Compact lanes that no process uses.

    Returns 1 if a lane was refused or has faults, 2 if one could not be compacted.
    """

    def progress(moved: int, live: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{moved} chunks moved, {live} alive   ", end="", file=sys.stderr)

    done = compact(
        options.path,
        dry_run=options.dry_run,
        progress=progress,
        strict_modes=options.strict_modes,
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        _print_json([dataclasses.asdict(one) for one in done])
    else:
        for one in done:
            _print_compacted(one, options.dry_run)
    bad = any(one.refused or (one.result and one.result.faults) for one in done)
    return _status(bad, done)


def run_purge(options: argparse.Namespace) -> int:
    """Forget chunks; return 1 if a lane or a segment was refused, 2 if one could not be purged."""
    conditions = (options.namespace, options.key, options.unused)
    if not options.all and all(one is None for one in conditions):
        raise ConfigError("say what to purge: --namespace, --unused, --key, or --all")
    unused_since = None
    if options.unused is not None:
        unused_since = int((time.time() - parse_age(options.unused)) * 1000)
    key = None
    if options.key is not None:
        try:
            key = check_key(bytes.fromhex(options.key))
        except BlockKeyError as error:
            raise ConfigError(f"--key {options.key!r}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"--key {options.key!r}: must be the key in hex") from error
    done = purge(
        options.path,
        namespace=options.namespace,
        key=key,
        unused_since_ms=unused_since,
        dry_run=options.dry_run,
        strict_modes=options.strict_modes,
    )
    if options.json:
        _print_json([dataclasses.asdict(one) for one in done])
    else:
        for one in done:
            _print_purged(one, options.dry_run)
        if not options.dry_run and any(one.chunks for one in done):
            print("the files keep their size; kvstore compact gives the space back")
    return _status(any(one.refused or one.faults for one in done), done)


def _status(bad: bool, done: Sequence[CompactedLane | PurgedLane]) -> int:
    if any(one.failed for one in done):
        return 2
    return 1 if bad else 0


def parse_age(text: str) -> float:
    """Parse an age, such as ``"90s"``, ``"15m"``, ``"36h"`` or ``"7d"``, to seconds.

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f'--unused {text!r}: allowed are ages such as "90s", "15m", "36h", "7d"')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _print_compacted(one: CompactedLane, dry_run: bool) -> None:
    if one.refused or one.failed:
        _print_not_done(one)
    elif one.result is None:
        print(f"{one.lane}: empty")
    else:
        before, after = one.result.before, one.result.after
        gained = before.file_bytes - after.file_bytes
        print(
            f"{one.lane}: {'would give' if dry_run else 'gave'} back {format_size(gained)}, "
            f"segments {before.segments} -> {after.segments}, "
            f"extents {before.extents} -> {after.extents}; "
            f"{one.result.moved} chunks moved, {_damage(one.result)}"
        )
        for fault in one.result.faults:
            print(f"WRONG {fault}")


def _damage(result: Compaction) -> str:
    """Summarize the faults in one phrase. Chunks that were not moved were not checked."""
    records = sum(fault.slot is not None and fault.key is None for fault in result.faults)
    files = sum(fault.slot is None for fault in result.faults)
    summary = f"{result.dropped} damaged and dropped"
    if records:
        summary += f", {records} damaged records"
    if files:
        summary += f", {files} segments with faults"
    return summary


def _print_purged(one: PurgedLane, dry_run: bool) -> None:
    if one.refused or one.failed:
        _print_not_done(one)
    if one.chunks or not (one.refused or one.failed):
        what = "would forget" if dry_run else "forgot"
        print(f"{one.lane}: {what} {one.chunks} chunks, {format_size(one.bytes)}")
    for fault in one.faults:
        print(f"WRONG {fault}")


def _print_not_done(one: CompactedLane | PurgedLane) -> None:
    print(f"REFUSED {one.refused}" if one.refused else f"FAILED {one.failed}")


def _print_json(found: Sequence[dict[str, Any]]) -> None:
    print(json.dumps({"lanes": list(found)}, indent=2))
