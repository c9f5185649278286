"""vLLM's scheduler and both halves of its connector over kvstore, with a model that is none."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

import kvstore
from kvstore.core.chunk import READY
from kvstore.errors import ConfigError
from kvstore.tiers.disk.format import Geometry
from kvstore.vllm.version import LOADS_WITHIN_STEPS, VERSION, mediums
from tests.vllm.whole import BLOCK, PAGE, Server

SHAPE = ("windows", "sizes", "interval", "blocks")
"""What is not kvstore's of the arguments of a server."""

SEGMENT = Geometry(16, 4096, 4096).file_bytes
SMALL = {"capacity_bytes": 2 * SEGMENT, "segment_bytes": SEGMENT}
"""A disk for 32 chunks."""

PROMPTS = [[(seed * 37 + place * 11) % 90 for place in range(66)] for seed in range(4)]


def disk(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "300MiB"}]


def in_vllms_tiering(folder: Path, rows: int = 256, **more: Any) -> dict[str, Any]:
    """Options of vLLM's own tiering, on the CPU, with kvstore's disk as its second tier."""
    mine = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "path": str(folder / "cache")}
    plain = {"automatic_identity": False, "identity": {"model": "m"}}
    return {
        "spec_name": "HostTieringOffloadingSpec",
        "spec_module_path": "benchmarks.serving.native",
        "cpu_bytes_to_use": rows * 4096,
        "secondary_tiers": [{**mine, "capacity_bytes": "300MiB", **plain, **more}],
    }


@pytest.fixture
def tiering_server(tmp_path: Path) -> Iterator[Any]:
    """A server with vLLM's own tiering over a disk of ours."""
    if VERSION < (0, 31):
        pytest.skip("vLLM's own tiering has another shape")
    servers: list[Server] = []

    def make(windows: tuple[int | None, ...] = (None,), blocks: int = 256, **more: Any) -> Server:
        options = in_vllms_tiering(tmp_path, **more)
        servers.append(Server(tmp_path, options, windows=windows, blocks=blocks))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def make(rows: int = 256, tiers: bool = False, **more: Any) -> Server:
        shape: dict[str, Any] = {"blocks": 256}
        shape |= {key: more.pop(key) for key in [*more] if key in SHAPE}
        options = {
            "cpu_bytes_to_use": rows * 4096,
            "deadline_s": 20,
            # This model computes a chunk sooner than a busy disk reads one.
            "recompute_s": 0,
            "tiers": disk(tmp_path) if tiers else [],
            **more,
        }
        servers.append(Server(tmp_path, options, **shape))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_prompts_are_loaded_from_host_memory(open_server: Any) -> None:
    server = open_server()
    cold = server.serve(*PROMPTS)
    server.settle()
    server.forget()
    again = server.serve(*PROMPTS)
    assert [one.cached for one in cold] == [0] * 4
    assert [one.cached for one in again] == [64] * 4
    assert [one.tokens for one in again] == [one.tokens for one in cold]


@pytest.mark.parametrize("windows", [(None,), (None, 10), (None, 22)])
def test_prompts_come_from_disk_after_a_restart(open_server: Any, windows: Any) -> None:
    first = open_server(rows=512, tiers=True, windows=windows)
    cold = first.serve(*PROMPTS)
    first.settle()
    first.close()
    again = open_server(rows=512, tiers=True, windows=windows).serve(*PROMPTS)
    assert [one.cached for one in again] == [64] * 4
    assert [one.tokens for one in again] == [one.tokens for one in cold]


class Hashing(Server):
    """One whose blocks have other hashes in each process."""

    def _configure(self, *given: Any) -> Any:
        config, caches = super()._configure(*given)
        config.cache_config.prefix_caching_hash_algo = "xxhash"
        return config, caches


