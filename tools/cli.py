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
    parser = argparse.ArgumentParser(prog="kvstore", description="Look at a KV cache on disk.")
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("inspect", inspect, "list namespaces, lanes and segments with what they hold"),
        ("verify", verify, "read every payload against its digest"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="folder of the cache, or one namespace in it")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run)
    return parser
