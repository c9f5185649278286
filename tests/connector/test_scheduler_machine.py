"""The scheduler's half against a reference, as a state machine: programs of a server that shrink.

`KVSTORE_PROGRAMS=3000` runs so many programs, others each time; `make programs` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("torch")

from kvstore.connector.mediums import (
    ConnectorMetadata,
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    TransferJob,
)
from kvstore.connector.server import NewRequest, StepOutput
from tests.connector import scripted
from tests.connector.chaos import Setup
from tests.connector.led import Led
from tests.connector.parts import Request
from tests.connector.scripted import Scripted, scheduler_over

PROGRAMS = os.environ.get("KVSTORE_PROGRAMS")
"""How many, at random; by default the same few each time."""

NAMES = "abcdefgh"
LONGEST = 76
"""Tokens of a request: the device has blocks for one of them at least."""

SMALL = st.integers(0, 7)
BUDGETS = st.sampled_from((80, 24, 9, 5))
RARELY = st.sampled_from((False,) * 4 + (True,))
FAILING = st.none() | st.integers(0, 7)
KINDS = st.sampled_from(("plain",) * 6 + ("nothing is loaded for it", "decoded elsewhere"))
WINDOWS = st.sampled_from((None, None, 1, 4, 6, 9, 14)) | st.integers(1, 17)


@st.composite
def shapes(draw: st.DrawFn) -> Setup:
    """A server. Where chunks are of several sizes, each is one block."""
    factor = draw(st.integers(1, 3))
    sizes = st.just(4) if factor > 1 else st.sampled_from((4, 8))
    groups = draw(st.lists(st.tuples(sizes, WINDOWS), min_size=1, max_size=3))
    keeps = draw(st.sampled_from(("policy", "host", "disk")))
    return Setup(
        tuple(groups),
        hash_size=draw(st.sampled_from((4, 2))),
        factor=factor if len({size for size, _ in groups}) == 1 else 1,
        blocks=1 + (LONGEST // 4 + 2) * len(groups) + draw(st.sampled_from((40, 6, 0))),
        rows=draw(st.sampled_from((400, 60, 24, 12))),
        keeps=keeps,
        prefix_cache=draw(st.booleans()),
        depth=draw(st.integers(0, 2)),
        prompt_only=draw(RARELY),
        workers=draw(st.integers(1, 2)),
        newest_first=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Prompt:
    """Those of a family share their beginnings, and some of them their ends."""

    family: int
    shared: int
    own: int

    def tokens(self) -> list[int]:
        return [self.family * 100 + n for n in range(self.shared)] + [1000] * self.own


PROMPTS = st.builds(
    Prompt,
    st.sampled_from((0, 0, 0, 1)),
    st.sampled_from((32, 24, 20, 13, 8, 6, 1)),
    st.sampled_from((0, 1, 3, 4, 8, 20)),
)


class SchedulerAgainstReference(RuleBasedStateMachine):
    """Acts are those of a server; what may come of them is said by `Led`."""

    server: Led | None = None

    @initialize(shape=shapes())
    def begin(self, shape: Setup) -> None:
        self.server = Led(shape)

    @property
    def its(self) -> Led:
        assert self.server is not None
        return self.server

    # -- requests --------------------------------------------------------------------------

    def free_names(self) -> list[str]:
        return [name for name in NAMES if self.its.is_free(name)]

    @precondition(lambda self: self.free_names())
    @rule(prompt=PROMPTS, answer=st.integers(1, 20), kind=KINDS, twice=RARELY)
    def arrive(self, prompt: Prompt, answer: int, kind: str, twice: bool) -> None:
        self.add(prompt, answer, kind)
        if twice and self.free_names():
            self.add(prompt, 1, kind)

    @precondition(lambda self: self.free_names() and not self.everyone())
    @rule(prompt=PROMPTS, answer=st.integers(1, 4), budget=BUDGETS, failing=FAILING)
    def serve(self, prompt: Prompt, answer: int, budget: int, failing: int | None) -> None:
        """A whole request, with workers that keep up."""
        request = self.add(prompt, answer, "plain")
        self.go_on(40, budget, failing)
        assert request.state == "gone"

    @precondition(lambda self: len(self.free_names()) > 1 and not self.everyone())
    @rule(
        prompt=PROMPTS,
        answer=st.integers(1, 4),
        budget=BUDGETS,
        failing=FAILING,
        kind=st.sampled_from(("plain", "plain", "decoded elsewhere")),
        twice=st.booleans(),
    )
    def serve_and_load(
        self,
        prompt: Prompt,
        answer: int,
        budget: int,
        failing: int | None,
        kind: str,
        twice: bool,
    ) -> None:
        """A request whose prompt was served before, until its load is under way."""
        self.serve(prompt, 1, budget, failing)
        self.forget_device()
        request = self.add(replace(prompt, own=prompt.own + 1), answer, kind)
        if twice:
            self.add(prompt, answer, "plain")
        for _ in range(4):
            if request.state == "waiting":
                self.its.step(80)

    def add(self, prompt: Prompt, answer: int, kind: str) -> Request:
        tokens = prompt.tokens()
        request = self.its.add(self.free_names()[0], tokens, len(tokens) + answer)
        request.skip_reading_prefix_cache = kind == "nothing is loaded for it"
        if kind == "decoded elsewhere":
            request.kv_transfer_params = {"do_remote_decode": True}
        return request

    def everyone(self) -> list[Request]:
        return [*self.its.running, *self.its.waiting]

    @precondition(lambda self: self.everyone())
    @rule(who=SMALL)
    def abort(self, who: int) -> None:
        self.its.abort(self.everyone()[who % len(self.everyone())])

    @precondition(lambda self: len(self.free_names()) > 1)
    @rule(prompt=PROMPTS)
    def abort_who_found_no_room(self, prompt: Prompt) -> None:
        """What it has computed is offered again while another one may get its blocks."""
        request = self.add(prompt, 4, "nothing is loaded for it")
        self.step(80, refusing=False, fewer=0, together=False, full=True)
        if request.state != "gone":
            self.its.abort(request)
        self.add(replace(prompt, family=2), 1, "plain")
        self.its.step(80)

    @precondition(lambda self: any(one.state == "loading" for one in self.its.waiting))
    @rule(who=SMALL)
    def abort_while_loading(self, who: int) -> None:
        loading = [one for one in self.its.waiting if one.state == "loading"]
        self.its.abort(loading[who % len(loading)])

    @precondition(lambda self: self.its.running)
    @rule(who=SMALL)
    def finish(self, who: int) -> None:
        """The next token is its last."""
        request = self.its.running[who % len(self.its.running)]
        request.target = request.num_tokens + 1

    @precondition(lambda self: self.its.running)
    @rule(who=SMALL, steps=st.integers(0, 3))
    def preempt(self, who: int, steps: int) -> None:
        self.its.drop(self.its.running[who % len(self.its.running)])
        self.go_on(steps, 80)

    # -- steps -----------------------------------------------------------------------------

    @rule(
        budget=BUDGETS,
        refusing=RARELY,
        fewer=st.integers(0, 9),
        together=st.booleans(),
        full=RARELY,
    )
    def step(self, budget: int, refusing: bool, fewer: int, together: bool, full: bool) -> None:
        its = self.its
        its.fewer, its.together = fewer, together
        its.told.refusing, its.full = refusing, full
        its.step(budget)
        its.told.refusing = its.full = False

    @rule()
    def step_with_nothing_to_do(self) -> None:
        self.its.step(0)

    @precondition(lambda self: self.everyone())
    @rule(steps=st.integers(1, 12), budget=BUDGETS)
    def go_on(self, steps: int, budget: int, failing: int | None = None) -> None:
        """Steps between which all transfers end; `failing` is the one that fails."""
        ended = 0
        for _ in range(steps):
            if not (self.everyone() or self.its.scheduler.has_pending_work()):
                break
            self.its.step(budget)
            for handler in self.its.handlers():
                while handler.queue:
                    handler.queue[0].fails |= ended == failing
                    handler.end_first()
                    ended += 1
            if self.its.engine is not None:
                self.its.engine.end_all()

    @precondition(lambda self: self.its.steps)
    @rule()
    def catch_up(self) -> None:
        """Steps that were scheduled ahead are done."""
        self.its.drain()

    # -- transfers -------------------------------------------------------------------------

    @precondition(lambda self: any(self.its.handlers()))
    @rule(which=SMALL, count=st.integers(1, 3), failing=st.sets(st.integers(0, 2)))
    def transfers_end(self, which: int, count: int, failing: set[int]) -> None:
        """Each handler ends them in their order; the handlers do so in any."""
        busy = list(self.its.handlers())
        handler = busy[which % len(busy)]
        for number in range(min(count, len(handler.queue))):
            handler.queue[0].fails |= number in failing
            handler.end_first()

    @precondition(lambda self: self.its.engine is not None and self.its.engine.moves)
    @rule(which=SMALL, failing=st.sets(st.integers(0, 2)))
    def move_ends(self, which: int, failing: set[int]) -> None:
        """Something was fetched from the disk, or written to it."""
        engine = self.its.engine
        assert engine is not None
        engine.end(which % len(engine.moves), failing)

    @precondition(lambda self: self.its.engine is not None)
    @rule(seconds=st.sampled_from((0.01, 0.3, 60.0)))
    def time_passes(self, seconds: float) -> None:
        """Who waits for the disk waits 0.2 s at most."""
        self.its.spec.clock.now += seconds  # type: ignore[attr-defined]

    # -- all at once -----------------------------------------------------------------------

    @rule()
    def forget_device(self) -> None:
        """The device's prefix cache forgets all it knows."""
        for block in list(self.its.pool.hash_of):
            self.its.pool.forget(block)

    @precondition(lambda self: self.its.rows() or self.its.jobs)
    @rule(weights=st.booleans())
    def reset(self, weights: bool) -> None:
        self.its.reset(weights=weights)

    @invariant()
    def all_is_well(self) -> None:
        if self.server is not None:
            self.server.check()

    def teardown(self) -> None:
        if self.server is None:
            return
        try:
            if sys.exc_info()[0] is None:
                self.server.come_to_rest()
                self.server.check_nothing_is_left()
                self.server.check_what_is_stored()
        finally:
            self.server.shutdown()