@pytest.mark.parametrize("through", ["connector", "tiering"])
@pytest.mark.parametrize(
    ("kind", "seed", "lost"), [(Server, None, False), (Hashing, "0", False), (Hashing, None, True)]
)
def test_hashes_that_do_not_outlive_the_process_are_warned_of(
    tmp_path: Path,
    through: str,
    kind: type[Server],
    seed: str | None,
    lost: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if through == "tiering" and VERSION < (0, 31):
        pytest.skip("vLLM's tiering is another there")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    ours = {"cpu_bytes_to_use": 256 * 4096, "tiers": disk(tmp_path)}
    options = ours if through == "connector" else in_vllms_tiering(tmp_path)
    with caplog.at_level(logging.WARNING, "kvstore"):
        kind(tmp_path, options).close()
    lines = [line for line in caplog.messages if "PYTHONHASHSEED" in line and "kvstore" in line]
    assert len(lines) == lost


def test_resets_amid_stores_and_loads_leave_no_row_held(open_server: Any) -> None:
    server = open_server(rows=128, tiers=True)
    cold = server.serve(*PROMPTS)
    for steps in range(8):
        server.forget()
        names = [server.add(prompt) for prompt in PROMPTS]
        # Stores of a step are copied in the next one, loads are reported at its end.
        for _ in range(steps % 4):
            server.step()
        server.scheduler.reset_connector_cache()
        server.settle()
        assert [server.served[name].tokens for name in names] == [one.tokens for one in cold]
    server.scheduler.reset_connector_cache()
    server.settle()
    server.forget()
    assert server.serve(PROMPTS[0])[0].cached == 0
    server.drain()


@pytest.mark.parametrize("length", [20, 23])
@pytest.mark.parametrize("windows", [(None,), (None, 10)])
def test_what_a_session_with_more_input_stores_is_right_for_others(
    open_server: Any, windows: Any, length: int
) -> None:
    """vLLM before 0.33 notes all blocks of the session again when it gets more."""
    server = open_server(tiers=True, windows=windows)
    server.feed("session", [(3 * place + 1) % 90 for place in range(length)])
    server.feed("session", [(7 * place + 5) % 90 for place in range(41)])
    session = server.requests["session"]
    prompt = [*session.all_token_ids, 1, 2, 3]
    server.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    server.settle()
    server.forget()
    assert server.serve(prompt)[0].cached >= length + 40
    server.settle()
    server.close()
    server = open_server(tiers=True, windows=windows)
    assert server.serve(prompt)[0].cached >= length + 40


@pytest.mark.parametrize("forgets", [False, True])
def test_a_reset_that_preempts_running_requests(open_server: Any, forgets: bool) -> None:
    """vLLM before 0.33 took a read of the step after it for a write, and failed."""
    server = open_server()
    expected = server.serve(PROMPTS[0], tokens=30)[0].tokens
    server.settle()
    server.forget()
    name = server.add(PROMPTS[0], tokens=30)
    while len(server.served[name].tokens) < 3:
        server.step()
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=forgets)
    server.settle()
    assert server.served[name].tokens == expected
    assert server.manager._core.stats().busy_rows == 0


def test_a_hit_within_the_budget_costs_no_step_of_its_own(open_server: Any) -> None:
    if not LOADS_WITHIN_STEPS:
        pytest.skip("vLLM before 0.33 loads between steps only")
    # Of a prompt and a half: a hit of 64 tokens fits, two do not.
    budget = 96 * PAGE // BLOCK
    server = open_server(tiers=True, sync_load_budget_bytes=budget)
    cold = server.serve(*PROMPTS)
    server.settle()
    server.forget()
    within = [server.serve(prompt)[0] for prompt in PROMPTS]
    server.settle()
    server.forget()
    together = server.serve(*PROMPTS)
    for found in (within, together):
        assert [one.cached for one in found] == [64] * 4
        assert [one.tokens for one in found] == [one.tokens for one in cold]
    assert [one.steps for one in within] == [1] * 4
    assert sorted(one.steps for one in together) == [1, 2, 2, 2]
    server.drain()


