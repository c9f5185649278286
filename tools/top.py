"""``kvstore top``: watch a server's tiers, or a cache on disk."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.errors import KVStoreError
from kvstore.maintenance.survey import survey
from kvstore.sizes import format_size
from kvstore.tools.drives import wear_under
from kvstore.tools.output import counted, is_terminal, number, whole_number

__all__ = ["Snapshot", "add_top_arguments", "is_url", "run_top", "scrape", "tables"]

PREFIXES = ("vllm:kvstore_", "kvstore_")

WHOLE = ""
"""In place of a tier, for metrics of the whole store."""

SECONDS = 10.0
"""How long a server may take to answer."""

STATES = ("closed", "stalled", "congested", "outpaced", "slow")


@dataclass(slots=True)
class Snapshot:
    """A server's metrics at one time, summed over its engines.

    Attributes:
        at: seconds of a monotonic clock.
        values: values by name without prefix, and tier.
        buckets: histograms by name and tier: counts up to each bound.
        engines: how many of the engines told a value that is not 0, by name and tier.
        wrong: what is wrong with the files, where it is a folder that is looked at.
    """

    at: float
    values: dict[tuple[str, str], float] = field(default_factory=dict)
    buckets: dict[tuple[str, str], dict[float, float]] = field(default_factory=dict)
    engines: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def tiers(self) -> list[str]:
        """Tiers that have metrics."""
        return sorted({tier for _, tier in self.values if tier != WHOLE})

    def get(self, name: str, tier: str = WHOLE) -> float:
        """Return a value, 0 if it is missing."""
        return self.values.get((name, tier), 0.0)

    def mean(self, name: str, tier: str = WHOLE) -> float:
        """Return the mean of the engines that told a value other than 0, or else 0."""
        return self.get(name, tier) / max(1, self.engines[name, tier])

    def rate(self, before: Snapshot, name: str, tier: str = WHOLE) -> float:
        """Return the growth of a counter per second, 0 if the server has restarted."""
        more = self.get(name, tier) - before.get(name, tier)
        return max(0.0, more) / max(self.at - before.at, 1e-9)

    def quantile(self, before: Snapshot, name: str, share: float, tier: str = WHOLE) -> float:
        """Return a quantile of the observations since `before`, NaN if there were none."""
        now, then = self.buckets.get((name, tier), {}), before.buckets.get((name, tier), {})
        if any(now.get(bound, 0.0) < count for bound, count in then.items()):
            # The server has restarted: all its observations are new.
            then = {}
        counts = {bound: count - then.get(bound, 0.0) for bound, count in sorted(now.items())}
        whole = counts.get(math.inf, 0.0)
        if whole <= 0:
            return math.nan
        return next(bound for bound, count in counts.items() if count >= share * whole)


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "where",
        metavar="URL|PATH",
        help="a server's metrics, such as http://host:8000/metrics, or the folder of a cache",
    )
    seconds = number(lambda value: 0.1 <= value <= 3600, "from 0.1 to 3600 seconds")
    parser.add_argument("--interval", type=seconds, default=2.0, help="seconds, 2 by default")
    parser.add_argument(
        "--times",
        type=whole_number,
        default=0,
        help="number of updates; by default until Ctrl-C, in a pipe one",
    )


def run_top(options: argparse.Namespace) -> int:
    """Show a server or a folder until Ctrl-C, or as often as `--times` says.

    Returns 1 if something is wrong with the folder, 2 if the last look did not succeed.

    Raises:
        KVStoreError: if a package is missing, or there is nothing to show.
    """
    from_url = is_url(options.where)
    wrong: list[str] = []
    reached = False

    def look() -> Snapshot:
        nonlocal reached
        reached = False
        found = scrape(options.where) if from_url else look_at(options.where)
        wrong[:], reached = found.wrong, True
        return found

    # Drives tell their wear in whole hundredths: once is enough.
    drives = [] if from_url else wear_under(Path(options.where))[0]
    show = tables if from_url else partial(_folders, "\n".join(map(str, drives)))
    console = Console(force_terminal=is_terminal())
    if not console.is_terminal:
        # In a pipe nothing can be drawn over: one table, unless more are asked for.
        for shown in _looks(look, options.interval, max(1, options.times), show):
            with console.capture() as printed:
                console.print(shown)
            print(printed.get(), end="", flush=True)
        return int(bool(wrong)) if reached else 2
    with Live(console=console, auto_refresh=False) as live:
        for shown in _looks(look, options.interval, options.times, show):
            live.update(shown, refresh=True)
    print()
    return int(bool(wrong)) if reached else 2


def _looks(
    look: Callable[[], Snapshot],
    interval: float,
    times: int,
    show: Callable[[Snapshot, Snapshot], Table],
) -> Iterator[RenderableType]:
    """Yield what to show after each look. The first look must succeed; later ones are retried."""
    before: Snapshot | None = look()
    gone = ""
    shown = 0
    while not times or shown < times:
        time.sleep(interval)
        shown += 1
        try:
            now = look()
        except KVStoreError as error:
            gone = gone or time.strftime("%H:%M:%S")
            # A restarted server counts from 0, so no rates can be shown at first.
            before = None
            yield Text(f"not reachable since {gone}, trying again: {error}")
            continue
        if before is None:
            yield Text(f"reachable again; was not reachable since {gone}")
        else:
            yield show(before, now)
        before, gone = now, ""


# -- a server ------------------------------------------------------------------------------------


def is_url(where: str) -> bool:
    """Whether this is the address of a server's metrics, and no folder.

    Raises:
        KVStoreError: for an address without its scheme.
    """
    if not where:
        raise KVStoreError("an empty name: give the folder of a cache, or http://HOST:PORT/metrics")
    if where.startswith(("http://", "https://")):
        return True
    if re.match(r"[\w.-]+:\d+(/|$)|\w+://", where) and not os.path.exists(where):
        raise KVStoreError(f"{where}: for a server's metrics write http://HOST:PORT/metrics")
    return False


def scrape(url: str) -> Snapshot:
    """Read kvstore's metrics from the server at `url`.

    Raises:
        KVStoreError: if it does not answer, or has no metrics of kvstore.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise KVStoreError(
            "metrics are read by another package: pip install 'kvstore-offload[top]'; missing is "
            "prometheus_client"
        ) from error
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        path = url.partition("://")[2].partition("/")[2]
        hint = "" if path.strip("/") else "; metrics are at /metrics as a rule"
        raise KVStoreError(f"{url}: {reason}{hint}") from error
    snapshot = Snapshot(time.monotonic())
    try:
        samples = [each for its in text_string_to_metric_families(text) for each in its.samples]
        samples = [each for each in samples if each.name.startswith(PREFIXES)]
        bounds = [float(each.labels.get("le", "inf")) for each in samples]
    except ValueError as error:
        told = f"{error!s:.100}"
        raise KVStoreError(f"{url}: not in Prometheus' text format: {told}") from error
    for sample, bound in zip(samples, bounds, strict=True):
        if sample.name.endswith("_created") or not math.isfinite(sample.value):
            continue
        name = sample.name.removeprefix("vllm:").removeprefix("kvstore_").removesuffix("_total")
        tier = sample.labels.get("tier", WHOLE)
        if "le" in sample.labels:
            counts = snapshot.buckets.setdefault((name.removesuffix("_bucket"), tier), {})
            counts[bound] = counts.get(bound, 0.0) + sample.value
        else:
            snapshot.values[name, tier] = snapshot.get(name, tier) + sample.value
            snapshot.engines[name, tier] += sample.value != 0
    if not snapshot.values:
        raise KVStoreError(f"{url}: has no metrics of kvstore")
    return snapshot


