"""Transfers under way at the workers, and the device blocks that they use.

`Loads` maps the chunks of a request to its blocks. `Stores` offers what a request has computed to
the manager, chunk by chunk. `ConnectorStats` counts both.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from kvstore.connector.contract import OffloadingManager
from kvstore.connector.mediums import ConnectorOutput, DeviceLoadStoreSpec, TransferJob
from kvstore.connector.server import BlockLike, BlocksLike
from kvstore.connector.tracked_request import GroupState, TrackedRequest
from kvstore.errors import KVStoreError

__all__ = ["ConnectorStats", "EndedLoads", "Job", "Jobs", "Loads", "Stores"]


@dataclass(slots=True)
class Job:
    """A transfer under way.

    Attributes:
        block_ids: blocks of the device that it reads or writes.
        awaited: number of workers that have not finished it yet.
        failed: whether it failed at some worker.
    """

    number: int
    tracked: TrackedRequest
    keys: list[bytes]
    block_ids: list[int]
    is_store: bool
    awaited: int
    failed: bool = field(default=False)


class Jobs:
    """The transfers under way, and the device blocks that each uses.

    A block may be given to another request while a transfer uses it. The transfer must then end
    before the block is written again.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.made = 0
        """How many there were; the next one has that number."""
        self._jobs: dict[int, Job] = {}
        self._users: dict[int, set[int]] = {}
        """Block -> the jobs that use it."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: int) -> bool:
        return number in self._jobs

    def begin(
        self, tracked: TrackedRequest, keys: list[bytes], block_ids: list[int], *, is_store: bool
    ) -> Job:
        """Create a job and record the blocks that it uses."""
        job = Job(self.made, tracked, keys, block_ids, is_store, self._workers)
        self.made += 1
        self._jobs[job.number] = job
        for block in block_ids:
            self._users.setdefault(block, set()).add(job.number)
        return job

    def ended(self, number: int, workers: int, *, failed: bool) -> Job | None:
        """Note that `workers` more have finished a job; return the job once all have, or None.

        Raises:
            KeyError: if no such job is under way.
        """
        job = self._jobs[number]
        job.failed |= failed
        job.awaited -= workers
        if job.awaited > 0:
            return None
        del self._jobs[number]
        for block in set(job.block_ids):
            users = self._users[block]
            users.discard(number)
            if not users:
                del self._users[block]
        return job

    def using(self, blocks: Set[int]) -> set[int]:
        """Return the jobs that use at least one of `blocks`."""
        users = self._users
        return {number for block in users.keys() & blocks for number in users[block]}


@dataclass(slots=True)
class EndedLoads:
    """Requests whose loads have ended.

    Attributes:
        loaded: their tokens are in their blocks.
        failed: what was to be loaded has to be computed.
    """

    loaded: list[str]
    failed: list[str]


@dataclass(slots=True)
class ConnectorStats:
    """Counters since the start.

    Attributes:
        loads, stores: transfers that were begun.
        failed_loads, failed_stores: transfers that failed.
        refused_stores: stores that found no room, counted each time they were offered.
        deferred: lookups answered with "ask again".
        matched_tokens: tokens of the loads that were begun.
        loaded_bytes, stored_bytes, loading_seconds, storing_seconds: totals of all workers.
        unknown_jobs: transfers that were reported as ended but were not under way.
    """

    loads: int = 0
    stores: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    refused_stores: int = 0
    deferred: int = 0
    matched_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    loading_seconds: float = 0.0
    storing_seconds: float = 0.0
    unknown_jobs: int = 0

    def count_copies(self, output: ConnectorOutput) -> None:
        """Add what workers have copied."""
        self.loaded_bytes += output.loaded.bytes
        self.stored_bytes += output.stored.bytes
        self.loading_seconds += output.loaded.seconds
        self.storing_seconds += output.stored.seconds


class Loads:
    """Begins loads, and tracks which chunks are being loaded."""

    def __init__(self, manager: OffloadingManager, jobs: Jobs, *, shares_blocks: bool) -> None:
        """
        Args:
            shares_blocks: whether a request can use the blocks into which another one loads.
        """
        self._manager = manager
        self._jobs = jobs
        self._shares_blocks = shares_blocks
        self._loading: dict[bytes, int] = {}
        """Key -> the job that loads it, if requests share blocks."""
        self._begun: dict[int, TransferJob] = {}

    def take_begun(self) -> dict[int, TransferJob]:
        """Return the loads that have begun since the last call."""
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
        """Finish a load."""
        self._manager.complete_load(job.keys, job.tracked.context)
        for key in job.keys:
            if self._loading.get(key) == job.number:
                del self._loading[key]
        job.tracked.load_ends(failed=job.failed)

    def under_way(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether any of a request's next `tokens` tokens are being loaded for another request."""
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
    """Return the first of a group's blocks to load, and the number of its blocks up to `end`."""
    group = state.group
    count = group.blocks_to(end)
    if len(blocks) < count or len(state.keys) < group.chunks_to(end):
        raise KVStoreError(
            f"request {tracked.context.req_id} has {len(blocks)} blocks and {len(state.keys)} "
            f"whole chunks in group {group.index}: too few to load {end} tokens"
        )
    if tracked.computed % group.tokens_per_block:
        raise KVStoreError(
            f"request {tracked.context.req_id} has {tracked.computed} tokens on the device: no "
            f"whole blocks of group {group.index}"
        )
    for place in range(group.blocks_to(tracked.computed), count):
        block = blocks[place]
        if not block.is_null and block.block_hash is None:
            return place, count
    return count, count


