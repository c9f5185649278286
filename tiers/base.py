"""Tier: the contract of a slower tier.

A tier stores chunks of one fixed size in numbered slots and copies them to and
from rows of one host region. It decides nothing: the caller chooses which key
goes to which slot, and which chunks are evicted or fetched.

The caller guarantees:

* `open` is called once, before anything else, and `close` once, at the end;
* a row in a running `read` is not used elsewhere, and a row in a running `write`
  is not written;
* no two running calls name the same slot, unless all of them are reads.

The tier guarantees:

* `open` reports each chunk for which `write` reported success to an earlier
  process, and nothing that can be distinguished from such a chunk;
* `read` reports True for a chunk only if its row holds exactly the bytes that
  were written under that key; a chunk that fails fails alone;
* `write` reports True only if the next `open` will report the chunk, even if
  this process is killed right after;
* neither raises because the medium is slow, full or broken;
* the event loop is never blocked.

A *store* is a tier of another kind: a remote store that others also write to, and that decides
itself where a chunk lies and how long it stays. Slots have no meaning, and no call names a key
twice. `open` reports no chunks; `holds` says which the store has. A chunk that was written may
disappear at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.keys import KeyRing
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import Changes, RecoveredTier

__all__ = ["Tier", "Transfer", "error_of"]


@dataclass(slots=True)
class Transfer:
    """The outcome of a call that moves chunks.

    Attributes:
        ok: one flag for each key.
        error: the error message, if any failed.
        unread: indices of keys that `read` or `relocate` could not copy this time, but that may be
            intact. A chunk that failed and is not among them is lost.
        removed: how many chunks a store has removed to make room, since it last said so.
    """

    ok: list[bool]
    error: str | None = None
    unread: Sequence[int] = ()
    removed: int = 0


def error_of(first: str | None, ok: Sequence[bool]) -> str | None:
    """Return `Transfer.error` for a call: the first error, and the number of other failures."""
    others = len(ok) - sum(ok) - 1
    if first is None or others < 1:
        return first
    return f"{first} (and {others} more chunk{'s' if others > 1 else ''})"


class Tier(ABC):
    """A slower tier: see the module's text for its contract.

    Attributes:
        is_peer: whether another process writes to it. It is then only read.
        refreshes: whether it may change without the core: the engine calls `refresh` now and then.
        is_store: whether it must be asked which chunks it has.
        encrypts: whether it encrypts chunks with the keys of its place. One that does not is
            refused where chunks are to be encrypted.
        encodes: the same for the codec of its place.
        key_ring: the keys of its place, set when it is created, if it encrypts with them.
        tail_bytes: bytes of memory right behind each chunk that make it faster; optional.
    """

    is_peer = False
    refreshes = False
    is_store = False
    encrypts = False
    encodes = False
    key_ring: KeyRing | None = None
    tail_bytes = 0

    @abstractmethod
    def open(self, region: PinnedRegion) -> RecoveredTier:
        """Open and lock the medium. May block; called before the engine runs.

        Raises:
            KVStoreError: if the medium cannot be used; names it and the reason.
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
        """Copy `rows` to `slots` under `keys`. Earlier contents of the slots are lost."""

    async def holds(self, keys: Sequence[bytes]) -> Transfer:
        """Return which of `keys`, in the order of a prompt, a store has now.

        `Transfer.unread` are the indices of keys for which this is not known.
        """
        raise NotImplementedError

    @abstractmethod
    async def grow(self) -> tuple[int | None, str | None]:
        """Make one more segment ready; return its number, or None and the reason.

        There is no reason if its capacity, which may have been reduced just now, is used up.
        """

    @abstractmethod
    async def clear(self) -> list[int] | str:
        """Forget all chunks, durably; return the segments that are now empty, or why it failed."""

    async def erase(self, keys: Sequence[bytes]) -> str | None:
        """Erase chunks in all slots, so that the next `open` does not report them.

        Called while no running call names any of `keys`. Other chunks stay, including those
        that are being written.

        Returns:
            Why it failed, or None.
        """
        return "this tier cannot erase single chunks"

    async def note_uses(self, keys: Sequence[bytes], slots: Sequence[int]) -> str | None:
        """Record that chunks were used, in order of use, so that a kill does not lose recency.

        The next `open` reports them as used after all that were noted or written before. They need
        not reach the medium at once. A slot that holds another chunk by now is ignored. Called only
        if the tier reports `note_chunks` at opening.

        Returns:
            Why it failed, or None.
        """
        return "this tier does not record uses"

    async def list_segment(self, segment: int) -> list[tuple[bytes, int]]:
        """List (key, slot) of the valid chunks in a segment; may include displaced chunks.

        Called only if the tier reports `relocation_chunks` at opening.

        Raises:
            OSError: if the segment cannot be read.
        """
        raise NotImplementedError

    async def relocate(
        self, keys: Sequence[bytes], slots: Sequence[int], targets: Sequence[int]
    ) -> Transfer:
        """Copy chunks from `slots` to the empty slots `targets`; the old copies stay valid.

        True for a chunk means that its copy is on the medium and survives a power cut.
        """
        raise NotImplementedError

    async def outdated_segments(self) -> list[int]:
        """Return the segments with chunks that are encrypted with other keys than the newest.

        Raises:
            KVStoreError: if chunks are not encrypted, or the keys cannot be looked up.
        """
        raise ConfigError("the tier does not encrypt chunks in segments")

    async def remove_segment(self, segment: int) -> str | None:
        """Remove a segment that no running or later call uses; return why it failed, or None."""
        raise NotImplementedError

    def segments_in(self, capacity_bytes: int) -> Sequence[int]:
        """Return how many segments each device may have if the size becomes this many bytes.

        Raises:
            KVStoreError: if the tier has no size to change, or not even a segment fits.
        """
        raise KVStoreError(f"{self.description}: its size cannot be changed while it is in use")

    def resize(self, capacity_bytes: int) -> None:
        """Let the medium hold so many bytes from now on, for which `segments_in` has an answer.

        Called on the loop, while other calls may run. Surplus segments stay until
        `remove_segment` is called for each.
        """
        raise NotImplementedError

    async def refresh(self) -> Changes:
        """Return a portion of what has changed without the core since the last call.

        Called until a portion is empty; the tier has then looked everywhere, and pauses.

        Raises:
            OSError: if it cannot look now.
        """
        return Changes()

    @abstractmethod
    async def close(self, coldest_first: Sequence[tuple[bytes, int]]) -> None:
        """Finish running calls and release the medium.

        Args:
            coldest_first: the (key, slot) pairs that are valid now, in the order of
                recency that the next `open` should report.
        """

    def detach(self) -> None:  # noqa: B027
        """Stop waiting for calls that hang; called on the loop, before its end.

        Such calls are reported as failed, but may still write to rows. A tier
        without such calls need not do anything.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Release the medium at once, while no call is running; may block briefly.

        Also called where `open` has raised: what it had begun is released then.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """Kind, place, size and I/O method, for the log line at start."""
