"""A Mooncake master for a while, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.redis_server import free_port, freeze

__all__ = ["MooncakeMaster"]

START_SECONDS = 60.0


class MooncakeMaster:
    """A mooncake_master, which comes with the package `mooncake`. It holds no values itself.

    Args:
        folder: for its log. host: the address that it listens on.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = free_port()
        self._admin = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """What a tier is told."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start it, empty, or let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            return
        with (self._folder / "master.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "mooncake_master"),
                    *(f"--rpc_address={self.host}", f"--rpc_port={self.port}"),
                    f"--metrics_port={self._admin}",
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port)):
                return
            if time.monotonic() > end:
                raise RuntimeError((self._folder / "master.log").read_text()[-2000:])
            time.sleep(0.02)

    def names(self) -> list[str]:
        """The names of all values."""
        url = f"http://127.0.0.1:{self._admin}/get_all_keys"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode()).split()

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
