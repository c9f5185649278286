"""A chunk in host memory and the states it passes through.

    absent --reserve--> filling --ready--> ready --pin--> pinned (n times)
       ^                   |                ^  |             |
       |                   |                |  +--evict--+   |
       +------discard------+                +--unpin-----|---+
       +-------------------------------------------------+

*filling*: the row is owned by whoever writes it, a device store or a
promotion; nobody may read it. *ready*: the bytes are whole and, if they came
from a slower tier, their digest was verified. *pinned*: somebody reads the
row or holds a lease on it; it can be neither evicted nor rewritten.

The whole state is one integer, `Chunk.status`: FILLING, READY, or the number
of pins. Transitions that the table does not allow raise `IllegalTransitionError`:
they are mistakes of the core, never of a caller or of a tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.core.request import Request

__all__ = ["FILLING", "READY", "Chunk", "IllegalTransitionError"]

FILLING = -1
READY = 0


class IllegalTransitionError(AssertionError):
    """The core tried to move a chunk along an edge that its life does not have."""


class Chunk:
    """One chunk resident in host memory.

    A row has one such object, which stands for each chunk that lives there in turn: so a
    server makes none while it runs, and its garbage collector has none to look at.

    Attributes:
        key: the chunk's key.
        row: its row in the host region.
        status: FILLING, READY, or n > 0 pins.
        unsaved: bit t is set while the chunk stands in the queue for tier t.
        step: the last step in which a lookup answered "hit" for it.
        counted: the last step in which the pool counted it among those.
        waiters: requests to be told when FILLING ends; None when there are none. A tuple is
            shared by many chunks, a list is the chunk's own.
        order: increases in the order in which rows were given, prefix order within a store.
        origin: index of the tier it was promoted from, or -1 for the device.
        stored_by: the request whose device store fills it; None otherwise.
        aside: the policy met it while it might not leave, and waits to hear that it may.
        leaving: the policy has given it up; it stays until it is copied to where it goes.
        left_step: the step in which that was.
    """

    __slots__ = (
        "aside",
        "counted",
        "key",
        "leaving",
        "left_step",
        "order",
        "origin",
        "row",
        "status",
        "step",
        "stored_by",
        "unsaved",
        "waiters",
    )

    def __init__(self, row: int) -> None:
        self.row = row
        self.end()

    def begin(self, key: bytes, origin: int, order: int) -> None:
        """Stand for `key` from now on, which is to be filled. Until then it stood for no chunk."""
        self.key, self.origin, self.order = key, origin, order
        self.status = FILLING

    def end(self) -> None:
        """Stand for no chunk: nothing is known but the row."""
        self.key = b""
        self.status = FILLING
        self.unsaved = 0
        self.step = -1
        self.counted = -1
        self.waiters: list[Request] | tuple[Request, ...] | None = None
        self.origin = -1
        self.order = -1
        self.stored_by: str | None = None
        self.aside = False
        self.leaving = False
        self.left_step = -1

    def __repr__(self) -> str:
        return f"Chunk({self.key.hex()[:12]}, row={self.row}, status={self.status})"
