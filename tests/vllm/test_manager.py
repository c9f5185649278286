"""The manager as vLLM's scheduler calls it, over a real disk and real host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import kvstore
from kvstore.vllm.version import HAS_POSITIONS, mediums
from tests.patience import PATIENCE, until
from tests.vllm.parts import make_spec

BLOCK = 4096


def keys_of(name: str, count: int, group: int = 0) -> list[bytes]:
    return [
        f"{name}-{index}".encode().ljust(32, b".") + bytes([0, 0, 0, group])
        for index in range(count)
    ]


class Server:
    """The calls of one scheduler, in vLLM's order."""

    def __init__(
        self,
        folder: Path,
        rows: int,
        groups: int = 1,
        windows: tuple[int | None, ...] = (),
        engine: Any = None,
        **extra: Any,
    ) -> None:
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        from kvstore.vllm.layout import worker_region

        self.context = ReqContext
        self.end = ScheduleEndContext((), ())
        spec = make_spec(
            {
                "cpu_bytes_to_use": rows * BLOCK,
                "tiers": [
                    {
                        "type": "disk",
                        "path": str(folder),
                        "capacity_bytes": "300MiB",
                        "share_after_reset": True,
                    }
                ],
                **extra,
            },
            BLOCK,
            groups=groups,
            windows=windows,
            engine=engine,
        )
        self.region = worker_region(spec.config.engine_id, 1, spec.region_shape)
        self.manager = spec.get_manager()

    def store(self, name: str, keys: list[bytes]) -> int:
        request = self.context(name)
        self.manager.on_new_request(request)
        self.step()
        out = self.manager.prepare_store(keys, request)
        if out is None:
            return 0
        for key, row in zip(out.keys_to_store, out.store_spec.block_ids, strict=True):
            self.region.row(int(row))[: len(key)] = key
        self.manager.complete_store(set(out.keys_to_store), request)
        self.manager.on_request_finished(request)
        return len(out.keys_to_store)

    def step(self) -> None:
        self.manager.on_schedule_end(self.end)

    def settle(self) -> None:
        # A slow disk is no pending work of the server after a while.
        end = time.monotonic() + PATIENCE
        while self.manager.has_pending_work() or self.manager._core.unsaved:
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)

    def scan(self, request: Any, keys: list[bytes]) -> int | None:
        """As `_maximal_prefix_lookup` of vLLM's connector does it."""
        from vllm.v1.kv_offload.base import LookupResult

        hits, deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, request)
            if result is LookupResult.MISS:
                break
            deferred |= result is not LookupResult.HIT
            hits += result is not LookupResult.RETRY
        return None if deferred else hits

    def load(self, name: str, keys: list[bytes]) -> list[bytes]:
        """Ask until there is an answer, load it, return what the rows hold."""
        request = self.context(name)
        self.manager.on_new_request(request)
        end = time.monotonic() + PATIENCE
        while (hits := self.scan(request, keys)) is None:
            assert time.monotonic() < end, "deferred for ever"
            self.step()
            time.sleep(0.001)
        spec = self.manager.prepare_load(keys[:hits], request)
        held = [bytes(self.region.row(int(row))[:36]) for row in spec.block_ids]
        self.step()
        self.manager.complete_load(set(keys[:hits]), request)
        self.manager.on_request_finished(request)
        return held

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "cache", rows=64)
    yield server
    server.close()


def test_stored_chunks_are_loaded_from_host_memory(server: Server) -> None:
    keys = keys_of("a", 20)
    assert server.store("r1", keys) == 20
    assert server.load("r2", keys) == keys


def test_chunks_come_back_from_disk_once_host_memory_has_forgotten_them(server: Server) -> None:
    keys = keys_of("a", 40)
    server.store("r1", keys)
    server.settle()
    for index in range(4):
        server.store(f"other-{index}", keys_of(f"b{index}", 40))
        server.settle()
    assert server.load("r2", keys) == keys
    stats = server.manager.get_stats().reduce()
    assert stats["vllm:kvstore_loaded_tier_chunks:('disk',)"] == 40
    assert stats["vllm:kvstore_tier_failed_reads:('disk',)"] == 0


