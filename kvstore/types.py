"""Types that the core, the tiers and their users share.

A *key* is ``bytes``: a block hash followed by the 4-byte big-endian index of its KV cache group,
which is below 256; with one group it can do without. A *row* is a chunk's place in host memory, a
*slot* its place on a slower tier; both are plain integers. `Flow` says when a chunk is copied from
host memory to a slower tier, and whether it stays in both.
"""

from __future__ import annotations

import enum
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.errors import BlockKeyError

if TYPE_CHECKING:
    from kvstore.tiers.codec import Codec
    from kvstore.tiers.keys import KeyRing

__all__ = [
    "MAX_KEY_BYTES",
    "NO_MOVE",
    "Changes",
    "Completion",
    "Event",
    "Flow",
    "Move",
    "Op",
    "Partitions",
    "RecoveredTier",
    "TierPlace",
    "check_key",
    "group_of",
    "short_name",
]

NO_MOVE = -1
"""The `move_id` of a completion that belongs to no move."""

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
    """Return the KV cache group of a key: its last four bytes, if they are a group index.

    A key without such an index belongs to no group; the result is then empty.
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
    """Remove an empty segment of a slower tier."""
    ASK = "ask"
    """Ask a store which of some chunks it has."""
    NOTE = "note"
    """Record on a slower tier that chunks were used."""
    ERASE = "erase"
    """Erase chunks on a slower tier, so that they are not found when it is opened again."""


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
        """Set the number under which the move is handed out."""
        self.id = number


@dataclass(slots=True)
class Completion:
    """The end of a move.

    Attributes:
        move_id: the move, or `NO_MOVE` for `changes`.
        ok: whether each of the move's keys succeeded: a chunk that failed fails alone.
        segments: the segment that GROW made ready (none if the tier cannot grow now), or those
            that CLEAR emptied.
        error: what went wrong, as text for one log line.
        changes: what has changed in the tier number `tier` without the core.
        found: the (key, slot) pairs that LIST found; may name chunks that were displaced.
        unread: indices of the keys that PROMOTE or RELOCATE could not copy this time, but that
            may be intact. A chunk that failed and is not among them is lost. For ASK, the keys
            without an answer.
        ended: when the move ended, by the clock of the core; None if only the receiver can tell.
        removed: chunks that a store has removed to make room, since it last said so.
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
    removed: int = 0

    def check(self, keys: int) -> None:
        """Take what a tier answered for so many keys in the types of its contract.

        Raises:
            ValueError, TypeError: if it cannot be taken so.
        """
        if type(self.ok) is not list:
            self.ok = [bool(each) for each in self.ok]
        if len(self.ok) != keys:
            raise ValueError(f"{len(self.ok)} answers for {keys} blocks")
        self.unread = [operator.index(place) for place in self.unread or ()]
        if not all(0 <= place < keys for place in self.unread):
            raise ValueError(f"unread = {self.unread!r:.100}: allowed are 0 to {keys - 1}")
        self.segments = [operator.index(segment) for segment in self.segments]
        self.error = None if self.error is None else str(self.error)

    def ended_by(self, now: float) -> float:
        """Return when the move ended; `now` if that is not known."""
        return now if self.ended is None else min(self.ended, now)


