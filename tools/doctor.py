"""``kvstore doctor``: does the cache help, and what should be changed?

Of a server everything is taken from its metrics since its start: seconds of prefill that hits have
saved, by the measured time to compute a chunk; seconds that requests waited for slower tiers; and
the bytes that were written to each tier for the chunks that were read from it. Of a cache on disk
it is taken from its records: how many chunks were read again, and when one was last used. Of the
drives that it lies on is told how long they last, where they say so.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.maintenance.survey import NamespaceSurvey, survey
from kvstore.sizes import format_size
from kvstore.tools.drives import YEARS, Wear, wear_under, write_metrics
from kvstore.tools.output import counted, print_json
from kvstore.tools.top import STATES, WHOLE, Snapshot, is_url, scrape

__all__ = ["Finding", "add_doctor_arguments", "diagnose", "run_doctor"]

FEW = 100
"""Chunks below which nothing is said of a place."""

WASTED = 20.0
"""Chunks written for each one that was read, from which on a filter should be tried."""

LOST = 0.05
"""Share of the chunks of stores that may find no room before host memory counts as too small."""

FORGOTTEN_DAYS = 7.0
"""Days without a use after which a namespace that no process has open counts as forgotten."""

GAP = 0.5
"""Share of a namespace's files that holds nothing, or chunks from before a reset, from which on
compacting is worth it."""

FULL = 0.03
"""Share of the drive below which free space counts as little."""


@dataclass
class Finding:
    """What was found of one place: host memory or a tier of a server, or a namespace.

    Attributes:
        place: its name.
        verdict: helps, does not help, too little to tell, or not used.
        loaded: chunks that came from it; of a namespace, reads of the chunks that it holds.
        saved_s: seconds of computing that they have saved; None where that is not known.
        advice: what to change, one sentence each.
        faults: how many things are wrong with a namespace's files, or went wrong in a server.
    """

    place: str
    verdict: str
    loaded: int
    saved_s: float | None
    advice: list[str] = field(default_factory=list)
    faults: int = 0


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "where",
        metavar="URL|PATH",
        help="a server's metrics, such as http://host:8000/metrics, or the folder of a cache",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        type=Path,
        help="of a folder: also write how worn its drives are to FILE, in Prometheus' text format, "
        "for node_exporter's textfile collector",
    )


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; 1 if a place does not help, has a fault, or no drive tells its wear.

    Raises:
        KVStoreError: if the server does not answer, or has no metrics of kvstore; or if there is
            no cache at that path; or if the metrics cannot be written.
    """
    waited: float | None = None
    drives: list[Wear] = []
    silent = False
    if is_url(options.where):
        if options.metrics is not None:
            raise KVStoreError("--metrics tells of the drives under a folder, not of a server's")
        now = scrape(options.where)
        findings, waited = diagnose(now), now.get("wait_seconds_sum")
    else:
        findings = examine(Path(options.where))
        drives, reasons = wear_under(Path(options.where))
        silent = options.metrics is not None and not drives
        if options.metrics is not None:
            write_metrics(drives, options.metrics)
        if silent:
            why = "; ".join(reasons) or "it is on no drive that the system names"
            print(f"{options.metrics} tells of no drive: {why}", file=sys.stderr)
    if options.json:
        known = [asdict(each) | {"hours_left": each.hours_left} for each in drives]
        places = [asdict(each) for each in findings]
        print_json({"waited_s": waited, "places": places, "drives": known})
    else:
        print("\n".join([*_lines(findings, waited), *map(_of_drive, drives)]))
    bad = any(each.faults or each.verdict == "does not help" for each in findings)
    return int(bad or silent)


def diagnose(now: Snapshot) -> list[Finding]:
    """Judge host memory and each tier by what has happened since the server's start."""
    return [_host(now), *(_tier(now, tier) for tier in now.tiers)]


def examine(path: Path) -> list[Finding]:
    """Judge each namespace of a cache on disk by its records, and look at the drive's free space.

    Raises:
        KVStoreError: if there is no cache at `path`.
    """
    found = [_namespace(path, each) for each in survey(path)]
    space = shutil.disk_usage(path)
    if found and space.free < FULL * space.total:
        found[0].advice.append(
            f"The drive has {format_size(space.free)} of {format_size(space.total)} free: a lane "
            "that cannot grow replaces its coldest chunks sooner."
        )
    return found


def _namespace(path: Path, held: NamespaceSurvey) -> Finding:
    segments = held.segments
    live, reused = sum(each.counted for each in segments), sum(each.reused for each in segments)
    size, reads = sum(each.file_bytes for each in segments), sum(each.reads for each in segments)
    useful = sum(each.counted * each.chunk_bytes for each in segments)
    found = Finding(f"namespace {held.name}", _verdict(reads, live), reads, None)
    folder = shlex.quote(str(path))
    if live >= FEW and live > WASTED * max(reused, 1):
        found.advice.append(
            f"{live:,} chunks are kept, and {reused:,} of them were read again: try "
            '"admission": "reuse" or "endurance", or see kvstore simulate.'
        )
    found.faults = len(held.faults)
    if held.faults and not any(each.live for each in segments):
        found.verdict = "cannot be read"
    if held.faults:
        found.advice.append(f"{counted(len(held.faults), 'fault')}: see kvstore verify {folder}.")
    if live and not held.is_open:
        days = (time.time() - max(each.used_ms for each in segments) / 1000) / 86400
        if days > FORGOTTEN_DAYS:
            found.advice.append(
                f"No process has it open, and nothing in it was used for {days:.0f} days. It takes "
                f"{format_size(size)}: kvstore purge {folder} --namespace {held.name} --all, then "
                f"kvstore compact {folder}."
            )
        elif len(segments) > 1 and useful < GAP * size and held.lost is None:
            found.advice.append(
                f"{format_size(int(useful))} of {format_size(size)} are chunks that can be found: "
                f"kvstore compact {folder}."
            )
    return found


