"""Chunks whose lease has ended while somebody still looks at their memory.

A cancelled task cannot stop a thread that copies a chunk for it, and a tensor holds nothing but
the view object that it was made from. The rows of such chunks stay pinned, so that whoever looks
goes on seeing the same bytes, until the last buffer and the last view object are gone.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Set
from functools import partial

from kvstore.api.lease import Chunks
from kvstore.home import Home
from kvstore.types import about

__all__ = ["Onlookers"]

logger = logging.getLogger("kvstore")

LINGER_SECONDS = 1.0
"""How long after its lease a view object without a known user may live before it is counted."""


class Onlookers:
    """See the module's text. Belongs to the store's loop.

    Attributes:
        outlived: chunks that were ever looked at when their lease had ended; those of which only
            the view object lives on count after `LINGER_SECONDS`.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pins: Counter[tuple[int, bytes]] = Counter()
        """Pins that wait for the end of views, by the era of the lease and the key."""
        self.outlived = 0

    @property
    def rows(self) -> int:
        """Rows that are looked at without a lease."""
        return len(self._pins)

    def pins_before(self, era: int) -> int:
        """Pins that wait for the end of views, of leases that began in earlier eras."""
        return sum(count for (begun, _), count in self._pins.items() if begun < era)

    def see(self, chunks: Chunks, era: int, unpin: Callable[[bytes], None]) -> set[bytes]:
        """A lease has ended; returns the keys of its chunks that are looked at still.

        Args:
            era: that in which the lease began.
            unpin: takes the pin of one of these back; called on the loop when nobody looks
                at the chunk any more. Not at all if the loop has ended by then.
        """
        views: Counter[bytes] = Counter()
        used: set[bytes] = set()
        for key, looked_at in chunks.looked_at():
            views[key] += 1
            # A view whose buffer nobody has may only be the variable of a loop.
            if not isinstance(looked_at, memoryview):
                used.add(key)
            # Views die in any thread, wherever the last reference to them is dropped.
            gone = partial(self._home.send, partial(self._gone, key, era, views, unpin))
            weakref.finalize(looked_at, gone).atexit = False
        if views:
            self._pins.update((era, key) for key in views)
            self._count(len(used))
        if len(views) > len(used):
            unsure = set(views) - used
            self._home.loop.call_later(LINGER_SECONDS, self._still_there, views, unsure)
        return set(views)

    def _still_there(self, views: Counter[bytes], keys: Set[bytes]) -> None:
        self._count(sum(views[key] > 0 for key in keys))

    def _count(self, outlived: int) -> None:
        if outlived and not self.outlived:
            logger.warning(
                "an array, a tensor or a view of a leased chunk has outlived its lease: its row "
                "stays pinned until it is gone (told once; stats: outlived, watched_rows)",
                extra=about("lease.outlived"),
            )
        self.outlived += outlived

    def _gone(
        self, key: bytes, era: int, views: Counter[bytes], unpin: Callable[[bytes], None]
    ) -> None:
        """One view less looks at the chunk."""
        views[key] -= 1
        if views[key]:
            return
        self._pins[era, key] -= 1
        if not self._pins[era, key]:
            del self._pins[era, key]
        unpin(key)
