"""``kvstore verify``: check every payload against its record."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from kvstore.maintenance.survey import Fault, Progress
from kvstore.maintenance.survey import verify as verify_path
from kvstore.sizes import format_size

__all__ = ["verify"]


def verify(options: argparse.Namespace) -> int:
    """Verify all payloads; return 1 if there are faults. Progress is shown on a terminal only."""
    faults: list[Fault] = []
    progress = Progress(0, 0, 0)
    started = time.monotonic()
    for found in verify_path(options.path):
        if isinstance(found, Progress):
            progress = found
            _show(progress, started)
        else:
            faults.append(found)
            if not options.json:
                print(f"WRONG {found}")
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        report = {
            "chunks": progress.chunks,
            "bytes": progress.done_bytes,
            "faults": [dataclasses.asdict(fault) for fault in faults],
        }
        print(json.dumps(report, indent=2))
    else:
        print(
            f"{progress.chunks} chunks, {format_size(progress.done_bytes)} read, "
            f"{len(faults)} faults"
        )
    return 1 if faults else 0


def _show(progress: Progress, started: float) -> None:
    if sys.stderr.isatty():
        share = 100 * progress.done_bytes / max(1, progress.total_bytes)
        rate = progress.done_bytes / max(1e-3, time.monotonic() - started)
        print(
            f"\r{share:5.1f} %  {format_size(progress.done_bytes)} at {format_size(rate)}/s   ",
            end="",
            file=sys.stderr,
        )
