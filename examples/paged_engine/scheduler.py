"""Which requests compute how many tokens in the next step, in which blocks.

Running requests go first, in the order of their arrival. Where one finds no block, the youngest is
preempted: it loses its blocks, and waits again.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.paged_engine.blocks import BlockPool
from examples.paged_engine.request import Request, State
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import Block, CachedRequests, KVBlocks, NewRequest, StepOutput

__all__ = ["Scheduler"]


class Scheduler:
    """See the module's text.

    Attributes:
        preempted: how often a request has lost its blocks.
        computed: tokens that were computed, those that were computed again included.
    """

    def __init__(
        self,
        pool: BlockPool,
        windows: Sequence[int | None],
        block_tokens: int,
        *,
        max_tokens_per_step: int,
        max_running: int,
        connector: ConnectorScheduler | None,
    ) -> None:
        """
        Args:
            windows: for each KV cache group the tokens that its layers attend to.
        """
        self._pool = pool
        self._windows = windows
        self._block_tokens = block_tokens
        self._budget = max_tokens_per_step
        self._max_running = max_running
        self._connector = connector
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._finished: set[str] = set()
        """Requests that have finished since the last step."""
        self.preempted = 0
        self.computed = 0

    @property
    def busy(self) -> bool:
        """Whether there is a request to be served."""
        return bool(self.waiting or self.running or self._loading)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> tuple[StepOutput, list[Request]]:
        """What the next step computes, and the requests that do, in its order."""
        output = StepOutput(finished_req_ids=self._finished, preempted_req_ids=set())
        self._finished = set()
        self._budget_left = self._budget
        for request in list(self.running):
            if request.state is State.RUNNING and self._budget_left:
                self._go_on(request, output)
        if not output.preempted_req_ids:
            self._begin_waiting(output)
        ids = output.num_scheduled_tokens
        return output, [request for request in self.running if request.request_id in ids]

    def _go_on(self, request: Request, output: StepOutput) -> None:
        count = min(request.num_tokens - request.num_computed_tokens, self._budget_left)
        end = request.num_computed_tokens + count
        self._give_back_left(request)
        while (new := self._grow(request, end)) is None:
            youngest = self.running[-1]
            self._preempt(youngest, output)
            if youngest is request:
                return
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new)
        self._schedule(request, count, output)

    def _begin_waiting(self, output: StepOutput) -> None:
        for request in list(self.waiting):
            if not self._budget_left or len(self.running) >= self._max_running:
                return
            if not request.block_ids and not self._find(request):
                continue
            if request.state is State.LOADING:
                self.waiting.remove(request)
                self._loading[request.request_id] = request
                continue
            if not request.block_ids:
                return
            count = min(request.num_tokens - request.num_computed_tokens, self._budget_left)
            while self._grow(request, request.num_computed_tokens + count) is None:
                # Those that run give blocks back one day; those that wait for blocks may not.
                holders = [other for other in self.waiting if other.block_ids]
                if self.running or holders[-1] is request:
                    return
                self._preempt(holders[-1], output)
            self.waiting.remove(request)
            self.running.append(request)
            request.state = State.RUNNING
            output.scheduled_new_reqs.append(
                NewRequest(request.request_id, [list(ids) for ids in request.block_ids])
            )
            self._schedule(request, count, output)

    def _find(self, request: Request) -> bool:
        """Look for what is there of a request, and give it blocks for that.

        False if the answer is still to come. Without enough blocks it gets none.
        """
        size = self._block_tokens
        shared: list[int] = []
        if len(self._windows) == 1:
            # The last token is computed in any case.
            shared = self._pool.cached(request.block_hashes)[: (request.num_tokens - 1) // size]
        had = len(shared) * size
        found = 0
        if self._connector is not None:
            matched, _ = self._connector.get_num_new_matched_tokens(request, had)
            if matched is None:
                return False
            found = matched
        first = min(request.num_tokens, had + found + 1)
        needed = sum(self._needed(window, had + found, first) for window in self._windows)
        if needed - len(shared) + self._pool.unused(shared) > self._pool.free:
            return True
        self._pool.share(shared)
        request.block_ids = [list(shared) for _ in self._windows]
        request.num_computed_tokens = min(had + found, request.num_tokens - 1)
        for ids, window in zip(request.block_ids, self._windows, strict=True):
            ids += [0] * (self._first_needed(window, had + found) - len(ids))
        if found and self._connector is not None:
            self._grow(request, had + found)
            request.loaded_tokens = found
            request.state = State.LOADING
            known = [
                [Block(block, not block, block in shared or None) for block in ids]
                for ids in request.block_ids
            ]
            self._connector.update_state_after_alloc(request, KVBlocks(known), found)
        return True

    def _schedule(self, request: Request, count: int, output: StepOutput) -> None:
        output.num_scheduled_tokens[request.request_id] = count
        self._budget_left -= count

    # -- blocks ------------------------------------------------------------------------------

    def _first_needed(self, window: int | None, computed: int) -> int:
        """The first block that the token after `computed` tokens attends to."""
        return 0 if window is None else max(0, computed - window + 1) // self._block_tokens

    def _needed(self, window: int | None, computed: int, end: int) -> int:
        """Blocks of a request whose tokens up to `end` are computed next."""
        return -(-end // self._block_tokens) - self._first_needed(window, computed)

    def _grow(self, request: Request, end: int) -> list[list[int]] | None:
        """Give a request blocks for its tokens up to `end`; None if there are too few."""
        wanted = [-(-end // self._block_tokens) - len(ids) for ids in request.block_ids]
        wanted = [max(0, count) for count in wanted]
        if sum(wanted) > self._pool.free:
            return None
        new = [self._pool.take(count) for count in wanted]
        for ids, its in zip(request.block_ids, new, strict=True):
            ids += its
        return new

    def _give_back_left(self, request: Request) -> None:
        """Blocks that the windows have left are somebody else's."""
        for ids, window in zip(request.block_ids, self._windows, strict=True):
            first = self._first_needed(window, request.num_computed_tokens)
            self._pool.give_back(ids[:first])
            ids[:first] = [0] * first

    def _preempt(self, request: Request, output: StepOutput) -> None:
        self.preempted += 1
        self._release(request)
        request.num_computed_tokens = 0
        if request.state is State.RUNNING:
            request.state = State.WAITING
            self.running.remove(request)
            self.waiting.insert(0, request)
        req_id = request.request_id
        assert output.preempted_req_ids is not None
        output.preempted_req_ids.add(req_id)
        self._budget_left += output.num_scheduled_tokens.pop(req_id, 0)
        cached: CachedRequests = output.scheduled_cached_reqs
        if req_id in cached.req_ids:
            place = cached.req_ids.index(req_id)
            del cached.req_ids[place], cached.new_block_ids[place]

    def _release(self, request: Request) -> None:
        for ids in request.block_ids:
            self._pool.give_back(ids[::-1])
        request.block_ids = []

    # -- what has happened -------------------------------------------------------------------

    def loads_ended(self, loaded: Sequence[str], failed: Sequence[str]) -> None:
        """These requests can go on; those that have `failed` compute what was to be loaded."""
        for req_id in [*loaded, *failed]:
            request = self._loading.pop(req_id, None)
            if request is None:
                continue
            request.state = State.WAITING
            if req_id in failed:
                self._release(request)
                request.num_computed_tokens = request.loaded_tokens = 0
            self.waiting.insert(0, request)

    def step_done(self, scheduled: Sequence[Request], output: StepOutput) -> list[Request]:
        """The step has been computed; returns the requests that now get a new token."""
        sampled = []
        for request in scheduled:
            count = output.num_scheduled_tokens[request.request_id]
            before = request.num_computed_tokens // self._block_tokens
            request.num_computed_tokens += count
            self.computed += count
            if len(self._windows) == 1:
                for place in range(before, request.num_computed_tokens // self._block_tokens):
                    self._pool.holds(request.block_ids[0][place], request.block_hashes[place])
            if request.num_computed_tokens == request.num_tokens:
                sampled.append(request)
        return sampled

    def finish(self, request: Request) -> None:
        """A request has all its tokens, or nobody wants them any more."""
        if request.state is State.FINISHED:
            return
        request.state = State.FINISHED
        if self._connector is not None:
            self._connector.request_finished(request)
        self._finished.add(request.request_id)
        self._release(request)
        self._loading.pop(request.request_id, None)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
