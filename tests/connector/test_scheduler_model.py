"""A small server with late, failing and refused copies: never a wrong byte, and nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvstore.connector.mediums import (
    ConnectorMetadata,
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    TransferJob,
)
from kvstore.connector.server import NewRequest, StepOutput
from kvstore.connector.tracked_request import GroupState
from tests.connector.bench import Server
from tests.connector.chaos import Model, Setup
from tests.connector.parts import Request
from tests.connector.scripted import Prompt, Scripted, scheduler_over

SEEDS = 24
"""For each kind of keeping."""

GROUPS = (
    ((4, None),),
    ((4, 6),),
    ((4, None), (4, 9)),
    ((4, 5), (4, 14)),
    ((4, None), (8, 10)),
    ((8, 6), (4, 17)),
    ((4, 1),),
    ((4, None), (4, 3), (4, 8)),
)

INTERESTING = (
    "aborts while loading",
    "deferred",
    "failed loads",
    "finished",
    "flushes",
    "keys checked",
    "loads",
    "new weights",
    "partial first chunks",
    "preemptions",
    "refused",
    "resets amid transfers",
    "window chunks lost",
)

done: Counter[str] = Counter()
"""What has happened in this file so far."""


def setup_of(keeps: str, seed: int) -> Setup:
    chance = random.Random(f"{keeps} {seed}")
    groups = GROUPS[seed % len(GROUPS)]
    one_size = len({size for size, _ in groups}) == 1
    return Setup(
        groups,
        hash_size=chance.choice((2, 4)),
        factor=chance.choice((1, 2, 3)) if one_size else 1,
        # A request has 76 tokens at most: the largest one fits.
        blocks=22 * len(groups) + chance.choice((2, 6, 20)),
        rows=chance.choice((12, 24, 60)),
        keeps=keeps,
        prefix_cache=chance.random() < 0.6,
        depth=chance.choice((0, 0, 1, 2)),
        prompt_only=chance.random() < 0.2,
        workers=chance.choice((1, 1, 2)),
        budget=chance.choice((9, 24, 40)),
        newest_first=chance.random() < 0.6,
        policy=chance.choice(("lru", "arc")),
    )


@pytest.fixture(autouse=True)
def lost_chunks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of = GroupState.blocks_of

    def counting(state: GroupState, chunk: int) -> list[int]:
        found = blocks_of(state, chunk)
        done["window chunks lost"] += not found
        return found

    monkeypatch.setattr(GroupState, "blocks_of", counting)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("keeps", ["policy", "host", "disk"])
def test_every_byte_that_is_attended_to_or_kept_is_right_and_nothing_is_left(
    tmp_path: Path, keeps: str, seed: int
) -> None:
    server = Server(setup_of(keeps, seed), seed, tmp_path)
    server.chaos.refuses = 0.25 if seed % 3 == 0 else 0.02
    server.run(60)
    server.shutdown()
    done.update(server.done)


def test_all_that_is_interesting_has_happened() -> None:
    """In the tests above, which have to run first."""
    if not done["finished"]:
        pytest.skip("the tests above did not run in this process")
    assert {name: done[name] for name in INTERESTING if not done[name]} == {}


# -- cases that were wrong once ----------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server whose transfers all succeed at once."""
    made = Server(Setup(((4, None),)), 0, tmp_path)
    made.chaos.calm = True
    yield made
    made.shutdown()


def request_of(server: Server, name: str, tokens: int) -> Request:
    prefixes = Model.prefixes(range(tokens + 5))
    request = Request(name, prefixes, tokens, tokens + 1, server.setup)
    server.names_in_use[name] = request
    server.waiting.append(request)
    server._name_chunks(request)
    return request


def test_nothing_more_is_stored_of_who_has_finished_before_a_reset(server: Server) -> None:
    """The reset may mean other weights; what it has computed is of the old ones."""
    request_of(server, "r", 16)
    server.step()
    assert server.finished == {"r"}
    server.reset(weights=True)
    server.run(0)
    assert server.done["keys checked"] == 0


def test_after_a_reset_no_block_is_stored_that_a_window_has_left() -> None:
    """The chunk had been stored before its block was given away."""
    manager = Scripted(takes=True)
    scheduler = scheduler_over(manager, 4, [(4, 4)])
    one, other = Prompt(16, 4, "one"), Prompt(4, 4, "other")
    scheduler.get_num_new_matched_tokens(one, 0)
    scheduler.build_connector_meta(
        StepOutput([NewRequest("one", [[1, 2, 3, 4]])], num_scheduled_tokens={"one": 16})
    )
    one.num_computed_tokens = 16
    scheduler.get_num_new_matched_tokens(other, 0)
    scheduler.build_connector_meta(
        StepOutput([NewRequest("other", [[1]])], num_scheduled_tokens={"other": 4})
    )
    scheduler.reset()
    other.num_computed_tokens = 4
    meta = scheduler.build_connector_meta(StepOutput(num_scheduled_tokens={"one": 0}))
    (job,) = meta.store_jobs.values()
    assert isinstance(job.src_spec, DeviceLoadStoreSpec)
    assert 1 not in job.src_spec.block_ids


def test_who_was_preempted_and_resumed_in_one_step_has_its_new_blocks() -> None:
    manager = Scripted(takes=True)
    scheduler = scheduler_over(manager, 4, [(4, None)])
    one = Prompt(12, 4, "one")
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


def test_what_no_handler_takes_is_reported_after_what_was_taken_before(server: Server) -> None:
    """As after a reset both may be stores of one key, which the manager cannot tell apart."""
    server.chaos.calm = False
    server.chaos.late, server.chaos.fails, server.chaos.refuses = 1.0, 0.0, 0.0
    (worker,) = server.workers

    def job() -> TransferJob:
        return TransferJob("r", DeviceLoadStoreSpec([1]), HostLoadStoreSpec([0]))

    worker.start_transfers(ConnectorMetadata(store_jobs={0: job()}))
    worker.start_transfers(ConnectorMetadata(store_jobs={1: job()}))
    server.chaos.refuses = 1.0
    worker.start_transfers(ConnectorMetadata())
    reported: list[int] = []
    for _ in range(10):
        reported += worker.get_finished().completed_jobs
    assert reported == [0, 1]