def test_vllm_is_told_where_a_hit_lies(server: Server) -> None:
    hit_source = pytest.importorskip(
        "vllm.v1.metrics.cache_hit_source", reason="vLLM before 0.32 does not ask"
    )
    keys = keys_of("a", 3)
    server.store("r1", keys)
    assert server.manager.get_load_source(keys[0], None) is hit_source.CacheHitSource.HOST


def test_chunks_come_back_after_a_restart(tmp_path: Path) -> None:
    keys = keys_of("a", 50)
    first = Server(tmp_path, rows=64)
    first.store("r1", keys)
    first.close()
    second = Server(tmp_path, rows=64)
    assert second.load("r2", keys) == keys
    second.close()


def test_a_deferred_request_is_asked_with_two_calls_a_step(server: Server) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    keys = keys_of("a", 40)
    server.store("r1", keys)
    server.settle()
    for index in range(4):
        server.store(f"other-{index}", keys_of(f"b{index}", 40))
        server.settle()
    server.manager._stepper.engine.submit = lambda moves: None  # the disk never answers
    request = server.context("r2")
    server.manager.on_new_request(request)
    assert server.scan(request, keys) is None
    server.step()
    for _ in range(3):
        answers = [server.manager.lookup(key, request) for key in keys[:2]]
        assert answers == [LookupResult.RETRY, LookupResult.MISS]
        server.step()


