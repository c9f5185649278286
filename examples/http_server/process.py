"""A server in a process of its own, for those who talk to it over HTTP."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

__all__ = ["ServerProcess"]

ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Starts at once, on a free port; the end of a ``with`` block stops it.

    Args:
        log: file for what it writes.
        arguments: of its command line.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.http_server", "--port", "0", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def url(self, seconds: float = 120.0) -> str:
        """Where it listens; waits until it does.

        Raises:
            RuntimeError: with its last lines, if it ends or does not come up in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            for line in self.lines():
                if line.startswith("listening on "):
                    return line.removeprefix("listening on ").strip()
            time.sleep(0.05)
        raise RuntimeError("the server does not answer:\n" + "".join(self.lines()[-20:]))

    def lines(self) -> list[str]:
        """What it has written so far, in whole lines."""
        return [line for line in self._log.read_text().splitlines(True) if line.endswith("\n")]

    def stop(self, seconds: float = 60.0) -> int:
        """Ask it to end, wait, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: if it does not; then it is killed.
        """
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
