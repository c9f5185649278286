"""Admission filter: the contract. It decides whether a chunk enters a tier.

A filter belongs to a tier and works with any eviction policy. It is asked
before room is made, so that a refused chunk costs nothing. It holds no bytes,
does no I/O and is owned by one thread; time is passed in.

The caller guarantees:

* `asked` is called once for a request, with every key of its prompt, including
  those after the first miss: otherwise only one more chunk of a new chain would
  enter with each request;
* `admit` is called for keys that are about to enter and are not resident, and
  the caller then tries to store what was admitted;
* `now` never goes back.

The filter guarantees:

* `admit` answers for each key, in the order given;
* its memory is bounded;
* `clear` resets it, except for the spent part of a budget: bytes that were
  written stay written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby

from kvstore.policies.shares import Places, Shares

__all__ = ["AdmissionFilter", "Chain", "TenantFilters"]


class AdmissionFilter(ABC):
    """Decides which chunks may enter a tier.

    Parameters of a filter are keyword-only arguments of its constructor, each
    with a default and annotated as `int`, `float`, `bool` or `str`.

    Args:
        capacity: the number of chunks that the tier can hold, at least 1.
        chunk_bytes: the size of a chunk in bytes, at least 1.
    """

    name: str
    """The name under which the filter is registered."""

    spends = False
    """Whether admitting uses up a budget; a chain asks such a filter last."""

    def __init__(self, capacity: int, chunk_bytes: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, not {capacity}")
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1 byte, not {chunk_bytes}")
        self.capacity = capacity
        self.chunk_bytes = chunk_bytes

    @abstractmethod
    def asked(self, keys: Sequence[bytes]) -> None:
        """Count the keys of a request: its whole prompt, head first, each key once."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        """Return for each of `keys`, head first, whether it may enter.

        Args:
            now: seconds of any monotonic clock.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all requests."""

    @property
    def faults(self) -> int:
        """How often the filter failed: see `guard`."""
        return 0


class Chain(AdmissionFilter):
    """Filter that admits what all of its filters admit.

    A filter is asked only about keys that earlier filters admitted; filters
    that spend a budget are asked last.
    """

    name = "chain"

    def __init__(self, filters: Sequence[AdmissionFilter]) -> None:
        if not filters:
            raise ValueError("a chain needs at least one filter")
        super().__init__(filters[0].capacity, filters[0].chunk_bytes)
        self.filters = sorted(filters, key=lambda each: each.spends)
        self.spends = self.filters[-1].spends

    def asked(self, keys: Sequence[bytes]) -> None:
        for each in self.filters:
            each.asked(keys)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        admitted = [True] * len(keys)
        left = list(range(len(keys)))
        for each in self.filters:
            answers = each.admit([keys[index] for index in left], now)
            for index, answer in zip(left, answers, strict=True):
                admitted[index] = answer
            left = [index for index in left if admitted[index]]
        return admitted

    def clear(self) -> None:
        for each in self.filters:
            each.clear()

    @property
    def faults(self) -> int:
        return sum(each.faults for each in self.filters)


class TenantFilters(AdmissionFilter):
    """An admission filter for each partition: nobody's requests make another's be forgotten.

    Args:
        make: makes the filter of one partition, for a capacity.
    """

    name = "tenants"

    def __init__(
        self,
        capacity: int,
        chunk_bytes: int,
        make: Callable[[int], AdmissionFilter],
        shares: Shares,
    ) -> None:
        super().__init__(capacity, chunk_bytes)
        self.places = Places(shares)
        places = range(len(self.places.shares))
        self.partitions = [make(self.places.expected(place, capacity)) for place in places]

    def asked(self, keys: Sequence[bytes]) -> None:
        for place, run in groupby(keys, self.places.of):
            self.partitions[place].asked(list(run))

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        admitted: list[bool] = []
        for place, run in groupby(keys, self.places.of):
            admitted += self.partitions[place].admit(list(run), now)
        return admitted

    def clear(self) -> None:
        for each in self.partitions:
            each.clear()

    @property
    def faults(self) -> int:
        return sum(each.faults for each in self.partitions)
