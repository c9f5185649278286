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

from kvstore.errors import ConfigError
from kvstore.sizes import format_size
from kvstore.upkeep import CompactedLane, PurgedLane, compact, layouts, purge

__all__ = ["run_compact", "run_purge", "run_stat"]


def run_stat(options: argparse.Namespace) -> int:
    """Print the layout of every lane."""
    found = layouts(options.path)
    if options.json:
        _print_json([{**dataclasses.asdict(one), **_derived(one.layout)} for one in found])
        return 0
    for one in found:
        layout = one.layout
        print(f"{one.lane}")
        print(
            f"  {layout.live} of {layout.slots} slots in {layout.segments} segments, "
            f"{format_size(layout.file_bytes)}; {layout.needed} segments would do"
        )
        print(
            f"  {layout.extents} extents of neighbours, {layout.chunks_per_extent:.1f} chunks each"
        )
        tenths = "  ".join(f"{count}" for count in one.occupancy)
        print(f"  segments by occupancy, 0-10 % to 90-100 %:  {tenths}")
    return 0


def run_compact(options: argparse.Namespace) -> int:
    """Compact lanes that nobody uses; 1 when one was refused or chunks were damaged."""

    def progress(moved: int, live: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{moved} chunks moved, {live} alive   ", end="", file=sys.stderr)

    done = compact(options.path, dry_run=options.dry_run, progress=progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        _print_json([dataclasses.asdict(one) for one in done])
    else:
        for one in done:
            _print_compacted(one, options.dry_run)
    bad = any(one.refused or (one.result and one.result.dropped) for one in done)
    return 1 if bad else 0


def run_purge(options: argparse.Namespace) -> int:
    """Forget chunks; 1 when a lane was refused."""
    if not (options.all or options.namespace or options.key or options.unused):
        raise ConfigError("say what to purge: --namespace, --unused, --key, or --all")
    unused_since = None
    if options.unused:
        unused_since = int((time.time() - parse_age(options.unused)) * 1000)
    key = None
    if options.key:
        try:
            key = bytes.fromhex(options.key)
        except ValueError as error:
            raise ConfigError(f"--key {options.key!r}: must be the key in hex") from error
    done = purge(
        options.path,
        namespace=options.namespace,
        key=key,
        unused_since_ms=unused_since,
        dry_run=options.dry_run,
    )
    if options.json:
        _print_json([dataclasses.asdict(one) for one in done])
    else:
        for one in done:
            _print_purged(one, options.dry_run)
    return 1 if any(one.refused for one in done) else 0


def parse_age(text: str) -> float:
    """Seconds from ``"90s"``, ``"15m"``, ``"36h"`` or ``"7d"``.

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f'--unused {text!r}: allowed are ages such as "90s", "15m", "36h", "7d"')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _print_compacted(one: CompactedLane, dry_run: bool) -> None:
    if one.refused:
        print(f"REFUSED {one.refused}")
    elif one.result is None:
        print(f"{one.lane}: empty")
    else:
        before, after = one.result.before, one.result.after
        gained = before.file_bytes - after.file_bytes
        print(
            f"{one.lane}: {'would give' if dry_run else 'gave'} back {format_size(gained)}, "
            f"segments {before.segments} -> {after.segments}, "
            f"extents {before.extents} -> {after.extents}; "
            f"{one.result.moved} chunks moved, {one.result.dropped} damaged and dropped"
        )


def _print_purged(one: PurgedLane, dry_run: bool) -> None:
    if one.refused:
        print(f"REFUSED {one.refused}")
    else:
        what = "would forget" if dry_run else "forgot"
        print(f"{one.lane}: {what} {one.chunks} chunks, {format_size(one.bytes)}")


def _derived(layout: Any) -> dict[str, float]:
    return {"chunks_per_extent": layout.chunks_per_extent}


def _print_json(found: Sequence[dict[str, Any]]) -> None:
    print(json.dumps({"lanes": list(found)}, indent=2))
