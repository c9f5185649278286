"""Our disk tier in vLLM's own tiering: under its real manager, and in a real engine."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvstore.core.tier_only import Jobs
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.disk import DiskTier
from kvstore.vllm.engine import building
from tests.exported import Exported
from tests.patience import PATIENCE
from tests.tools.support import command
from tests.vllm import parts
from tests.vllm.engines import (
    ENGINE_SECONDS,
    ONE_PROCESS,
    Run,
    run_engine,
    start_script,
    with_root,
)
from tests.vllm.parts import make_spec
from tests.vllm.tiering import CHUNK, SLOTS, Server, key_of, keys_of, options, segment_bytes


def segments(path: Path) -> list[Path]:
    return sorted(path.rglob("segment-*.safetensors"))


# -- what it does ----------------------------------------------------------------------------


def test_it_is_a_secondary_tier_of_vllm_by_one_line_of_configuration(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    with Server(options(tmp_path)) as server:
        assert isinstance(server.tier, SecondaryTierManager)
        assert not type(server.tier).__abstractmethods__
        assert str(server.tier.cache_hit_source.name) == "DISK"


def test_chunks_are_found_after_a_restart(tmp_path: Path) -> None:
    keys = keys_of(range(12))
    with Server(options(tmp_path)) as server:
        assert server.get(keys) == 0
        assert server.put(keys) == keys
        assert server.counters["tier_written_chunks"] == 12
        assert server.counters["tier_chunks"] == 12
    with Server(options(tmp_path)) as server:
        assert server.get([*keys, key_of(99)]) == 12
        assert server.counters["tier_read_chunks"] == 12
        # From host memory this time.
        assert server.get(keys) == 12
        assert server.counters["tier_read_chunks"] == 12
    assert command("verify", str(tmp_path)).returncode == 0
    assert "12" in command("inspect", str(tmp_path)).stdout
    assert command("compact", str(tmp_path)).returncode == 0
    with Server(options(tmp_path)) as server:
        assert server.get(keys) == 12


def test_reads_and_writes_are_spans(tmp_path: Path, exported: Exported) -> None:
    keys = keys_of(range(12))
    for fresh in (True, False):
        with Server(options(tmp_path, spans=True)) as server:
            assert server.put(keys) == keys if fresh else server.get(keys) == 12
    for kind in ("cascade", "promotion"):
        spans = exported.of(kind)
        assert sum(span.attributes["kvstore.chunks_done"] for span in spans) == 12
        assert {span.attributes["kvstore.tier"] for span in spans} == {"disk"}
    assert exported.of("deferral") == []


def test_a_reset_of_host_memory_waits_for_jobs_and_keeps_the_disk(tmp_path: Path) -> None:
    with Server(options(tmp_path), rows=48) as server:
        server.put(keys_of(range(8)), settle=False)
        server.forget_host()
        assert not server.manager.has_pending_work()
        assert server.get(keys_of(range(8))) == 8


def test_stores_that_wait_at_the_end_are_finished(tmp_path: Path) -> None:
    with Server(options(tmp_path)) as server:
        server.put(keys_of(range(10)), settle=False)
    with Server(options(tmp_path)) as server:
        assert server.get(keys_of(range(10))) == 10


def test_uses_are_recorded_while_the_server_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.core.recency.NOTE_SECONDS", 0.5)
    with Server(options(tmp_path)) as server:
        server.put(keys_of(range(8)))
        server.forget_host()
        assert server.get(keys_of(range(4))) == 4
        tier, end = server.tier._runner._jobs.target, time.monotonic() + PATIENCE
        while tier.unrecorded:
            assert time.monotonic() < end, "uses that a kill would lose are never recorded"
            time.sleep(0.05)
        assert server.get(keys_of(range(4))) == 4


def test_upkeep_lets_nothing_leave_between_a_lookup_and_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(options(tmp_path)) as server:
        server.put(keys_of(range(8)))
        runner = server.tier._runner
        steps: list[int] = []
        hand_over = runner._hand_over

        def counted(now: float) -> None:
            steps.append(1)
            hand_over(now)

        monkeypatch.setattr(Jobs, "upkeep", True)
        monkeypatch.setattr(runner, "_hand_over", counted)

        def idle() -> int:
            """For long: how many steps of upkeep there are then."""
            steps.clear()
            runner._ended = -math.inf
            runner._go_on_while_idle()
            return len(steps)

        runner.end_step()
        assert idle()
        runner.lookup(keys_of(range(1))[0])
        assert not idle()
        runner.end_step()
        assert idle()


def test_a_slow_disk_is_closed_in_order_though_not_all_stores_fit_in_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = DiskTier.write

    async def slow(self: DiskTier, *told: Any) -> Any:
        await asyncio.sleep(0.3)
        return await write(self, *told)

    told: dict[str, Any] = {"shutdown_timeout_s": 4.0, "write_queue_bytes": 4 * CHUNK}
    told["capacity_bytes"] = 8 * segment_bytes()
    with Server(options(tmp_path, **told), rows=256) as server:
        server.put(keys_of(range(8)))
        monkeypatch.setattr(DiskTier, "write", slow)
        server.put(keys_of(range(8, 108)), settle=False)
        server.step()
    assert "left behind" not in caplog.text
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{server.spec.config.engine_id}*"))
    with Server(options(tmp_path, **told), rows=256) as server:
        assert 8 < server.get(keys_of(range(108))) < 108


def test_capacity_is_a_hard_limit_and_the_coldest_leave(tmp_path: Path) -> None:
    capacity = 2 * segment_bytes()
    with Server(options(tmp_path, capacity_bytes=capacity)) as server:
        for first in range(0, 128, 8):
            server.put(keys_of(range(first, first + 8)))
            assert sum(path.stat().st_size for path in segments(tmp_path)) <= capacity
        assert server.counters["tier_evicted_chunks"] >= 128 - 2 * SLOTS
        found = server.each(range(128))
        assert found <= set(range(128 - 2 * SLOTS, 128))
        assert len(found) >= SLOTS
    # A clean stop keeps who is cold and who is not.
    with Server(options(tmp_path, capacity_bytes=capacity)) as server:
        assert server.each(range(128)) == found


def test_policy_and_admission_come_from_the_registry(tmp_path: Path) -> None:
    told = {"eviction_policy": "hit-density", "admission": {"name": "reuse", "threshold": 2}}
    with Server(options(tmp_path, **told)) as server:
        server.put(keys_of(range(4)))
        assert server.counters["tier_declined_chunks"] == 4
        server.forget_host()
        # Offered for the second time.
        server.put(keys_of(range(4)))
        server.forget_host()
        assert server.get(keys_of(range(4))) == 4
        assert "hit-density" in server.tier._runner.description


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    with Server(options(tmp_path)) as server:
        server.put(keys_of(range(6)))
        server.forget_host()
        server.put(keys_of(range(8)))
        assert server.counters["tier_written_chunks"] == 8


def test_events_tell_what_the_disk_has_stored_and_given_up(tmp_path: Path) -> None:
    capacity = segment_bytes()
    with Server(options(tmp_path, capacity_bytes=capacity, enable_kv_events=True)) as server:
        server.put(keys_of(range(SLOTS)))
        server.put(keys_of(range(50, 54)))
        told = [each for each in server.manager.take_events() if each.medium.name == "STORAGE"]
    stored = [key for each in told if not each.removed for key in each.keys]
    gone = [key for each in told if each.removed for key in each.keys]
    assert set(stored) == set(keys_of([*range(SLOTS), *range(50, 54)]))
    assert len(gone) == 4
    assert {each.locality.name for each in told} == {"LOCAL"}


# -- whose chunks they are ---------------------------------------------------------------------


def test_chunks_of_another_identity_are_not_used(tmp_path: Path) -> None:
    with Server(options(tmp_path)) as server:
        server.put(keys_of(range(4)))
    with Server(options(tmp_path, identity={"model": "other"})) as server:
        assert server.get(keys_of(range(4))) == 0
        server.put(keys_of(range(2)))
    with Server(options(tmp_path)) as server:
        assert server.get(keys_of(range(4))) == 4
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == 2


def test_our_own_spec_finds_the_same_chunks(tmp_path: Path) -> None:
    from kvstore.vllm.layout import worker_region

    keys = keys_of(range(4))
    with Server(options(tmp_path)) as server:
        server.put(keys)
    disk = {"type": "disk", "path": str(tmp_path), "capacity_bytes": 4 * segment_bytes()}
    spec = make_spec(
        {
            "cpu_bytes_to_use": 8 * CHUNK,
            "tiers": [{**disk, "segment_bytes": segment_bytes()}],
        },
        CHUNK,
    )
    worker_region(spec.config.engine_id, 1, spec.region_shape)
    manager: Any = spec.get_manager()
    try:
        tier = manager._core.tiers[0]
        assert all(key in tier.entries for key in keys)
    finally:
        manager.shutdown()


def test_two_servers_on_one_path_share_what_they_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine.engine.FOLLOW_SECONDS", 0.02)
    rounds = [keys_of(range(6 * number, 6 * number + 6)) for number in range(6)]
    with Server(options(tmp_path)) as one, Server(options(tmp_path)) as other:
        # More often than changes are told ahead.
        for keys in rounds:
            one.put(keys)
            end = time.monotonic() + PATIENCE
            while other.get(keys) < 6 and time.monotonic() < end:
                time.sleep(0.02)
            assert other.get(keys) == 6
        # What the neighbour keeps is not written twice.
        other.forget_host()
        other.put(rounds[0])
        assert other.counters.get("tier_written_chunks", 0) == 0


def test_without_the_engines_configuration_nothing_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="automatic_identity = false"):
        Server(options(tmp_path, automatic_identity=True))
    with pytest.raises(ConfigError, match="name in identity"):
        Server(options(tmp_path, identity={}))


def test_the_identity_is_found_at_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvstore.vllm.identity.identity.engine_identity",
        lambda engine, **more: {"weights": engine.weights},
    )

    def found(weights: str) -> int:
        tier = options(tmp_path, automatic_identity=True, identity={})
        server = Connector(tier, weights)
        with server:
            count = server.get(keys_of(range(4)))
            server.put(keys_of(range(4)))
        return count

    assert [found("a"), found("b"), found("a")] == [0, 0, 4]


class Connector(Server):
    """Builds its manager for an engine, and tells requests, as `KVStoreConnector` does."""

    def __init__(self, tier: dict[str, Any], weights: str, lora: Any = None) -> None:
        self.engine = parts.engine_like(lora=lora)
        self.engine.vllm_config.weights = weights
        with building(self.engine):
            super().__init__(tier)
        self.adapter: Path | None = None

    def request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        lora = None
        if self.adapter is not None:
            lora = SimpleNamespace(lora_int_id=1, lora_path=str(self.adapter), load_inplace=False)
        name = f"r{next(self._requests)}"
        request = SimpleNamespace(request_id=name, lora_request=lora)
        context = ReqContext(request.request_id)
        self.engine.request = request
        self.manager.on_new_request(context)
        self.engine.request = None
        end = time.monotonic() + PATIENCE
        while lora is not None and time.monotonic() < end:
            # Its files are read elsewhere.
            use = self.tier._adapters.use(context)
            if not use.waiting:
                break
            time.sleep(0.005)
        return context


def test_an_adapters_chunks_are_those_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvstore.vllm.identity.identity.engine_identity", lambda engine, **more: {"weights": "w"}
    )
    from vllm.config import LoRAConfig

    lora = LoRAConfig(max_lora_rank=8)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")

    def found(content: bytes, *, without: bool = False) -> int:
        (adapter / "adapter_model.safetensors").write_bytes(content)
        tier = options(tmp_path / "cache", automatic_identity=True, identity={})
        with Connector(tier, "w", lora) as server:
            server.adapter = None if without else adapter
            count = server.get(keys_of(range(4)))
            server.put(keys_of(range(4)))
        return count

    assert [found(b"one"), found(b"two"), found(b"one"), found(b"two")] == [0, 0, 4, 4]
    assert [found(b"one", without=True), found(b"two", without=True)] == [0, 4]


# -- faults ------------------------------------------------------------------------------------


def test_a_flipped_byte_is_a_miss_of_that_chunk(tmp_path: Path) -> None:
    keys = keys_of(range(8))
    with Server(options(tmp_path)) as server:
        server.put(keys)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    from kvstore.testing.bench import payload_of

    place = data.index(payload_of(keys[3], CHUNK)[:64])
    with path.open("r+b") as file:
        file.seek(place + CHUNK // 2)
        byte = file.read(1)
        file.seek(place + CHUNK // 2)
        file.write(bytes([byte[0] ^ 1]))
    with Server(options(tmp_path)) as server:
        assert server.get(keys) == 3
        assert server.counters["tier_failed_reads"] == 1
        assert server.get(keys) == 3
        # Computed anew, and stored anew.
        server.put(keys)
        assert server.counters["tier_written_chunks"] == 1
    with Server(options(tmp_path)) as server:
        assert server.get(keys) == 8
    assert command("verify", str(tmp_path)).returncode == 0


def test_after_kill_9_every_chunk_that_was_reported_stored_is_found(tmp_path: Path) -> None:
    writer, said = tmp_path / "writer.py", tmp_path / "said.txt"
    writer.write_text("""
