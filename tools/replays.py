"""Options and output shared by all kinds of ``kvstore simulate``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.errors import ConfigError
from kvstore.plugins import Choice
from kvstore.policies.reuse import REUSE_TABLE
from kvstore.simulation import Costs, Setup, Trace, sample
from kvstore.simulation.replay import DEFAULT_CHUNK_BYTES
from kvstore.sizes import format_size, parse_size
from kvstore.tools.output import number, shows_progress

__all__ = [
    "DEFAULT_PART",
    "about",
    "add_costs",
    "chunks_of",
    "costs_of",
    "note",
    "part_of",
    "print_trace",
    "progress_of",
    "sampled",
    "scaled",
    "shown_bytes",
    "split",
]

DEFAULT_PART = 10
"""The part of a trace, one in so many chunks, that host memory takes by default."""


def split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def chunks_of(option: str, text: str, trace: Trace, size: int | None) -> int:
    """Parse a number of chunks: a number, a share of the trace's chunks, or a size in bytes.

    Args:
        size: bytes of a chunk; None if unknown.
    """
    found = _chunks_of(option, text, trace, size)
    if not found and any(digit in text for digit in "123456789"):
        raise ConfigError(f"{option} {text}: less than one chunk; 0 is none")
    return found


def _chunks_of(option: str, text: str, trace: Trace, size: int | None) -> int:
    try:
        if re.fullmatch(r"\d+(\.\d+)?%", text):
            return int(trace.unique * float(text[:-1]) / 100)
        if re.fullmatch(r"\d{1,18}", text):
            return int(text)
        wanted = parse_size(text)
        if wanted >= 2**63:
            raise ValueError
    except (OverflowError, ValueError) as error:
        raise ConfigError(
            f'{option} {text}: must be a number of chunks, a share such as "5%", '
            'or a size such as "64GiB"'
        ) from error
    if size is None:
        raise ConfigError(
            f"{option} {text}: a size in bytes needs --chunk-bytes, because {trace.name} does not "
            "give the size of a chunk"
        )
    return wanted // size


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell what a chunk costs."""
    parser.add_argument(
        "--compute-ms", type=_costs, metavar="N[,N@DEPTH]",
        help="milliseconds to compute a chunk: the first of a prompt, and one behind DEPTH others",
    )  # fmt: skip
    above_0 = number(lambda value: 0 < value < math.inf, "milliseconds, a number above 0")
    parser.add_argument(
        "--read-ms", type=above_0, metavar="N", help="milliseconds to read a chunk from disk"
    )


def costs_of(options: argparse.Namespace, known: Costs | None = None) -> Costs:
    """What a chunk costs: what is given counts for more than what is `known`."""
    costs = Costs() if known is None else known
    if options.compute_ms is not None:
        costs = replace(options.compute_ms, read=costs.read)
    if options.read_ms is not None:
        costs = replace(costs, read=options.read_ms / 1000)
    return costs


def _costs(text: str) -> Costs:
    try:
        return Costs.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sampled(trace: Trace, rate: float, seed: int) -> Trace | None:
    """Sample so much of a trace; None where it has too few conversations to be sampled."""
    if rate >= 1:
        return trace
    part = sample(trace, rate, seed)
    return part if part.accesses >= rate * trace.accesses / 2 else None


def part_of(trace: Trace, options: argparse.Namespace) -> Trace:
    """The part of a trace that `--sample` asks for.

    Raises:
        ConfigError: if it has too few conversations to be sampled.
    """
    if options.sample is None:
        return trace
    part = sampled(trace, options.sample, options.seed)
    if part is None:
        raise ConfigError(f"--sample {options.sample:g}: there are too few conversations")
    return part


def scaled(setup: Setup, scale: float) -> Setup:
    """Scale a setup for a sample that has this share of the trace's chunks."""
    if scale == 1:
        return setup

    def sized(filters: tuple[Choice, ...]) -> tuple[Choice, ...]:
        return tuple(map(partial(_sized, scale=scale), filters))

    return replace(
        setup,
        host=max(1, round(setup.host * scale)),
        disk=max(1, round(setup.disk * scale)) if setup.disk else 0,
        host_admission=sized(setup.host_admission),
        disk_admission=sized(setup.disk_admission),
    )


def _sized(choice: Choice, scale: float) -> Choice:
    """A filter that remembers a number of keys, for that part of them."""
    if choice.name != "reuse":
        return choice
    parameters = {"table": REUSE_TABLE, **dict(choice.parameters)}
    parameters["table"] = max(1, round(parameters["table"] * scale))
    return replace(choice, parameters=tuple(sorted(parameters.items())))


def about(trace: Trace, part: Trace) -> dict[str, Any]:
    """Describe a trace and the part of it that was replayed, for JSON."""
    description: dict[str, Any] = {
        "name": trace.name,
        "requests": len(trace.requests),
        "accesses": trace.accesses,
        "unique": trace.unique,
    }
    if part is not trace:
        description["sample"] = {
            "requests": len(part.requests), "accesses": part.accesses, "unique": part.unique
        }  # fmt: skip
    return description


def print_trace(trace: Trace, part: Trace) -> None:
    """Print a trace and the part of it that was replayed."""
    print(
        f"{trace.name}: {len(trace.requests)} requests, {trace.accesses} accesses to "
        f"{trace.unique} chunks"
    )
    if part is not trace:
        print(
            f"sample: {len(part.requests)} requests, {part.accesses} accesses to "
            f"{part.unique} chunks; sizes are scaled"
        )


def progress_of(what: str, trace: Trace) -> Callable[[int], None]:
    """What shows how far a replay of this trace is, its rate and the time left, on a terminal."""
    begun, total = time.monotonic(), len(trace.requests)

    def show(done: int) -> None:
        seconds = time.monotonic() - begun
        if not done or not seconds:
            note(what)
            return
        left = seconds / done * (total - done)
        note(f"{what}: {done / total:.0%}, {done / seconds:,.0f} requests/s, {left:.0f} s left")

    return show


def shown_bytes(size: float, chunk_bytes: int | None) -> str:
    """A size, of chunks of `DEFAULT_CHUNK_BYTES` where nobody knows theirs: then in chunks."""
    return f"{size / DEFAULT_CHUNK_BYTES:.2g} chunks" if chunk_bytes is None else format_size(size)


def note(text: str) -> None:
    """Show progress on a terminal; an empty text clears it."""
    if shows_progress():
        print(f"\r{text:<60}", end="" if text else "\r", file=sys.stderr, flush=True)
