"""How long chunks had not been used when they left for others: how far back a cache reaches.

Only a sample of the chunks is followed, so that nothing is kept for each chunk and a use costs
no more than the question whether it is one of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.durations import AGES, Durations

__all__ = ["EVERY", "MOST", "Ages"]

EVERY = 32
"""Of so many chunks that come one is followed, at first."""

MOST = 4096
"""Most chunks that are followed. Where there would be more, every second one is let go, and from
then on half as many of those that come are followed."""


class Ages:
    """When the chunks of a sample came or were last used.

    Chunks that were there before the start are in no sample: nobody knows their age.

    Attributes:
        left: seconds since the last use, of those that left for others.
    """

    def __init__(self) -> None:
        self.left = Durations(bounds=AGES)
        self._used: dict[bytes, float] = {}
        self._now = 0.0
        self._every = EVERY
        # How many of those that come are passed over until the next is followed.
        self._skip = 0

    def __len__(self) -> int:
        """Chunks that are followed."""
        return len(self._used)

    def begin_step(self, now: float) -> None:
        """What happens from now on happens at this time."""
        self._now = now

    def come(self, keys: Sequence[bytes]) -> None:
        """These chunks have come."""
        used, now = self._used, self._now
        for key in keys[self._skip :: self._every]:
            used[key] = now
        self._skip = (self._skip - len(keys)) % self._every
        if len(used) > MOST:
            self._used = {key: used[key] for key in list(used)[::2]}
            self._every *= 2

    def use(self, keys: Iterable[bytes]) -> None:
        """These chunks were used."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                used[key] = self._now

    def leave(self, keys: Iterable[bytes]) -> None:
        """These chunks have left for others."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                self.left.add(self._now - used.pop(key))

    def forget(self, keys: Iterable[bytes]) -> None:
        """These chunks are gone, and for no other's sake."""
        used = self._used
        if used:
            for key in used.keys() & keys:
                del used[key]

    def reset(self) -> None:
        """All chunks are gone."""
        self._used.clear()