def test_with_several_groups_every_group_of_a_deferred_request_is_deferred(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    server = Server(tmp_path, rows=64, groups=2)
    keys = keys_of("a", 20) + keys_of("a", 20, group=1)
    server.store("r1", keys)
    server.settle()
    for index in range(4):
        server.store(f"other-{index}", keys_of(f"b{index}", 40))
        server.settle()
    engine = server.manager._stepper.engine
    submit, engine.submit = engine.submit, lambda moves: None
    request = server.context("r2")
    server.manager.on_new_request(request)
    assert server.scan(request, keys) is None
    server.step()
    answers = [server.manager.lookup(key, request) for key in keys]
    assert answers[0] is answers[20] is LookupResult.RETRY
    assert LookupResult.HIT not in answers
    engine.submit = submit
    server.manager._manager._drain = 0.1
    server.close()


# -- an idle server ----------------------------------------------------------------------------


def sparse(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """A cache whose segments hold few chunks each: what to open it with, and the chunks."""
    from kvstore.maintenance.offline import purge

    tier = {"type": "disk", "path": str(folder), "capacity_bytes": "4MiB"}
    extra: dict[str, Any] = {"tiers": [{**tier, "segment_bytes": 100 * 1024}]}
    keys = keys_of("a", 160)
    first = Server(folder, rows=64, **extra)
    for start in range(0, len(keys), 16):
        assert first.store(f"w{start}", keys[start : start + 16]) == 16
        first.settle()
    first.close()
    purge(folder, key=[key for number, key in enumerate(keys) if number % 8])
    extra["tiers"][0]["compaction_rate"] = "1GiB"
    return extra, keys[::8]


def segments(folder: Path) -> int:
    return len(list(folder.rglob("segment-*")))


def test_compaction_goes_on_while_nothing_is_asked_of_the_server(tmp_path: Path) -> None:
    extra, kept = sparse(tmp_path)
    before = segments(tmp_path)
    assert before >= 6
    server = Server(tmp_path, rows=64, **extra)
    end = time.monotonic() + PATIENCE
    while segments(tmp_path) > 3:
        assert time.monotonic() < end, f"{segments(tmp_path)} of {before} segments are left"
        assert not server.manager.has_pending_work(), "a server that is idle shall rest"
        time.sleep(0.02)
    assert [server.load(f"r{key!r}", [key]) for key in kept] == [[key] for key in kept]
    server.close()


def test_an_idle_server_forgets_whose_keys_are_forgotten(tmp_path: Path) -> None:
    from kvstore.tools.cli import main

    keys_file = tmp_path / "keys.toml"
    assert all(main(["keys", str(keys_file), "--add", name]) == 0 for name in ("alice", "bob"))
    theirs = {name: kvstore.tenant_keys(name, keys_of(name, 4)) for name in ("alice", "bob")}
    # As vLLM's keys with a tenant's name.
    server = Server(tmp_path / "cache", rows=64, tenants={}, encryption_keys=str(keys_file))
    for name in theirs:
        request = server.context(name, kv_transfer_params={"kvstore": {"tenant": name}})
        server.manager.on_new_request(request)
        server.step()
        plain = keys_of(name, 4)
        out = server.manager.prepare_store(plain, request)
        assert out is not None
        server.manager.complete_store(set(out.keys_to_store), request)
        server.manager.on_request_finished(request)
    server.settle()
    core = server.manager._core
    assert {*core.chunks} == {*theirs["alice"], *theirs["bob"]}
    assert main(["keys", str(keys_file), "--forget", "alice"]) == 0
    # Nothing is asked of the server any more.
    until(lambda: {*core.chunks} == {*theirs["bob"]})
    until(lambda: not core.hidden)
    assert {*core.tiers[0].entries} == {*theirs["bob"]}
    server.close()


def test_the_end_waits_for_records_to_be_erased_but_not_for_rows_in_use(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    server = Server(place, rows=64, shutdown_timeout_s=10 * PATIENCE)
    keys = keys_of("prompt", 4)
    server.store("writer", keys)
    server.settle()
    request = server.context("reader")
    server.manager.on_new_request(request)
    assert server.scan(request, keys) == 4
    server.manager.prepare_load(keys, request)
    core = server.manager._core
    core.remove(keys)
    begun = time.monotonic()
    server.close()
    # The rows that are being loaded are left behind with the server.
    assert core.hidden
    assert time.monotonic() - begun < PATIENCE
    again = Server(place, rows=64)
    assert again.load("again", keys) == []
    again.close()


def test_compaction_of_an_idle_server_keeps_out_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.engine import scheduler_steps as stepper

    monkeypatch.setattr(stepper, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(stepper, "UPKEEP_SECONDS", 0.0)
    extra, kept = sparse(tmp_path)
    server = Server(tmp_path, rows=8, **extra)
    turns = 0
    poll = server.manager._core.poll

    def watched(*args: Any) -> None:
        nonlocal turns
        turns += 1
        assert server.manager._stepper.turn.acquire(blocking=False), "somebody else's turn"
        poll(*args)
        server.manager._stepper.turn.release()

    monkeypatch.setattr(server.manager._core, "poll", watched)
    for round in range(3):
        for key in kept:
            assert server.load(f"r{round}-{key!r}", [key]) == [key]
    server.close()
    assert turns > 100


def test_without_compaction_an_idle_server_does_nothing(server: Server) -> None:
    polls: list[float] = []
    server.manager._core.poll = lambda now, done=(): polls.append(now)
    time.sleep(0.6)
    assert polls == []


# -- the order of a prompt ---------------------------------------------------------------------


def position(request: Any, *groups: list[bytes]) -> Any:
    """The request as vLLM's scheduler knows it: with the place of each key in its prompt."""
    if not HAS_POSITIONS:
        pytest.skip("vLLM before 0.31 does not tell where a key belongs")
    for keys in groups:
        for number, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (number + 1))
    return request


def scan_window(server: Server, request: Any, keys: list[bytes], window: int) -> int | None:
    """As `_sliding_window_lookup` of vLLM's connector does it, from the end."""
    from vllm.v1.kv_offload.base import LookupResult

    run, deferred, pending = 0, False, False
    for index in range(len(keys) - 1, -1, -1):
        result = server.manager.lookup(keys[index], request)
        if result in (LookupResult.HIT, LookupResult.HIT_PENDING):
            pending |= result is LookupResult.HIT_PENDING
            run += 1
        else:
            deferred |= result is LookupResult.RETRY
            run, pending = 0, False
        if run == window:
            return None if deferred or pending else index + window
    return None if deferred or pending else run


@pytest.mark.parametrize("groups", [1, 2])
def test_a_window_that_is_looked_for_from_its_end_is_told_in_the_order_of_its_prompt(
    tmp_path: Path, groups: int
) -> None:
    full = keys_of("a", 12) if groups == 2 else []
    sliding = keys_of("a", 12, group=groups - 1)
    windows = (None, 4)[2 - groups :]
    first = Server(tmp_path, rows=64, groups=groups, windows=windows)
    first.store("r1", full + sliding)
    first.close()
    server = Server(tmp_path, rows=64, groups=groups, windows=windows)
    ended: list[Any] = []
    server.manager._core._chains.listen(ended.append)
    fetched: list[bytes] = []
    submit = server.manager._stepper.engine.submit

    def watched(moves: Any) -> None:
        fetched.extend(key for move in moves for key in move.keys)
        submit(moves)

    server.manager._stepper.engine.submit = watched
    request = position(server.context("r2"), full, sliding)
    server.manager.on_new_request(request)
    end = time.monotonic() + PATIENCE
    while True:
        hits = [server.scan(request, full)] if full else []
        hits.append(scan_window(server, request, sliding, 4))
        server.step()
        if None not in hits:
            break
        assert time.monotonic() < end
        time.sleep(0.001)
    window = sliding[-4:]
    assert [key for key in fetched if key in sliding] == window
    assert set(fetched) == {*full, *window}
    scan_window(server, request, sliding, 4)
    spec = server.manager.prepare_load(full + window, request)
    held = [bytes(server.region.row(int(row))[:36]) for row in spec.block_ids]
    assert held == full + window, "rows in the order in which vLLM names the keys"
    server.manager.complete_load(set(full + window), request)
    server.manager.on_request_finished(request)
    server.close()
    assert [list(keys) for keys in ended[0]] == ([full, window] if full else [window])


def test_of_a_store_that_does_not_fit_every_group_gets_the_head_of_the_prompt(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, rows=8, groups=2)
    groups = keys_of("a", 12), keys_of("a", 12, group=1)
    request = position(server.context("r"), *groups)
    server.manager.on_new_request(request)
    server.step()
    out = server.manager.prepare_store([*groups[0], *groups[1]], request)
    assert out is not None
    assert list(out.keys_to_store) == groups[0][:4] + groups[1][:4]
    assert len({int(row) for row in out.store_spec.block_ids}) == 8
    server.manager.complete_store(set(out.keys_to_store), request)
    server.close()


def test_a_request_may_choose_tiers_below_host_memory(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, TierFilter, TierMatcher

    below, here = keys_of("a", 4), keys_of("b", 4)
    first = Server(tmp_path, rows=64)
    first.store("w", below)
    first.settle()
    first.close()
    server = Server(tmp_path, rows=64)
    server.store("w", here)

    def answer(key: Any, **wanted: Any) -> LookupResult:
        told = TierFilter((TierMatcher(**wanted),))
        return server.manager.lookup(key, server.context(f"{wanted}", load_tier_filter=told))

    other = ({"medium": Medium.CPU}, {"medium": Medium.STORAGE, "locality": Locality.REMOTE})
    for wanted in other:
        assert answer(below[0], **wanted) is LookupResult.MISS
        assert answer(here[0], **wanted) is LookupResult.HIT
    disk = {"medium": Medium.STORAGE, "locality": Locality.LOCAL}
    assert answer(below[0], **disk) not in (LookupResult.MISS, LookupResult.HIT)
    server.settle()
    server.step()
    assert answer(below[0], **disk) is LookupResult.HIT
    server.close()


def test_a_store_counts_as_remote_for_requests_that_choose(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import Locality, LookupResult, TierFilter, TierMatcher

    (tmp_path / "shared").mkdir(mode=0o700)
    store = {"type": "object", "url": f"file://{tmp_path}/shared"}
    server = Server(tmp_path, rows=64, tiers=[store])
    key = keys_of("a", 1)[0]

    def answer(where: Locality) -> LookupResult:
        told = TierFilter((TierMatcher(locality=where),))
        return server.manager.lookup(key, server.context(f"{where}", load_tier_filter=told))

    assert answer(Locality.LOCAL) is LookupResult.MISS
    assert answer(Locality.REMOTE) is not LookupResult.MISS
    server.close()


def test_events_tell_what_appeared_where(server: Server) -> None:
    medium = mediums()
    keys = keys_of("a", 4)
    server.store("r1", keys)
    server.settle()
    server.step()
    told = {
        (event.medium, event.removed): set(event.keys) for event in server.manager.take_events()
    }
    assert told == {(medium.CPU, False): set(keys), (medium.STORAGE, False): set(keys)}


def test_a_reset_clears_the_disk_for_the_next_process_too(tmp_path: Path) -> None:
    keys = keys_of("a", 10)
    first = Server(tmp_path, rows=64)
    first.store("r1", keys)
    first.settle()
    first.manager.reset_cache()
    assert first.load("r2", keys) == []
    first.close()
    second = Server(tmp_path, rows=64)
    assert second.load("r3", keys) == []
    second.close()


class Trainee(Server):
    """A server whose device copies are begun and land whenever the test says, as vLLM's may."""

    def begin_store(self, name: str, keys: list[bytes]) -> list[int]:
        request = self.context(name)
        self.manager.on_new_request(request)
        self.step()
        out = self.manager.prepare_store(keys, request)
        assert out is not None
        assert len(out.keys_to_store) == len(keys)
        return [int(row) for row in out.store_spec.block_ids]

    def begin_load(self, name: str, keys: list[bytes]) -> list[int]:
        request = self.context(name)
        self.manager.on_new_request(request)
        assert self.scan(request, keys) == len(keys)
        return [int(row) for row in self.manager.prepare_load(keys, request).block_ids]

    def reset(self) -> None:
        """vLLM reports nothing more of what is under way, but for the end of the flush."""
        self.manager.reset_cache()

    def report(self) -> None:
        """The workers' report of a step is in; with the first after a reset they have flushed."""
        self.manager.get_stats()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Trainee, Server]]:
    trainee = Trainee(tmp_path / "cache", rows=16)
    replica = Server(tmp_path / "cache", rows=16)
    yield trainee, replica
    trainee.close()
    replica.close()


def both_reset(pair: tuple[Trainee, Server]) -> None:
    for each in pair:
        each.manager.reset_cache()
    for each in pair:
        while each.manager._core.clearing:
            each.step()
            time.sleep(0.001)


def shared(trainee: Trainee, keys: list[bytes]) -> None:
    """Wait until the trainee has seen what the replica stored."""
    end = time.monotonic() + PATIENCE
    while not any(keys[-1] in tier.entries for tier in trainee.manager._core.tiers):
        assert time.monotonic() < end, "never seen"
        trainee.step()
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_late_device_copy_and_what_is_promoted_after_a_reset_never_meet(
    pair: tuple[Trainee, Server], kind: str
) -> None:
    trainee, replica = pair
    old, new = keys_of("old", 8), keys_of("new", 8)
    if kind == "store":
        late = trainee.begin_store("r1", old)
    else:
        trainee.store("r0", old)
        trainee.settle()
        late = trainee.begin_load("r1", old)
    both_reset(pair)
    replica.store("n1", new)
    replica.settle()
    shared(trainee, new)
    request = trainee.context("r2")
    while (hits := trainee.scan(request, new)) is None:
        trainee.step()
        time.sleep(0.001)
    assert hits == 8
    rows = [int(row) for row in trainee.manager.prepare_load(new, request).block_ids]
    if kind == "load":
        held = [bytes(trainee.region.row(row)[:36]) for row in late]
        assert held == old, "a late load reads what was promoted into its rows"
    for row in late:
        trainee.region.row(row)[:36] = b"late" * 9
    assert [bytes(trainee.region.row(row)[:36]) for row in rows] == new


def test_rows_of_late_copies_are_free_once_the_workers_have_flushed(
    pair: tuple[Trainee, Server],
) -> None:
    from kvstore.vllm.version import TELLS_OF_FLUSHES

    trainee, _ = pair
    pool = trainee.manager._core._pool
    for round in range(3):
        trainee.begin_store(f"s{round}", keys_of("a", 8))
        trainee.reset()
        # The report of the step that was under way comes first: it tells of no flush.
        trainee.report()
        assert pool.held == 8
        trainee.step()
        if TELLS_OF_FLUSHES:
            trainee.manager.on_reset_flushed()
        else:
            assert pool.held == 8
            trainee.report()
        assert (pool.held, pool.free) == (0, 16)


def test_what_is_asked_for_more_often_than_there_are_steps_tells_of_no_flush(
    pair: tuple[Trainee, Server],
) -> None:
    trainee, _ = pair
    trainee.begin_store("s", keys_of("a", 8))
    trainee.reset()
    for _ in range(5):
        trainee.report()
    assert trainee.manager._core._pool.held == 8


def test_a_request_that_goes_on_at_a_reset_stores_no_more_and_the_next_one_does(
    pair: tuple[Trainee, Server],
) -> None:
    trainee, _ = pair
    keys = keys_of("a", 4)
    first = trainee.begin_store("r1", keys)
    trainee.reset()
    trainee.step()
    request = trainee.context("r1")
    out = trainee.manager.prepare_store(keys, request)
    assert out is not None
    assert not out.keys_to_store
    trainee.manager.on_request_finished(request)
    trainee.step()
    again = trainee.begin_store("r1", keys)
    assert len(again) == 4, "another one of that name"
    assert not set(first) & set(again)
    for key, row in zip(keys, again, strict=True):
        trainee.region.row(row)[:36] = key
    trainee.manager.complete_store(set(keys), trainee.context("r1"))
    assert trainee.load("r2", keys) == keys


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_byte": 1}, "unknown key cpu_byte = 1; did you mean cpu_bytes_to_use"),
        ({"chunk_bytes": 5}, "unknown key chunk_bytes = 5: vLLM decides it"),
        ({"automatic_identiy": True}, "did you mean automatic_identity"),
        ({"blocks_per_chunks": 2}, "did you mean blocks_per_chunk"),
        ({"cpu_bytes_to_use": "12 apples"}, "cpu_bytes_to_use = '12 apples'"),
        ({"offload_prompt_only": "false"}, "offload_prompt_only = 'false': must be true or false"),
        ({"self_describing_kv_events": 1}, "self_describing_kv_events = 1: must be true or false"),
        ({"blocks_per_chunk": 2.5}, "blocks_per_chunk = 2.5: must be a whole number"),
        ({"cpu_bytes_to_use": 100}, "must hold at least one chunk of 4096 bytes"),
        (
            {"eviction_policy": "magic"},
            "eviction_policy = 'magic': unknown policy.*known are:.*lru",
        ),
    ],
)
def test_a_bad_value_stops_the_server_with_a_message_that_names_it(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec({"cpu_bytes_to_use": "1MiB", **extra}, BLOCK)


def test_the_spec_module_imports_nothing_heavy_until_the_spec_is_asked_for() -> None:
    import subprocess
    import sys

    code = "import sys, kvstore.vllm; assert not {'torch', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_that_vllm_asks_about_a_request_waits_for_the_step_of_an_idle_engine(
    server: Server,
) -> None:
    entered, leaves = threading.Event(), threading.Event()

    def engine() -> None:
        with server.manager._manager._turn:
            entered.set()
            leaves.wait(PATIENCE)

    holder = threading.Thread(target=engine)
    holder.start()
    assert entered.wait(PATIENCE)
    asking = threading.Thread(target=server.manager.on_request_turn, args=("r",))
    asking.start()
    asking.join(0.1)
    assert asking.is_alive()
    leaves.set()
    for each in (asking, holder):
        each.join(PATIENCE)
        assert not each.is_alive()
