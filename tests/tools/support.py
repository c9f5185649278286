"""Commands in a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.patience import PATIENCE

__all__ = ["command", "on_terminal"]


def command(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `kvstore` in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore.tools", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def on_terminal(arguments: list[str], typed: str, columns: int = 80) -> tuple[str, int]:
    """Run `kvstore` on a terminal of that width; what it shows, and its exit status."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools", *arguments],
        stdin=theirs,
        stdout=theirs,
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
