"""Stores: what a request has computed is offered to the manager, chunk by chunk."""

from __future__ import annotations

from kvstore.connector.manager.base import OffloadingManager
from kvstore.connector.mediums import DeviceLoadStoreSpec, TransferJob
from kvstore.connector.scheduler.jobs import Job, Jobs
from kvstore.connector.scheduler.tracked import GroupState, TrackedRequest

__all__ = ["Stores"]


class Stores:
    """Begins stores.

    Attributes:
        refused: stores that found no room, each time they were offered.
    """

    def __init__(self, manager: OffloadingManager, jobs: Jobs, *, prompt_only: bool) -> None:
        self._manager = manager
        self._jobs = jobs
        self._prompt_only = prompt_only
        self.refused = 0

    def offer(
        self, tracked: TrackedRequest, scheduled: int | None
    ) -> tuple[Job, TransferJob] | None:
        """Offer what a request will have computed in this step and was not offered yet.

        Where nothing finds room, it is offered again in its next step. Where a part finds some, the
        rest is not. None if nothing is to be copied.

        Args:
            scheduled: tokens that it computes in this step, or None if it has finished.
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
                tracked.store_begins(job.number)
                begun = job, TransferJob(tracked.context.req_id, source, out.store_spec)
        tracked.offered_up_to(ends)
        return begun

    def end(self, job: Job) -> None:
        """A store has ended."""
        self._manager.complete_store(job.keys, job.tracked.context, not job.failed)
        job.tracked.store_ends(job.number)


def _to_store(state: GroupState, end: int) -> dict[bytes, list[int]]:
    """Chunks up to `end` that were not offered yet, and the blocks in which they are."""
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
    """The blocks of the chunks that are stored, group by group."""
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
