"""The states of a chunk in host memory and on a tier, and the transitions between them.

Two tables, `HOST` and `TIER`, name for each state the events that may happen in it
and the state that follows. Only `Life` applies them. A transition that the table
lacks is a bug of the core, never of a caller or of a tier: it raises in tests; in
service it is counted and does nothing.

In host memory: *filling*, a device store or a promotion owns the row and writes it;
the row may not be read. *ready*, the bytes are complete and, if they came from a
slower tier, their digest was verified. *pinned*, the row is being read or leased:
it is neither evicted nor rewritten. *leaving*, the policy has given the chunk up;
it stays until it is copied to a tier or its row is needed, and a use brings it back.

On a tier: *writing*, its slot is being written. *resident*, it can be read. *reading*, it
is being read, and not evicted. *forgotten*, it was removed while it was being read;
*rewriting*, it is being written again before that read has ended.

This module is long because the states of a chunk and all the code that changes them
belong side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.core.request import Request

__all__ = [
    "ABSENT",
    "FILLING",
    "HOST",
    "LEAVING",
    "LEAVING_PINNED",
    "PINNED",
    "READY",
    "TIER",
    "Chunk",
    "IllegalTransitionError",
    "Life",
    "Table",
    "keep_all",
    "queue_all",
    "start_copies",
    "wait_together",
]

Table = Mapping[str, Mapping[str, str]]
"""For each state, the events that may happen in it, each with the state that follows."""

HOST: Table = {
    "absent": {"reserve": "filling"},
    "filling": {
        "fill": "ready",
        "fill for a request": "pinned",
        "discard": "absent",
        "reset": "absent",
    },
    "ready": {"pin": "pinned", "give up": "leaving", "leave": "absent", "reset": "absent"},
    "pinned": {"pin": "pinned", "unpin": "pinned", "unpin last": "ready", "reset": "absent"},
    "leaving": {
        "pin": "leaving, pinned",
        "use": "ready",
        "leave": "absent",
        "reset": "absent",
    },
    "leaving, pinned": {
        "pin": "leaving, pinned",
        "unpin": "leaving, pinned",
        "unpin last": "leaving",
        "use": "pinned",
        "reset": "absent",
    },
}

ABSENT, FILLING, READY, PINNED, LEAVING, LEAVING_PINNED = range(len(HOST))
"""The states of host memory as numbers. From READY on a chunk can be read."""

TIER: Table = {
    "absent": {"write": "writing", "appear": "resident", "reset": "absent"},
    "writing": {"written": "resident", "not written": "absent", "reset": "absent"},
    "resident": {
        "read": "reading",
        "evict": "absent",
        "forget": "absent",
        "relocate": "resident",
        "appear": "resident",
        "reset": "absent",
    },
    "reading": {
        "read": "reading",
        "read ended": "reading",
        "last read ended": "resident",
        "forget": "forgotten",
        "relocate": "reading",
        "appear": "reading",
        "reset": "absent",
    },
    "forgotten": {
        "read ended": "forgotten",
        "last read ended": "absent",
        "write": "rewriting",
        "appear": "reading",
        "reset": "absent",
    },
    "rewriting": {
        "read ended": "rewriting",
        "last read ended": "writing",
        "written": "reading",
        "not written": "forgotten",
        "reset": "absent",
    },
}


class IllegalTransitionError(AssertionError):
    """The core tried a transition that the table of states does not have."""


class Life:
    """Applies the transitions of a table.

    Attributes:
        states: the number of each state.
        raises: whether illegal transitions raise; tests set it for all instances.
        illegal: number of illegal transitions that were tried.
    """

    raises = False
    ever_illegal = 0
    """The sum of `illegal` of all instances: cheap to read."""

    def __init__(self, table: Table) -> None:
        self.states = {state: number for number, state in enumerate(table)}
        rows = table.values()
        events = dict.fromkeys(event for row in rows for event in row)
        self._next = {
            event: tuple(self.states[row[event]] if event in row else -1 for row in rows)
            for event in events
        }
        self.illegal = 0

    def after(self, state: int, event: str) -> int:
        """Return the state after an event, or -1 if it may not happen.

        Raises:
            IllegalTransitionError: if it may not happen and `raises` is set.
        """
        following = self._next[event][state]
        if following < 0:
            self._refuse(state, event)
        return following

    def apply(self, event: str, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Apply an event to each of `chunks`; returns those that it may happen to."""
        after = self._next[event]
        wrong: set[int] = set()
        for chunk in chunks:
            state = after[chunk.state]
            if state < 0:
                wrong.add(id(chunk))
                self._refuse(chunk.state, event)
            else:
                chunk.state = state
        return [chunk for chunk in chunks if id(chunk) not in wrong] if wrong else chunks

    def begin(
        self,
        chunks: Sequence[Chunk],
        keys: Sequence[bytes],
        origin: int,
        order: int,
        stored_by: str | None,
    ) -> None:
        """Assign one of `keys` to each of `chunks`, which are to be filled.

        Args:
            order: the order of the first chunk; the others count on from it.
        """
        after = self._next["reserve"]
        for chunk, key in zip(chunks, keys, strict=True):
            state = after[chunk.state]
            if state < 0:
                self._refuse(chunk.state, "reserve")
                continue
            chunk.state = state
            chunk.key = key
            chunk.origin = origin
            chunk.order = order
            chunk.depth = 0
            chunk.stored_by = stored_by
            order += 1

    def pin(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Add one pin to each chunk; returns those that had none."""
        pinned = self._next["pin"]
        first: list[Chunk] = []
        for chunk in chunks:
            state = pinned[chunk.state]
            if state < 0:
                self._refuse(chunk.state, "pin")
                continue
            chunk.state = state
            pins = chunk.pins
            chunk.pins = pins + 1
            if not pins:
                first.append(chunk)
        return first

    def fill(self, chunks: Sequence[Chunk], step: int) -> tuple[int, list[Chunk]]:
        """Mark each chunk as complete: no store fills it any more.

        Returns:
            How many became complete, and those of them that requests wait for, that are set
            aside, or that are kept until this step ends.
        """
        filled = self._next["fill"]
        refused = 0
        noted: list[Chunk] = []
        for chunk in chunks:
            state = filled[chunk.state]
            if state < 0:
                refused += 1
                self._refuse(chunk.state, "fill")
                continue
            chunk.state = state
            chunk.stored_by = None
            if chunk.aside or chunk.step == step or chunk.waiters is not None:
                noted.append(chunk)
        return len(chunks) - refused, noted

    def fill_pinned(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Mark each chunk as complete and pin it for its one waiter; returns as `apply`."""
        filled = self.apply("fill for a request", chunks)
        for chunk in filled:
            chunk.pins = 1
            chunk.waiters = None
        return filled

    def give_up(self, chunks: Sequence[Chunk], step: int) -> Sequence[Chunk]:
        """Mark each chunk as given up by the policy in this step; returns as `apply`."""
        gone = self.apply("give up", chunks)
        for chunk in gone:
            chunk.left_step = step
        return gone

    def leave(self, chunks: Sequence[Chunk]) -> tuple[int, list[Chunk]]:
        """Remove each chunk, also from the queues of tiers.

        Returns:
            How many of them were queued for a tier, and those that may not leave.
        """
        after = self._next["leave"]
        unsaved = 0
        staying: list[Chunk] = []
        for chunk in chunks:
            state = after[chunk.state]
            if state < 0:
                self._refuse(chunk.state, "leave")
                staying.append(chunk)
                continue
            chunk.state = state
            if chunk.unsaved:
                chunk.unsaved = 0
                unsaved += 1
        return unsaved, staying

    def unpin(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Drop one pin of each chunk; returns those that have none left."""
        one, last = self._next["unpin"], self._next["unpin last"]
        free: list[Chunk] = []
        for chunk in chunks:
            pins = chunk.pins - 1
            state = (one if pins > 0 else last)[chunk.state]
            if state < 0:
                self._refuse(chunk.state, "unpin")
                continue
            chunk.state = state
            chunk.pins = pins
            if not pins:
                free.append(chunk)
        return free

    def _refuse(self, state: int, event: str) -> None:
        self.illegal += 1
        Life.ever_illegal += 1
        if self.raises:
            name = list(self.states)[state]
            raise IllegalTransitionError(f"{event!r} may not happen to a chunk that is {name}")


class Chunk:
    """The record of one row of host memory and of the chunk that it holds, if any.

    There is one for each row, so a server creates none while it runs, and its garbage
    collector has none to scan. Where the row holds no chunk, only the key, the order and
    the steps of use may remain of the last one.

    Attributes:
        key: the chunk's key.
        row: its row in the host region.
        state: see `HOST`, as a number.
        pins: number of readers and of leases.
        unsaved: bit t is set while the chunk is in the queue for tier t.
        step: it is kept until this step ends, as it has answered "hit".
        waiters: requests that wait until it is filled; None when there are none. A tuple is
            shared by many chunks, a list is the chunk's own.
        order: increases in the order in which rows were assigned, prefix order within a store.
        depth: how many chunks of its tenant its request had used or stored before it; 0 if no
            request stored it.
        origin: number of the tier it was promoted from, or -1 for the device.
        stored_by: the request whose device store fills it; None otherwise.
        aside: the policy has set it aside as it could not leave, and is to be told when it can.
        left_step: the step in which the policy gave it up.
    """

    __slots__ = (
        "aside",
        "depth",
        "key",
        "left_step",
        "order",
        "origin",
        "pins",
        "row",
        "state",
        "step",
        "stored_by",
        "unsaved",
        "waiters",
    )

    def __init__(self, row: int) -> None:
        self.row = row
        self.state = ABSENT
        self.end()

    def end(self) -> None:
        """Forget the chunk: only the row remains."""
        self.key = b""
        self.pins = 0
        self.unsaved = 0
        self.step = -1
        self.waiters: list[Request] | tuple[Request, ...] | None = None
        self.origin = -1
        self.order = -1
        self.depth = 0
        self.stored_by: str | None = None
        self.aside = False
        self.left_step = -1

    def loaded(self) -> None:
        """Note that it was loaded: later loads count as loads from host memory."""
        self.origin = -1

    def set_aside(self, aside: bool) -> None:
        """Set whether the policy waits to be told that it may leave."""
        self.aside = aside

    def queued(self, bit: int) -> None:
        """Mark it as queued for the tier of this bit."""
        self.unsaved |= bit

    def dequeued(self, bit: int) -> None:
        """Mark it as no longer queued for the tiers of these bits."""
        self.unsaved &= ~bit

    def wait(self, request: Request) -> None:
        """Add a request that waits until it is filled."""
        if isinstance(self.waiters, list):
            self.waiters.append(request)
        else:
            self.waiters = [*(self.waiters or ()), request]

    def wait_no_more(self, request: Request) -> None:
        """Remove a request that waits for it."""
        if isinstance(self.waiters, list):
            self.waiters.remove(request)
        else:
            self.waiters = None

    def take_waiters(self) -> Sequence[Request]:
        """Return the requests that wait for it, and forget them."""
        waiters, self.waiters = self.waiters, None
        return waiters or ()

    def __repr__(self) -> str:
        return f"Chunk({self.key.hex()[:12]}, row={self.row}, state={list(HOST)[self.state]})"


def wait_together(chunks: Sequence[Chunk], request: Request) -> None:
    """Make the request the only waiter of each of `chunks`."""
    alone = (request,)
    for chunk in chunks:
        chunk.waiters = alone


def keep_all(chunks: Sequence[Chunk], step: int) -> int:
    """Keep each until this step ends; returns how many of them could have left before."""
    leavable = 0
    for chunk in chunks:
        if chunk.step != step:
            chunk.step = step
            leavable += not chunk.pins and chunk.state != FILLING and not chunk.unsaved
    return leavable


def set_depths(chunks: Sequence[Chunk], depths: Mapping[bytes, int]) -> None:
    """Set the depth of each chunk in its prompt, by key; 0 where `depths` has none."""
    for chunk in chunks:
        chunk.depth = depths.get(chunk.key, 0)


def queue_all(chunks: Sequence[Chunk], bit: int, step: int) -> list[Chunk]:
    """Queue each that is ready, queued for no tier and may leave; returns the others."""
    others: list[Chunk] = []
    for chunk in chunks:
        if chunk.state != READY or chunk.unsaved or chunk.step == step:
            others.append(chunk)
        else:
            chunk.unsaved = bit
    return others


def start_copies(life: Life, chunks: Sequence[Chunk], bit: int, step: int) -> list[Chunk]:
    """Dequeue and pin each that is ready and queued for this tier only; returns the others."""
    others: list[Chunk] = []
    pinned = life.after(READY, "pin")
    for chunk in chunks:
        if chunk.state != READY or chunk.unsaved != bit or chunk.aside or chunk.step == step:
            others.append(chunk)
        else:
            chunk.state = pinned
            chunk.pins = 1
            chunk.unsaved = 0
    return others
