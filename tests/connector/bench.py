"""A small server around both halves of a connector, which knows what every byte must be.

It has blocks of a device that groups share, a prefix cache, chunked prefill, preemption, windows
that leave blocks silently, steps that overlap, aborts and resets. What a step computes is written
to the device after its transfers have begun; then all that its tokens attend to is compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore.connector.contract import ReqContext
from kvstore.connector.device_transfers import EndedLoads
from kvstore.connector.mediums import ConnectorMetadata, ConnectorOutput
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import Block, KVBlocks, NewRequest, StepOutput
from kvstore.connector.worker import ConnectorWorker
from tests.connector.chaos import LAYERS, Content, Model, Setup, Told, spec_of
from tests.connector.parts import Cached, Pool, Request, Seen, Step, Work
from tests.patience import PATIENCE

__all__ = ["Request", "Server"]

MAX_STEPS = 600
"""Without progress of anybody."""


class Server:
    """See the module's text.

    Attributes:
        fewer: so many tokens less than were found are loaded, where that is allowed.
        together: the scheduler is told at once what several workers have ended.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.told = Told()
        self.fewer = 0
        self.together = False
        self.spec = spec_of(setup, self.told)
        self.scheduler = ConnectorScheduler(self.spec)
        self.workers = [ConnectorWorker(self.spec) for _ in range(setup.workers)]
        for worker, device in zip(self.workers, self.spec.devices, strict=True):
            worker.register_kv_caches(device.layers)
        self.model = Model()
        self.pool = Pool(setup.blocks, newest_first=setup.newest_first)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: deque[Step] = deque()
        self.finished: set[str] = set()
        self.dropped: set[str] = set()
        """Preempted between steps."""
        self.names_in_use: dict[str, Request] = {}
        self.names_loading: set[str] = set()
        self.seen = Seen()
        self.bytes = Counter[str]()
        self.matched = 0
        self.chunks: dict[bytes, tuple[int, Content]] = {}
        """Key -> group, and what names its tokens."""
        self.on: dict[str, set[bytes]] = {}
        """Medium -> keys, as events tell."""
        self.idle = 0
        self._progress = False

    # -- what befalls it -------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], target: int) -> Request:
        """A request that goes on to `target` tokens; which ones follows from its prompt."""
        tokens = list(prompt)
        while len(tokens) < target + 4:
            tokens.append((tokens[-1] * 7 + len(tokens)) % 5)
        request = Request(name, Model.prefixes(tokens), len(prompt), target, self.setup)
        self.names_in_use[name] = request
        self.waiting.append(request)
        self._name_chunks(request)
        return request

    def is_free(self, name: str) -> bool:
        return not ({name} & (self.names_in_use.keys() | self.finished | self.names_loading))

    def _name_chunks(self, request: Request) -> None:
        for group, (size, _) in enumerate(self.setup.groups):
            chunk = size * self.setup.factor
            for end in range(chunk, len(request.prefixes) + 1, chunk):
                key = request.hash_at(end) + group.to_bytes(4, "big")
                self.chunks[key] = group, request.prefixes[end - chunk : end]

    def abort(self, request: Request) -> None:
        self._finish(request)

    def reset(self, *, weights: bool) -> None:
        """Forget what is offloaded; with other `weights` also all that was computed."""
        if weights:
            self.drain()
            for request in [*self.running, *self.waiting]:
                self.drop(request)
            for block in list(self.pool.hash_of):
                self.pool.forget(block)
            self.model.salt += 1
        self.scheduler.reset()

    def drop(self, request: Request) -> None:
        """It loses what was computed and loaded for it."""
        if request.state == "loading":
            request.stale = True
        elif request.state in ("ready", "running"):
            if request.state == "running":
                self.running.remove(request)
                self.waiting.insert(0, request)
                self.dropped.add(request.request_id)
                request.preempted = True
            self._free(request)

    # -- blocks ------------------------------------------------------------------------------

    def _free(self, request: Request) -> None:
        for its in request.table:
            for block in reversed(its):
                if block:
                    self.pool.give_back(block)
            its.clear()
        request.state = "waiting"
        request.num_computed_tokens = 0

    def _left(self, group: int, computed: int) -> int:
        """Leading blocks of a group that no token from `computed` on attends to."""
        size, window = self.setup.groups[group]
        return 0 if window is None else max(0, computed - window + 1) // size

    def _leave(self, request: Request) -> None:
        for group, its in enumerate(request.table):
            for place in range(min(self._left(group, request.num_computed_tokens), len(its))):
                if its[place]:
                    self.pool.give_back(its[place])
                    its[place] = 0

    def _extend(self, request: Request, tokens: int) -> list[list[int]] | None:
        """Blocks for its first `tokens` tokens; returns the new ones, or None."""
        missing = [
            -(-tokens // size) - len(its)
            for (size, _), its in zip(self.setup.groups, request.table, strict=True)
        ]
        if sum(count for count in missing if count > 0) > len(self.pool.free):
            return None
        new = [[self.pool.take() for _ in range(count)] for count in missing]
        for its, more in zip(request.table, new, strict=True):
            its += more
        return new

    def _keep(self, request: Request, tokens: int) -> None:
        """The prefix cache knows the whole blocks of its first `tokens` tokens."""
        if self.setup.prefix_cache:
            for group, (size, _) in enumerate(self.setup.groups):
                for place in range(min(tokens // size, len(request.table[group]))):
                    if block := request.table[group][place]:
                        self.pool.keep(block, (group, request.hash_at((place + 1) * size)))

    def _cached(self, request: Request) -> tuple[int, list[list[int]]]:
        """What the prefix cache has of it: tokens, and blocks."""
        step = math.lcm(*(size for size, _ in self.setup.groups))
        usable = self.setup.prefix_cache and not request.skip_reading_prefix_cache
        for tokens in range((request.num_tokens - 1) // step * step if usable else 0, 0, -step):
            table: list[list[int]] = []
            for group, (size, _) in enumerate(self.setup.groups):
                left = min(self._left(group, tokens), tokens // size)
                table.append(
                    [0] * left
                    + [
                        self.pool.cached.get((group, request.hash_at((n + 1) * size)), -1)
                        for n in range(left, tokens // size)
                    ]
                )
            if not any(-1 in its for its in table):
                return tokens, table
        return 0, [[] for _ in self.setup.groups]

    # -- a step of the scheduler -------------------------------------------------------------

    def schedule(self, budget: int | None = None) -> None:
        """Begin a step of `budget` tokens at most, by default as many as the server is set to."""
        cached = Cached()
        output = StepOutput([], cached, {}, self.finished, self.dropped)
        self.finished, self.dropped = set(), set()
        preempted = output.preempted_req_ids
        assert preempted is not None
        step = Step(ConnectorMetadata(), [], [set() for _ in self.setup.groups])
        most = budget = self.setup.budget if budget is None else budget
        before = len(preempted)
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.num_tokens + request.sampling - request.num_computed_tokens, budget)
            if request.num_tokens + request.sampling > request.target + 2:
                count = 0
            if count < 1:
                continue
            self._leave(request)
            while (new := self._extend(request, request.num_computed_tokens + count)) is None:
                victim = self.running[-1]
                self.drop(victim)
                preempted.add(victim.request_id)
                self.dropped.clear()
                if victim is request:
                    break
            if new is None:
                break
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new if any(new) else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            for its, more in zip(step.fresh, new, strict=True):
                its.update(more)
            budget -= self._work(request, count, output, step)
        if len(preempted) == before:
            for request in sorted(self.waiting, key=lambda one: one.state != "ready"):
                if budget < 1 or not self._begin(request, budget, output, step):
                    break
                budget = most - sum(output.num_scheduled_tokens.values())
        ready = [request for request in self.waiting if request.state == "ready"]
        if ready and not self.running:
            # They may have all blocks together, and none of them enough.
            self._free(ready[-1])
        step.meta = self.scheduler.build_connector_meta(output)
        for number in step.meta.load_jobs:
            self.seen.made[number] = "load"
        for number in step.meta.store_jobs:
            self.seen.made[number] = "store"
        for work in step.work:
            work.request.num_computed_tokens = work.end
            work.request.sampling += work.samples
        self.steps.append(step)
        self.take_events()

    def _work(self, request: Request, count: int, output: StepOutput, step: Step) -> int:
        begin = request.num_computed_tokens
        end = begin + count
        samples = end == request.num_tokens + request.sampling
        output.num_scheduled_tokens[request.request_id] = count
        self._keep(request, min(end, request.num_tokens))
        step.work.append(Work(request, begin, end, [list(its) for its in request.table], samples))
        return count

    def _begin(self, request: Request, budget: int, output: StepOutput, step: Step) -> bool:
        """Begin a request that waits; returns whether others may still begin."""
        if request.state == "loading":
            return True
        if request.state == "waiting":
            computed, table = self._cached(request)
            found, between = self.ask(request, computed)
            if found is None:
                return True
            assert between == (found > 0)
            if found and not self.setup.windowed:
                found = self.wanted_of(found)
            if not self._allocate(request, computed, table, found, budget):
                return False
            given = [
                [Block(b, b == 0, self.pool.hash_of.get(b)) for b in its] for its in request.table
            ]
            self.give(request, computed, found, given)
            request.num_computed_tokens = computed
            if found:
                self.matched += found
                request.num_computed_tokens += found
                request.state = "loading"
                self.names_loading.add(request.request_id)
                return True
            for group, its in enumerate(request.table):
                step.fresh[group].update(its[len(table[group]) :])
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        self._leave(request)
        new = self._extend(request, request.num_computed_tokens + count)
        if new is None:
            # Only where it was loaded before: it keeps what it has.
            return False
        for group, its in enumerate(new):
            step.fresh[group].update(its)
        ids = [list(its) for its in request.table]
        if request.preempted:
            cached = output.scheduled_cached_reqs
            assert isinstance(cached, Cached)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(ids)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.resumed_req_ids.add(request.request_id)
        else:
            new_one = NewRequest(request.request_id, ids, request.num_computed_tokens)
            output.scheduled_new_reqs.append(new_one)
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        self._work(request, count, output, step)
        return True

    def ask(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, computed)

    def give(self, request: Request, computed: int, found: int, blocks: list[list[Block]]) -> None:
        """`request` gets its blocks; its next `found` tokens after `computed` are loaded."""
        self.scheduler.update_state_after_alloc(request, KVBlocks(blocks), found)

    def wanted_of(self, found: int) -> int:
        """How many of the tokens that were found are loaded; 1 at least."""
        return max(1, found - self.fewer)

    def _allocate(
        self, request: Request, computed: int, table: list[list[int]], found: int, budget: int
    ) -> bool:
        total = computed + found
        upto = total if found else computed + min(request.num_tokens - computed, budget)
        new = [
            max(0, -(-upto // size) - max(len(its), self._left(group, total)))
            for group, ((size, _), its) in enumerate(zip(self.setup.groups, table, strict=True))
        ]
        idle = {b for its in table for b in its if b and not self.pool.users[b]}
        if sum(new) > len(self.pool.free) - len(idle):
            return False
        for its in table:
            for block in filter(None, its):
                self.pool.share(block)
        for group, count in enumerate(new):
            its = request.table[group]
            its += table[group]
            its += [0] * (self._left(group, total) - len(its))
            its += [self.pool.take() for _ in range(count)]
        return True

    # -- a step of the workers -----------------------------------------------------------------

    def complete(self) -> None:
        """The workers do the oldest step, and its results come back."""
        step = self.steps.popleft()
        outputs = [self._execute(number, step) for number in range(len(self.workers))]
        for output in outputs:
            self.seen.reports += output.completed_jobs
            self.seen.failed |= output.failed_jobs
            self.bytes["loaded"] += output.loaded.bytes
            self.bytes["stored"] += output.stored.bytes
        if len(outputs) > 1 and self.together:
            outputs = [sum(outputs[1:], outputs[0])]
        for work in step.work:
            self._take_token(work)
        for output in outputs:
            self._take_ended(self.scheduler.update_connector_output(output))
        self.take_events()

    def written(self, step: Step) -> set[int]:
        """The blocks that it computes into."""
        written = {block for its in step.fresh for block in its}
        for work in step.work:
            for (size, _), its in zip(self.setup.groups, work.table, strict=True):
                written.update(its[work.begin // size : -(-work.end // size)])
        return written

    def _execute(self, number: int, step: Step) -> ConnectorOutput:
        worker, device = self.workers[number], self.spec.devices[number]
        worker.start_transfers(step.meta)
        written = self.written(step)
        for handler in self.spec.handlers[number]:
            assert not (both := handler.blocks() & written), f"{both}: written amid a transfer"
        for group, blocks in enumerate(step.fresh):
            device.poison(group, blocks, 0xBAD)
        for work in step.work:
            self._compute(device, work)
        for work in step.work:
            self._check(device, work)
        return worker.get_finished()

    def _pages(self, device: Any, work: Work, begin: int, end: int) -> Iterator[tuple[Any, ...]]:
        """For each group and layer: table, blocks, places in them, and what belongs there."""
        for group, (size, window) in enumerate(self.setup.groups):
            first = begin if window is None or begin else max(0, work.begin - window + 1)
            place = np.arange(first, end)
            blocks = np.array(work.table[group], np.int64)[place // size]
            assert blocks.all(), "a block that is needed is not there"
            for layer in range(LAYERS):
                right = self.model.content(work.request.prefixes[first:end], group, layer)
                yield device.tables[group][layer], blocks, place % size, right

    def _compute(self, device: Any, work: Work) -> None:
        for group, (size, _) in enumerate(self.setup.groups):
            place = np.arange(work.begin, work.end)
            blocks = np.array(work.table[group], np.int64)[place // size]
            assert blocks.all(), "a block that is written is not there"
            for layer in range(LAYERS):
                right = self.model.content(work.request.prefixes[place], group, layer)
                device.tables[group][layer][blocks, place % size] = right

    def _check(self, device: Any, work: Work) -> None:
        for table, blocks, places, right in self._pages(device, work, 0, work.end):
            assert (table[blocks, places] == right).all(), (
                f"request {work.request.request_id} attends to wrong bytes"
            )

    def _take_token(self, work: Work) -> None:
        request = work.request
        if not work.samples or request.state == "gone":
            return
        self._progress = True
        request.sampling -= 1
        request.num_tokens += 1
        if request.num_tokens >= request.target:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        (self.running if request.state == "running" else self.waiting).remove(request)
        state, request.state = request.state, "gone"
        computed = request.num_computed_tokens
        self.scheduler.request_finished(request, [list(its) for its in request.table])
        self._free(request)
        request.state = "gone"
        request.num_computed_tokens = computed
        self.finished.add(request.request_id)
        if self.names_in_use.get(request.request_id) is request:
            del self.names_in_use[request.request_id]
        if state == "loading":
            request.stale = True

    def _take_ended(self, ended: EndedLoads) -> None:
        for name in [*ended.loaded, *ended.failed]:
            self._progress = True
            self.names_loading.remove(name)
            request = self.names_in_use.get(name)
            if request is None:
                continue
            assert request.state == "loading"
            if name in ended.failed or request.stale:
                request.stale = False
                self._free(request)
                continue
            request.state = "ready"
            self._keep(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1

    # -- all of it -----------------------------------------------------------------------------

    def drain(self) -> None:
        while self.steps:
            self.complete()

    def step(self, budget: int | None = None) -> None:
        self._progress = False
        self.schedule(budget)
        while len(self.steps) > self.setup.depth:
            self.complete()
        self.idle = 0 if self._progress or not (self.running or self.waiting) else self.idle + 1
        assert self.idle < MAX_STEPS, "nobody gets on"

    def come_to_rest(self) -> None:
        """Everybody finishes; nothing befalls anybody any more."""
        self.told.calm = True
        while self.running or self.waiting:
            self.step()
        for _ in range(MAX_STEPS):
            if not (self.finished or self.scheduler.has_pending_work()):
                break
            self.step()
        self.drain()

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_pending_work()
        assert not scheduler._requests
        assert not len(scheduler._jobs)
        assert not scheduler._jobs._users
        assert not scheduler._loads._loading
        assert not scheduler._loads._begun
        assert not scheduler._given_out
        for worker in self.workers:
            assert not worker._held
            assert not worker._loading
            assert not worker._under_way
            assert not worker._refused
        made = self.seen.made
        assert self.seen.reports == Counter(dict.fromkeys(made, self.setup.workers))
        stats, failed = scheduler.stats, self.seen.failed
        loads = {number for number, kind in made.items() if kind == "load"}
        assert stats.loads == len(loads)
        assert stats.stores == len(made) - len(loads)
        assert stats.failed_loads == len(failed & loads)
        assert stats.failed_stores == len(failed - loads)
        assert stats.matched_tokens == self.matched
        assert stats.unknown_jobs == 0
        assert stats.loaded_bytes == self.bytes["loaded"]
        assert stats.stored_bytes == self.bytes["stored"]
        assert len(self.pool.free) == self.setup.blocks - 1

    def take_events(self) -> None:
        for event in self.scheduler.take_events():
            its = self.on.setdefault(event.medium, set())
            for key in event.keys:
                assert (key in its) == event.removed, "an event that cannot be"
            if event.removed:
                its.difference_update(event.keys)
            else:
                its.update(event.keys)

    def check_what_is_stored(self) -> None:
        """All that can be loaded has the bytes that whoever loads it needs, and events know it."""
        manager = self.scheduler.manager
        self.take_events()
        everywhere: set[bytes] = set().union(*self.on.values())
        assert everywhere <= self.chunks.keys()
        for number, (key, (group, prefixes)) in enumerate(self.chunks.items()):
            context = ReqContext(f"probe {number}")
            manager.on_new_request(context)
            end = time.monotonic() + PATIENCE
            while (found := manager.lookup(key, context)) is None:
                assert time.monotonic() < end, "deferred for ever"
                manager.on_schedule_end()
            assert found == (key in everywhere), f"events know otherwise: {found}"
            if found:
                row = int(manager.prepare_load([key], context).block_ids[0])  # type: ignore[attr-defined]
                self._check_row(row, group, prefixes)
                manager.complete_load([key], context)
            manager.on_schedule_end()
            manager.on_request_finished(context)
            self.take_events()
            everywhere = set().union(*self.on.values())

    def _check_row(self, row: int, group: int, prefixes: Content) -> None:
        region = self.spec.host_memory()
        window = self.setup.groups[group][1]
        size = len(prefixes)
        needed = size if window is None or not self.setup.one_size else min(window, size)
        page = region.array[row][: LAYERS * size * 8].view(np.uint64).reshape(LAYERS, size)
        for layer in range(LAYERS):
            right = self.model.content(prefixes, group, layer)
            assert (page[layer][size - needed :] == right[size - needed :]).all(), (
                f"row {row} has wrong bytes for group {group}"
            )

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
        self.spec.close()
