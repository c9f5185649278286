"""Shares: who a tenant is, and what each may have of a tier.

A key begins with the tag of its tenant (`tag_of`). Each tenant that is named in `Shares` has a
partition; the others are spread over some more by their tags, as in stochastic fair queueing
(P. E. McKenney, 1990, section 2): who floods one of these harms only those that have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import TypeVar

__all__ = ["OTHERS", "TAG_BYTES", "Places", "Share", "Shares", "level", "tag_of", "tenant_keys"]

_T = TypeVar("_T")

TAG_BYTES = 8
"""Length of a tag: the first bytes of each key, where there are tenants."""

OTHERS = "others"
"""What all tenants that have no name of their own in `Shares` are called in statistics."""


def tenant_keys(tenant: str, keys: Iterable[bytes]) -> list[bytes]:
    """Return the keys of a tenant: its tag, and then each of `keys`.

    Chunks of one tenant are never found by the keys of another. Keys get `TAG_BYTES` longer.

    Raises:
        TypeError: if the tenant is no text, or a key is not bytes.
    """
    keys = list(keys)
    if not isinstance(tenant, str):
        raise TypeError(f"a tenant must be a name (str), not {type(tenant).__name__}")
    if not set(map(type, keys)) <= {bytes}:
        raise TypeError("the keys of a tenant must be bytes")
    tag = tag_of(tenant)
    return [tag + key for key in keys]


def tag_of(tenant: str) -> bytes:
    """Return the tag of the tenant of this name."""
    return blake2b(
        tenant.encode(errors="surrogatepass"), digest_size=TAG_BYTES, person=b"kvstore tenant"
    ).digest()


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant may have of each tier.

    Attributes:
        guaranteed: part of the capacity that others do not take from it.
        maximal: part of the capacity beyond which it has nothing for long.
        weight: how much of the rest it gets, compared with others that want it.
    """

    guaranteed: float = 0.0
    maximal: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of all tenants.

    Attributes:
        named: those of the tenants that are named.
        others: that of all others together.
        partitions: over how many partitions the others are spread.
        idle_s: seconds without a use after which a partition keeps only its guarantee.
    """

    named: Mapping[str, Share] = field(default_factory=dict)
    others: Share = Share()
    partitions: int = 8
    idle_s: float = 600.0

    @property
    def guaranteed(self) -> float:
        """The part of the capacity that is guaranteed to all of them together."""
        return math.fsum(share.guaranteed for share in (*self.named.values(), self.others))


def part_of(share: float, total: int) -> int:
    """Return how many whole chunks of `total` a share is: 29 of 100 for 0.29."""
    return int(share * total + 1e-6)


class Places:
    """Which partition each key belongs to: those of named tenants come first.

    Attributes:
        shares: for each partition its share, and among how many it is divided.
    """

    def __init__(self, shares: Shares) -> None:
        named = list(shares.named.values())
        self.shares = [(share, 1) for share in named]
        self.shares += [(shares.others, shares.partitions)] * shares.partitions
        self.names = {tag_of(name): name for name in shares.named}
        self._of = {tag: place for place, tag in enumerate(self.names)}
        self._others, self._first = shares.partitions, len(named)
        self._weights = sum(share.weight for share in (*named, shares.others))

    def within(self, limits: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Return what each partition gets of what it wants; a limit of the others is of them all.

        Each of them gets what it wants, or as much as any other of them (max-min fairness).
        """
        first = self._first
        found = list(map(min, wanted[:first], limits[:first]))
        left, last = limits[first], len(wanted)
        parts = [0] * (last - first)
        for done, place in enumerate(sorted(range(first, last), key=wanted.__getitem__)):
            parts[place - first] = part = min(wanted[place], left // (last - first - done))
            left -= part
        return found + parts

    def weights(self, sizes: Sequence[int]) -> list[float]:
        """Return the weight of each partition; that of the others is divided among who has some."""
        several = max(1, sum(map(bool, sizes[self._first :])))
        return [share.weight / (several if parts > 1 else 1) for share, parts in self.shares]

    def of(self, key: bytes) -> int:
        """Return the number of the key's partition."""
        tag = key[:TAG_BYTES]
        place = self._of.get(tag)
        return self._first + sum(key[:1]) % self._others if place is None else place

    def expected(self, place: int, capacity: int) -> int:
        """Return how many chunks a partition has where all others want as many as they can get."""
        share, parts = self.shares[place]
        part = max(share.guaranteed, share.weight / self._weights)
        return max(1, round(part * capacity / parts))

    def kept(self, counts: Mapping[int, int], capacity: int, room: int | None = None) -> list[int]:
        """Return how many chunks each partition keeps of those that it has; `room` in all.

        At least what is guaranteed to it and at most its maximum, if it has so many; the rest is
        shared by weight, and what one does not want is the others' (max-min fairness).

        Args:
            counts: for each partition how many it has.
            capacity: what shares are parts of.
            room: at least what is guaranteed; by default the capacity.
        """
        sizes = [counts.get(place, 0) for place in range(len(self.shares))]
        wanted = self.within([part_of(share.maximal, capacity) for share, _ in self.shares], sizes)
        kept = self.within(
            [part_of(share.guaranteed, capacity) for share, _ in self.shares], wanted
        )
        weights = self.weights(sizes)
        # Who wants least for its weight comes first, and leaves the rest to the others.
        order = sorted(range(len(kept)), key=lambda n: (wanted[n] - kept[n]) / weights[n])
        theirs = [weights[place] for place in reversed(order)]
        rest = list(accumulate(theirs))[::-1]
        left = (capacity if room is None else room) - sum(kept)
        for place, weight in zip(order, rest, strict=True):
            more = min(wanted[place] - kept[place], int(left * weights[place] / weight))
            kept[place] += more
            left -= more
        return kept


def level(
    spare: Mapping[_T, int], weights: Mapping[_T, float], short: int, floor: float
) -> Iterator[tuple[_T, int]]:
    """Yield how much each gives so that what remains to them, by weight, is level.

    Args:
        spare: what each has beyond its guarantee.
        floor: nobody gives below this, by weight.
    """
    richest = sorted(
        (each for each in spare if spare[each] > floor * weights[each]),
        key=lambda each: spare[each] / weights[each],
        reverse=True,
    )
    height, total, weight = floor, 0, 0.0
    for number, each in enumerate(richest, 1):
        total += spare[each]
        weight += weights[each]
        height = max(floor, (total - short) / weight)
        if number < len(richest):
            follower = richest[number]
            if height >= spare[follower] / weights[follower]:
                break
    amounts = {each: spare[each] - height * weights[each] for each in richest}
    # Chunks are not divided: those with the largest remainders give one more.
    whole = {each: int(amount) for each, amount in amounts.items() if amount > 0}
    more = min(short, math.ceil(sum(map(amounts.__getitem__, whole)))) - sum(whole.values())
    for each in sorted(whole, key=lambda each: whole[each] - amounts[each])[: max(0, more)]:
        whole[each] += 1
    yield from whole.items()