def tables(before: Snapshot, now: Snapshot) -> Table:
    """Tabulate what happened between two looks at a server."""
    loaded = now.rate(before, "loaded_host_chunks")
    missed = now.rate(before, "missed_keys")
    from_tiers = sum(now.rate(before, "loaded_tier_chunks", tier) for tier in now.tiers)
    asked = loaded + from_tiers + missed
    share = f"{(loaded + from_tiers) / asked:.0%}" if asked else "-"
    wait = now.quantile(before, "wait_seconds", 0.99)
    table = Table(
        title=f"hits {share}; {loaded:.0f} chunks/s from host memory, {missed:.0f} missed, "
        f"{now.rate(before, 'stored_chunks'):.0f} stored; host memory "
        f"{now.mean('host_used_ratio'):.0%} full; {now.get('waiting_requests'):.0f} requests wait, "
        f"slowest of 100 waited {_time(wait)}",
        title_justify="left",
    )
    for head in ("tier", "loaded/s", "read", "written", "queued", "reads, 99 %", "full", "state"):
        table.add_column(head, justify="left" if head in ("tier", "state") else "right")
    for tier in now.tiers:
        read, written = (
            f"{format_size(int(now.rate(before, f'tier_{what}_bytes', tier)))}/s"
            for what in ("read", "written")
        )
        states = [state for state in STATES if now.get(f"tier_{state}", tier)]
        if now.get("store_away", tier):
            states.append("away")
        used, free = now.get("tier_used_bytes", tier), now.get("tier_free_bytes", tier)
        table.add_row(
            Text(tier),
            f"{now.rate(before, 'loaded_tier_chunks', tier):.0f}",
            read,
            written,
            f"{now.get('tier_queued_chunks', tier):.0f}",
            _time(now.quantile(before, "tier_read_seconds", 0.99, tier)),
            f"{used / (used + free):.0%}" if used + free else "-",
            ", ".join(states) or "well",
        )
    return table


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return "longer than 50 s" if math.isinf(seconds) else f"up to {seconds * 1000:g} ms"


