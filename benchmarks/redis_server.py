"""A Redis or Valkey server for a while, for benchmarks and tests: in memory alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_process import ServerProcess

__all__ = ["RedisServer"]


class RedisServer(ServerProcess):
    """A redis-server, or the like, which has to be installed. It starts empty.

    Args:
        folder: for its log. options: more of its command line. host: the address that it listens
            on. program: `redis-server`, or a path.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        host: str = "127.0.0.1",
        program: str | Path = "redis-server",
    ) -> None:
        super().__init__(folder / "redis.log", host)
        self._folder = folder
        self._program = program
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        """What a tier is told."""
        return f"redis://{self.host}:{self.port}/0"

    def command(self) -> Sequence[str]:
        """What starts it."""
        return [
            str(self._program),
            *("--port", str(self.port), "--bind", self.host, "--save", ""),
            *("--dir", str(self._folder), "--protected-mode", "no", *self._options),
        ]