@dataclass(slots=True)
class Changes:
    """What has changed in a tier without the core: keys that are gone, then what else has changed.

    Attributes:
        appeared: (key, slot) that others have stored. gone: keys that they have removed.
        lost: (key, slot) of this process's own chunks that cannot be read any more.
        forgotten: what the keys of chunks begin with that nobody may have any more, host memory
            included: secrets of theirs were forgotten.
        taken: the core has applied or dropped these changes, so more may be sent.
        on_taken: called then.
    """

    appeared: list[tuple[bytes, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    lost: list[tuple[bytes, int]] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    taken: bool = field(default=False, compare=False)
    on_taken: Callable[[], object] = field(default=lambda: None, compare=False)

    def __len__(self) -> int:
        return len(self.gone) + len(self.appeared) + len(self.lost) + len(self.forgotten)

    def end(self) -> None:
        """Mark the changes as applied or dropped."""
        self.taken = True
        self.on_taken()

    def part(self, start: int, count: int) -> Changes:
        """Return `count` changes from number `start` on, in time proportional to `count`."""
        end = start + count
        gone = self.gone[start:end]
        start, end = max(0, start - len(self.gone)), max(0, end - len(self.gone))
        appeared = self.appeared[start:end]
        start, end = max(0, start - len(self.appeared)), max(0, end - len(self.appeared))
        lost = self.lost[start:end]
        start, end = max(0, start - len(self.lost)), max(0, end - len(self.lost))
        return Changes(appeared, gone, lost, self.forgotten[start:end])


@dataclass(slots=True)
class Event:
    """Chunks that appeared on a medium, or left it.

    Attributes:
        keys: their keys.
        medium: "host", "disk" or "remote".
        removed: whether they left.
        tier: name of the tier, as in `TierStats`; "" for host memory.
    """

    keys: list[bytes]
    medium: str
    removed: bool
    tier: str = ""


@dataclass(slots=True)
class RecoveredTier:
    """What a tier holds when it is opened.

    Attributes:
        name: the tier's name in logs and statistics.
        medium: "disk" or "remote".
        entries: (key, slot) of every chunk found, coldest first.
        segment_slots: slots in a segment; slot s lies in segment s // segment_slots.
        segments: segments that are ready for use.
        max_segments: segments that fit the tier's capacity.
        relocation_chunks: most chunks that one RELOCATE may name; 0 if it is not supported.
        note_chunks: the same for NOTE.
        stripes: number of devices; segment s lies on device s % stripes.
        payload_bytes: of a chunk there; 0 if they are those of host memory.
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
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierPlace:
    """What a tier stores chunks of.

    Attributes:
        namespace: name of the set of chunks; chunks of another namespace are never valid here.
        identity: what the namespace stands for: model, dtype, layout and so on.
        chunk_bytes: size of a chunk.
        keys: the keys with which chunks are encrypted before they leave this host, if they are.
        partitions: of tenants, if there are tenants.
        codec: encodes chunks before they leave this host, if they are to be encoded.
    """

    namespace: str
    identity: Mapping[str, Any]
    chunk_bytes: int
    keys: KeyRing | None = None
    partitions: Partitions | None = None
    codec: Codec | None = None


class Partitions(Protocol):
    """How tenants share a tier."""

    def of(self, key: bytes) -> int:
        """Return the number of the key's partition."""
        ...

    def kept(self, counts: Mapping[int, int], capacity: int, room: int | None = None) -> list[int]:
        """Return how many chunks each partition keeps of those that it has, by its share of
        `capacity`; `room` in all, or by default `capacity`."""
        ...


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line with its event and attributes, for structured logs.

    Attributes:
        event: stable name of what happened: ``tier.away``.
        text: the line.
        about: attributes by name: the tier, the error, a count, seconds.
    """

    event: str
    text: str
    about: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def about(event: str, **named: object) -> dict[str, object]:
    """Return the attributes of a log record, for the `extra` of `logging`: see `LogLine`.

    Each name gets the prefix ``kvstore.``. Values other than numbers and booleans become text.
    """
    attributes: dict[str, object] = {"kvstore.event": event}
    for name, value in named.items():
        attributes[f"kvstore.{name}"] = value if isinstance(value, (int, float)) else str(value)
    return attributes


class Flow(enum.Enum):
    """How chunks flow between host memory and one slower tier."""

    WRITE_THROUGH = "write-through"
    """Copied as soon as it is stored. What is reported as stored survives the process."""

    DEMOTE = "demote"
    """Copied when host memory evicts it, unless the tier has it. The copy stays when the chunk is
    promoted, so evicting it again writes nothing."""

    EXCLUSIVE = "exclusive"
    """Copied when host memory evicts it; the copy is dropped when the chunk is promoted."""
