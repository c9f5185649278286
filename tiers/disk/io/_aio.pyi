"""Batches of requests through Linux native AIO, without the GIL."""

from collections.abc import Sequence

from kvstore.tiers.disk.io.base import IORequest

class Context:
    """See `kvstore.tiers.disk.io.aio.Context`.

    Args:
        depth: most places in a device's queue, a single call excepted.
        call_bytes: most bytes of one call.
        function: address of the C function that makes a digest.

    Raises:
        OSError: when the system has none left, or refuses the calls.
    """

    def __new__(cls, depth: int, call_bytes: int, function: int, /) -> Context: ...
    def begin(self, requests: Sequence[IORequest], load: bool, hashed: int, /) -> Batch: ...

class Batch:
    def waits(self) -> bool: ...
    def end(self) -> list[tuple[int, list[bytes]]]: ...