def _host(now: Snapshot) -> Finding:
    loaded, stored = int(now.get("loaded_host_chunks")), now.get("stored_chunks")
    saved = _saved(now, "saved_host_seconds")
    found = Finding("host memory", _verdict(loaded, stored), loaded, saved)
    refused = now.get("refused_chunks")
    lost = refused + now.get("shed_chunks")
    if stored and lost > LOST * stored:
        found.advice.append(
            f"{lost:.0f} of {stored + refused:.0f} chunks found no room, or left before they were "
            "copied to a tier: give it more host memory, or a faster tier."
        )
    if now.get("timeouts"):
        found.advice.append(
            f"{now.get('timeouts'):.0f} requests waited until their deadline: see kvstore top for "
            "the tier that is slow."
        )
    found.faults = int(now.get("internal_errors"))
    if found.faults:
        found.advice.append(f"{counted(found.faults, 'internal error')}: please report them.")
    return found


def _tier(now: Snapshot, tier: str) -> Finding:
    loaded = int(now.get("loaded_tier_chunks", tier))
    read, written = now.get("tier_read_chunks", tier), now.get("tier_written_chunks", tier)
    held = now.get("tier_chunks", tier)
    saved = _saved(now, "saved_tier_seconds", tier)
    asked = now.get("loaded_host_chunks") + now.get("missed_keys")
    asked += sum(now.get("loaded_tier_chunks", each) for each in now.tiers)
    # What it has found there at its start says nothing before somebody asks.
    had = max(written, held if asked >= FEW else min(held, FEW - 1))
    found = Finding(tier, _verdict(loaded, had), loaded, saved)
    if now.get("tier_outpaced", tier):
        sentence = "Computing is faster than reading from it now, so it is not read"
        if not loaded:
            found.verdict = "does not help"
            sentence += ": take a faster device, larger chunks, or leave it out"
        found.advice.append(f"{sentence}.")
    if written >= FEW and written > WASTED * max(read, 1):
        size = format_size(int(now.get("tier_written_bytes", tier)))
        found.advice.append(
            f"{size} were written, {written / max(read, 1):.0f} chunks for each one that was read: "
            'try "admission": "reuse" or "endurance", or see kvstore simulate.'
        )
    if read >= FEW and read > WASTED * max(loaded, 1):
        found.advice.append(
            f"{read:,.0f} chunks were read from it, and {loaded:,} of them loaded: most of what "
            "was fetched for requests in the queue was not needed then."
        )
    found.faults = int(now.get("tier_corrupt_chunks", tier))
    if found.faults:
        found.advice.append(
            f"{counted(found.faults, 'chunk')} read from it had wrong bytes, and were not used: "
            "see the server's log."
        )
    # These may have been of a moment when it was away.
    failed, errors = int(now.get("tier_failed_writes", tier)), int(now.get("tier_errors", tier))
    if failed or errors:
        found.advice.append(
            f"Since the start {counted(errors, 'operation')} on it failed, and "
            f"{counted(failed, 'chunk')} could not be written to it."
        )
    states = [state for state in STATES if state != "outpaced" and now.get(f"tier_{state}", tier)]
    for state in [*states, *["away"] * bool(now.get("store_away", tier))]:
        found.advice.append(f"It is {state} now: see the server's log.")
    return found


def _verdict(loaded: int, had: float) -> str:
    if not had and not loaded:
        return "not used"
    if had < FEW and loaded < FEW:
        return "too little to tell"
    return "helps" if loaded else "does not help"


def _saved(now: Snapshot, name: str, tier: str = WHOLE) -> float | None:
    return now.get(name, tier) if now.get("compute_seconds_per_chunk") else None


def _lines(findings: list[Finding], waited: float | None) -> Iterator[str]:
    for each in findings:
        saved = "" if each.saved_s is None else f", which saved {each.saved_s:.1f} s of computing"
        came = "chunks came from it" if waited is not None else "reads of its chunks"
        yield f"{each.place}: {each.verdict}; {each.loaded:,} {came}{saved}"
        yield from (f"  {sentence}" for sentence in each.advice)
    if waited is not None:
        yield f"Requests waited {waited:.1f} s for slower tiers."


def _of_drive(told: Wear) -> str:
    """What a drive tells, and what to do about it."""
    daily = told.daily_bytes
    if told.years_left is None or daily is None or told.years_left >= YEARS:
        return str(told)
    budget = f'"admission": {{"name": "endurance", "bytes_per_day": "{format_size(daily)}"}}'
    return (
        f"{told} For {YEARS:g} years {format_size(daily)} a day may be written to it: if kvstore "
        f'writes most of that, try {budget} in the tier of the disk, or "reuse", or see '
        "kvstore simulate."
    )
