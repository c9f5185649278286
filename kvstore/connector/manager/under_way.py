"""Whose a transfer is, for calls that name keys only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.engine.unnamed_requests import Prompt

__all__ = ["Share", "UnderWay"]


@dataclass(slots=True)
class Share:
    """Keys that one prompt has prepared in one era of the core."""

    prompt: Prompt
    era: int
    keys: list[bytes] = field(default_factory=list)


class UnderWay:
    """Loads, or stores, that were prepared and are not complete.

    A key that was prepared several times is completed in that order.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, list[tuple[Prompt, int]]] = {}

    def add(self, keys: Iterable[bytes], prompt: Prompt, era: int) -> None:
        """`prompt` has prepared `keys`."""
        for key in keys:
            self._shares.setdefault(key, []).append((prompt, era))
            prompt.busy += 1

    def take(self, keys: Iterable[bytes]) -> tuple[list[Share], list[bytes]]:
        """Whose `keys` are, and those that nobody has prepared."""
        found: dict[tuple[str, int], Share] = {}
        stray: list[bytes] = []
        for key in keys:
            shares = self._shares.get(key)
            if shares is None:
                stray.append(key)
                continue
            prompt, era = shares.pop(0)
            if not shares:
                del self._shares[key]
            found.setdefault((prompt.id, era), Share(prompt, era)).keys.append(key)
        return list(found.values()), stray