import json, os, sys
from tests.vllm.tiering import Server, keys_of
said = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with Server(json.loads(sys.argv[1]), rows=64) as server:
    for first in range(int(sys.argv[2]), 10**6, 8):
        server.put(keys_of(range(first, first + 8)))
        os.write(said, f"{first}\\n".encode())
""")
    tier = options(tmp_path / "cache", capacity_bytes=400 * segment_bytes())
    chance, log = random.Random(7), tmp_path / "log.txt"
    for life in range(4):
        before = said.stat().st_size if said.exists() else 0
        arguments = [json.dumps(tier), str(life * 100_000), str(said)]
        process = start_script(writer, arguments, tmp_path, log, with_root())
        end = time.monotonic() + ENGINE_SECONDS
        while not said.exists() or said.stat().st_size == before:
            assert Path(f"/proc/{process.pid}").exists(), log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    reported = [int(line) for line in said.read_text().splitlines()]
    assert len({first // 100_000 for first in reported}) == 4
    with Server(tier) as server:
        for first in reported:
            server.forget_host()
            assert server.get(keys_of(range(first, first + 8))) == 8
        assert server.counters.get("tier_failed_reads", 0) == 0
    for region in Path("/dev/shm").glob("vllm_offload_tiering-*.mmap"):
        # vLLM leaves the memory of a scheduler that is killed before its workers have come.
        if not Path(f"/proc/{region.name.split('-')[1]}").exists():
            region.unlink(missing_ok=True)


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"capacity": 1},
            "unknown key capacity = 1; did you mean capacity_bytes? allowed are: path",
        ),
        ({"capacity_bytes": "much"}, "capacity_bytes = 'much'"),
        ({"capacity_bytes": 4096}, "capacity_bytes = 4096: smaller than one segment"),
        ({"segment_bytes": 4096}, "segment_bytes = 4096: a segment must hold"),
        ({"path": ""}, "path = ''"),
        ({"eviction_policy": "best"}, "eviction_policy = 'best'"),
        ({"admission": "best"}, "admission = 'best'"),
        ({"io": "fast"}, "io = 'fast'"),
        ({"flow": "demote"}, "flow = 'demote': must be 'write-through'"),
        ({"locality": "near"}, "locality = 'near': must be one of: LOCAL, REMOTE"),
        ({"enable_kv_events": "yes"}, "enable_kv_events = 'yes': must be true or false"),
        ({"fingerprint_weights": 1}, "fingerprint_weights = 1: must be true or false"),
        ({"deadline_s": -1}, "deadline_s = -1"),
        ({"cpu_bytes_to_use": 1}, "unknown key cpu_bytes_to_use = 1"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(KVStoreError) as raised:
        Server({**options(tmp_path), **wrong})
    assert message in str(raised.value)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "tiering-" in name]


def test_a_path_is_required(tmp_path: Path) -> None:
    tier = options(tmp_path)
    del tier["path"]
    with pytest.raises(ConfigError, match="missing key path"):
        Server(tier)


def test_parts_of_chunks_that_vllm_may_store_as_whole_ones_are_not_taken(tmp_path: Path) -> None:
    with Server(options(tmp_path / "one"), groups=2) as server:
        keys = [key_of(number, group) for number in range(4) for group in (0, 1)]
        server.put(keys)
        server.forget_host()
        assert server.get(keys) == 8
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tests.vllm.parts import offloading_config

    extra = {"cpu_bytes_to_use": 8 * CHUNK, "secondary_tiers": [options(tmp_path / "two")]}
    config = offloading_config(extra, CHUNK // 2, "tiering-parts", blocks_per_chunk=2, groups=2)
    with pytest.raises(ConfigError, match="may have layers with a sliding window"):
        TieringOffloadingSpec(config).get_manager()


def test_the_canonical_layout_of_vllms_rows_is_refused(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tests.vllm.parts import offloading_config

    extra = {
        "cpu_bytes_to_use": 8 * CHUNK,
        "secondary_tiers": [options(tmp_path)],
        "canonical_layout": True,
    }
    config = offloading_config(extra, CHUNK, "tiering-canonical")
    with pytest.raises(ConfigError, match="canonical_layout = true has not been tried"):
        TieringOffloadingSpec(config).get_manager()


def test_host_memory_that_direct_io_cannot_use_is_moved_through_the_page_cache(
    tmp_path: Path,
) -> None:
    import numpy as np
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tests.vllm.parts import offloading_config

    memory = np.zeros(9 * CHUNK, np.int8)
    first = -memory.ctypes.data % 4096 + 8
    view: Any = memory[first : first + 8 * CHUNK].reshape(8, CHUNK)
    spec = TieringOffloadingSpec(
        offloading_config({"cpu_bytes_to_use": 8 * CHUNK}, CHUNK, "tiering-unaligned")
    )
    with pytest.raises(ConfigError, match="io = 'aio': vLLM's host memory does not begin"):
        SecondaryTierFactory.create_secondary_tier(
            options(tmp_path, io="aio"), memoryview(view), spec
        )
    tier: Any = SecondaryTierFactory.create_secondary_tier(
        options(tmp_path), memoryview(view), spec
    )
    try:
        view[:4] = np.random.default_rng(0).integers(-128, 128, (4, CHUNK), np.int8)
        keys = keys_of(range(4))
        for number, rows, load in ((0, range(4), False), (1, range(4, 8), True)):
            job = TransferJob(number, keys, np.array(rows), load, ReqContext("r"))
            (tier.submit_load if load else tier.submit_store)(job)
            tier.drain_jobs()
            (result,) = tier.get_finished_jobs()
            assert result.success
        assert (view[4:] == view[:4]).all()
        assert "buffered" in tier._runner.description
    finally:
        tier.shutdown()


# -- against a model ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_acts_give_right_bytes_or_a_miss(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    prompts = [keys_of(range(100 * n, 100 * n + chance.randint(3, 14))) for n in range(12)]
    policy = chance.choice(["lru", "arc", "hit-density", "s3-fifo"])
    tier = options(tmp_path, capacity_bytes=3 * segment_bytes(), eviction_policy=policy)
    ever: set[bytes] = set()
    server, hits = Server(tier, rows=24), 0
    try:
        for _ in range(150):
            prompt = chance.choice(prompts)
            act = chance.random()
            if act < 0.45:
                found = server.get(prompt)
                hits += found
                # What nobody has stored is never found.
                assert set(prompt[:found]) <= ever
            elif act < 0.85:
                ever |= set(server.put(prompt, settle=chance.random() < 0.5))
            elif act < 0.95:
                server.forget_host()
            else:
                server.close()
                server = Server(tier, rows=24)
            held = sum(path.stat().st_size for path in segments(tmp_path))
            assert held <= 3 * segment_bytes()
        server.settle()
        # Every row can be had: none is held by a job.
        assert len(server.put(keys_of(range(5000, 5024)))) == 24
    finally:
        server.close()
    assert hits
    assert command("verify", str(tmp_path)).returncode == 0


# -- a real engine -----------------------------------------------------------------------------

PROMPTS = [[seed, 1024] for seed in range(300, 304)]


def engine(folder: Path, cache: Path, rounds: list[dict[str, Any]], launcher: int = 0) -> Run:
    """vLLM's tiering with its own region and manager; its worker refuses the CPU platform."""
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.vllm",
        "path": str(cache),
        "capacity_bytes": "1GiB",
        "segment_bytes": "34MiB",
        "deadline_s": 30,
    }
    scenario = {
        "kv_transfer_config": {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostTieringOffloadingSpec",
                "spec_module_path": "benchmarks.serving.native",
                "cpu_bytes_to_use": 48 * 2**20,
                "secondary_tiers": [tier],
            },
        },
        "rounds": rounds,
    }
    return run_engine(folder, scenario, {**ONE_PROCESS, **with_root()}, launcher=launcher)


