"""Which LoRA weights a request is computed with, as far as it can be known."""

from __future__ import annotations

import functools
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from vllm.lora.request import LoRARequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvstore.vllm import adapters
from kvstore.vllm.adapters import AdapterKeys, Adapters, Use
from kvstore.vllm.engine import Engine
from kvstore.vllm.identity.fingerprint import (
    AbsentError,
    Fingerprint,
    UnreadableError,
    adapter_files,
)
from tests.patience import PATIENCE, until
from tests.vllm.parts import engine_like
from tests.vllm.test_manager import Server, keys_of

KEY = bytes(range(32)) + b"\0\0\0\1"


class Disk:
    """Files of adapters; fingerprints are taken when the test says so."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}
        self.writes = 0
        self.asked: list[tuple[str, Future[Fingerprint]]] = []
        self.at_once = True
        self.unreadable = False

    def write(self, path: str, content: str) -> None:
        self.writes += 1
        self.content[path] = f"{content}:{self.writes}"

    def take(self, path: str, known: Fingerprint | None) -> Future[Fingerprint]:
        future: Future[Fingerprint] = Future()
        self.asked.append((path, future))
        if self.at_once:
            self.answer()
        return future

    def answer(self, count: int = 1000) -> None:
        for path, future in self.asked[:count]:
            if self.unreadable:
                future.set_exception(UnreadableError(f"{path}: the files change"))
            elif path in self.content:
                digest, write = self.content[path].split(":")
                signature = ((path, 0, 0, 0, int(write), int(write)),)
                future.set_result(Fingerprint(digest, signature, 1))
            else:
                future.set_exception(AbsentError(path))
        del self.asked[:count]


class Rig:
    def __init__(self, settings: str = "") -> None:
        self.disk = Disk()
        self.disk.write("a", "first")
        self.adapters = Adapters(self.disk.take, settings, 2.0)
        self.now = 0.0
        self.count = 0

    def arrive(self, adapter: int = 1, path: str = "a", inplace: bool = False) -> Use:
        self.count += 1
        use = self.adapters.arrive(f"r{self.count}", adapter, path, inplace, self.now)
        self.adapters.settle(self.now)
        return use


@pytest.fixture
def rig() -> Rig:
    return Rig()


def clean(use: Use) -> bool:
    return bool(use.salt) and not use.waiting and not use.doubtful


def test_the_same_weights_have_the_same_keys_in_every_process(rig: Rig) -> None:
    other = Rig()
    other.disk.write("a", "first")
    key = rig.arrive().key(KEY)
    assert other.arrive(adapter=7).key(KEY) == key
    assert len(key) == len(KEY)
    assert key[-4:] == KEY[-4:]
    assert key != KEY


def test_other_weights_or_settings_have_other_keys(rig: Rig) -> None:
    rig.disk.write("b", "second")
    keys = {rig.arrive().key(KEY), rig.arrive(2, "b").key(KEY), Rig("bf16").arrive().key(KEY)}
    assert len(keys) == 3


def test_a_touched_file_is_the_same_adapter(rig: Rig) -> None:
    first = rig.arrive()
    rig.disk.write("a", "first")
    assert rig.arrive().key(KEY) == first.key(KEY)


def test_files_that_change_under_the_engine_put_the_adapter_in_doubt(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    first = rig.arrive()
    other = rig.arrive(2)
    rig.disk.write("a", "second")
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert rig.arrive().doubtful
        assert rig.arrive().doubtful
    assert first.doubtful, "it may be computed with either"
    assert clean(other)
    assert len(caplog.records) == 1
    rig.disk.write("a", "first")
    assert rig.arrive().doubtful, "vLLM may have loaded the second meanwhile"
    assert clean(rig.arrive(3)), "loaded afresh under an id of its own"


def test_other_weights_under_a_loaded_id_are_in_doubt_wherever_they_lie(rig: Rig) -> None:
    rig.arrive()
    rig.disk.write("b", "first")
    assert clean(rig.arrive(1, "b"))
    rig.disk.write("c", "second")
    assert rig.arrive(1, "c").doubtful


def test_an_adapter_that_was_loaded_in_place_is_in_doubt_from_then_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    before, other = rig.arrive(), rig.arrive(2)
    rig.disk.at_once = False
    waiting = rig.arrive()
    with caplog.at_level(logging.WARNING, "kvstore"):
        reload = rig.arrive(inplace=True)
    assert "was loaded in place: not offloaded" in caplog.text
    rig.disk.answer()
    rig.disk.at_once = True
    rig.adapters.settle(rig.now)
    assert [use.doubtful for use in (before, waiting, reload, rig.arrive())] == [True] * 4
    assert clean(other)
    assert clean(rig.arrive(3))


def test_an_adapter_that_the_server_loads_in_place_is_in_doubt_before_its_next_request(
    tmp_path: Path,
) -> None:
    """Of `/v1/load_lora_adapter` no request tells, and requests of the adapter may be under way."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("weights")
    keys = AdapterKeys("", PATIENCE)
    workers = SimpleNamespace(collective_rpc=lambda *_, **__: [True])

    def begun(name: str, adapter: int) -> Use:
        lora = LoRARequest(f"adapter {adapter}", adapter, str(tmp_path))
        context = ReqContext(req_id=name)
        opened = SimpleNamespace(request_id=name, lora_request=lora)
        keys.arrived(context, Engine(None, None, request=opened))
        use = keys.use(context)
        assert use is not None

        def settled() -> bool:
            keys.settle()
            return clean(use)

        until(settled)
        return use

    one, other = begun("r1", 1), begun("r2", 2)
    assert Executor.add_lora(workers, LoRARequest("adapter 1", 1, str(tmp_path)))
    assert clean(one)
    again = LoRARequest("adapter 1", 1, str(tmp_path), load_inplace=True)
    assert Executor.add_lora(workers, again)
    assert one.doubtful
    assert clean(other)
    # Nothing was computed with what it replaces.
    assert Executor.add_lora(workers, LoRARequest("adapter 3", 3, str(tmp_path), load_inplace=True))
    assert clean(begun("r3", 3))
    keys.close()


