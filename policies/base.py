"""Eviction policy: the contract.

A policy orders keys. It holds no bytes, does no I/O, knows no time and is
owned by one thread. Host memory and disk use the same contract.

The caller guarantees:

* `insert` is called only for keys that are not resident, `touch` and `remove`
  only for keys that are;
* a request's keys come tail first, so that a policy which orders equal keys by
  arrival evicts a chain from its end;
* it calls `link` with what it knows of the order of a prompt before the touches
  and inserts of its keys;
* `protected` gives the same answer for a key throughout one `evict` call, except `LATER`;
* a key for which it answered `HELD` is passed to `release` when it may be evicted again.

The policy guarantees:

* `evict` returns exactly `count` distinct resident keys, none of them
  protected, and forgets them; or, if fewer may be evicted, it returns None and
  the set of resident keys does not change;
* a key that `evict` found protected may be treated as just used: this keeps
  eviction O(1) amortised while a fixed part of the keys is in use. A key that
  is `HELD` may be set aside: it stays resident, is not asked about again, and
  counts as just used when the caller passes it to `release`. So eviction stays
  O(1) amortised even while nearly all keys are in use;
* `link`, `settle`, `cool` and `incoming` are advice: without them, or with wrong
  advice, all guarantees still hold. But a policy that shares a tier among tenants may
  evict fewer keys for one tenant than for another (see `tenants`);
* `clear` resets the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

__all__ = ["HELD", "LATER", "EvictionPolicy", "Protected", "UntilLater"]

HELD: Final = 2
"""Answer of `Protected`: the key must not be evicted before the caller passes it to `release`."""

LATER: Final = 3
"""Answer of `Protected`: this call of `evict` has asked too often. It must return None and keep
its place, so that the next call continues there. The key itself may or may not be protected."""

Protected = Callable[[bytes], int]
"""Returns whether a key is protected from eviction: false, true, `HELD` or `LATER`. A policy may
treat the last two like true, which makes it slower."""


class UntilLater:
    """Answers as a `Protected` does, for several policies; `LATER` for good after the first.

    Attributes:
        later: whether the answer was `LATER`.
    """

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self.later = False

    def __call__(self, key: bytes) -> int:
        answer = LATER if self.later else self._protected(key)
        self.later = answer == LATER
        return answer


class EvictionPolicy(ABC):
    """Decides which keys are evicted when room is needed.

    Parameters of a policy are keyword-only arguments of its constructor, each
    with a default and annotated as `int`, `float`, `bool` or `str`.

    Args:
        capacity: the number of chunks that the tier can hold, at least 1. More keys may be
            resident: where a tier is made smaller, until they have left, and where tenants share
            one, as each has its expected part for a capacity and may use what others leave.
    """

    name: str
    """The name under which the policy is registered."""

    effort = 1.0
    """Roughly how many times as long as LRU's its calls for entering and leaving chunks take. A
    step of a server moves that many times fewer chunks."""

    declines = True
    """Whether `evict` may choose keys of the store for which room is made. Room for such a policy
    is made chunk by chunk, for others at once for a whole store. In host memory above slower tiers
    they are protected: what has no row would not get to these either."""

    spares_latest = False
    """Whether `evict` chooses the keys that entered or were used last only if no others may be
    evicted. Room for a whole store is then made at once."""

    shared = False
    """Whether tenants share the tier: `evict` may find for one what it does not for another."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: bytes) -> None:
        """Add a key that has entered the tier."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Count a use of a resident key."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Remove a key that has left the tier for another reason.

        A failed copy, a purge; or its promotion from a tier with the exclusive flow, to which it
        may come back by `insert`. Such a promotion is told by `touch` before.
        """

    @abstractmethod
    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        """Choose and forget exactly `count` keys, or return None.

        Args:
            incoming: the keys for which room is made, if known, in the order in which
                they will be inserted (tail first). They may be more or fewer than
                `count`, and may not be inserted after all.
        """

    def evict_up_to(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Choose and forget `count` keys, or as many as may be evicted; otherwise as `evict`."""
        count = min(count, len(self))
        found = self.evict(count, protected, incoming) if count > 0 else []
        if found is not None:
            return found
        victims: list[bytes] = []
        while len(victims) < count and (one := self.evict(1, protected, incoming)):
            victims += one
        return victims

    @property
    def excess(self) -> int:
        """How many resident keys shall leave even if nobody needs the room: see `trim`."""
        return 0

    def trim(self, count: int, protected: Protected) -> list[bytes]:
        """Choose and forget up to `count` of those keys, as far as they may leave."""
        return []

    @property
    def parts(self) -> Sequence[EvictionPolicy]:
        """The policies that this one is made of."""
        return ()

    def overrides(self, hook: str) -> bool:
        """Whether the policy has an optional method of its own."""
        return getattr(type(self), hook) is not getattr(EvictionPolicy, hook)

    @property
    def faults(self) -> int:
        """How many of the `parts` have failed: see `guard`."""
        return sum(part.faults for part in self.parts)

    def reach(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys of one prompt may be resident together, as things are.

        More than there are, if there is room for more that follow.
        """
        return self.capacity

    def owner_of(self, key: bytes) -> int:
        """Return a number for whoever shares a part of the tier with `key`; 0 without tenants."""
        return 0

    def tenant_of(self, key: bytes) -> str:
        """Return whose key it is: the name of a tenant, or "others"; empty without tenants."""
        return ""

    def tenants(self) -> dict[str, int]:
        """Return how many resident keys each tenant has; nothing without tenants."""
        return {}

    def release(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Allow `HELD` keys, tail first, to be evicted again.

        They are resident. Those that were not set aside are ignored.
        """

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:  # noqa: B027
        """Note that `keys`, head first, follow one another in one prompt.

        Args:
            after: the key before the first of them; None if that one begins its prompt,
                or if it is not known. The keys need not be resident.
        """

    def settle(  # noqa: B027
        self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None
    ) -> None:
        """End a request whose prompt was `keys`, head first, resident or not.

        This is not a use. Of equal keys, the later ones should be evicted first.

        Args:
            ends: the last key of each KV cache group, if `keys` are of several; by
                default `keys` are of one group, and `keys[-1]` is its end.
        """

    def cool(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Make `keys`, tail first, among the first to be evicted: no use of them is expected.

        They are resident. This is not a use. If the policy counts uses, it no longer applies once
        a key is used again. A key that was set aside may be ignored.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, including ghosts and statistics."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of resident keys."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is resident."""

    def restore(self, keys: Iterable[bytes]) -> None:
        """Insert keys found at opening, coldest first."""
        for key in keys:
            self.insert(key)

    def order(self) -> Iterable[bytes]:
        """Return resident keys, coldest first, if the policy has an order.

        Used at a clean stop to keep recency across a restart, on another thread than the other
        methods, while none of them is called.
        """
        return ()
