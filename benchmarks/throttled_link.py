"""A TCP port that leads to a server no faster than a link would, for benchmarks and tests.

All connections share the link; each direction has its own bytes per second. Needs no privileges,
other than `benchmarks.hosts.cable`, which also delays and loses frames.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.server_process import ServerProcess

__all__ = ["ThrottledLink"]

PIECE_BYTES = 64 * 2**10

BUFFER_BYTES = 256 * 2**10
"""What a socket of the link holds, so that the far end notices that it is slow."""


class ThrottledLink(ServerProcess):
    """A link to a server on this machine, carried by a process of its own.

    Args:
        folder: for its log. port: where the server listens.
        bytes_per_s: in each direction.
    """

    def __init__(self, folder: Path, port: int, bytes_per_s: float) -> None:
        super().__init__(folder / "link.log")
        self._to = port
        self._bytes_per_s = bytes_per_s
        self.start()

    def command(self) -> Sequence[str]:
        """What starts it."""
        return [sys.executable, __file__, str(self.port), str(self._to), str(self._bytes_per_s)]


class _Direction:
    """What goes one way."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                with self._lock:
                    begin = max(time.monotonic(), self._free_at)
                    due = self._free_at = begin + len(piece) / self._bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Carry what comes to the first port to the second, so many bytes per second."""
    listens, leads_to, bytes_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    there, back = _Direction(bytes_per_s), _Direction(bytes_per_s)
    with socket.create_server(("127.0.0.1", listens)) as server:
        while True:
            near, _ = server.accept()
            far = socket.socket()
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                far.connect(("127.0.0.1", leads_to))
            except OSError:
                near.close()
                far.close()
                continue
            for direction, ends in ((there, (near, far)), (back, (far, near))):
                threading.Thread(target=direction.carry, args=ends, daemon=True).start()


if __name__ == "__main__":
    main()
