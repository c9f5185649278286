"""Hits of one request in a row, which need not be asked of the core one by one."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Streak"]


class Streak:
    """The request that was told of a hit last, while nothing else has happened since.

    Its next key is a hit, too, if host memory holds that chunk whole (`state` is at least
    `READY`): whoever answers so calls `hit` with the key. All else is asked of the core.

    Attributes:
        whose: the context of that request, as its caller has given it to `Lookups.go_on`; None
            once anything else has happened.
        hit: notes a key that was a hit.
    """

    __slots__ = ("hit", "whose")

    def __init__(self) -> None:
        self.whose: object | None = None
        nobody: list[bytes] = []
        self.hit: Callable[[bytes], None] = nobody.append

    def begin(self, whose: object, hit: Callable[[bytes], None]) -> None:
        """This request goes on."""
        self.whose, self.hit = whose, hit

    def end(self) -> None:
        """Something else happens."""
        self.whose = None
