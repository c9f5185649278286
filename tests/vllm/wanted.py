"""Where our connector's scheduler wants to differ from vLLM's, each difference as narrow as it is.

* `AFTER_RESET`: vLLM forgets transfers at a reset, ours waits until they are reported.
* `ABORTED`: of a request that was aborted ours takes the last known token as not computed.
* `PREEMPTED`: of a request that finishes after it was preempted ours stores nothing: its blocks
  are others'.
* `LOST`: ours does not store a chunk of which the window has left so much that a request which
  loads it could miss some.
* `GAP`: ours does not store a chunk with lost blocks behind others that it has offered together
  with it: workers take the blocks of a transfer as one run.
* `FORGOTTEN`: vLLM's reset drops what requests that have just finished could still store.
* `LEFT`: after a reset vLLM stores anew from blocks that the window has left, whoever has them
  now. It may also crash, as it thinks twice that a block is the request's.
* `SMALL`: where groups have chunks of several sizes, vLLM finds less than a chunk of one of them
  if another group has cut it down last. Ours finds nothing then.
* `SPARSE`: vLLM stores only those chunks of a window that it deems worth it, if it is told so or
  if groups have chunks of several sizes. Ours stores all of them.
* `AGAIN`: of a request that starts over, having been preempted, ours offers all chunks once more:
  some may have been refused or evicted.

vLLM 0.33 does as ours in two of them, `AGAIN` and `GAP`. Of `LOST` it has left one case: it stores
a chunk whose window lacks one token, which a request misses that ends with the chunk.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.v1.request import Request, RequestStatus

from kvstore.vllm.version import VERSION

AFTER_RESET = "after a reset"
ABORTED = "last token of an aborted request"
LOST = "lost window chunk"
GAP = "window chunk behind a gap"
FORGOTTEN = "finished just before a reset"
LEFT = "left by the window before a reset"
PREEMPTED = "finished after it was preempted"
SMALL = "less than a chunk of some group"
SPARSE = "window chunk that vLLM skips"
AGAIN = "offered again after a preemption"

MENDED = {LOST, GAP, AGAIN} if VERSION >= (0, 33) else set[str]()
"""Differences that this vLLM does not have, or hardly ever."""

Raw = tuple[list[bytes], list[int], list[int], list[int]]
"""A transfer: keys, blocks, group sizes, block indices."""

Tables = dict[str, list[list[int]]]
"""Each request's blocks in each group, 0 where they were lost."""


def raw_of(job: Any, is_store: bool) -> Raw:
    """A job of either side."""
    device, other = (job.src_spec, job.dst_spec) if is_store else (job.dst_spec, job.src_spec)
    return (
        list(other.keys),
        [int(block) for block in device.block_ids],
        list(device.group_sizes),
        list(device.block_indices),
    )


class Wanted:
    """What explains a difference.

    Attributes:
        requests: all that there were.
        had: tokens that a request had computed at the last reset, if it goes on.
    """

    def __init__(self, config: SchedulerOffloadConfig, windows: list[int | None]) -> None:
        self._config = config
        self._windows = windows
        self._factor = config.blocks_per_chunk
        self.block_sizes = [group.tokens_per_block for group in config.kv_group_configs]
        self._one_size = len(set(self.block_sizes)) == 1
        self.requests: dict[str, Request] = {}
        self.had: dict[str, int] = {}

    def table(self, request: str, status: Any) -> list[list[int]]:
        """A request's blocks, 0 where they were lost."""
        table = [list(state.block_ids) for state in status.group_states]
        had = self.had.get(request, 0)
        for its, window, size in zip(table, self._windows, self.block_sizes, strict=True):
            if window is not None:
                left = min(len(its), max(0, had - window + 1) // size)
                its[:left] = [0] * left
        return table

    def place(self, request: str, key: bytes) -> tuple[int, int]:
        """The group and the number of a request's chunk."""
        group = int.from_bytes(key[-4:], "big")
        config = self._config.kv_group_configs[group]
        hashes = self.requests[request].block_hashes
        named = hashes[config.hashes_per_chunk - 1 :: config.hashes_per_chunk]
        return group, named.index(key[:-4])

    def told(self, request: str, raw: Raw | None) -> str:
        """A transfer for people: group and number of each chunk, and its blocks."""
        if raw is None:
            return "nothing"
        places = " ".join("{}:{}".format(*self.place(request, key)) for key in raw[0])
        return f"{places} blocks {raw[1]} sizes {raw[2]} begins {raw[3]}"

    def reason(self, request: str, key: bytes, table: list[list[int]] | None) -> str | None:
        """Which wanted difference explains that only vLLM stores `key`."""
        if table is None:
            return None
        of = self.requests[request]
        group, chunk = self.place(request, key)
        size = self._factor * self.block_sizes[group]
        if (
            of.status is RequestStatus.FINISHED_ABORTED
            and (chunk + 1) * size == of.num_tokens > of.num_prompt_tokens
        ):
            return ABORTED
        if of.is_finished() and not of.num_computed_tokens and of.num_preemptions:
            return PREEMPTED
        window = self._windows[group]
        if window is None:
            return None
        blocks = table[group][chunk * self._factor : (chunk + 1) * self._factor]
        if 0 in blocks:
            kept = blocks[::-1].index(0) * self.block_sizes[group]
            if kept < (min(window, size) if self._one_size else size):
                if request in self.had:
                    return LEFT
                return LOST if LOST not in MENDED or kept >= window - 1 else None
            if any(table[group][: chunk * self._factor]):
                return GAP if GAP not in MENDED else None
        if self.is_sparse(key):
            return SPARSE
        return None

    def is_again(self, request: str, key: bytes, passed: list[int]) -> bool:
        """Whether a request that has started over offers a chunk that vLLM has `passed` before."""
        if AGAIN in MENDED or not self.requests[request].num_preemptions:
            return False
        group, chunk = self.place(request, key)
        return chunk < passed[group]

    def is_sparse(self, key: bytes) -> bool:
        """Whether vLLM may have reasons of its own not to store a chunk, or not at once."""
        dense = self._config.retention_interval is None and self._one_size
        return not dense and self._windows[int.from_bytes(key[-4:], "big")] is not None

    def has_gap(
        self, request: str, key: bytes, together: set[bytes], table: list[list[int]]
    ) -> bool:
        """Whether blocks of a chunk are lost that lie behind what is stored with it."""
        group, chunk = self.place(request, key)
        blocks = table[group][chunk * self._factor : (chunk + 1) * self._factor]
        places = {self.place(request, other) for other in together}
        if any(other[0] == group and other[1] < chunk for other in places):
            return 0 in blocks
        held = [place for place, block in enumerate(blocks) if block]
        return bool(held) and 0 in blocks[held[0] :]
