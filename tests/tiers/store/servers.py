"""Real engines on this machine, for tests."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE

__all__ = ["RedisServer", "redis_server"]


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server that keeps everything in memory."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """What a tier is told."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, or let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            return
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "redis-server",
                    *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                    *("--dir", str(self._folder), *self._options),
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < end, (self._folder / "redis.log").read_text()
            time.sleep(0.02)

    def freeze(self) -> None:
        """It takes connections, and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server for a while; skips the test where redis-server is not installed."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), *options)
        try:
            yield server
        finally:
            server.stop()
