"""Commands in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from typing import IO, Any
from unittest.mock import patch

from kvstore.tools.cli import main
from tests.patience import PATIENCE

__all__ = [
    "answering",
    "command",
    "error_of",
    "in_a_process",
    "json_of",
    "on_terminal",
    "run",
]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvstore` in this process, which is several times as fast, as in a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def run(*arguments: object, status: int = 0) -> str:
    """Run `kvstore`, which has to end with `status`; returns its output."""
    done = command(*map(str, arguments))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def json_of(*arguments: object, status: int = 0) -> Any:
    """The same with ``--json``; returns what is told."""
    return json.loads(run(*arguments, "--json", status=status))


def error_of(*arguments: object, status: int = 2) -> str:
    """Run `kvstore`, which has to end with `status`; returns what it says on standard error."""
    done = command(*map(str, arguments))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr


class Terminal(io.StringIO):
    """A person, who types this."""

    def isatty(self) -> bool:
        return True


def answering(typed: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `kvstore` for a person who types that, with its outputs in pipes."""
    with patch("sys.stdin", Terminal(f"{typed}\n")):
        return command(*map(str, arguments))


def in_a_process(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `kvstore` in a process of its own, in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore.tools", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def on_terminal(
    arguments: list[str], typed: str, columns: int = 80, out: IO[bytes] | None = None
) -> tuple[str, int]:
    """Run `kvstore` on a terminal of that width; what it shows there, and its exit status.

    Its standard output goes to `out`, if that is given.
    """
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools", *arguments],
        stdin=theirs,
        stdout=theirs if out is None else out,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # The other end is closed.
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown.decode(), running.wait(PATIENCE)
