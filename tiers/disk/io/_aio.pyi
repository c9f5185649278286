"""Batches of calls through Linux native AIO, moved without the GIL."""

from collections.abc import Sequence

from tiers.disk.io.base import IORequest

class Context:
    """The AIO context of one thread: see `tiers.disk.io.aio`.

    Args:
        depth: most calls in flight.
        function: address of the C function that makes a digest.

    Raises:
        OSError: when the system has none left, or refuses the calls.
    """

    def __new__(cls, depth: int, function: int, /) -> Context: ...
    def move(
        self, requests: Sequence[IORequest], load: bool, hashed: int, /
    ) -> list[tuple[int, list[bytes]]]: ...
