"""The `kvstore` command.

Exit status: 0 no fault was found, 1 a fault was found, 2 the command failed
(usage, a path without a cache, a disk error, a closed output pipe).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import kvstore
from kvstore.errors import KVStoreError
from kvstore.tools.ctl import add_ctl_arguments, run_ctl
from kvstore.tools.doctor import add_doctor_arguments, run_doctor
from kvstore.tools.inspect import inspect
from kvstore.tools.simulate import add_arguments, run_simulate
from kvstore.tools.top import add_top_arguments, run_top
from kvstore.tools.upkeep import run_compact, run_purge, run_stat
from kvstore.tools.verify import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal's encoding lacks instead of failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KVStoreError as error:
        return _fail(str(error))
    except BrokenPipeError:
        _drop_output()
        return 2
    except OSError as error:
        _drop_output()
        about = f"{error.filename}: " if error.filename else ""
        return _fail(f"{about}{error.strerror or error}")
    except KeyboardInterrupt:
        return 130


def _drop_output() -> None:
    """Redirect a broken stdout, so that the interpreter does not flush it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str) -> int:
    with contextlib.suppress(OSError):
        print(f"kvstore: {text}", file=sys.stderr)
    return 2


def _folder(text: str) -> Path:
    """Parse the path of a folder; refuse "", which an unset shell variable gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be the path of a folder, not empty")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore", description="Inspect, check, tidy, watch and simulate a KV cache."
    )
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("inspect", inspect, "list namespaces, lanes and segments and their contents"),
        ("verify", verify, "check every payload against its digest"),
        ("stat", run_stat, "show fragmentation: occupancy of segments, extents"),
        ("compact", run_compact, "remove sparse segments and put chunks in order"),
        ("purge", run_purge, "forget chunks by namespace, age or key"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "path", type=_folder, help="folder of the cache, or one namespace in it"
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run)
        if run in (run_compact, run_purge):
            command.add_argument(
                "--dry-run", action="store_true", help="only report what would be done"
            )
            command.add_argument(
                "--no-strict-modes",
                dest="strict_modes",
                action="store_false",
                help="also accept lanes that other users own or may write to",
            )
        if run is run_purge:
            command.add_argument("--namespace", help="only in the namespace of that name")
            command.add_argument(
                "--unused", metavar="AGE", help="only chunks not used for 36h, 7d, ..."
            )
            command.add_argument("--key", metavar="HEX", help="only the chunk of that key")
            command.add_argument("--all", action="store_true", help="every chunk")
    text = "replay a trace of requests with other sizes, policies and flows"
    command = commands.add_parser("simulate", help=text, description=text)
    add_arguments(command)
    command.set_defaults(run=run_simulate)
    text = "show the rates and states of a server's tiers, or the growth of a cache on disk, live"
    command = commands.add_parser("top", help=text, description=text)
    add_top_arguments(command)
    command.set_defaults(run=run_top)
    text = "say whether the cache helps a server, and what to change"
    command = commands.add_parser("doctor", help=text, description=text)
    add_doctor_arguments(command)
    command.set_defaults(run=run_doctor)
    text = "inspect and change a store while it serves, by its control socket"
    command = commands.add_parser("ctl", help=text, description=text)
    add_ctl_arguments(command)
    command.set_defaults(run=run_ctl)
    return parser
