"""Client: what a store tier asks of a remote engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

__all__ = [
    "SHARED_EPOCH",
    "ListingClient",
    "StoreClient",
    "StoreError",
    "Unread",
    "epoch_of",
    "in_waves",
]

SHARED_EPOCH = "0"
"""The epoch of processes that were not cleared; any other is a single process's."""

PRIVATE_SECONDS = 7 * 86400.0
"""How long a value of a single process's epoch is kept at least: nobody else reads it, and the
process may be gone."""

FIRST_ASKED = 4
"""Values of which `in_waves` asks before those behind them."""


class StoreError(Exception):
    """A call that could not be made, or was not answered: nothing is known of what it named."""


class Unread(str):
    """Why a value could not be read this time: it may be there."""

    __slots__ = ()


class StoreClient(Protocol):
    """A client of one engine, used from one event loop.

    A value is a record of `RECORD_BYTES` bytes (`record.py`) and a payload, in an order that is
    the client's. Every call raises `StoreError`, and nothing else, where the engine does not
    answer as it should. It may be cancelled: when it has ended, however it did, it uses no memory
    of its caller's.
    """

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there is a value of each name."""

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        """Store values; for each why that could not be, or None.

        Args:
            replace: whatever the names have is replaced: a value among them is no good. Otherwise
                a name that has a value keeps it: it is the same one.
        """

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        """Read the payload of each value into the memory given for it.

        Returns:
            The records; an empty one where the value has another size; None where there is no
            value; words where it could not be read, `Unread` where another time it may be. Without
            a record the memory may hold anything.
        """

    async def remove(self, names: Sequence[str]) -> None:
        """Let there be no values of these names."""

    async def close(self) -> None:
        """Let go of all connections. Never raises."""


@runtime_checkable
class ListingClient(StoreClient, Protocol):
    """A client that can tell what its engine has."""

    def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        """Names below a place, with the time (Unix) of the last write, but for these epochs.

        In portions of which each is of one epoch.
        """


def epoch_of(name: str) -> str:
    """The epoch in the name of a value."""
    return name.rsplit("/", 2)[1]


async def in_waves(
    names: Sequence[str], most: int, ask: Callable[[Sequence[str]], Awaitable[list[bool]]]
) -> list[bool]:
    """Whether there is a value of each name, asked up to a wave of names without any.

    Args:
        most: names of one wave.
    """
    told: list[bool] = []
    while len(told) < len(names):
        found = await ask(names[len(told) :][: most if told else FIRST_ASKED])
        told += found
        if not any(found):
            break
    return told + [False] * (len(names) - len(told))
