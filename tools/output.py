"""Output of commands: tables, progress and JSON.

On a terminal a table fits the width of the window. In a pipe or a file each row is one line,
however long it is. Progress is shown on a terminal only, on standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvstore.errors import KVStoreError
from kvstore.sizes import format_size, parse_size

__all__ = [
    "age",
    "asks",
    "confirm",
    "counted",
    "is_terminal",
    "number",
    "parse_bytes",
    "print_json",
    "print_table",
    "show_progress",
    "shows_progress",
    "tell_unchecked",
    "whole_number",
]

JSON_VERSION = 1
"""Raised when a field is removed or means something else; fields may be added without."""

PIPE_WIDTH = 10_000

LEAST_WIDTH = 40
"""In a narrower window lines are wrapped by the terminal."""


def is_terminal() -> bool:
    """Whether standard output is one; what the environment says of colours makes none of a pipe."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(report: Mapping[str, Any]) -> None:
    """Print a report for programs: an object that begins with its `version`.

    Raises:
        KVStoreError: for a number that JSON does not have.
    """
    try:
        text = json.dumps({"version": JSON_VERSION, **report}, indent=2, allow_nan=False)
    except ValueError as error:
        raise KVStoreError(f"what is there cannot be told in JSON: {error}") from error
    print(text)


def tell_unchecked(chunks: int, keys: str | None) -> None:
    """Say how many chunks were read and not checked; `keys` is what was given with --keys."""
    if chunks and keys is None:
        print(f"{counted(chunks, 'chunk')} encrypted: read, but not checked; see --keys")
    elif chunks:
        print(
            f"{counted(chunks, 'chunk')} encrypted with keys that {keys} does not have: read, but "
            "not checked; a server with these keys does not find them"
        )


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0
) -> None:
    """Print a table; columns whose name begins with ">" stand at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        side: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        # An empty column without a width would take that of another.
        table.add_column(name.removeprefix(">"), justify=side, overflow="fold", min_width=1)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    terminal = is_terminal()
    console = Console(force_terminal=terminal, highlight=False, emoji=False, markup=False)
    console.width = max(console.width, LEAST_WIDTH) if terminal else PIPE_WIDTH
    with console.capture() as printed:
        console.print(Padding(table, (0, 0, 0, indent), expand=False))
    # A padded cell at the end of a line is of use to nobody.
    print("\n".join(line.rstrip() for line in printed.get().rstrip("\n").split("\n")))


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 lane" or "3 lanes"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def whole_number(text: str) -> int:
    """A whole number of at least one, from a command line."""
    if not text.isdecimal() or not 0 < int(text) <= sys.maxsize:
        raise argparse.ArgumentTypeError("must be a whole number, 1 at least")
    return int(text)


def number(allowed: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Return what takes a number from a command line that is allowed; `what` says which are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {what}")
        return value

    return parse


def asks(options: argparse.Namespace) -> bool:
    """Whether a person is there, who did not agree beforehand."""
    if options.yes or getattr(options, "dry_run", False) or sys.stdin is None:
        return False
    return sys.stdin.isatty()


def confirm(question: str) -> None:
    """Go on if the person at the terminal says yes.

    Raises:
        KVStoreError: if not.
    """
    # Standard output may go to a file.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KVStoreError("nothing was changed")


def age(milliseconds: int) -> str:
    """How long ago a time was, such as "3 d"; "-" for none."""
    if not milliseconds:
        return "-"
    seconds = max(0.0, time.time() - milliseconds / 1000)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def parse_bytes(text: str) -> int:
    """A size of at least one byte, from a command line."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError("must be at least 1 byte")
    return size


def shows_progress() -> bool:
    """Whether standard error is a terminal, and so there is somebody to watch."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def show_progress(unit: str = "chunks") -> Iterator[Callable[[float, float], None]]:
    """Show how much is done, the rate and the time left, on a terminal; else do nothing.

    Args:
        unit: what is counted; "bytes" are shown as sizes.
    """
    if not shows_progress():
        yield lambda done, total: None
        return
    progress = Progress(
        BarColumn(),
        TextColumn("{task.percentage:>5.1f} %"),
        _Rate(unit),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # It would write to the terminal what is printed for a pipe or a file.
        redirect_stdout=is_terminal(),
    )
    with progress:
        task = progress.add_task("", total=None)

        def show(done: float, total: float) -> None:
            progress.update(task, completed=done, total=total)

        yield show


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        if self._unit == "bytes":
            return Text(f"{format_size(task.completed)} at {format_size(speed)}/s")
        return Text(f"{task.completed:,.0f} {self._unit} at {speed:,.0f}/s")