def test_files_that_do_not_answer_hold_up_no_other_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_model.safetensors").write_text("weights")
    answers = threading.Event()
    looks: list[str] = []

    def files(path: str) -> list[Path]:
        looks.append(path)
        if path == "dead":
            answers.wait(PATIENCE)
        return adapter_files(path)

    monkeypatch.setattr(adapters, "adapter_files", files)
    keys = AdapterKeys("", 0.5)
    its = keys._adapters
    dead = [its.arrive(f"dead-{number}", 1, "dead", False, time.monotonic()) for number in range(3)]
    others = [its.arrive(f"r{n}", n, str(tmp_path), False, time.monotonic()) for n in (2, 3)]

    def settled() -> bool:
        keys.settle()
        return not any(use.waiting for use in [*dead, *others])

    until(settled)
    assert all(use.doubtful for use in dead)
    assert all(map(clean, others))
    assert looks.count("dead") == 1, "those that come meanwhile share what is taken"
    answers.set()
    keys.close()


def test_requests_wait_for_their_fingerprint_in_turn(rig: Rig) -> None:
    rig.disk.at_once = False
    one, two = rig.arrive(), rig.arrive()
    assert one.waiting
    assert two.waiting
    rig.disk.answer(1)
    rig.adapters.settle(rig.now)
    assert clean(one)
    assert two.waiting
    rig.disk.answer()
    rig.adapters.settle(rig.now)
    assert clean(two)


def test_nobody_waits_longer_than_the_deadline_and_nothing_is_guessed_then(rig: Rig) -> None:
    rig.disk.at_once = False
    use = rig.arrive()
    rig.adapters.settle(1.9)
    assert use.waiting
    rig.adapters.settle(2.0)
    assert not use.waiting
    assert use.doubtful
    rig.disk.answer()
    rig.disk.at_once = True
    assert rig.arrive().doubtful, "what vLLM has loaded was not seen in time"


def test_what_cannot_be_read_is_in_doubt_from_then_on(rig: Rig) -> None:
    """vLLM may have loaded other files than lie there when they can be read again."""
    loaded = rig.arrive(2)
    rig.disk.unreadable = True
    assert rig.arrive().doubtful
    assert rig.arrive(2).doubtful
    rig.disk.unreadable = False
    rig.disk.write("a", "second")
    assert rig.arrive().doubtful
    assert rig.arrive(2).doubtful
    assert loaded.doubtful
    assert clean(rig.arrive(3))


def test_a_fingerprint_that_nobody_takes_any_more_is_none(rig: Rig) -> None:
    """As when the server goes down."""
    rig.disk.at_once = False
    use = rig.arrive()
    assert use.taken is not None
    assert use.taken.cancel()
    rig.adapters.settle(0.0)
    assert use.doubtful


def test_an_adapter_that_is_not_there_yet_may_come(rig: Rig) -> None:
    assert rig.arrive(5, "org/name").doubtful
    rig.disk.write("org/name", "x")
    assert clean(rig.arrive(5, "org/name"))


def test_a_request_whose_adapter_nobody_tells_is_in_doubt(rig: Rig) -> None:
    assert rig.adapters.unknown("r").doubtful


def test_a_finished_request_keeps_its_keys_for_what_is_under_way(rig: Rig) -> None:
    use = rig.arrive()
    key = use.key(KEY)
    rig.disk.write("a", "second")
    rig.arrive()
    assert use.key(KEY) == key