def test_without_a_budget_a_hit_takes_a_step_more(open_server: Any) -> None:
    server = open_server()
    server.serve(*PROMPTS)
    server.settle()
    server.forget()
    assert [server.serve(prompt)[0].steps for prompt in PROMPTS] == [2] * 4


def test_what_never_changes_is_told_under_the_names_that_were_announced(open_server: Any) -> None:
    if VERSION < (0, 33):
        pytest.skip("vLLM before 0.33 does not ask")
    from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

    server = open_server(rows=100, tiers=True, windows=(None, 10), eviction_policy="sieve")
    spec = server.worker.spec
    (facts,) = server.manager.config_info()
    assert tuple(facts) == type(spec).config_info_keys(spec.extra_config)
    theirs = CPUOffloadingInfo.from_config(spec.config, 100, 4096).as_config_info()
    assert facts == {
        **theirs,
        "kvstore_version": kvstore.__version__,
        "kvstore_eviction_policy": "sieve",
        "kvstore_tiers": 1,
        "kvstore_disk_bytes": 300 * 2**20,
    }
    # vLLM sends them with its first statistics.
    server.serve(PROMPTS[0])
    assert server.told[0]["info"] == [facts]
    assert all(told["info"] is None for told in server.told[1:])


@pytest.mark.parametrize("windows", [(None,), (None, 10)])
def test_what_was_only_on_disk_is_not_told_to_be_in_host_memory(
    open_server: Any, windows: Any
) -> None:
    if VERSION < (0, 31):
        pytest.skip("vLLM before 0.31 keeps no such account")
    server = open_server(rows=512, tiers=True, windows=windows, self_describing_kv_events=True)
    server.serve(*PROMPTS)
    server.settle()
    server.close()
    server = open_server(rows=24, tiers=True, windows=windows, self_describing_kv_events=True)
    names = [server.add(prompt) for prompt in PROMPTS]
    server.step()
    # They go away before there was room for them.
    server.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    server.settle()
    held = {bytes(key) for key in server.manager._core._pool.chunks}
    assert held, "nothing was fetched"
    known = server.connector.connector_scheduler._events_tracker._pending_event_metadata
    told = {key for key, its in known.items() if (mediums().CPU, None) in its.active_residencies}
    assert told <= held


def believed(server: Server) -> dict[str, int]:
    """How many blocks a router believes on each tier, by the events alone."""
    counts: defaultdict[str, Counter[Any]] = defaultdict(Counter)
    for event in server.events:
        step = 1 if isinstance(event, BlockStored) else -1
        where = event.ownership or event.medium
        counts[where].update(dict.fromkeys(event.block_hashes, step))
    return {name: sum(count > 0 for count in its.values()) for name, its in counts.items()}


@pytest.mark.parametrize(("blocks", "disks"), [(1, 1), (2, 1), (2, 2)])
def test_who_follows_the_events_knows_which_blocks_host_memory_and_disk_have(
    tmp_path: Path, blocks: int, disks: int
) -> None:
    if VERSION < (0, 31) and blocks > 1:
        pytest.skip("vLLM before 0.31 keeps no such account")
    larger = {**disk(tmp_path / "larger")[0], **SMALL, "capacity_bytes": 4 * SEGMENT}
    options = {
        "cpu_bytes_to_use": 16 * 4096,
        "blocks_per_chunk": blocks,
        "self_describing_kv_events": True,
        "tiers": [{**disk(tmp_path)[0], **SMALL}, larger][:disks],
    }
    server = Server(tmp_path, options)
    for number in range(20):
        server.serve([(7 * at + 13 * number) % 90 for at in range(66)])
        if number % 3 == 2:
            server.drain()
    for number in range(3):
        server.serve([number] * 5)
        server.drain()
    core = server.manager._core
    host = sum(chunk.state >= READY for chunk in core.chunks.values())
    on_disk = {tier.name: len(tier.index.entries) for tier in core.owned}
    assert host
    assert [*on_disk.values()] == [32, 64][:disks], "they are full"
    counts = {name: count * blocks for name, count in on_disk.items()}
    assert believed(server) == {"CPU": host * blocks, **counts}
    server.close()


