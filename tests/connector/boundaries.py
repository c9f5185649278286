"""How many tokens can be loaded, by trying every boundary."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from tests.connector.scripted import Key, key

__all__ = ["Case", "expected", "needed", "supplies"]


@dataclass(frozen=True)
class Case:
    """A server, a prompt, and what is known of its chunks.

    Attributes:
        groups: for each the tokens of a block of the device, and the window.
        factor: blocks of the device in a chunk.
        computed: tokens that the device has.
        hits: chunks that can be loaded.
        deferred: chunks that are being fetched.
    """

    hash_size: int
    groups: tuple[tuple[int, int | None], ...]
    factor: int
    tokens: int
    computed: int
    hits: frozenset[Key]
    deferred: frozenset[Key] = frozenset()

    def chunk(self, group: int) -> int:
        """Tokens of a chunk."""
        return self.groups[group][0] * self.factor

    @property
    def end(self) -> int:
        """The largest boundary that counts: with a window the last token is computed anew."""
        return self.tokens - any(window is not None for _, window in self.groups)

    def name(self, place: Key) -> bytes:
        group, chunk = place
        return key(group, chunk, self.chunk(group) // self.hash_size)

    def places(self) -> list[Key]:
        """All chunks that may be asked for."""
        return [
            (group, chunk)
            for group in range(len(self.groups))
            for chunk in range(self.computed // self.chunk(group), self.tokens // self.chunk(group))
        ]


def needed(case: Case, group: int, boundary: int) -> range:
    """The chunks of a group that a request needs that computes on from `boundary`."""
    size, window = case.chunk(group), case.groups[group][1]
    first = 0
    last = (boundary - 1) // size
    if window is not None:
        # The chunk that ends it is wanted even where the window of the next token is empty.
        first = min(max(0, boundary - window + 1) // size, last)
        if boundary % size == 0:
            first = min(first, boundary // size - math.ceil(window / size))
    return range(max(first, case.computed // size), last + 1)


def supplies(case: Case, group: int, boundary: int, hits: Collection[Key]) -> bool:
    """Whether one group has what a request needs that computes on from `boundary`."""
    size = case.chunk(group)
    if boundary > case.tokens // size * size:
        return False
    return all((group, chunk) in hits for chunk in needed(case, group, boundary))


def expected(case: Case, hits: Collection[Key]) -> int:
    """The largest boundary that all groups supply, by trying each."""
    everyone = range(len(case.groups))
    for boundary in range(case.end, case.computed, -1):
        if all(supplies(case, group, boundary, hits) for group in everyone):
            found = boundary - case.computed
            return 0 if any(found < case.chunk(group) for group in everyone) else found
    return 0