@pytest.mark.parametrize("then", ["same", "others", "gone", "silent"])
def test_what_a_request_stored_goes_if_its_files_were_others_when_it_was_computed(
    rig: Rig, then: str
) -> None:
    """It waits in vLLM's queue, and vLLM reads the files when it is computed."""
    use, idle = rig.arrive(), rig.arrive()
    match then:
        case "others":
            rig.disk.write("a", "second")
        case "gone":
            del rig.disk.content["a"]
        case "silent":
            rig.disk.at_once = False
    use.stored.append(OffloadKey(KEY))
    removed: list[str] = []
    for name, each in (("stored", use), ("idle", idle)):
        rig.adapters.leave(each, functools.partial(removed.append, name), rig.now)
    assert rig.adapters.leaving
    for rig.now in (1.0, 2.0):
        rig.adapters.settle(rig.now)
        assert bool(rig.adapters.leaving) is (then == "silent" and rig.now < 2.0)
    assert removed == ([] if then == "same" else ["stored"])
    assert clean(use) is clean(rig.arrive()) is (then == "same")


def test_what_a_request_stored_goes_if_its_adapter_came_into_doubt_meanwhile(rig: Rig) -> None:
    use = rig.arrive()
    use.stored.append(OffloadKey(KEY))
    rig.disk.write("a", "second")
    assert rig.arrive().doubtful
    removed: list[bool] = []
    rig.adapters.leave(use, lambda: removed.append(True), rig.now)
    assert removed
    assert not rig.adapters.leaving


@pytest.mark.parametrize("tenants", [{}, {"tenants": {}}])
@pytest.mark.parametrize("ends", ["step", "shutdown"])
def test_what_was_stored_before_its_files_changed_is_found_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, tenants: dict[str, Any]
) -> None:
    """Also where the request has not ended when the engine is told to."""
    from vllm.config import LoRAConfig

    monkeypatch.setattr(
        "kvstore.vllm.identity.identity.engine_identity", lambda engine, **more: {"weights": "w"}
    )
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    keys = keys_of("prompt", 4)

    def serve(*, changed: bool = False) -> int:
        """How many chunks are found; those that are not are stored."""
        (adapter / "adapter_model.safetensors").write_bytes(b"first")
        engine = engine_like(lora=LoRAConfig(max_lora_rank=8))
        more = {"automatic_identity": True, "identity": {}, **tenants}
        server = Server(tmp_path / "cache", rows=16, engine=engine, **more)
        lora = LoRARequest("mine", 1, str(adapter))
        engine.request = SimpleNamespace(request_id="r", lora_request=lora, cache_salt=None)
        context = ReqContext("r")
        server.manager.on_new_request(context)
        engine.request = None
        found: list[int | None] = []

        def is_found() -> bool:
            found.append(server.scan(context, keys))
            server.step()
            return found[-1] is not None

        until(is_found)
        out = server.manager.prepare_store(keys, context)
        assert out is not None
        assert len(out.keys_to_store) == 4 - (found[-1] or 0)
        server.manager.complete_store(set(out.keys_to_store), context)
        server.settle()
        if changed:
            (adapter / "adapter_model.safetensors").write_bytes(b"second")
        if ends == "step":
            server.manager.on_request_finished(context)
            server.step()
            server.settle()
        server.close()
        return found[-1] or 0

    assert [serve(changed=True), serve(), serve()] == [0, 0, 4]


class Reloads(RuleBasedStateMachine):
    """vLLM loads, evicts and reloads; whoever is clean was computed with what its keys say.

    Files change only while vLLM holds the adapter, or with a reload; what is loaded on
    eviction is what lies there at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.adapters = Adapters(self.disk.take, "", 2.0)
        self.disk.write("a", "0")
        self.loaded: str | None = None
        self.live: list[tuple[Use, bool]] = []
        self.count = 0
        self.keys: dict[bytes, str] = {}

    def _content(self) -> str:
        return self.disk.content["a"].split(":")[0]

    @rule(content=st.sampled_from("012"))
    @precondition(lambda self: self.loaded is not None)
    def write(self, content: str) -> None:
        self.disk.write("a", content)

    @rule(inplace=st.booleans(), unreadable=st.booleans())
    def arrive_and_run(self, inplace: bool, unreadable: bool) -> None:
        self.count += 1
        self.disk.unreadable = unreadable
        use = self.adapters.arrive(f"r{self.count}", 1, "a", inplace, 0.0)
        self.adapters.settle(0.0)
        self.live.append((use, inplace))
        if inplace or self.loaded is None:
            self.loaded = self._content()
        self.step()

    @rule()
    @precondition(lambda self: self.live)
    def step(self) -> None:
        if any(inplace for _, inplace in self.live):
            # vLLM reads the files again in each step of such a request.
            self.loaded = self._content()
        for use, _ in self.live:
            if clean(use):
                told = self.keys.setdefault(use.key(KEY), str(self.loaded))
                assert told == self.loaded

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def finish(self, data: st.DataObject) -> None:
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    @rule(unreadable=st.booleans())
    @precondition(lambda self: not self.live and self.loaded is not None)
    def evict_and_load(self, unreadable: bool) -> None:
        """Room was needed for other adapters, and this one is asked for again."""
        self.loaded = None
        self.arrive_and_run(False, unreadable)


TestEngine = Reloads.TestCase