def test_who_follows_the_events_of_vllms_tiering_knows_which_blocks_the_disk_has(
    tmp_path: Path,
) -> None:
    if VERSION < (0, 31):
        pytest.skip("vLLM's own tiering has another shape")
    told = {"blocks_per_chunk": 2, "self_describing_kv_events": True}
    server = Server(
        tmp_path, {**in_vllms_tiering(tmp_path, rows=16, enable_kv_events=True, **SMALL), **told}
    )
    for number in range(20):
        server.serve([(7 * at + 13 * number) % 90 for at in range(66)])
        server.settle()
    (tier,) = server.manager.secondary_tiers
    assert len(tier._runner._jobs.target.index.entries) == 32, "it is full"
    assert believed(server)["STORAGE"] == 64
    server.close()


def test_a_budget_is_a_number_that_this_vllm_knows(open_server: Any) -> None:
    if LOADS_WITHIN_STEPS:
        with pytest.raises(ConfigError, match="sync_load_budget_bytes = '1GiB'"):
            open_server(sync_load_budget_bytes="1GiB")
    else:
        with pytest.raises(ConfigError, match=r"sync_load_budget_bytes.*vLLM 0\.33"):
            open_server(sync_load_budget_bytes=2**30)


def lookups_of_a_step(server: Server) -> int:
    """How often vLLM asks the manager in one step."""
    asked = 0
    lookup = server.manager.lookup

    def counting(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return lookup(*arguments)

    server.manager.lookup = counting
    server.step()
    server.manager.lookup = lookup
    return asked


@pytest.mark.parametrize("tiering", [False, True])
@pytest.mark.parametrize("windows", [(10,), (None, 10)])
def test_blocks_that_a_window_has_left_are_not_stored_again_after_a_reset(
    open_server: Any, tiering_server: Any, windows: Any, tiering: bool
) -> None:
    """vLLM offers them, although they have become another request's."""
    server = (
        tiering_server(windows=windows, blocks=80, **SMALL)
        if tiering
        else open_server(rows=512, windows=windows, blocks=80)
    )
    prompt = [place % 90 for place in range(60)]
    name = server.add(prompt, tokens=70)
    while len(server.served[name].tokens) < 30:
        server.step()
    for number in range(4):
        server.serve([(place * 7 + number) % 90 for place in range(100)])
    assert not server.requests[name].is_finished()
    server.scheduler.reset_connector_cache()
    while not server.requests[name].is_finished():
        server.step()
    server.settle()
    server.forget()
    (again,) = server.serve(prompt)
    # A reset leaves below vLLM's manager what the disk has, and was right.
    assert tiering or again.cached == 0
    server.forget()
    (again,) = server.serve(prompt)
    assert again.cached >= 56, "who comes after a reset stores as ever"


@pytest.mark.parametrize("tiering", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 10)])
def test_who_has_not_begun_at_a_reset_stores_as_ever(
    open_server: Any, tiering_server: Any, windows: Any, tiering: bool
) -> None:
    server = (tiering_server if tiering else open_server)(windows=windows)
    names = [server.add([(place * 7 + number) % 90 for place in range(66)]) for number in range(12)]
    server.step()
    last = server.requests[names[-1]]
    assert last.num_computed_tokens == 0
    server.scheduler.reset_connector_cache()
    server.settle()
    server.forget()
    assert server.serve(list(last.prompt_token_ids))[0].cached == 64


