"""Chunks whose lease has ended while somebody still looks at their memory.

A cancelled task cannot stop a thread that copies a chunk for it. The rows of such chunks
stay pinned, so that whoever looks goes on seeing the same bytes, until the last view dies.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvstore.home import Home
from kvstore.leases import Chunks
from kvstore.types import about

__all__ = ["Onlookers"]

logger = logging.getLogger("kvstore")


class Onlookers:
    """See the module's text. Belongs to the store's loop.

    Attributes:
        outlived: chunks that were ever looked at when their lease had ended.
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
        for key, exporter in chunks.looked_at():
            views[key] += 1
            # Views die in any thread, wherever the last reference to them is dropped.
            gone = partial(self._home.send, partial(self._gone, key, era, views, unpin))
            weakref.finalize(exporter, gone).atexit = False
        if views:
            if not self.outlived:
                logger.warning(
                    "an array made from a leased chunk has outlived its lease: its row stays "
                    "pinned until nobody looks at it (told once; stats: outlived, watched_rows)",
                    extra=about("lease.outlived"),
                )
            self.outlived += len(views)
            self._pins.update((era, key) for key in views)
        return set(views)

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
