"""Tracked requests: the scheduler's half's state of a request, and the sizes of its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.connector.contract import ReqContext
from kvstore.connector.queued import QueuedKeys
from kvstore.connector.server import BlockIds, RequestLike
from kvstore.connector.spec import OffloadingSpec
from kvstore.core.hints import read_hints
from kvstore.types import MAX_KEY_BYTES, short_name

__all__ = ["Group", "GroupState", "TrackedRequest", "groups_of", "key_of"]


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group: layers whose blocks are allocated together.

    Attributes:
        index: its number.
        tokens_per_block: tokens of a block of the device.
        tokens_per_chunk: tokens of an offloaded chunk.
        blocks_per_chunk: blocks of the device in a chunk.
        hashes_per_chunk: hashed blocks in a chunk; the last one's hash names the chunk.
        window: tokens that a token attends to, itself included; None: all before it.
        uncut: tokens at the end of a chunk that must still be in blocks for it to be stored.
    """

    index: int
    tokens_per_block: int
    tokens_per_chunk: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    window: int | None
    uncut: int

    @property
    def sizes(self) -> tuple[int, int | None]:
        """Tokens of a chunk, and how many of the last chunks the next token needs at most."""
        window = None if self.window is None else self.window_chunks(1)
        return self.tokens_per_chunk, window

    def chunks_to(self, tokens: int) -> int:
        """Count the chunks that contain any of the first `tokens` tokens."""
        return -(-tokens // self.tokens_per_chunk)

    def blocks_to(self, tokens: int) -> int:
        """Count the blocks that contain any of the first `tokens` tokens."""
        return -(-tokens // self.tokens_per_block)

    def window_chunks(self, tokens: int) -> int:
        """Count the last chunks of the first `tokens` tokens that the next token needs.

        Only for groups with a window. At least as many as the window fills.
        """
        assert self.window is not None
        size = self.tokens_per_chunk
        in_last = -tokens % size
        return max(-(-self.window // size), -(-(self.window - 1 + in_last) // size))


def groups_of(spec: OffloadingSpec) -> tuple[Group, ...]:
    """Return the KV cache groups of a server."""
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
    """Return the key of the chunk whose last hashed block has this hash.

    A hash that is too long for a key is replaced by its SHA-256.
    """
    suffix = group.to_bytes(4, "big")
    return short_name(bytes(block_hash), MAX_KEY_BYTES - len(suffix)) + suffix


def _uncut(window: int | None, chunk: int, *, one_size: bool) -> int:
    """Return how many tokens at the end of a chunk a request may need when it loads the chunk.

    With chunks of one size, a request loads up to the end of a chunk, or up to the token before it
    if only the last token is left to compute. Otherwise it may end anywhere in a chunk.
    """
    if window is None or not one_size:
        return chunk
    return min(window, chunk)


@dataclass(slots=True)
class GroupState:
    """A request's chunks and blocks in one KV cache group.

    Attributes:
        keys: keys of its whole chunks.
        block_ids: blocks of the device that it holds; 0 where it has none, because the window has
            moved past it or the group needs no block there.
        next_chunk: the first chunk that was neither stored nor loaded yet.
    """

    group: Group
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    next_chunk: int = 0

    def storable(self, tokens: int) -> int:
        """Count the leading chunks that are computed, named and in blocks after `tokens` tokens."""
        return min(
            tokens // self.group.tokens_per_chunk,
            len(self.block_ids) // self.group.blocks_per_chunk,
            len(self.keys),
        )

    def blocks_of(self, chunk: int) -> list[int]:
        """Return the blocks of a chunk to be stored, without those that the window has passed.

        Empty if the window has passed so much of the chunk that a request which loads it could
        need more than is left, or if a group without a window lacks a block.
        """
        group = self.group
        count = group.blocks_per_chunk
        blocks = self.block_ids[chunk * count : (chunk + 1) * count]
        if all(blocks):
            return blocks
        if group.window is None:
            # A group with one state for the whole prompt has no blocks for earlier tokens.
            return []
        # Freed blocks precede those that are kept.
        kept = blocks[len(blocks) - blocks[::-1].index(0) :]
        return kept if len(kept) * group.tokens_per_block >= group.uncut else []

    def left_by(self, blocks: Collection[int]) -> None:
        """Forget those of this request's blocks that were given out again: `blocks`.

        This happens only with a sliding window, and matters only for chunks still to be stored.
        """
        begin = self.next_chunk * self.group.blocks_per_chunk
        for place in range(begin, len(self.block_ids)):
            if self.block_ids[place] in blocks:
                self.block_ids[place] = 0

    def store_anew(self, computed: int) -> None:
        """Offer all chunks again after a reset; `computed` tokens of the request are computed."""
        self.next_chunk = 0
        if self.group.window is not None:
            # Blocks that the window has passed may belong to another request by now.
            left = max(0, computed - self.group.window + 1) // self.group.tokens_per_block
            left = min(left, len(self.block_ids))
            self.block_ids[:left] = [0] * left


class TrackedRequest:
    """A request of the server, with its chunks, blocks and transfers.

    Attributes:
        context: the request as the manager sees it.
        computed: tokens that the device had when it was last looked up.
        jobs: its transfers under way.
        loading: its load under way, or None.
        load_failed: whether a load has failed; then nothing more is loaded for it.
        finished: whether the server has reported it as finished.
        ended: whether the manager has been told so.
    """

    def __init__(self, request: RequestLike, groups: Sequence[Group]) -> None:
        self.request = request
        self.groups = [GroupState(group) for group in groups]
        self._ends: dict[bytes, int] | None = None
        position: Callable[[bytes], int] | None = None
        if len(groups) > 1 or groups[0].window is not None:
            ends = self._ends = {}

            def position(key: bytes) -> int:
                return ends.get(key, 0)

        params = getattr(request, "kv_transfer_params", None)
        envelope = getattr(request, "kv_hints", None)
        headers = getattr(request, "trace_headers", None)
        self.context = ReqContext(request.request_id, position, params, envelope, headers)
        remote = isinstance(params, Mapping) and bool(params.get("do_remote_decode"))
        self._offers_all = remote or read_hints(params, envelope)[0].at_end
        self.computed = 0
        self.jobs: set[int] = set()
        self.loading: int | None = None
        self._used_taken = False
        self.load_failed = False
        self.finished = False
        self.ended = False

    # -- its prompt ------------------------------------------------------------------------

    def name_chunks(self) -> None:
        """Add the keys of chunks that have become whole since the last call."""
        hashes = self.request.block_hashes
        for state in self.groups:
            group = state.group
            step = group.hashes_per_chunk
            for place in range((len(state.keys) + 1) * step - 1, len(hashes), step):
                key = key_of(hashes[place], group.index)
                state.keys.append(key)
                if self._ends is not None:
                    self._ends[key] = len(state.keys) * group.tokens_per_chunk

    def queued_keys(self) -> list[QueuedKeys]:
        """Return the keys of its prompt, for each KV cache group."""
        queued = []
        for state in self.groups:
            group, size = state.group, state.group.tokens_per_chunk
            window = None if group.window is None else group.window_chunks(len(state.keys) * size)
            queued.append(QueuedKeys(state.keys, size, window))
        return queued

    def look_up(self, computed: int) -> None:
        """Begin a lookup of the request, of which the device has the first `computed` tokens.

        After a preemption all chunks are offered once more: those that were refused, or have been
        evicted since, may find room.
        """
        self.name_chunks()
        self.computed = computed
        self.offered_up_to([0] * len(self.groups))

    def take_used(self, *, loaded: bool) -> list[bytes]:
        """Return the keys that the request uses, in prompt order; [] after the first call.

        Args:
            loaded: whether to return all keys, or only those that the device already had.
        """
        if self._used_taken:
            return []
        self._used_taken = True
        used: list[bytes] = []
        for state in self.groups:
            if loaded:
                used += state.keys
                continue
            group = state.group
            last = self.computed // group.tokens_per_chunk
            first = 0
            if group.window is not None:
                first = max(0, last - group.window_chunks(self.computed))
            used += state.keys[first:last]
        return used

    def computed_after(self, scheduled: int | None) -> int:
        """Count the leading tokens that are known and computed after `scheduled` more.

        If steps overlap, a server counts tokens that are still being sampled; their KV cache is
        computed one step later. `scheduled` is None for a finished request, whose last sampled
        token has no KV cache.
        """
        request = self.request
        if scheduled is not None:
            return min(request.num_computed_tokens + scheduled, request.num_tokens)
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        return min(request.num_computed_tokens, known)

    # -- its blocks ------------------------------------------------------------------------

    def give_blocks(self, block_ids: BlockIds, *, anew: bool) -> None:
        """Add blocks; with `anew`, they replace all earlier ones."""
        for state in self.groups:
            if anew:
                state.block_ids.clear()
            state.block_ids.extend(block_ids[state.group.index])

    def left_by(self, blocks: Collection[int]) -> None:
        """Forget blocks behind a sliding window that were given out again: `blocks`."""
        for state in self.groups:
            if state.group.window is not None:
                state.left_by(blocks)

    def drop_blocks(self) -> None:
        """Forget all blocks."""
        for state in self.groups:
            state.block_ids.clear()

    # -- its transfers ---------------------------------------------------------------------

    def load_begins(self, job: int, end: int) -> None:
        """Begin a load of the tokens up to `end`; they need not be stored.

        All chunks are still offered if the request will be decoded elsewhere, which looks up all of
        them, or has hints, which apply to all of them.
        """
        self.jobs.add(job)
        self.loading = job
        if not self._offers_all:
            self.offered_up_to([state.group.chunks_to(end) for state in self.groups])

    def load_ends(self, *, failed: bool) -> None:
        """End the load. If it `failed`, nothing is loaded again, and what is computed is stored."""
        assert self.loading is not None
        self.jobs.discard(self.loading)
        self.loading = None
        if failed:
            self.load_failed = True
            self.store_anew()

    def offered_up_to(self, ends: Sequence[int]) -> None:
        """Set, for each group, the first chunk that was neither offered nor loaded."""
        for state, end in zip(self.groups, ends, strict=True):
            state.next_chunk = end

    def finish(self) -> None:
        """Mark the request as finished by the server."""
        self.name_chunks()
        self.finished = True

    def store_anew(self) -> None:
        """Offer all chunks again after a reset; nothing, if the request has finished."""
        if self.finished:
            self.drop_blocks()
            return
        for state in self.groups:
            state.store_anew(self.request.num_computed_tokens)

    def end(self) -> None:
        """Mark the request as ended: nothing more of it is stored."""
        self.ended = True