@pytest.mark.parametrize("windows", [(None,), (10,), (None, 10), (None, 10, 22)])
def test_to_ask_again_for_a_request_that_waits_costs_the_same_for_any_length_of_its_prompt(
    open_server: Any, windows: Any
) -> None:
    if VERSION < (0, 31) and windows != (None,):
        pytest.skip("this vLLM does not tell where a key is in its prompt")
    prompts = [[(seed * 37 + place * 11) % 90 for place in range(66 * seed)] for seed in (1, 3)]
    first = open_server(rows=512, tiers=True, windows=windows)
    first.serve(*prompts)
    first.settle()
    first.close()
    server = open_server(rows=512, tiers=True, windows=windows, fetch_queued=False)
    core = server.manager._core
    grant, core._grants.grant = core._grants.grant, lambda *_: []
    counts = []
    for prompt in prompts:
        name = server.add(prompt)
        while not core.is_waiting(name):
            server.step()
        counts.append(lookups_of_a_step(server))
        assert lookups_of_a_step(server) == counts[-1]
        server.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        server.step()
    assert counts[0] == counts[1]
    chunks_of_windows = sum(-(-window // BLOCK) + 1 for window in windows if window is not None)
    assert counts[0] <= 2 * len(windows) + chunks_of_windows
    core._grants.grant = grant


def test_a_part_of_a_chunk_is_never_taken_for_the_whole(
    open_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a window has left when the device had the beginning is of no use to shorter prompts."""
    shape: dict[str, Any] = {"rows": 24, "blocks_per_chunk": 4, "blocks": 2048}
    prompt = [(place * 7) % 90 for place in range(40)]

    def serve(server: Server) -> None:
        server.serve(prompt[:30])
        server.settle()
        for other in range(4):
            server.serve([(place * 11 + other + 1) % 90 for place in range(100)])
            server.settle()
        server.serve(prompt[:24] + [5] * 8)
        server.settle()
        server.forget()
        server.serve(prompt[:18])

    serve(open_server(**shape))
    with pytest.raises(ConfigError, match="blocks_per_chunk = 4, and this model has layers"):
        open_server(**shape, windows=(None, 10), interval=None)
    if VERSION != (0, 32):
        return
    # As vLLM is, it would go wrong; with other releases after other requests.
    monkeypatch.setattr("kvstore.vllm.spec.check_windows", lambda *_: None)
    with pytest.raises(AssertionError, match="reads a wrong token"):
        serve(open_server(**shape, windows=(None, 10), interval=None))


@pytest.mark.parametrize("blocks", range(15, 25))
def test_a_window_of_smaller_blocks_is_stored_from_no_block_that_is_anothers(
    open_server: Any, blocks: int
) -> None:
    """vLLM goes back to chunks that it had left out, when a request ends."""
    server = open_server(windows=(None, 10), sizes=(16, 4), interval=None, blocks=blocks)
    for factor, offset in ((3, 1), (7, 5), (11, 5)):
        server.add([(factor * place + offset) % 90 for place in range(34)], tokens=8)
    while server.scheduler.has_requests():
        server.step()
    server.settle()
    server.check_rows()


def test_an_error_amid_a_store_below_vllms_own_manager(tmp_path: Path) -> None:
    """Of each store it is told one end."""
    if VERSION < (0, 31):
        pytest.skip("vLLM's own tiering has another shape")
    server = Server(tmp_path, in_vllms_tiering(tmp_path))
    try:
        name = server.add([7] * 66, tokens=20)
        scheduler: Any = server.connector.connector_scheduler
        while not scheduler._jobs:
            server.step()
        server.scheduler.finish_requests({name}, RequestStatus.FINISHED_ERROR)
        server.settle()
        assert not scheduler._jobs
        assert not scheduler._req_status
        server.forget()
        server.serve([7] * 66)
    finally:
        server.close()


@pytest.mark.parametrize("preempted", [False, True])
def test_of_a_request_that_ends_early_only_what_was_computed_is_stored(
    open_server: Any, preempted: bool
) -> None:
    """vLLM takes the whole prompt for computed, and the blocks for its own, but for aborts."""
    server = open_server(rows=512, blocks=48)
    busy = server.add([1] * 8, tokens=60)
    server.step()
    prompt = [(place * 7) % 90 for place in range(150)]
    name = server.add(prompt)
    # Beside the other one a step has room for no whole number of blocks.
    server.step()
    request = server.requests[name]
    assert 100 < request.num_computed_tokens < len(prompt)
    assert request.num_computed_tokens % 4
    if preempted:
        # What was in flight when it was preempted has ended it.
        server.scheduler.running.remove(request)
        server.scheduler._preempt_request(request, 0.0)
        server.add([(place * 11 + 5) % 90 for place in range(150)])
    ended = RequestStatus.FINISHED_STOPPED if preempted else RequestStatus.FINISHED_ERROR
    server.scheduler.finish_requests({name}, ended)
    while not server.requests[busy].is_finished():
        server.step()
    server.settle()
    server.forget()
    # It fails where a token is read that was not computed.
    server.serve(prompt)


@pytest.mark.parametrize(("windows", "chunks"), [((None,), 64), ((None, 10), 76)])
def test_a_request_in_the_queue_is_fetched_for_before_its_turn(
    open_server: Any, windows: Any, chunks: int
) -> None:
    first = open_server(rows=512, tiers=True, windows=windows)
    cold = first.serve(*PROMPTS)
    first.settle()
    first.close()
    again = open_server(rows=512, tiers=True, windows=windows, blocks=1024)
    # All places are taken for a while.
    busy = [again.add([seed] * 20, tokens=200) for seed in range(8)]
    while len(again.scheduler.running) < 8:
        again.step()
    names = [again.add(prompt) for prompt in PROMPTS]
    core = again.manager._core
    # However slow the disk is, all of it has to be there before a place becomes free.
    while sum(tier.promoted for tier in core.stats().tiers) < chunks:
        again.step()
        assert len(again.scheduler.running) == 8, core.stats()
        time.sleep(0.02)
    assert core.stats().fetched_queued == chunks
    while not all(again.requests[name].is_finished() for name in (*busy, *names)):
        again.step()
    assert [again.served[name].cached for name in names] == [64] * 4
    assert [again.served[name].tokens for name in names] == [one.tokens for one in cold]
    assert core.stats().deferrals == 0, "all of it was there in time"


def test_nothing_is_fetched_for_what_the_device_still_has(open_server: Any) -> None:
    server = open_server(rows=16, tiers=True)
    (cold,) = server.serve(PROMPTS[0])
    server.settle()
    # Others take its place in host memory, and none of its blocks on the device.
    for prompt in PROMPTS[1:]:
        server.serve(prompt)
        server.settle()
    core = server.manager._core
    before = core.stats().fetched_queued
    (again,) = server.serve(PROMPTS[0])
    assert (again.tokens, again.cached) == (cold.tokens, 64)
    assert core.stats().fetched_queued == before
    longer = PROMPTS[0] + [1] * 100
    server.serve(longer)
    assert core.stats().fetched_queued == before


def test_an_abort_in_the_queue_leaves_nothing(open_server: Any) -> None:
    first = open_server(rows=512, tiers=True)
    first.serve(*PROMPTS)
    first.settle()
    first.close()
    again = open_server(rows=512, tiers=True)
    for seed in range(8):
        again.add([seed] * 20, tokens=40)
    while len(again.scheduler.running) < 8:
        again.step()
    names = [again.add(prompt) for prompt in PROMPTS]
    again.step()
    again.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    again.drain()


def paused(server: Server, *, resets: int) -> None:
    """Pause, reset so often, go on."""
    server.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(resets):
        assert server.scheduler.reset_prefix_cache(reset_connector=True)
    server.step()
    server.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.mark.parametrize("resets", [1, 2])
def test_the_first_reset_of_a_pause_keeps_what_is_right_and_a_second_one_forgets_it(
    open_server: Any, resets: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = open_server(tiers=True)
    server.serve(*PROMPTS)
    server.settle()
    caplog.clear()
    for _ in range(2):
        with caplog.at_level(logging.INFO, "kvstore"):
            paused(server, resets=resets)
            again = server.serve(*PROMPTS)
            server.settle()
        assert [one.cached for one in again] == [64 if resets == 1 else 0] * 4
    # One look for each pause, however many steps came after it.
    assert caplog.text.count("the weights in memory were read") == 2


def test_two_resets_amid_transfers_without_a_step_between_them(open_server: Any) -> None:
    """vLLM's half of the connector fails at the second one."""
    server = open_server(tiers=True)
    for prompt in PROMPTS:
        server.add(prompt)
    while not server.connector.connector_scheduler._jobs:
        server.step()
    for _ in range(3):
        assert server.scheduler.reset_connector_cache()
    server.settle()
    assert [one.cached for one in server.serve([7] * 66, [8] * 66)] == [0, 0]
    server.drain()


def test_two_resets_without_a_step_between_them_below_vllms_own_manager(
    open_server: Any, tiering_server: Any
) -> None:
    expected = [one.tokens for one in open_server().serve(*PROMPTS)]
    server = tiering_server()
    for prompt in PROMPTS:
        server.add(prompt)
    scheduler: Any = server.connector.connector_scheduler
    while not scheduler._jobs:
        server.step()
    for _ in range(3):
        assert server.scheduler.reset_connector_cache()
    assert [one.tokens for one in server.serve(*PROMPTS)] == expected


@pytest.mark.parametrize("resets", [1, 2])
def test_after_resets_the_disk_below_vllms_own_manager_is_read_again(
    tiering_server: Any, resets: int
) -> None:
    server = tiering_server()
    server.serve(PROMPTS[0])
    server.settle()
    for _ in range(resets):
        server.reset()
    assert server.serve(PROMPTS[0])[0].cached == 64


def test_no_row_that_a_worker_still_writes_at_a_reset_is_filled_from_disk(
    tiering_server: Any,
) -> None:
    """vLLM before 0.33 gave it away: what the worker wrote was then read under another's key."""
    server = tiering_server()
    server.serve(PROMPTS[0])
    server.settle()
    server.reset()
    server.add(PROMPTS[1], tokens=1)
    server.step()  # Computes the prompt. Workers store it in the next step.
    server.reset()
    name = server.add(PROMPTS[0])
    output = server.scheduler.schedule()
    (tier,) = server.manager.secondary_tiers
    tier.drain_jobs()
    server.scheduler.update_from_output(output, server._execute(output))
    server.settle()
    assert server.requests[name].is_finished()
    server.reset()
    assert server.serve(PROMPTS[0])[0].cached == 64


def test_a_request_whose_parts_displace_each_other_computes_them_below_vllms_own_manager(
    tiering_server: Any,
) -> None:
    """vLLM 0.33 loaded one part of its prompt in the place of another, and then that one again."""
    server = tiering_server(rows=48)
    name = server.add([place % 90 for place in range(104)], tokens=100)
    for _ in range(6):
        server.step()
    for number in range(6):
        server.serve([(place * 7 + number + 1) % 90 for place in range(16)])
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
    server.settle()
    assert len(server.served[name].tokens) == 100


@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_of_a_prompt_that_is_evicted_in_part_the_head_is_left_below_vllms_own_manager(
    tiering_server: Any, policy: str
) -> None:
    """vLLM names the chunks of a store in no order."""
    server = tiering_server(**SMALL, eviction_policy=policy)
    prompts = [[100 * number + place for place in range(24 * BLOCK)] for number in range(3)]
    for prompt in prompts:
        server.serve(prompt)
        server.settle()
    server.reset()
    found = [server.serve(prompt)[0].cached for prompt in reversed(prompts)]
    assert found == [24 * BLOCK - 1, 8 * BLOCK, 0]
