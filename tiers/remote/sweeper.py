"""Sweeper: remove from a store what nobody reads any more, and the oldest beyond its capacity.

The values of a store are listed once an hour, and once this process has stored a sixteenth of what
the store may hold. Those of epochs that nobody uses are removed. With a capacity the others are
counted by their age, to a second at first, and listed again if there are too many: then the oldest
of them go. So a sweep needs little memory, however many values there are. With tenants each
partition keeps its share of the capacity.

All processes that share a store may sweep it, also at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvstore.tiers.remote.client import (
    PRIVATE_SECONDS,
    SHARED_EPOCH,
    ListingClient,
    StoreClient,
    StoreError,
    epoch_of,
)
from kvstore.types import Partitions, about

__all__ = ["MOST_REMOVED", "PARTS", "Ages", "Sweeper"]

logger = logging.getLogger("kvstore.store")

MOST_REMOVED = 128
"""Most values of a call that removes them."""

SWEEP_SECONDS = 3600.0
"""Most seconds between sweeps, and before the first one where there is no capacity."""

FIRST_SECONDS = 30.0
"""The same before the first one, of a store of a capacity: few processes live for an hour. And
after one that failed: then twice as long each time."""

MOST_REFUSED = 8
"""Calls that remove values and fail one after the other, with which a sweep ends."""

SWEEP_PAUSE = 0.5
"""Seconds between calls that remove values of unused epochs."""

PARTS = 16
"""A sweep leaves room for one of so many parts of the capacity, and comes when that was stored."""

MOST_AGES = 2**16
"""Ages that are told apart: beyond that they are counted more roughly."""


class Ages:
    """How many values of each partition were stored when."""

    def __init__(self) -> None:
        self._seconds = 1
        self._counts: Counter[tuple[int, int]] = Counter()

    def add(self, partition: int, since: float) -> None:
        """Count a value.

        Args:
            since: Unix time of its last write.
        """
        self._counts[partition, int(since) // self._seconds] += 1
        if len(self._counts) > MOST_AGES:
            self._seconds *= 2
            rough: Counter[tuple[int, int]] = Counter()
            for (its, age), count in self._counts.items():
                rough[its, age // 2] += count
            self._counts = rough

    def excess(self, capacity: int, room: int, partitions: Partitions | None) -> Excess:
        """Return which values are to go so that `room` are left; shares are of `capacity`."""
        going: Counter[int] = Counter()
        for (partition, _), count in self._counts.items():
            going[partition] += count
        kept = [room] if partitions is None else partitions.kept(going, capacity, room)
        going.subtract(dict(enumerate(kept)))
        going = +going
        excess = Excess(self._seconds, dict(going), {}, {})
        for partition, age in sorted(self._counts):
            if going[partition] > 0:
                count = self._counts[partition, age]
                excess.last[partition] = age
                excess.staying[partition] = max(0, count - going[partition])
                going[partition] -= count
        return excess


@dataclass
class Excess:
    """Values that are to go.

    Attributes:
        seconds: of one age.
        going: by partition, how many are still to go.
        last: the last age of which values go.
        staying: how many of that age stay: those that are found first. So others who sweep at the
            same time remove the same values.
    """

    seconds: int
    going: dict[int, int]
    last: dict[int, int]
    staying: dict[int, int]

    def takes(self, partition: int, since: float) -> bool:
        """Whether this value, the next that is found, is one of them."""
        age = int(since) // self.seconds
        if not self.going.get(partition) or age > self.last[partition]:
            return False
        if age == self.last[partition] and self.staying[partition]:
            self.staying[partition] -= 1
            return False
        self.going[partition] -= 1
        return True


class Sweeper:
    """Sweeps one store.

    Attributes:
        epoch: that in which this process stores.
        left: epochs of its own that it has left.

    Args:
        place: what all names begin with.
        capacity: how many values the store may hold, `PARTS` at least; None if that is its own
            affair.
        reached: returns the client.
        remove: removes values.
    """

    def __init__(
        self,
        place: str,
        capacity: int | None,
        partitions: Partitions | None,
        reached: Callable[[], StoreClient],
        remove: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self.epoch = SHARED_EPOCH
        self.left: set[str] = set()
        self._place, self._capacity, self._partitions = place, capacity, partitions
        self._reached, self._remove = reached, remove
        self._stored = 0
        self._removed = self._told = 0
        self._fault: str | None = None
        self._due = asyncio.Event()
        self._sweeping = asyncio.Lock()
        self._told_fault: str | None = None
        # Why the first call of this sweep that failed did, and how many since one that did not.
        self._refused: StoreError | None = None
        self._refusals = 0

    def stored(self, count: int) -> None:
        """Note that this process has stored so many values."""
        self._stored += count
        if self._capacity is not None and self._stored >= self._capacity // PARTS:
            self._due.set()

    def tell_removed(self) -> int:
        """Return how many of the oldest values were removed since the last call, on any thread."""
        removed, told = self._removed, self._told
        self._told = removed
        return removed - told

    def tell_fault(self) -> str | None:
        """Return why a sweep has failed since the last call, on any thread; None if none has."""
        fault, self._fault = self._fault, None
        return fault

    async def leave(self, epoch: str) -> None:
        """Note that this process has left an epoch of its own, which the next sweep removes."""
        self.left.add(epoch)
        self._due.set()

    async def run(self) -> None:
        """Sweep whenever it is time."""
        wait = SWEEP_SECONDS if self._capacity is None else FIRST_SECONDS
        again = FIRST_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._due.wait()
            early = self._due.is_set()
            done = False
            try:
                done = await self.sweep()
            except Exception as error:
                self._fault = f"a sweep raised {error!r}"
                logger.exception("a sweep raised", extra=about("store.not_swept"))
            if done:
                wait, again = SWEEP_SECONDS, FIRST_SECONDS
            else:
                wait, again = again, again if early else min(2 * again, SWEEP_SECONDS)

    async def sweep(self) -> bool:
        """Sweep once, as far as the client can list values; False if the store failed."""
        async with self._sweeping:
            self._due.clear()
            self._stored = 0
            self._refused, self._refusals = None, 0
            client, left = self._reached(), set(self.left)
            if not isinstance(client, ListingClient):
                if self._capacity is not None:
                    self._tell("the store cannot list its values: capacity_bytes has no effect")
                return True
            try:
                ages = await self._remove_unused(client, left)
                if self._refused is None:
                    self.left -= left
                complaint = getattr(client, "complaint", None)
                if self._capacity is not None:
                    await self._remove_oldest(client, ages, self._capacity)
                if self._refused is not None:
                    raise self._refused
            except StoreError as error:
                # What cannot be removed now is found by the next sweep.
                risk = "what resets have left stays there"
                if self._capacity is not None:
                    risk = "it may grow beyond its capacity"
                self._tell(f"the store cannot be swept ({error}): {risk}")
                return False
            self._tell(None if self._capacity is None else complaint)
            return True

    def _tell(self, fault: str | None) -> None:
        """Tell what is wrong with the sweeps; log it once, until nothing is."""
        if fault is not None and self._told_fault is None:
            logger.warning(
                "%s: %s",
                self._place,
                fault,
                extra=about("store.not_swept", place=self._place, error=fault),
            )
        self._told_fault = fault
        self._fault = fault or self._fault

    async def _remove_unused(self, client: ListingClient, left: set[str]) -> Ages:
        """Remove values of epochs that nobody uses, and count the others if there is a capacity."""
        before, ages = time.time() - PRIVATE_SECONDS, Ages()
        used = {SHARED_EPOCH, self.epoch}
        async for found in client.listed(self._place, used if self._capacity is None else ()):
            unused = []
            for name, since in found:
                if not (key := self._key_of(name)):
                    continue
                epoch = epoch_of(name)
                if epoch not in used and (since < before or epoch in left):
                    unused.append(name)
                elif self._capacity is not None:
                    ages.add(self._partition(key), since)
            async for _ in self._removed_of(unused):
                await asyncio.sleep(SWEEP_PAUSE if self._capacity is None else 0)
        return ages

    def _key_of(self, name: str) -> bytes:
        """Return the key in a name; b"" if that of a value has another form: it is not ours."""
        found = re.fullmatch(r"[0-9a-f]+/([0-9a-f]+)", name.removeprefix(f"{self._place}/"))
        return bytes.fromhex(found[1]) if found and len(found[1]) % 2 == 0 else b""

    async def _remove_oldest(self, client: ListingClient, ages: Ages, capacity: int) -> None:
        excess = ages.excess(capacity, capacity - capacity // PARTS, self._partitions)
        if not excess.going:
            return
        before = self._removed
        async for found in client.listed(self._place, ()):
            going = [
                name
                for name, since in found
                if (key := self._key_of(name)) and excess.takes(self._partition(key), since)
            ]
            async for count in self._removed_of(going):
                self._removed += count
        if removed := self._removed - before:
            logger.info(
                "%s: the %d oldest chunks were removed from the store, which may hold %d",
                self._place,
                removed,
                capacity,
                extra=about("store.shrunk", place=self._place, chunks=removed),
            )

    async def _removed_of(self, names: Sequence[str]) -> AsyncIterator[int]:
        """Remove values of one page of a listing; yield how many after each call.

        A value that cannot be removed keeps no other one from going, unless there are many.
        """
        for start in range(0, len(names), MOST_REMOVED):
            some = names[start : start + MOST_REMOVED]
            try:
                await self._remove(some)
            except StoreError as error:
                self._refused = self._refused or error
                self._refusals += 1
                if self._refusals == MOST_REFUSED:
                    raise
            else:
                self._refusals = 0
                yield len(some)

    def _partition(self, key: bytes) -> int:
        return 0 if self._partitions is None else self._partitions.of(key)