SchedulerAgainstReference.TestCase.settings = settings(
    max_examples=int(PROGRAMS or 120),
    stateful_step_count=40,
    deadline=None,
    derandomize=PROGRAMS is None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerAgainstReference = SchedulerAgainstReference.TestCase


# -- cases that were wrong once ----------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Led]:
    """A server of one group."""
    made = Led(Setup(((4, None),)))
    yield made
    made.shutdown()


def test_nothing_more_is_stored_of_who_has_finished_before_a_reset(server: Led) -> None:
    """The reset may mean other weights; what it has computed is of the old ones."""
    server.told.calm = True
    server.add("r", list(range(16)), 17)
    server.step()
    assert server.finished == {"r"}
    server.reset(weights=True)
    server.come_to_rest()
    server.check_nothing_is_left()
    assert not any(server.on.values())


def test_who_was_preempted_and_resumed_in_one_step_has_its_new_blocks() -> None:
    manager = Scripted(takes=True)
    scheduler = scheduler_over(manager, 4, [(4, None)])
    one = scripted.Prompt(12, 4, "one")
    scheduler.get_num_new_matched_tokens(one, 0)
    scheduler.build_connector_meta(
        StepOutput([NewRequest("one", [[1]])], num_scheduled_tokens={"one": 2})
    )
    assert scheduler.get_num_new_matched_tokens(one, 0) == (0, False)
    again = StepOutput(num_scheduled_tokens={"one": 6}, preempted_req_ids={"one"})
    again.scheduled_cached_reqs.req_ids.append("one")
    again.scheduled_cached_reqs.new_block_ids.append([[5, 6]])
    again.scheduled_cached_reqs.resumed_req_ids.add("one")
    (job,) = scheduler.build_connector_meta(again).store_jobs.values()
    assert isinstance(job.src_spec, DeviceLoadStoreSpec)
    assert job.src_spec.block_ids.tolist() == [5]


def test_what_no_handler_takes_is_reported_after_what_was_taken_before(server: Led) -> None:
    """As after a reset both may be stores of one key, which the manager cannot tell apart."""
    (worker,) = server.workers

    def job() -> TransferJob:
        return TransferJob("r", DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0]))

    worker.start_transfers(ConnectorMetadata(store_jobs={0: job()}))
    worker.start_transfers(ConnectorMetadata(store_jobs={1: job()}))
    server.told.refusing = True
    worker.start_transfers(ConnectorMetadata())
    assert not list(worker.get_finished().completed_jobs)
    (handler,) = server.handlers()
    handler.end_first()
    assert list(worker.get_finished().completed_jobs) == [0, 1]
