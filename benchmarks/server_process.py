"""A server in a process of its own: started, frozen, killed, started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ServerProcess", "free_port"]


PORTS = range(12_000, 32_000)
"""Below those that Linux gives to whoever names none: a client gets no port of a server to come."""

_taken: list[socket.socket] = []


def free_port() -> int:
    """A port of the loopback that nobody listens on, and that no other process is given here.

    Raises:
        RuntimeError: if there is none.
    """
    for port in random.sample(PORTS, len(PORTS)):
        # A name without a file, which this process has until it ends.
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0kvstore-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _taken.append(name)
                return port
        except OSError:
            name.close()
    raise RuntimeError(f"each port of {PORTS.start} to {PORTS.stop - 1} is taken")


class ServerProcess(ABC):
    """A server at a free port; a kind of server says by which command it is started.

    Args:
        log: what it prints. host: the address that it listens on.
    """

    start_seconds = 60.0

    def __init__(self, log: Path, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = free_port()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """What starts it."""

    def serves(self) -> bool:
        """Whether it takes calls."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port)):
            return True
        return False

    def start(self) -> None:
        """Start it, or let it go on.

        Raises:
            RuntimeError: with the end of its log, if it does not serve in time.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        end = time.monotonic() + self.start_seconds
        while not self.serves():
            if time.monotonic() > end:
                raise RuntimeError(self._log.read_text()[-2000:])
            time.sleep(0.02)

    def freeze(self) -> None:
        """It takes connections, and does nothing: none of its threads runs any more."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
