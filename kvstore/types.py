"""Types that the core, the tiers and their users share.

A *key* is ``bytes``: a block hash followed by the 4-byte big-endian index of its KV cache group,
which is below 256; with one group it can do without. A *row* is a chunk's place in host memory, a
*slot* its place on a slower tier; both are plain integers. `Flow` says when a chunk is copied from
host memory to a slower tier, and whether it stays in both.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import BlockKeyError

__all__ = [
    "MAX_KEY_BYTES",
    "NO_MOVE",
    "Changes",
    "Completion",
    "Event",
    "Flow",
    "Move",
    "Op",
    "RecoveredTier",
    "TierPlace",
    "check_key",
    "group_of",
    "short_name",
]

NO_MOVE = -1
"""The move of completions that nobody asked for."""

MAX_KEY_BYTES = 56
"""Longest key that a record of the disk format can hold, in bytes."""


def check_key(key: bytes) -> bytes:
    """Return `key` unchanged.

    Raises:
        BlockKeyError: if it is not ``bytes`` of 1 to `MAX_KEY_BYTES` bytes.
    """
    if not isinstance(key, bytes):
        raise BlockKeyError(f"a block key must be bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise BlockKeyError(
            f"a block key must have 1 to {MAX_KEY_BYTES} bytes; this one has {len(key)}"
        )
    return key


def short_name(name: bytes, longest: int = MAX_KEY_BYTES) -> bytes:
    """`name`, or its SHA-256 if it has more than `longest` bytes."""
    return name if len(name) <= longest else hashlib.sha256(name).digest()


def group_of(key: bytes) -> bytes:
    """The KV cache group of a key: its last four bytes, where they are the index of one.

    A key without such an index belongs to no group: the answer is empty.
    """
    return key[-4:] if len(key) > 4 and key[-4:-1] == b"\0\0\0" else b""


class Op(enum.Enum):
    """What a move does."""

    PROMOTE = "promote"
    """Copy slots of a slower tier to rows of host memory."""
    CASCADE = "cascade"
    """Copy rows of host memory to slots of a slower tier."""
    GROW = "grow"
    """Make one more segment of a slower tier ready for use."""
    CLEAR = "clear"
    """Forget everything that a slower tier holds, durably."""
    LIST = "list"
    """Name the chunks that a segment of a slower tier holds."""
    RELOCATE = "relocate"
    """Copy slots of a slower tier to other slots of it."""
    SHRINK = "shrink"
    """Give an empty segment of a slower tier back."""
    ASK = "ask"
    """Say which of some chunks a store has."""
    NOTE = "note"
    """Write down on a slower tier that chunks were used."""
    ERASE = "erase"
    """Let nothing be found of some chunks on a slower tier when it is opened again."""


@dataclass(slots=True)
class Move:
    """One unit of work that the core asks of the engine.

    `keys`, `rows` and `slots` run in parallel, for RELOCATE `keys`, `slots` and
    `targets`, for NOTE `keys` and `slots`; ERASE and ASK name `keys` alone, the others carry none.
    LIST and SHRINK name a `segment`. The rows and slots of a move stay reserved until its
    `Completion` comes back, whatever happens meanwhile; those of NOTE do not.
    """

    id: int
    op: Op
    tier: int
    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    segment: int = -1

    def number(self, number: int) -> None:
        """The move is handed out under this number."""
        self.id = number


@dataclass(slots=True)
class Completion:
    """The end of a move.

    `ok` runs in parallel to the move's keys: a block that failed fails alone.
    `segments` names the segment that GROW made ready (empty when the tier
    cannot grow now), or those that CLEAR emptied; `found` is the answer to LIST,
    (key, slot), which may name chunks that were displaced. `unread` are the places of
    blocks that PROMOTE or RELOCATE could not read or copy this time, but that may be whole; a
    block that failed and is not among them is lost. Those of ASK are keys without an answer.
    `error` says in words what went wrong, for one log line. `changes` of a tier that others write
    to (number `tier`) come as the completion of no move: `move_id` is NO_MOVE. `ended` is when it
    ended, by the clock of the core; None where nobody knows better than who takes it in.
    """

    move_id: int
    ok: list[bool]
    segments: list[int] = field(default_factory=list)
    error: str | None = None
    changes: Changes | None = None
    tier: int = -1
    found: list[tuple[bytes, int]] = field(default_factory=list)
    unread: Sequence[int] = ()
    ended: float | None = None

    def ended_by(self, now: float) -> float:
        """When it ended, as far as anybody knows."""
        return now if self.ended is None else min(self.ended, now)


@dataclass(slots=True)
class Changes:
    """What others have done to a tier: keys that are gone, then (key, slot) that appeared.

    `taken`: the core has taken them in, or does not need them; time for more.
    """

    appeared: list[tuple[bytes, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    taken: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.appeared) + len(self.gone)

    def end(self) -> None:
        """They are taken in, or not needed."""
        self.taken = True

    def part(self, start: int, count: int) -> Changes:
        """`count` of them from number `start` on; costs no more than these are."""
        first = start - len(self.gone)
        return Changes(
            self.appeared[max(0, first) : max(0, first + count)], self.gone[start : start + count]
        )


@dataclass(slots=True)
class Event:
    """Keys that appeared on (`removed` is False) or left a medium."""

    keys: list[bytes]
    medium: str
    removed: bool


@dataclass(slots=True)
class RecoveredTier:
    """What a tier has recovered when it is opened.

    Attributes:
        name: the tier's name in logs and statistics.
        medium: "disk" or "remote".
        entries: (key, slot) of every chunk found, coldest first.
        segment_slots: slots in a segment; slot s lies in segment s // segment_slots.
        segments: segments that are ready for use.
        max_segments: segments that fit the tier's capacity.
        relocation_chunks: most chunks that one RELOCATE may name; 0 where it is not offered.
        note_chunks: the same of NOTE.
        stripes: devices among which segments are dealt out: segment s lies on device s % stripes.
    """

    name: str
    medium: str
    entries: Sequence[tuple[bytes, int]]
    segment_slots: int
    segments: Sequence[int]
    max_segments: int
    stripes: int = 1
    relocation_chunks: int = 0
    note_chunks: int = 0


@dataclass(frozen=True, slots=True)
class TierPlace:
    """What a tier is made for.

    Attributes:
        namespace: name of what may be exchanged: chunks of another namespace are never right.
        identity: the same in full: model, dtype, layout and the like.
        chunk_bytes: size of a chunk.
    """

    namespace: str
    identity: Mapping[str, Any]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """What one line of the log says, and what it names, for those whose logs are searched.

    Attributes:
        event: what happened, in words that stay the same: ``tier.away``.
        text: the line.
        about: what it names, by name: the tier, the error, how many, how long.
    """

    event: str
    text: str
    about: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def about(event: str, **named: object) -> dict[str, object]:
    """The attributes of a log record, for the `extra` of `logging`: see `LogLine`.

    Each begins with ``kvstore.``. What is neither a number nor a truth value is told as text.
    """
    told = {
        name: each if isinstance(each, (int, float)) else str(each) for name, each in named.items()
    }
    return {"kvstore.event": event, **{f"kvstore.{name}": each for name, each in told.items()}}


class Flow(enum.Enum):
    """How chunks flow between host memory and one slower tier."""

    WRITE_THROUGH = "write-through"
    """Copied as soon as it is stored. What is reported stored survives the process."""

    DEMOTE = "demote"
    """Copied when host memory gives it up, unless the tier has it; the copy stays when it is
    promoted, so that giving it up once more writes nothing."""

    EXCLUSIVE = "exclusive"
    """Copied when host memory gives it up; the copy is given up when it is promoted."""
