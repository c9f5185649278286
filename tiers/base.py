"""Tier: the contract of a slower tier.

A tier stores chunks of one fixed size in numbered slots and copies them to
and from rows of one host region. It decides nothing: it is told which key goes
to which slot, which chunks leave and which are fetched.

The caller guarantees:

* `open` is called once, before anything else, and `close` once, at the end;
* a row that is named in a running `read` is not touched by anybody else, and a
  row in a running `write` is not written;
* no two running calls name the same slot, unless all of them are reads.

The tier guarantees:

* `open` reports each chunk that an earlier process was told had been written,
  and nothing that can be told apart from such a chunk;
* `read` says True for a block only when its row holds exactly the bytes that
  were written under that key; a block that fails fails alone;
* `write` says True only when the chunk will be reported by the next `open`,
  also when this process is killed right after;
* neither raises because the medium is slow, full or broken;
* its event loop is never blocked.

A *store* is a tier of another kind: a remote engine that others write to as well, and that
decides itself where a chunk lies and how long it stays. Slots mean nothing to it, and no call
names a key twice. `open` reports
no chunk; `holds` says which it has. What `write` says has been written may leave at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import Changes, RecoveredTier

__all__ = ["Tier", "Transfer", "error_of"]


@dataclass(slots=True)
class Transfer:
    """The outcome of a call that moves blocks: one flag per key, and what went wrong in words.

    `unread` are the places of blocks that `read` or `relocate` could not do this time, and that
    may be whole: nothing is known of their bytes. One that failed and is not named there is lost.
    """

    ok: list[bool]
    error: str | None = None
    unread: Sequence[int] = ()


def error_of(first: str | None, ok: Sequence[bool]) -> str | None:
    """`Transfer.error` for a call in which `first` is what went wrong first: one line, not many."""
    others = len(ok) - sum(ok) - 1
    if first is None or others < 1:
        return first
    return f"{first} (and {others} more chunk{'s' if others > 1 else ''})"


class Tier(ABC):
    """See the module's text.

    Attributes:
        is_peer: whether others write to it: it is only read, and the engine calls `refresh` now
            and then.
        is_store: whether it has to be asked what it has.
        tail_bytes: bytes of memory right behind each chunk that make it faster. It may get none.
    """

    is_peer = False
    is_store = False
    tail_bytes = 0

    @abstractmethod
    def open(self, region: PinnedRegion) -> RecoveredTier:
        """Take possession of the medium. May block; called before the engine runs.

        Raises:
            KVStoreError: if the medium cannot be used; says which and why.
        """

    @abstractmethod
    async def read(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        """Copy `slots` to `rows`, verified against `keys`."""

    @abstractmethod
    async def write(
        self, keys: Sequence[bytes], slots: Sequence[int], rows: Sequence[int]
    ) -> Transfer:
        """Copy `rows` to `slots` under `keys`. What the slots held before is lost."""

    async def holds(self, keys: Sequence[bytes]) -> Transfer:
        """For a store: which of `keys`, in the order of a prompt, it has now.

        `Transfer.unread` are the places of keys of which that could not be known.
        """
        raise NotImplementedError

    @abstractmethod
    async def grow(self) -> tuple[int | None, str | None]:
        """Make one more segment ready; returns its number, or None and why that cannot be now."""

    @abstractmethod
    async def clear(self) -> list[int] | None:
        """Forget all chunks, durably; returns the segments that are empty now, None on failure."""

    async def erase(self, keys: Sequence[bytes]) -> str | None:
        """Let the next `open` report none of these chunks, whatever slots hold them or held them.

        Called while no running call names any of `keys`. Records of others stay, those
        that are written meanwhile too.

        Returns:
            Why that could not be, or None.
        """
        return "this tier cannot erase single chunks"

    async def note_uses(self, keys: Sequence[bytes], slots: Sequence[int]) -> str | None:
        """Write down that these chunks, first used first, were used, for the case of a kill.

        The next `open` reports them as used after all that were noted or written before; nothing
        needs to reach the medium at once. A slot that holds another chunk by now is left alone.
        Where the tier says `note_chunks` at opening.

        Returns:
            Why that could not be, or None.
        """
        return "this tier does not write down uses"

    async def list_segment(self, segment: int) -> list[tuple[bytes, int]]:
        """(key, slot) of the valid chunks in a segment; may name chunks that were displaced.

        Where the tier says `relocation_chunks` at opening.

        Raises:
            OSError: if the segment cannot be read.
        """
        raise NotImplementedError

    async def relocate(
        self, keys: Sequence[bytes], slots: Sequence[int], targets: Sequence[int]
    ) -> Transfer:
        """Copy chunks from `slots` to the empty slots `targets`; the old copies stay valid.

        True for a chunk says that its copy is on the medium: a power cut does not take it.
        """
        raise NotImplementedError

    async def remove_segment(self, segment: int) -> str | None:
        """Remove a segment to which no running or later call refers; why not, or None."""
        raise NotImplementedError

    async def refresh(self) -> Changes:
        """For a followed tier: a portion of what others have done since the last call.

        Called until there is nothing: then the tier has looked everywhere, and rests a while.
        """
        return Changes()

    @abstractmethod
    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        """Finish what runs and let go of the medium.

        Args:
            coldest_first: the (key, slot) that are valid now, in the order of
                recency that the next `open` should report.
        """

    def detach(self) -> None:  # noqa: B027
        """Stop waiting for calls that do not return; called on the loop, before its end.

        Whoever waits for one is told that it failed. Rows may still be written to.
        A tier that has no such calls need not do anything.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the medium at once, with nothing running; may block shortly."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Kind, place, size and means in a few words, for the line in the log at start."""
