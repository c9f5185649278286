"""Tracked requests: what the scheduler's half knows of a request, and the sizes of its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvstore.connector.contract import ReqContext
from kvstore.connector.server import BlockIds, RequestLike
from kvstore.connector.spec import OffloadingSpec
from kvstore.core.hints import read_hints
from kvstore.types import MAX_KEY_BYTES, short_name

__all__ = ["Group", "GroupState", "TrackedRequest", "groups_of", "key_of"]


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


@dataclass(slots=True)
class GroupState:
    """A request's chunks and blocks in one KV cache group.

    Attributes:
        keys: of its whole chunks.
        block_ids: blocks of the device that it holds; 0 where there is none: a window has left
            it, or the group needs none there.
        next_chunk: the first chunk that was not stored yet, nor loaded.
    """

    group: Group
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    next_chunk: int = 0

    def storable(self, tokens: int) -> int:
        """How many leading chunks are computed, named and in blocks once `tokens` tokens are."""
        return min(
            tokens // self.group.tokens_per_chunk,
            len(self.block_ids) // self.group.blocks_per_chunk,
            len(self.keys),
        )

    def blocks_of(self, chunk: int) -> list[int]:
        """The blocks of a chunk to be stored, without those that the window has left.

        Empty if the window has left so much of it that a request which loads it could miss some,
        and in a group without a window if there is a block missing.
        """
        group = self.group
        count = group.blocks_per_chunk
        blocks = self.block_ids[chunk * count : (chunk + 1) * count]
        if all(blocks):
            return blocks
        if group.window is None:
            # Where a group has one state for all of a prompt, no block stands for what came before.
            return []
        # What is given back lies before what is not.
        kept = blocks[len(blocks) - blocks[::-1].index(0) :]
        return kept if len(kept) * group.tokens_per_block >= group.uncut else []

    def left_by(self, blocks: Collection[int]) -> None:
        """`blocks` were given to somebody: those that this request had before are lost to it.

        Only with a sliding window does that happen, and only what is still to be stored matters.
        """
        begin = self.next_chunk * self.group.blocks_per_chunk
        for place in range(begin, len(self.block_ids)):
            if self.block_ids[place] in blocks:
                self.block_ids[place] = 0

    def store_anew(self, computed: int) -> None:
        """Nothing is stored any more; the request has computed its first `computed` tokens."""
        self.next_chunk = 0
        if self.group.window is not None:
            # Nobody has looked after what the window has left: it may be somebody else's.
            left = max(0, computed - self.group.window + 1) // self.group.tokens_per_block
            left = min(left, len(self.block_ids))
            self.block_ids[:left] = [0] * left


class TrackedRequest:
    """See the module's text.

    Attributes:
        context: how the manager knows it.
        computed: tokens that the device had when it was looked up last.
        jobs: its transfers under way.
        loading: the one that is a load, or None.
        load_failed: nothing is loaded for it any more.
        finished: the server has told that it has finished.
        ended: the manager has been told so.
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
        remote = bool(params and params.get("do_remote_decode"))
        self._offers_all = remote or read_hints(params, envelope)[0].at_end
        self.computed = 0
        self.jobs: set[int] = set()
        self.loading: int | None = None
        self._told = False
        self.load_failed = False
        self.finished = False
        self.ended = False

    # -- its prompt ------------------------------------------------------------------------

    def name_chunks(self) -> None:
        """Chunks may have become whole since the last call: they have keys now."""
        hashes = self.request.block_hashes
        for state in self.groups:
            group = state.group
            step = group.hashes_per_chunk
            for place in range((len(state.keys) + 1) * step - 1, len(hashes), step):
                key = key_of(hashes[place], group.index)
                state.keys.append(key)
                if self._ends is not None:
                    self._ends[key] = len(state.keys) * group.tokens_per_chunk

    def look_up(self, computed: int) -> None:
        """It is looked up; the device has its first `computed` tokens.

        If it was preempted, all of it is offered once more: what was refused or has been evicted
        since may find room.
        """
        self.name_chunks()
        self.computed = computed
        self.offered_up_to([0] * len(self.groups))

    def take_used(self, *, loaded: bool) -> list[bytes]:
        """Keys of chunks that it uses, in prompt order, when it was looked up first; [] later.

        Args:
            loaded: all of them; otherwise those that the device had itself.
        """
        if self._told:
            return []
        self._told = True
        had: list[bytes] = []
        for state in self.groups:
            if loaded:
                had += state.keys
                continue
            group = state.group
            last = self.computed // group.tokens_per_chunk
            first = 0
            if group.window is not None:
                first = max(0, last - group.window_chunks(self.computed))
            had += state.keys[first:last]
        return had

    def computed_after(self, scheduled: int | None) -> int:
        """Leading tokens that are known and computed once it has computed `scheduled` more.

        Where steps overlap, a server counts tokens that are only being sampled; their KV cache is
        computed one step later. None says that it has finished: of the token that was sampled
        last nobody has computed it.
        """
        request = self.request
        if scheduled is not None:
            return min(request.num_computed_tokens + scheduled, request.num_tokens)
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        return min(request.num_computed_tokens, known)

    # -- its blocks ------------------------------------------------------------------------

    def give_blocks(self, block_ids: BlockIds, *, anew: bool) -> None:
        """It has got blocks: all of its blocks `anew`, or some more."""
        for state in self.groups:
            if anew:
                state.block_ids.clear()
            state.block_ids.extend(block_ids[state.group.index])

    def left_by(self, blocks: Collection[int]) -> None:
        """`blocks` were given out: those that a window of it has left are lost to it."""
        for state in self.groups:
            if state.group.window is not None:
                state.left_by(blocks)

    def drop_blocks(self) -> None:
        """It has lost its blocks."""
        for state in self.groups:
            state.block_ids.clear()

    # -- its transfers ---------------------------------------------------------------------

    def load_begins(self, job: int, end: int) -> None:
        """Its tokens up to `end` are being loaded: they need not be stored.

        Unless it will be decoded elsewhere, where all of it is looked for, or has hints, which
        speak of all of it.
        """
        self.jobs.add(job)
        self.loading = job
        if not self._offers_all:
            self.offered_up_to([state.group.chunks_to(end) for state in self.groups])

    def load_ends(self, *, failed: bool) -> None:
        """If it `failed`, what is computed instead can be stored, and nothing is loaded again."""
        assert self.loading is not None
        self.jobs.discard(self.loading)
        self.loading = None
        if failed:
            self.load_failed = True
            self.store_anew()

    def store_begins(self, job: int) -> None:
        self.jobs.add(job)

    def store_ends(self, job: int) -> None:
        self.jobs.discard(job)

    def offered_up_to(self, ends: Sequence[int]) -> None:
        """For each group the first chunk that was not offered, nor loaded."""
        for state, end in zip(self.groups, ends, strict=True):
            state.next_chunk = end

    def finish(self) -> None:
        """The server has told that it has finished."""
        self.name_chunks()
        self.finished = True

    def store_anew(self) -> None:
        """Nothing of it is stored any more. Of what has finished nothing more is stored."""
        if self.finished:
            self.drop_blocks()
            return
        for state in self.groups:
            state.store_anew(self.request.num_computed_tokens)

    def end(self) -> None:
        """It has finished, and nothing more of it is stored."""
        self.ended = True
