"""Client: the calls that a store tier makes to a remote store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "MOST_UNREAD",
    "SHARED_EPOCH",
    "ListingClient",
    "StoreClient",
    "StoreError",
    "Unread",
    "checked",
    "epoch_of",
]

SHARED_EPOCH = "0"
"""Epoch of processes that were not cleared; any other epoch belongs to a single process."""

PRIVATE_SECONDS = 7 * 86400.0
"""How long a value in the epoch of a single process is kept at least. No other process reads it,
and its own may be gone."""

MOST_UNREAD = 4
"""So many values that cannot be read, and none in between that can: then the store is at fault."""


class StoreError(Exception):
    """A call failed or was not answered: nothing is known about the values that it named."""


class Unread(str):
    """Why a value could not be read this time, although it may exist."""

    __slots__ = ()


class StoreClient(Protocol):
    """A client of one store, used from one event loop.

    A value is a record of `RECORD_BYTES` bytes (`record.py`) and a payload, in an order that the
    client chooses. Every call raises only `StoreError`, if the store does not answer as it should.
    A call may be cancelled. Once it has ended in any way, it no longer uses its caller's memory.
    """

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether it has a value."""

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        """Store values; return for each why it could not be stored, or None.

        Args:
            replace: whether to replace existing values, because some of them are invalid. If not,
                a name that has a value keeps it, as it is the same value.
        """

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        """Read the payload of each value into the memory given for it.

        Returns:
            For each value its record; b"" if the value has another size; None if there is no
            value; an error message if it could not be read, `Unread` if another try may succeed.
            Without a record, the contents of the memory are undefined.
        """

    async def remove(self, names: Sequence[str]) -> None:
        """Remove the values of these names, if they exist."""

    async def close(self) -> None:
        """Close all connections. Never raises."""


@runtime_checkable
class ListingClient(StoreClient, Protocol):
    """A client that can list the values of its store.

    One with an attribute ``complaint`` says there what an operator should know, as of the last
    listing; None if nothing.
    """

    def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        """Yield names below a place, each with the Unix time of its last write.

        Each portion is of one epoch.

        Args:
            but: epochs to leave out.
        """


def checked(call: str, answers: Any, count: int, *kinds: type) -> list[Any]:
    """Return the answers of a client, which need not be kvstore's own. Any may be None.

    Raises:
        StoreError: if there are not `count`, or one is of none of `kinds`.
    """
    found = list(answers) if isinstance(answers, Iterable) else [answers]
    wrong = [each for each in found if not (each is None or isinstance(each, kinds))]
    if len(found) != count or wrong or "" in found:
        told = f"{len(found)} answers for {count} values" if len(found) != count else ""
        told = told or (f"a {type(wrong[0]).__name__}" if wrong else "an empty message")
        allowed = ", ".join(["None", *(kind.__name__ for kind in kinds)])
        raise StoreError(f"the client's {call} returned {told}; allowed are, for each: {allowed}")
    return found


def epoch_of(name: str) -> str:
    """Return the epoch in the name of a value."""
    return name.rsplit("/", 2)[1]
