"""The `kvstore` command.

Exit status: 0 all is well, 1 something wrong was found, 2 the command could
not be carried out (usage, a path that holds no cache).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import kvstore
from kvstore.errors import KVStoreError
from tools.inspect import inspect
from tools.simulate import add_arguments, run_simulate
from tools.upkeep import run_compact, run_purge, run_stat
from tools.verify import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore", description="Inspect, check, tidy and simulate a KV cache."
    )
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("inspect", inspect, "list namespaces, lanes and segments with what they hold"),
        ("verify", verify, "read every payload against its digest"),
        ("stat", run_stat, "how well chunks lie: occupancy of segments, extents"),
        ("compact", run_compact, "give sparse segments back and put chunks in order"),
        ("purge", run_purge, "forget chunks by namespace, age or key"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="folder of the cache, or one namespace in it")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run)
        if run in (run_compact, run_purge):
            command.add_argument(
                "--dry-run", action="store_true", help="only say what would be done"
            )
        if run is run_purge:
            command.add_argument("--namespace", help="only in the namespace of that name")
            command.add_argument("--unused", metavar="AGE", help="not used for 36h, 7d, ...")
            command.add_argument("--key", metavar="HEX", help="only the chunk of that key")
            command.add_argument("--all", action="store_true", help="every chunk")
    text = "replay a trace of requests with other sizes, policies and flows"
    command = commands.add_parser("simulate", help=text, description=text)
    add_arguments(command)
    command.set_defaults(run=run_simulate)
    return parser
