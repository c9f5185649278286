"""``kvstore verify``: check every payload against its record."""

from __future__ import annotations

import argparse
import dataclasses

from kvstore.maintenance.survey import Fault, Progress, verify
from kvstore.sizes import format_size
from kvstore.tools.output import counted, print_json, show_progress, tell_unchecked

__all__ = ["run_verify"]


def run_verify(options: argparse.Namespace) -> int:
    """Verify all payloads; return 1 if there are faults. Progress is shown on a terminal only."""
    faults: list[Fault] = []
    progress = Progress(0, 0, 0)
    with show_progress("bytes") as show:
        for found in verify(options.path, options.keys):
            if isinstance(found, Progress):
                progress = found
                show(progress.done_bytes, progress.total_bytes)
            else:
                faults.append(found)
                if not options.json:
                    print(f"WRONG {found}")
    if options.json:
        report = {
            "chunks": progress.chunks,
            "bytes": progress.done_bytes,
            "unchecked": progress.unchecked,
            "faults": [dataclasses.asdict(fault) for fault in faults],
        }
        print_json(report)
    else:
        print(
            f"{counted(progress.chunks, 'chunk')}, {format_size(progress.done_bytes)} read, "
            f"{counted(len(faults), 'fault')}"
        )
        tell_unchecked(progress.unchecked, options.keys)
    return 1 if faults else 0