# -- a folder ------------------------------------------------------------------------------------


def look_at(path: str) -> Snapshot:
    """Survey a cache on disk; its lanes take the place of tiers."""
    snapshot = Snapshot(time.monotonic())
    for namespace in survey(path):
        snapshot.wrong += [f"WRONG {fault}" for fault in namespace.faults]
        for lane in namespace.lanes:
            name = f"{namespace.name}/lane-{lane.number}"
            snapshot.values["chunks", name] = sum(each.counted for each in lane.segments)
            snapshot.values["bytes", name] = sum(
                each.counted * each.chunk_bytes for each in lane.segments
            )
            snapshot.values["file_bytes", name] = sum(each.file_bytes for each in lane.segments)
            snapshot.values["owner", name] = float(lane.owner or 0)
    return snapshot


def _folders(below: str, before: Snapshot, now: Snapshot) -> Table:
    """Tabulate the lanes of a cache on disk; `below` is written below them."""
    table = Table(title=counted(len(now.tiers), "lane"), title_justify="left")
    told = [*now.wrong, *([below] if below else [])]
    table.caption = Text("\n".join(told), "table.caption") if told else None
    table.caption_justify = "left"
    for head in ("lane", "process", "chunks", "more/s", "held", "files"):
        left = head == "lane"
        table.add_column(head, justify="left" if left else "right", overflow="fold")
    for lane in now.tiers:
        owner = int(now.get("owner", lane))
        more = (now.get("chunks", lane) - before.get("chunks", lane)) / (now.at - before.at)
        table.add_row(
            Text(lane),
            str(owner) if owner else "-",
            f"{now.get('chunks', lane):.0f}",
            f"{more:+.0f}",
            format_size(int(now.get("bytes", lane))),
            format_size(int(now.get("file_bytes", lane))),
        )
    return table