class Stores:
    """Begins stores.

    Attributes:
        refused: stores that found no room, counted each time they were offered.
    """

    def __init__(self, manager: OffloadingManager, jobs: Jobs, *, prompt_only: bool) -> None:
        self._manager = manager
        self._jobs = jobs
        self._prompt_only = prompt_only
        self.refused = 0

    def offer(
        self, tracked: TrackedRequest, scheduled: int | None
    ) -> tuple[Job, TransferJob] | None:
        """Offer the chunks that a request completes in this step, if not offered before.

        If no chunk finds room, all are offered again in the request's next step. If some do, the
        others are not offered again. Returns None if nothing is to be copied.

        Args:
            scheduled: tokens that the request computes in this step, or None if it has finished.
        """
        if tracked.loading is not None:
            return None
        tracked.name_chunks()
        tokens = tracked.computed_after(scheduled)
        if self._prompt_only:
            tokens = min(tokens, tracked.request.num_prompt_tokens)
        ends = [max(state.next_chunk, state.storable(tokens)) for state in tracked.groups]
        offered: dict[bytes, list[int]] = {}
        """Key -> blocks."""
        for state, end in zip(tracked.groups, ends, strict=True):
            offered.update(_to_store(state, end))
        begun = None
        if offered:
            out = self._manager.prepare_store(list(offered), tracked.context)
            if out is None:
                self.refused += 1
                return None
            if out.keys_to_store:
                chosen = {key: offered[key] for key in out.keys_to_store}
                source, block_ids = _source(tracked, chosen, ends)
                job = self._jobs.begin(tracked, list(chosen), block_ids, is_store=True)
                tracked.jobs.add(job.number)
                begun = job, TransferJob(tracked.context.req_id, source, out.store_spec)
        tracked.offered_up_to(ends)
        return begun

    def end(self, job: Job) -> None:
        """Finish a store."""
        self._manager.complete_store(job.keys, job.tracked.context, not job.failed)
        job.tracked.jobs.discard(job.number)


def _to_store(state: GroupState, end: int) -> dict[bytes, list[int]]:
    """Return the chunks up to `end` that were not offered yet, each with its blocks."""
    found: dict[bytes, list[int]] = {}
    for chunk in range(state.next_chunk, end):
        blocks = state.blocks_of(chunk)
        # A transfer can begin in the middle of a chunk, and has no gap after that.
        if blocks and (len(blocks) == state.group.blocks_per_chunk or not found):
            found[state.keys[chunk]] = blocks
    return found


def _source(
    tracked: TrackedRequest, chosen: dict[bytes, list[int]], ends: list[int]
) -> tuple[DeviceLoadStoreSpec, list[int]]:
    """Return the blocks of the chosen chunks, group by group."""
    block_ids: list[int] = []
    sizes: list[int] = []
    begins: list[int] = []
    for state, end in zip(tracked.groups, ends, strict=True):
        its: list[int] = []
        begin = 0
        for chunk in range(state.next_chunk, end):
            blocks = chosen.get(state.keys[chunk])
            if blocks is None:
                continue
            if not its:
                begin = (chunk + 1) * state.group.blocks_per_chunk - len(blocks)
            its += blocks
        block_ids += its
        sizes.append(len(its))
        begins.append(begin)
    return DeviceLoadStoreSpec(block_ids, sizes, begins), block_ids
