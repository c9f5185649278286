"""A scheduler's half over rows of memory, and requests of a server, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.connector.backend import PinnedBackend
from kvstore.connector.device_transfers import EndedLoads
from kvstore.connector.mediums import (
    ConnectorMetadata,
    ConnectorOutput,
    DeviceLoadStoreSpec,
    TransferJob,
)
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import Block, CachedRequests, KVBlocks, NewRequest, StepOutput
from kvstore.connector.single_tier import PolicyManager
from tests.connector.scripted import scheduler_over

__all__ = ["TOKENS", "Request", "Server", "blocks_of", "open_scheduler"]

TOKENS = 4
"""Of a block of the device."""


def open_scheduler(
    *windows: int | None, blocks_per_chunk: int = 1, rows: int = 64, **more: Any
) -> ConnectorScheduler:
    """A scheduler's half over rows of memory; a group for each of `windows`, by default one
    without a window.
    """
    manager = PolicyManager(PinnedBackend(blocks_per_chunk * TOKENS, rows, 4096))
    groups = [(TOKENS, window) for window in windows or [None]]
    return scheduler_over(manager, TOKENS, groups, blocks_per_chunk, **more)


@dataclass(eq=False)
class Request:
    """A request of a server. Its hashes follow from its tokens."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    finished: bool = False
    kv_transfer_params: Mapping[str, Any] | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        ends = range(TOKENS, len(self.tokens) + 1, TOKENS)
        return [hashlib.sha256(bytes(self.tokens[:end])).digest() for end in ends]

    def is_finished(self) -> bool:
        return self.finished


class Server:
    """Says what a server says, step by step."""

    def __init__(self, scheduler: ConnectorScheduler) -> None:
        self.scheduler = scheduler

    def step(
        self,
        scheduled: Mapping[Request, int] | None = None,
        *,
        new: Mapping[Request, Sequence[Sequence[int]]] | None = None,
        finished: Sequence[Request] = (),
    ) -> ConnectorMetadata:
        """A step in which requests compute some tokens and new ones get blocks."""
        scheduled, new = scheduled or {}, new or {}
        cached = CachedRequests()
        for request in scheduled:
            if request not in new:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
        output = StepOutput(
            [NewRequest(request.request_id, ids) for request, ids in new.items()],
            cached,
            {request.request_id: count for request, count in scheduled.items()},
            {request.request_id for request in finished},
        )
        meta = self.scheduler.build_connector_meta(output)
        for request, count in scheduled.items():
            request.num_computed_tokens += count
        return meta

    def end(self, *jobs: Mapping[int, TransferJob] | int) -> EndedLoads:
        """Workers have ended these."""
        output = ConnectorOutput()
        for some in jobs:
            output.completed_jobs.update([some] if isinstance(some, int) else list(some))
        return self.scheduler.update_connector_output(output)

    def find(self, request: Request, computed: int = 0) -> int | None:
        """Tokens that can be loaded."""
        return self.scheduler.get_num_new_matched_tokens(request, computed)[0]

    def load(self, request: Request, tokens: int, *ids: Sequence[int]) -> None:
        """The request gets blocks, 0 for none, and its next tokens are loaded."""
        known = [[Block(block, is_null=not block) for block in its] for its in ids]
        self.scheduler.update_state_after_alloc(request, KVBlocks(known), tokens)

    def store(self, tokens: list[int], *ids: Sequence[int], name: str = "first") -> None:
        """A request computes and stores all of a prompt, and finishes."""
        request = Request(name, tokens)
        self.find(request)
        self.end(self.step({request: len(tokens)}, new={request: ids}).store_jobs)
        request.finished = True
        self.scheduler.request_finished(request)
        self.end(self.step(finished=[request]).store_jobs)


def blocks_of(job: TransferJob) -> tuple[list[list[int]], list[int]]:
    """For each group the blocks of the device of a transfer, and the place of the first."""
    for spec in (job.src_spec, job.dst_spec):
        if isinstance(spec, DeviceLoadStoreSpec):
            ids = spec.block_ids.tolist()
            groups = []
            for size in spec.group_sizes:
                groups.append(ids[:size])
                ids = ids[size:]
            return groups, spec.block_indices
    raise AssertionError("no blocks of the device")
