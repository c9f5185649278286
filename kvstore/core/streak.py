"""Answers of one kind in a row for one request, which need not be asked of the core one by one."""

from __future__ import annotations

from collections.abc import Callable, Container

__all__ = ["Streak"]

_NOTHING: Container[bytes] = frozenset()


class Streak:
    """The request that was answered last, while nothing else has happened since.

    Its next key is a hit, if host memory holds that chunk whole (`state` is at least `READY`),
    and "ask again", if host memory does not know it and it is in `below`: whoever answers so
    calls `note` with the key. All else is asked of the core.

    Attributes:
        whose: the context of that request, as its caller has given it to `Lookups.go_on`; None
            once anything else has happened.
        below: keys whose chunks are fetched for the request from a slower tier if it asks.
        note: notes a key that was answered so.
    """

    __slots__ = ("below", "note", "whose")

    def __init__(self) -> None:
        self.whose: object | None = None
        self.below = _NOTHING
        nobody: list[bytes] = []
        self.note: Callable[[bytes], None] = nobody.append

    def begin(
        self, whose: object, note: Callable[[bytes], None], below: Container[bytes] = _NOTHING
    ) -> None:
        """This request goes on."""
        self.whose, self.note, self.below = whose, note, below

    def end(self) -> None:
        """Something else happens."""
        self.whose = None
