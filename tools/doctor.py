"""``kvstore doctor``: does the cache help a server, and what should be changed?

Everything is taken from the server's metrics since its start: seconds of prefill that hits have
saved, by the measured time to compute a chunk; seconds that requests waited for slower tiers; and
the bytes that were written to each tier for the chunks that were read from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from kvstore.sizes import format_size
from kvstore.tools.top import WHOLE, Snapshot, scrape

__all__ = ["Finding", "add_doctor_arguments", "diagnose", "run_doctor"]

FEW = 100
"""Chunks below which nothing is said of a place."""

WASTED = 20.0
"""Chunks written for each one that was read, from which on a filter should be tried."""

LOST = 0.05
"""Share of the chunks of stores that may find no room before host memory counts as too small."""


@dataclass
class Finding:
    """What was found of one place, host memory or a tier.

    Attributes:
        place: its name.
        verdict: helps, does not help, too little to tell, or not used.
        loaded: chunks that came from it. saved_s: seconds of computing that they have saved; None
            if the server does not say how long computing takes.
        advice: what to change, one sentence each.
    """

    place: str
    verdict: str
    loaded: int
    saved_s: float | None
    advice: list[str] = field(default_factory=list)


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("url", metavar="URL", help="metrics, such as http://host:8000/metrics")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; 1 if a place does not help.

    Raises:
        KVStoreError: if the server does not answer, or has no metrics of kvstore.
    """
    now = scrape(options.url)
    findings = diagnose(now)
    waited = now.get("wait_seconds_sum")
    if options.json:
        told = {"version": 1, "waited_s": waited, "places": [asdict(each) for each in findings]}
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(_lines(findings, waited)))
    return int(any(each.verdict == "does not help" for each in findings))


def diagnose(now: Snapshot) -> list[Finding]:
    """Judge host memory and each tier by what has happened since the server's start."""
    return [_host(now), *(_tier(now, tier) for tier in now.tiers)]


def _host(now: Snapshot) -> Finding:
    loaded, stored = int(now.get("loaded_host_chunks")), now.get("stored_chunks")
    found = Finding("host memory", _verdict(loaded, stored), loaded, _saved(now, loaded))
    lost = now.get("refused_chunks") + now.get("shed_chunks")
    if stored and lost > LOST * stored:
        found.advice.append(
            f"{lost:.0f} of {stored + lost:.0f} chunks found no room, or left before they were "
            "copied to a tier: give it more host memory, or a faster tier."
        )
    if now.get("timeouts"):
        found.advice.append(
            f"{now.get('timeouts'):.0f} requests waited until their deadline: see kvstore top for "
            "the tier that is slow."
        )
    return found


def _tier(now: Snapshot, tier: str) -> Finding:
    loaded = int(now.get("loaded_disk_chunks", tier))
    read, written = now.get("disk_read_chunks", tier), now.get("disk_written_chunks", tier)
    held = now.get("disk_chunks", tier)
    found = Finding(tier, _verdict(loaded, max(written, held)), loaded, _saved(now, loaded))
    if now.get("disk_outpaced", tier):
        found.verdict = "does not help"
        found.advice.append(
            "Computing is faster than reading from it, so it is not read: take a faster device, "
            "larger chunks, or leave it out."
        )
    if written >= FEW and written > WASTED * max(read, 1):
        size = format_size(int(now.get("disk_written_bytes", tier)))
        found.advice.append(
            f"{size} were written, {written / max(read, 1):.0f} chunks for each one that was read: "
            'try "admission": "reuse" or "endurance", or see kvstore simulate.'
        )
    for state in ("closed", "stalled", "slow"):
        if now.get(f"disk_{state}", tier):
            found.advice.append(f"It is {state} now: see the server's log.")
    return found


def _verdict(loaded: int, had: float) -> str:
    if not had and not loaded:
        return "not used"
    if had < FEW and loaded < FEW:
        return "too little to tell"
    return "helps" if loaded else "does not help"


def _saved(now: Snapshot, loaded: int) -> float | None:
    pace = now.get("compute_seconds_per_chunk", WHOLE)
    return loaded * pace if pace else None


def _lines(findings: list[Finding], waited: float) -> Iterator[str]:
    for each in findings:
        saved = "" if each.saved_s is None else f", which saved {each.saved_s:.1f} s of computing"
        yield f"{each.place}: {each.verdict}; {each.loaded} chunks came from it{saved}"
        yield from (f"  {sentence}" for sentence in each.advice)
    yield f"Requests waited {waited:.1f} s for slower tiers."