def test_an_engine_answers_the_same_with_chunks_of_our_tier_after_a_restart(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    # One after the other: what a busy disk cannot take is refused, and never offered again.
    one_by_one = [{"name": f"{n}", "prompts": [one], "pause": 1} for n, one in enumerate(PROMPTS)]
    cold = list(engine(tmp_path / "first", cache, one_by_one).rounds.values())
    assert [one.cached for one in cold] == [[0]] * len(PROMPTS)
    second = engine(
        tmp_path / "second",
        cache,
        [
            {"name": "disk", "prompts": PROMPTS},
            {"name": "together", "prompts": PROMPTS, "together": True},
        ],
        launcher=1,
    )
    for name in ("disk", "together"):
        assert second.rounds[name].tokens == [one.tokens[0] for one in cold]
    # All but the last block, at least, which one version computes in any case.
    assert min(second.rounds["disk"].cached) >= 992
    assert second.rounds["disk"].metrics["tier_read_chunks"] >= len(PROMPTS) * 31
    assert second.rounds["disk"].metrics["tier_chunks"] >= len(PROMPTS) * 31
    assert second.rounds["together"].metrics.get("tier_failed_reads", 0) == 0
    assert "in vLLM's tiering" in second.log
    assert command("verify", str(cache)).returncode == 0
