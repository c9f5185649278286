"""A Mooncake master for a while, for benchmarks and tests."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_process import ServerProcess, free_port

__all__ = ["MooncakeMaster"]


class MooncakeMaster(ServerProcess):
    """A mooncake_master, which comes with the package `mooncake`. It holds no values itself.

    Args:
        folder: for its log. host: the address that it listens on.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(folder / "master.log", host)
        self._admin = free_port()
        self.start()

    @property
    def address(self) -> str:
        """What a tier is told."""
        return f"{self.host}:{self.port}"

    def command(self) -> Sequence[str]:
        """What starts it."""
        return [
            str(Path(sys.executable).parent / "mooncake_master"),
            *(f"--rpc_address={self.host}", f"--rpc_port={self.port}"),
            f"--metrics_port={self._admin}",
        ]

    def names(self) -> list[str]:
        """The names of all values."""
        url = f"http://127.0.0.1:{self._admin}/get_all_keys"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode()).split()
