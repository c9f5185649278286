"""What a connector class is given: the engine's configuration, and the adapter of each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.lora import LoRAConfig

from kvstore.errors import ConfigError
from kvstore.vllm.engine import WorkerFacts, has_siblings
from kvstore.vllm.identity.naming import Naming
from tests.vllm.parts import engine_like, make_spec

BLOCK = 4096
ANSWERS = {"model.name": "m"}


def extra(folder: Path | None, **more: Any) -> dict[str, Any]:
    tiers = [{"type": "disk", "path": str(folder), "capacity_bytes": "300MiB"}] if folder else []
    return {
        "cpu_bytes_to_use": 64 * BLOCK,
        "tiers": tiers,
        "automatic_identity": True,
        "identity": {},
        **more,
    }


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvstore.vllm.identity.identity.engine_identity", lambda vllm_config, **more: dict(ANSWERS)
    )


@contextmanager
def manager(spec: Any) -> Iterator[Any]:
    from kvstore.vllm.layout import worker_region

    region = worker_region(spec.config.engine_id, 1, spec.region_shape)
    found = spec.get_manager()
    found.region = region
    try:
        yield found
    finally:
        found.shutdown()


def test_what_the_engine_says_is_in_the_identity_on_disk(tmp_path: Path) -> None:
    from kvstore.tiers.disk.namespace import read_namespace

    spec = make_spec(extra(tmp_path, identity={"build": "b"}), BLOCK, engine=engine_like())
    with manager(spec):
        (folder,) = tmp_path.iterdir()
        identity = read_namespace(folder)["identity"]
    assert identity["model.name"] == "m"
    assert identity["build"] == "b"
    assert identity["tokens_per_hash"] == 16


def test_a_cold_start_says_what_parts_the_engine_from_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(build: str) -> list[str]:
        spec = make_spec(extra(tmp_path, identity={"build": build}), BLOCK, engine=engine_like())
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvstore"), manager(spec):
            pass
        return [line for line in caplog.messages if "differs" in line]

    assert start("a") == []
    (line,) = start("b")
    assert line.endswith("is of the same model and differs in build")
    assert start("a") == start("b") == []


def test_an_engine_that_is_not_given_is_refused_and_the_ways_out_are_named(tmp_path: Path) -> None:
    spec = make_spec(extra(tmp_path), BLOCK)
    with pytest.raises(ConfigError, match="KVStoreConnector.*automatic_identity = false.*identity"):
        spec.get_manager()
    assert list(tmp_path.iterdir()) == []


def test_workers_that_have_not_told_their_backends_get_no_tiers(tmp_path: Path) -> None:
    for workers in ({}, {(0, 0): WorkerFacts(None, "digest")}):
        engine = engine_like()
        engine.workers = workers
        spec = make_spec(extra(tmp_path), BLOCK, engine=engine)
        with pytest.raises(ConfigError, match="backends.*MultiConnector.*automatic_identity"):
            spec.get_manager()
        by_hand = extra(tmp_path, automatic_identity=False, identity={"weights": "1"})
        with manager(make_spec(by_hand, BLOCK, engine=engine)):
            pass


def test_beside_other_connectors_a_worker_tells_nothing() -> None:
    def worker(*connectors: str) -> Any:
        options = {"connectors": [{"kv_connector": name} for name in connectors]}
        transfer = SimpleNamespace(kv_connector_extra_config=options)
        return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))

    assert has_siblings(worker("KVStoreConnector", "NixlConnector"))
    assert not has_siblings(worker("KVStoreConnector"))
    assert not has_siblings(worker())
    assert not has_siblings(None)


def test_an_engine_of_another_shape_is_refused_and_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_shape(vllm_config: Any, **more: Any) -> Any:
        return vllm_config.model_config

    monkeypatch.setattr("kvstore.vllm.identity.identity.engine_identity", other_shape)
    spec = make_spec(extra(tmp_path), BLOCK, engine=engine_like())
    with pytest.raises(ConfigError, match=r"model_config.*automatic_identity = false"):
        spec.get_manager()


def test_without_an_automatic_identity_one_by_hand_is_required(tmp_path: Path) -> None:
    spec = make_spec(extra(tmp_path, automatic_identity=False), BLOCK, engine=engine_like())
    with pytest.raises(ConfigError, match="automatic_identity = false: name in identity"):
        spec.get_manager()
    told = extra(tmp_path, automatic_identity=False, identity={"weights": "1"})
    spec = make_spec(told, BLOCK, engine=engine_like())
    with manager(spec):
        assert spec.identity["weights"] == "1"
        assert "model.name" not in spec.identity


def test_host_memory_alone_needs_no_identity() -> None:
    with manager(make_spec(extra(None), BLOCK)):
        pass


@pytest.mark.parametrize("key", ["automatic_identity", "fingerprint_weights"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_are_true_or_false(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*true or false"):
        make_spec(extra(tmp_path, **{key: value}), BLOCK)


class Server:
    """A scheduler over a manager that knows LoRA."""

    def __init__(self, manager: Any, engine: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        self.manager, self.region, self.engine = manager, manager.region, engine
        self.context, self.end = ReqContext, ScheduleEndContext
        self.count = 0

    def on_new_request(self, request: Any) -> Any:
        context = self.context(request.request_id)
        self.engine.request = request
        self.manager.on_new_request(context)
        self.engine.request = None
        return context

    def arrive(self, path: Path | None = None, adapter: int = 1, inplace: bool = False) -> Any:
        self.count += 1
        lora = path and SimpleNamespace(
            lora_int_id=adapter, lora_path=str(path), load_inplace=inplace
        )
        return self.on_new_request(SimpleNamespace(request_id=f"r{self.count}", lora_request=lora))

    def step(self, *new: Any) -> None:
        self.manager.on_schedule_end(self.end([context.req_id for context in new], ()))

    def lookup(self, keys: list[bytes], context: Any) -> list[str]:
        for _ in range(2000):
            answers = [self.manager.lookup(key, context).name for key in keys]
            if "RETRY" not in answers and "HIT_PENDING" not in answers:
                return answers
            self.step()
            time.sleep(0.001)
        raise AssertionError("deferred forever")

    def store(self, keys: list[bytes], context: Any) -> list[bytes]:
        self.lookup(keys, context)
        out = self.manager.prepare_store(keys, context)
        for key, row in zip(out.keys_to_store, out.store_spec.block_ids, strict=True):
            self.region.row(int(row))[: len(key)] = key
        self.manager.complete_store(set(out.keys_to_store), context)
        return list(out.keys_to_store)

    def load(self, keys: list[bytes], context: Any) -> list[bytes]:
        spec = self.manager.prepare_load(keys, context)
        found = [bytes(self.region.row(int(row))[: len(keys[0])]) for row in spec.block_ids]
        self.manager.complete_load(set(keys), context)
        return found

    def finish(self, *contexts: Any) -> None:
        for context in contexts:
            self.manager.on_request_finished(context)
        self.step()


KEYS = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(4)]
HITS, MISSES = ["HIT"] * 4, ["MISS"] * 4


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


@contextmanager
def server(cache: Path) -> Iterator[Server]:
    engine = engine_like(lora=LoRAConfig())
    with manager(make_spec(extra(cache), BLOCK, engine=engine)) as found:
        yield Server(found, engine)


def test_adapters_and_the_base_model_share_no_chunk(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", b"1"), adapter(tmp_path / "two", b"2")
    with server(tmp_path / "cache") as serving:
        first, second, base = serving.arrive(one), serving.arrive(two, 2), serving.arrive()
        assert serving.store(KEYS, first) == KEYS
        assert serving.lookup(KEYS, first) == HITS
        assert serving.load(KEYS, first) == KEYS
        assert serving.lookup(KEYS, second) == MISSES
        assert serving.lookup(KEYS, base) == MISSES
        assert serving.store(KEYS, base) == KEYS
        assert serving.lookup(KEYS, base) == HITS


def test_events_that_tell_tokens_are_refused_with_adapters(tmp_path: Path) -> None:
    """vLLM keeps what it knows of a chunk until its removal is told, by the key that it gave."""
    told = {**extra(tmp_path), "self_describing_kv_events": True}
    spec = make_spec(told, BLOCK, engine=engine_like(lora=LoRAConfig()))
    if not hasattr(spec, "kv_events_config"):
        pytest.skip("this release has no such events")
    with pytest.raises(ConfigError, match="self_describing_kv_events = true: not for an engine"):
        spec.get_manager()
    with manager(make_spec(told, BLOCK, engine=engine_like())) as found:
        assert found.take_events() == []


def test_an_adapter_hits_after_a_restart_if_its_files_are_the_same(tmp_path: Path) -> None:
    path, cache = adapter(tmp_path / "adapter", b"1"), tmp_path / "cache"

    def answers(content: bytes) -> list[str]:
        adapter(path, content)
        with server(cache) as serving:
            context = serving.arrive(path)
            found = serving.lookup(KEYS, context)
            serving.store(KEYS, context)
            serving.finish(context)
        return found

    assert answers(b"1") == MISSES
    assert answers(b"2") == MISSES
    assert answers(b"1") == answers(b"2") == HITS


def test_a_request_in_doubt_neither_hits_nor_stores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = adapter(tmp_path / "adapter", b"1")
    with server(tmp_path / "cache") as serving:
        first = serving.arrive(path)
        serving.store(KEYS, first)
        adapter(path, b"2")
        with caplog.at_level(logging.WARNING, "kvstore"):
            second = serving.arrive(path)
            assert serving.lookup(KEYS, second) == MISSES
        assert serving.store(KEYS, second) == []
        assert serving.lookup(KEYS, first) == MISSES
        assert "other files than vLLM has loaded" in caplog.text
        serving.finish(first, second)
        # Loaded under another id, the new files are known.
        third = serving.arrive(path, 2)
        assert serving.store(KEYS, third) == KEYS
        assert serving.lookup(KEYS, third) == HITS
        reload = serving.arrive(path, 2, inplace=True)
        assert serving.lookup(KEYS, reload) == serving.lookup(KEYS, third) == MISSES


def test_a_request_that_does_not_show_its_adapter_neither_hits_nor_stores(tmp_path: Path) -> None:
    with server(tmp_path / "cache") as serving:
        base = serving.arrive()
        serving.store(KEYS, base)
        hidden = serving.context("hidden")
        serving.manager.on_new_request(hidden)
        assert serving.lookup(KEYS, hidden) == MISSES
        assert serving.store(KEYS, hidden) == []
        serving.finish(base, hidden)


def test_positions_of_keys_stay_with_the_keys_of_an_adapter(tmp_path: Path) -> None:
    from kvstore.vllm.adapters import Use

    path = adapter(tmp_path / "adapter", b"1")
    with server(tmp_path / "cache") as serving:
        context = serving.arrive(path)
        for number, key in enumerate(KEYS):
            context.set_offload_key_position(key, 16 * (number + 1))
        serving.store(KEYS, context)
        use = context.get_state(Use)
        assert [context.get_offload_key_position(use.key(key)) for key in KEYS] == [16, 32, 48, 64]


def test_a_fingerprint_that_does_not_come_costs_the_deadline_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    with server(tmp_path / "cache") as serving:
        serving.manager._adapters._adapters._take = lambda path, known: Future()
        serving.manager._adapters._adapters._patience = 0.05
        context = serving.arrive(tmp_path)
        assert serving.manager.prepare_store(KEYS, context) is None
        assert serving.lookup(KEYS, context) == MISSES
        assert serving.store(KEYS, context) == []


def test_what_an_operator_tells_parts_engines_and_joins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    naming = Naming(automatic=True, fingerprint=True)
    found = {"weights": "abc", "dtype": "bfloat16", "nothing": None}
    monkeypatch.setattr(Naming, "engine_identity", lambda self, config, engine, told: dict(found))
    told = {"weights": "v1", "groups": 3, "code": "v2", "nothing": "told"}
    assert naming.whole({"groups": 1}, None, None, told) == {
        **found,
        "groups": 1,
        "told.weights": "v1",
        "told.groups": 3,
        "code": "v2",
        "nothing": "told",
    }
