"""A Redis server for a while, for benchmarks and tests: in memory alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["RedisServer", "free_port", "freeze"]

START_SECONDS = 60.0


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stop a process; when this returns, none of its threads runs any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


class RedisServer:
    """A redis-server, which has to be installed.

    Args:
        folder: for its log. options: more of its command line. host: the address that it listens
            on.
    """

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """What a tier is told."""
        return f"redis://{self.host}:{self.port}/0"

    def start(self) -> None:
        """Start it, empty, or let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            return
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "redis-server",
                    *("--port", str(self.port), "--bind", self.host, "--save", ""),
                    *("--dir", str(self._folder), "--protected-mode", "no", *self._options),
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port)):
                return
            if time.monotonic() > end:
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.02)

    def freeze(self) -> None:
        """It takes connections, and does nothing."""
        if self._process is not None:
            freeze(self._process)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
