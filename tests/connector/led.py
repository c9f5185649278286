"""A server that leaves nothing to chance, and compares what it is told with what must be.

What can be loaded is searched for boundary by boundary. What has to be offered to the manager, so
that it may be stored, is counted chunk by chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvstore.connector.contract import PrepareStoreOutput, ReqContext, RequestContext
from kvstore.connector.device_transfers import EndedLoads
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import DeviceLoadStoreSpec
from kvstore.connector.server import Block
from kvstore.connector.single_tier import PolicyManager
from kvstore.core import Core
from kvstore.core.chunk import READY
from tests.connector.bench import Server
from tests.connector.boundaries import Case, expected, needed
from tests.connector.chaos import HeldSpec, LateHandler, Setup
from tests.connector.held import HeldEngine
from tests.connector.parts import Request, Step, Work

__all__ = ["Led"]


class Led(Server):
    """See the module's text.

    Attributes:
        full: there is no room for what is to be stored.
        jobs: those under way, and whose they are.
        loading: request -> what is being loaded into its blocks.
        offered: what each request has offered to the manager, or loaded, since it was looked up
            last, or since a later reset.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.full = False
        self.jobs: dict[int, Request] = {}
        self.loading: dict[str, set[bytes]] = {}
        self.offered: defaultdict[Request, set[bytes]] = defaultdict(set)
        self._refused: set[Request] = set()
        """Who found no room in this step."""
        manager = self.scheduler.manager
        self._prepare_store = manager.prepare_store
        self._blocks: dict[int, set[int]] = {}
        """Of the device, that each transfer reads or writes."""
        self._flushed: set[int] = set()
        self._refusals = 0
        manager.prepare_store = self.prepare_store  # type: ignore[method-assign, assignment]
        self._named: dict[str, Request] = {}
        self._overtaken: set[Request] = set()
        """Who had finished before the last reset, and was not named in a step."""
        self._cannot_load: set[Request] = set()
        self._leaving: list[tuple[Request, int]] = []
        """Who has finished while it ran, and how many tokens were computed."""

    @property
    def engine(self) -> HeldEngine | None:
        return self.spec.engine if isinstance(self.spec, HeldSpec) else None

    def handlers(self) -> Iterator[LateHandler]:
        """Those with transfers under way."""
        return (one for its in self.spec.handlers for one in its if one.queue)

    # -- what there is ---------------------------------------------------------------------

    def can_be_loaded(self, key: bytes) -> bool | None:
        """None: it is being fetched or stored, or could be fetched."""
        manager = self.scheduler.manager
        if isinstance(manager, PolicyManager):
            return bool(manager.lookup(key, ReqContext("anybody")))
        core = self._core()
        chunk = core._pool.chunks.get(key)
        if chunk is not None and chunk.state >= READY:
            return True
        return None if chunk or any(key in tier.entries for tier in core.tiers) else False

    def rows(self) -> dict[bytes, int]:
        """The chunks that can be loaded, and where they are."""
        manager = self.scheduler.manager
        if isinstance(manager, PolicyManager):
            return {key: block.block_id for key, block in manager._blocks.items() if block.is_ready}
        chunks = self._core().chunks
        return {key: chunk.row for key, chunk in chunks.items() if chunk.state >= READY}

    def _core(self) -> Core:
        manager = self.scheduler.manager
        assert isinstance(manager, KVStoreManager)
        return manager._core

    def _key(self, request: Request, group: int, chunk: int) -> bytes:
        size = self.setup.groups[group][0] * self.setup.factor
        return request.hash_at((chunk + 1) * size) + group.to_bytes(4, "big")

    # -- what can be loaded ----------------------------------------------------------------

    def ask(self, request: Request, computed: int) -> tuple[int | None, bool]:
        before = self._case(request, computed)
        found, between = super().ask(request, computed)
        if found is not None:
            self.offered[request].clear()
        if request in self.jobs.values():
            assert found is None, "its own transfers go on"
        elif request.skip_reading_prefix_cache or request in self._cannot_load:
            assert found == 0, "nothing is loaded for it"
        else:
            self._compare(request, found, before, self._case(request, computed))
        return found, between

    def _case(self, request: Request, computed: int) -> Case:
        setup = self.setup
        bare = Case(
            setup.hash_size, setup.groups, setup.factor, request.num_tokens, computed, frozenset()
        )
        answers = {place: self.can_be_loaded(self._key(request, *place)) for place in bare.places()}
        hits = frozenset(place for place, answer in answers.items() if answer)
        deferred = frozenset(place for place, answer in answers.items() if answer is None)
        return replace(bare, hits=hits, deferred=deferred)

    def _compare(self, request: Request, found: int | None, before: Case, after: Case) -> None:
        """While chunks can still come, `found` is one of several numbers."""
        deferred = before.deferred | after.deferred
        least = expected(before, before.hits & after.hits)
        most = expected(before, before.hits | after.hits | deferred)
        if found is None:
            # Who waits in the store is answered at a step; what it waits for may be gone by then.
            waits = deferred or self.scheduler.manager.is_deferred(ReqContext(request.request_id))
            assert waits or self._shared(request, after, least), "there is nothing to wait for"
            return
        assert least <= found <= most, f"{found} tokens were found, not {least} to {most}"
        if found:
            assert expected(after, after.hits) >= found, "it counts on what is not there"
            assert not self._shared(request, after, found), "others are loading it"

    def _shared(self, request: Request, case: Case, found: int) -> bool:
        """Whether others load some of it into blocks that it could share."""
        loading: set[bytes] = set().union(*self.loading.values())
        return (
            self.setup.prefix_cache
            and found > 0
            and any(
                self._key(request, group, chunk) in loading
                for group in range(len(case.groups))
                for chunk in needed(case, group, case.computed + found)
            )
        )

    def give(self, request: Request, computed: int, found: int, blocks: list[list[Block]]) -> None:
        super().give(request, computed, found, blocks)
        keys: set[bytes] = set()
        end = computed + found
        for group, ((size, _), its) in enumerate(zip(self.setup.groups, blocks, strict=True)):
            for place in range(-(-computed // size), -(-end // size) if found else 0):
                if not its[place].is_null and its[place].block_hash is None:
                    last = -(-end // (size * self.setup.factor))
                    first = place // self.setup.factor
                    keys.update(self._key(request, group, chunk) for chunk in range(first, last))
                    break
        if found:
            self.loading[request.request_id] = keys
            if not request.kv_transfer_params:
                for group, (size, _) in enumerate(self.setup.groups):
                    count = -(-end // (size * self.setup.factor))
                    loaded = (self._key(request, group, chunk) for chunk in range(count))
                    self.offered[request].update(loaded)

    # -- what has to be stored ---------------------------------------------------------------

    def prepare_store(
        self, keys: list[bytes], context: RequestContext
    ) -> PrepareStoreOutput | None:
        """Stands before the manager's own."""
        request = self._named[context.req_id]
        assert request not in self._overtaken, "it had finished before a reset"
        assert self.offered[request].isdisjoint(keys), "it was offered, or loaded, before"
        if self.setup.prompt_only:
            everyone = range(len(self.setup.groups))
            prompt = self._chunks(request, request.num_prompt_tokens, everyone)
            assert set(keys) <= prompt, "what is no prompt is stored"
        if request.state == "gone":
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            computed = self._chunks(request, known, range(len(self.setup.groups)))
            assert set(keys) <= computed, "its last token was never computed"
        output = None if self.full else self._prepare_store(keys, context)
        if output is None:
            self._refused.add(request)
            self._refusals += 1
        else:
            self.offered[request].update(keys)
        return output

    def schedule(self, budget: int | None = None) -> None:
        leaving, self._leaving = self._leaving, []
        preempted = self.dropped
        self._refused.clear()
        super().schedule(budget)
        step = self.steps[-1]
        for number in sorted(step.meta.load_jobs.keys() | step.meta.store_jobs.keys()):
            job = self.scheduler._jobs._jobs[number]
            self.jobs[number] = self._named[job.tracked.context.req_id]
        self._check_flushed(step, {self._named[name] for name in preempted})
        for work in step.work:
            if work.request not in self._refused:
                self._check_offered(work.request, work.end)
                self._check_windows(work)
        for request, end in leaving:
            if request not in self._refused:
                self._check_offered(request, end)

    def _check_flushed(self, step: Step, preempted: set[Request]) -> None:
        """Transfers end before their blocks are written; those of the preempted end in any case."""
        loads, begun = step.meta.load_jobs, step.meta.load_jobs | step.meta.store_jobs
        written = self.written(step)
        for number, job in begun.items():
            device = job.dst_spec if number in loads else job.src_spec
            assert isinstance(device, DeviceLoadStoreSpec)
            self._blocks[number] = set(device.block_ids.tolist())
            written |= self._blocks[number] if number in loads else set()
        flushed = {
            number
            for number, request in self.jobs.items()
            # Only who has finished stores what another computes into in the same step.
            if number not in begun or request.state == "gone"
            if request in preempted or not written.isdisjoint(self._blocks[number])
        }
        flush = step.meta.jobs_to_flush - self._flushed
        assert flush == flushed - self._flushed, "transfers end too late, or are waited for"
        self._flushed |= flush

    def _check_offered(self, request: Request, computed: int) -> None:
        """It has offered all whole chunks of groups without a window."""
        everywhere = [
            group for group, (_, window) in enumerate(self.setup.groups) if window is None
        ]
        tokens = min(computed, request.num_tokens)
        if self.setup.prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        missing = self._chunks(request, tokens, everywhere) - self.offered[request]
        assert not missing, f"request {request.request_id} has not offered {len(missing)} chunks"

    def _check_windows(self, work: Work) -> None:
        """What became whole in this step, and is in its blocks, was offered.

        Not where blocks are shared: one that was given to another counts as left by the window.
        """
        if self.setup.prompt_only or self.setup.prefix_cache:
            return
        offered = self.offered[work.request]
        for group, (size, window) in enumerate(self.setup.groups):
            chunk = size * self.setup.factor
            last = min(work.end, work.request.num_tokens) // chunk
            for place in range(work.begin // chunk, last if window is not None else 0):
                blocks = work.table[group][place * self.setup.factor :][: self.setup.factor]
                if all(blocks):
                    key = self._key(work.request, group, place)
                    assert key in offered, "it has not offered a chunk that is whole"

    def _chunks(self, request: Request, tokens: int, groups: Iterable[int]) -> set[bytes]:
        """Keys of its whole chunks up to `tokens`."""
        return {
            self._key(request, group, chunk)
            for group in groups
            for chunk in range(tokens // (self.setup.groups[group][0] * self.setup.factor))
        }

    def _finish(self, request: Request) -> None:
        if request.state == "running" and not self.setup.windowed:
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            self._leaving.append((request, min(request.num_computed_tokens, known)))
        super()._finish(request)

    def reset(self, *, weights: bool) -> None:
        super().reset(weights=weights)
        self.offered.clear()
        self._overtaken = {self._named[name] for name in self.finished}
        self._leaving.clear()

    # -- what has ended ----------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], target: int) -> Request:
        request = self._named[name] = super().add(name, prompt, target)
        return request

    def _take_ended(self, ended: EndedLoads) -> None:
        for name in [*ended.loaded, *ended.failed]:
            del self.loading[name]
        for name in ended.failed:
            # What it computes instead can be stored.
            self._cannot_load.add(self._named[name])
            self.offered[self._named[name]].clear()
        super()._take_ended(ended)

    def complete(self) -> None:
        super().complete()
        for number in [n for n in self.jobs if self.seen.reports[n] == self.setup.workers]:
            del self.jobs[number]

    # -- at any time, and at the end -----------------------------------------------------------

    def check(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler._jobs) == len(self.jobs), "a transfer too many, or too few"
        alive = {request.request_id for request in [*self.waiting, *self.running]}
        ending = {request.request_id for request in self.jobs.values()}
        assert scheduler._requests.keys() <= alive | self.finished | ending, "one was not forgotten"
        for key, row in self.rows().items():
            self._check_row(row, *self.chunks[key])

    def come_to_rest(self) -> None:
        for handler in self.handlers():
            for late in handler.queue:
                late.ends = True
        if self.engine is not None:
            self.engine.calm = True
            self.engine.end_all()
        super().come_to_rest()
        for _ in range(2):
            # What a tier has ended is taken in at the next step.
            self.step()

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        self.check()
        assert self.scheduler.stats.refused_stores == self._refusals
        manager = self.scheduler.manager
        if isinstance(manager, PolicyManager):
            assert not manager._late_loads
            assert not manager._late_stores
            assert not manager.stray
            assert not any(block.ref_cnt for block in manager._blocks.values()), "a row is held"
            free = manager._backend.get_num_free_blocks()
            assert free + len(manager._blocks) == self.setup.rows, "a row is lost"
            return
        core = self._core()
        assert core._pool.busy == core._pool.held == 0, "a row is held"
        assert not core._requests, "the store still knows a request"
        assert core.waiting == core.in_flight == core.unsaved == 0
        stats = core.stats()
        assert stats.illegal == stats.stray == 0
