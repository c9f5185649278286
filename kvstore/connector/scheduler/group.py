"""Sizes of a KV cache group: blocks, chunks, hashes and the sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.connector.spec import OffloadingSpec
from kvstore.types import MAX_KEY_BYTES, short_name

__all__ = ["Group", "groups_of", "key_of"]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are given out together.

    Attributes:
        index: its number.
        tokens_per_block: of a block of the device.
        tokens_per_chunk: of an offloaded chunk.
        blocks_per_chunk: blocks of the device in a chunk.
        hashes_per_chunk: hashed blocks in a chunk; the last one's hash names it.
        window: tokens that a token attends to, itself included; None: all before it.
        uncut: tokens at the end of a chunk that have to be there so that it may be stored.
    """

    index: int
    tokens_per_block: int
    tokens_per_chunk: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    window: int | None
    uncut: int

    def chunks_to(self, tokens: int) -> int:
        """Chunks that have one of the first `tokens` tokens at least."""
        return -(-tokens // self.tokens_per_chunk)

    def blocks_to(self, tokens: int) -> int:
        """Blocks that have one of the first `tokens` tokens at least."""
        return -(-tokens // self.tokens_per_block)

    def window_chunks(self, tokens: int) -> int:
        """Chunks before the end of `tokens` tokens that the next token needs.

        Only for groups with a window. At the end of a chunk never fewer than the window fills.
        """
        assert self.window is not None
        size = self.tokens_per_chunk
        in_last = -tokens % size
        return max(-(-self.window // size), -(-(self.window - 1 + in_last) // size))


def groups_of(spec: OffloadingSpec) -> tuple[Group, ...]:
    """The groups of a server."""
    sizes = set(spec.offloaded_block_size)
    return tuple(
        Group(
            index=index,
            tokens_per_block=block,
            tokens_per_chunk=chunk,
            blocks_per_chunk=spec.block_size_factor,
            hashes_per_chunk=chunk // spec.hash_block_size,
            window=window,
            uncut=_uncut(window, chunk, one_size=len(sizes) == 1),
        )
        for index, (block, chunk, window) in enumerate(
            zip(spec.device_block_size, spec.offloaded_block_size, spec.sliding_window, strict=True)
        )
    )


def key_of(block_hash: bytes, group: int) -> bytes:
    """The key of the chunk whose last hashed block has this hash.

    A hash that is too long for a key is named by its SHA-256.
    """
    suffix = group.to_bytes(4, "big")
    return short_name(bytes(block_hash), MAX_KEY_BYTES - len(suffix)) + suffix


def _uncut(window: int | None, chunk: int, *, one_size: bool) -> int:
    """How much of a chunk's end some request may load.

    With chunks of one size a request loads up to the end of a chunk, or to the token before,
    when only the last one is left to compute. Otherwise it may end anywhere in a chunk.
    """
    if window is None or not one_size:
        return chunk
    return min(window, chunk)
