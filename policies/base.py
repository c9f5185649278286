"""Eviction policy: the contract.

A policy orders keys. It holds no bytes, does no I/O, knows no time and is
owned by one thread. Host memory and disk use the same contract.

The caller guarantees:

* `insert` is called only for keys that are not resident, `touch` and `remove`
  only for keys that are;
* a request's keys come tail first, so that a policy which treats equals in
  order of arrival sheds a chain from its end;
* it calls `link` with what it knows of the order of a prompt before the touches
  and inserts of its keys;
* `protected` answers the same for a key throughout one `evict` call, `LATER` excepted;
* a key that was answered `HELD` is named to `release` when it may leave again.

The policy guarantees:

* `evict` returns exactly `count` distinct resident keys, none of them
  protected, and forgets them; or, when fewer may leave, it returns None and
  nothing has changed in the set of resident keys;
* a key that `evict` met and found protected may be treated as used just now:
  this is what keeps eviction O(1) amortised while a fixed part of the keys is
  in use. A key that was answered `HELD` may be set aside: it stays resident, is
  not asked about again, and comes back as used just now when the caller names
  it to `release`. So eviction stays O(1) amortised even while nearly all keys
  are in use;
* `link`, `settle`, `cool` and `incoming` are advice: without them, or with advice that
  proves wrong, everything here still holds;
* `clear` leaves the policy as new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

__all__ = ["HELD", "LATER", "EvictionPolicy", "Protected"]

HELD: Final = 2
"""An answer of `Protected`: the key may not leave before the caller names it to `release`."""

LATER: Final = 3
"""An answer of `Protected`: this call of `evict` has asked enough. It shall return None and
keep its place, so that the next call goes on from there. Nothing is said of the key."""

Protected = Callable[[bytes], int]
"""Tells whether a key may not leave now: false, true, `HELD` or `LATER`. A policy may take
the last two for true, and is slower for it."""


class EvictionPolicy(ABC):
    """Decides who leaves when room is needed.

    Parameters of a policy are keyword-only arguments of its constructor, each
    with a default and annotated as `int`, `float`, `bool` or `str`.

    Args:
        capacity: the number of chunks that the tier can hold, at least 1.
    """

    name: str
    """The name under which the policy is registered."""

    effort = 1.0
    """How many times longer its calls take than LRU's, roughly, where chunks enter and leave. A
    step of a server moves that many times fewer chunks."""

    declines = True
    """Whether `evict` may choose keys of the very store that room is made for. Such a
    policy is asked chunk by chunk; another one takes a store whole."""

    spares_latest = False
    """Whether `evict` chooses keys that have entered or were used last only when no others may
    leave. Room for a whole store is then made in one go."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: bytes) -> None:
        """`key` has entered the tier."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """`key` is resident and was used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """`key` left the tier for a reason of the caller's (a failed copy, a purge)."""

    @abstractmethod
    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        """Choose and forget exactly `count` keys, or return None.

        Args:
            incoming: the keys for which room is made, in the order in which they
                will be inserted (tail first), as far as they are known. They need
                not be as many as `count`, and may in the end not be inserted.
        """

    def release(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """`keys`, tail first, may leave again: the end of what `HELD` has said of them.

        They are resident. Nothing is done about those that were not set aside.
        """

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:  # noqa: B027
        """`keys`, head first, follow one another in one prompt.

        Args:
            after: what the first of them follows; None when it begins its prompt
                or that is not known. None of the keys need be resident.
        """

    def settle(  # noqa: B027
        self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None
    ) -> None:
        """A request has ended whose prompt was `keys`, head first, resident or not.

        This is not a use. It says that of equals the later keys should leave
        first.

        Args:
            ends: the last key of each KV cache group, where `keys` are of several; by
                default `keys` are of one group, and `keys[-1]` is its end.
        """

    def cool(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Nobody is expected to use `keys`, tail first: they should be among the first to leave.

        They are resident. This is not a use, and void once a key is used again, where uses
        count. A key that was set aside may be left as it is.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, ghosts and statistics included."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of resident keys."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is resident."""

    def restore(self, keys: Iterable[bytes]) -> None:
        """Insert keys found at opening, coldest first."""
        for key in keys:
            self.insert(key)

    def order(self) -> Iterable[bytes]:
        """Resident keys, coldest first where the policy has an order.

        Used at a clean stop to keep recency across a restart.
        """
        return ()
