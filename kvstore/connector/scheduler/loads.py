"""Loads: which chunks of a request go to which of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.connector.manager.base import OffloadingManager
from kvstore.connector.mediums import DeviceLoadStoreSpec, TransferJob
from kvstore.connector.scheduler.jobs import Job, Jobs
from kvstore.connector.scheduler.tracked import GroupState, TrackedRequest
from kvstore.connector.server import BlockLike, BlocksLike
from kvstore.errors import KVStoreError

__all__ = ["Loads"]


class Loads:
    """Begins loads, and knows what is being loaded."""

    def __init__(self, manager: OffloadingManager, jobs: Jobs, *, shares_blocks: bool) -> None:
        """
        Args:
            shares_blocks: a request can use the blocks into which another one loads.
        """
        self._manager = manager
        self._jobs = jobs
        self._shares_blocks = shares_blocks
        self._loading: dict[bytes, int] = {}
        """Key -> the job that loads it, where requests share blocks."""
        self._begun: dict[int, TransferJob] = {}

    def take_begun(self) -> dict[int, TransferJob]:
        """Those that have begun since the last call."""
        begun, self._begun = self._begun, {}
        return begun

    def begin(self, tracked: TrackedRequest, blocks: BlocksLike, tokens: int) -> None:
        """Load the next `tokens` tokens of a request.

        Raises:
            KVStoreError: if it has too few blocks.
            KeyError: if some of it was not found in this step.
        """
        end = tracked.computed + tokens
        keys: list[bytes] = []
        block_ids: list[int] = []
        sizes: list[int] = []
        begins: list[int] = []
        for state in tracked.groups:
            group = state.group
            its = blocks.blocks[group.index]
            begin, count = _to_load(tracked, state, its, end)
            if begin < count:
                keys += state.keys[begin // group.blocks_per_chunk : group.chunks_to(end)]
            block_ids += [block.block_id for block in its[begin:count]]
            sizes.append(count - begin)
            begins.append(begin)
        source = self._manager.prepare_load(keys, tracked.context)
        target = DeviceLoadStoreSpec(block_ids, sizes, begins)
        job = self._jobs.begin(tracked, keys, block_ids, is_store=False)
        tracked.load_begins(job.number, end)
        self._begun[job.number] = TransferJob(tracked.context.req_id, source, target)
        if self._shares_blocks:
            self._loading.update(dict.fromkeys(keys, job.number))

    def end(self, job: Job) -> None:
        """A load has ended."""
        self._manager.complete_load(job.keys, job.tracked.context)
        for key in job.keys:
            if self._loading.get(key) == job.number:
                del self._loading[key]
        job.tracked.load_ends(failed=job.failed)

    def under_way(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether some of a request's next `tokens` tokens are being loaded for another."""
        if not self._loading:
            return False
        end = tracked.computed + tokens
        for state in tracked.groups:
            group = state.group
            last = group.chunks_to(end)
            first = tracked.computed // group.tokens_per_chunk
            if group.window is not None:
                first = max(first, last - group.window_chunks(end))
            if any(key in self._loading for key in state.keys[first:last]):
                return True
        return False


def _to_load(
    tracked: TrackedRequest, state: GroupState, blocks: Sequence[BlockLike], end: int
) -> tuple[int, int]:
    """The first of a group's blocks that is to be loaded, and how many there are up to `end`."""
    group = state.group
    count = group.blocks_to(end)
    if len(blocks) < count or len(state.keys) < group.chunks_to(end):
        raise KVStoreError(
            f"request {tracked.context.req_id} has {len(blocks)} blocks and {len(state.keys)} "
            f"whole chunks in group {group.index}: too few to load {end} tokens"
        )
    for place in range(group.blocks_to(tracked.computed), count):
        block = blocks[place]
        if not block.is_null and block.block_hash is None:
            return place, count
    return count, count
