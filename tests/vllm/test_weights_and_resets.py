"""Resets and pauses in any order while weights change: no chunk is served to other weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_offload.base import LookupResult

from tests.patience import until
from tests.vllm.test_manager import Server, keys_of

KEYS, OTHERS = keys_of("a", 4), keys_of("b", 4)
FIRST, OTHER = 1, 2
"""Weights, and what is computed with them."""

_names: dict[str, Any] = {"__name__": "vllm.v1.engine.core"}
exec("def _reset_caches(manager): manager.reset_cache()", _names)
pause: Callable[[Any], None] = _names["_reset_caches"]


def reset(manager: Any) -> None:
    manager.reset_cache()


class Executor:
    """What asks the workers; here it is the worker, too, which may be `slow` to answer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8, bias=False)
        self.load(FIRST)
        self.slow = False
        self.asked: list[tuple[Callable[[Any], Any], Future[Any]]] = []

    def load(self, weights: int) -> None:
        self.model.weight.data.fill_(weights)

    def collective_rpc(self, ask: Callable[[Any], Any], *, non_block: bool = False) -> Any:
        assert non_block, "a scheduler never waits for its workers"
        self.asked.append((ask, Future()))
        future = self.asked[-1][1]
        if not self.slow:
            self.answer()
        return future

    def answer(self) -> None:
        runner = SimpleNamespace(get_model=lambda: self.model, drafter=None)
        asked, self.asked = self.asked, []
        for ask, future in asked:
            future.set_result([ask(SimpleNamespace(model_runner=runner))])


class Engine:
    """The manager finds the executor where vLLM's engine has it."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.model_executor = Executor()
        self.server = Server(folder, rows=64, **more)
        self.manager = self.server.manager
        self.requests = 0

    def steps(self) -> None:
        for _ in range(3):
            self.server.step()
            self.manager.get_stats()
        self.server.settle()

        def cleared() -> bool:
            self.server.step()
            return not self.manager._core.clearing

        until(cleared)

    def change(self, weights: int) -> None:
        self.model_executor.load(weights)

    def compute(self, keys: list[Any]) -> None:
        """What these weights compute is stored."""
        self.requests += 1
        context = self.server.context(f"storing-{self.requests}")
        self.manager.on_new_request(context)
        self.server.step()
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        weights = int(self.model_executor.model.weight[0, 0].item())
        for row in out.store_spec.block_ids:
            self.server.region.row(int(row))[:1] = bytes([weights])
        self.manager.complete_store(set(out.keys_to_store), context)
        self.manager.on_request_finished(context)
        self.server.settle()

    def served(self, keys: list[Any]) -> list[int]:
        self.requests += 1
        return [chunk[0] for chunk in self.server.load(f"loading-{self.requests}", keys)]


def test_after_a_reset_that_followed_new_weights_a_pause_knows_that_the_first_are_others(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path / "cache", tiers=[])
    engine.change(OTHER)
    reset(engine.manager)
    engine.steps()
    engine.compute(KEYS)
    assert engine.served(KEYS) == [OTHER] * 4
    pause(engine.manager)
    engine.change(FIRST)
    engine.steps()
    assert engine.served(KEYS) == []
    engine.server.close()


def test_a_reset_amid_a_pause_hides_no_change_of_weights_from_the_disk(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cache")
    pause(engine.manager)
    engine.change(OTHER)
    reset(engine.manager)
    engine.steps()
    engine.compute(KEYS)
    engine.server.close()
    engine = Engine(tmp_path / "cache")
    assert engine.served(KEYS) == []
    engine.server.close()


def test_a_disk_that_was_closed_keeps_what_it_has_over_later_resets(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    pause(engine.manager)
    engine.change(OTHER)
    engine.steps()
    assert engine.served(KEYS) == []
    reset(engine.manager)
    engine.steps()
    engine.compute(OTHERS)
    engine.server.close()
    engine = Engine(tmp_path / "cache")
    assert engine.served(KEYS) == [FIRST] * 4
    assert engine.served(OTHERS) == []
    engine.server.close()


def test_after_a_reset_with_the_same_weights_the_disk_is_used(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    reset(engine.manager)
    engine.steps()
    assert engine.served(KEYS) == []
    engine.compute(OTHERS)
    engine.server.close()
    engine = Engine(tmp_path / "cache")
    assert engine.served(OTHERS) == [FIRST] * 4
    engine.server.close()


@pytest.mark.parametrize("weights", [FIRST, OTHER])
def test_until_the_workers_have_told_their_weights_nothing_is_served_or_stored(
    tmp_path: Path, weights: int
) -> None:
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    engine.model_executor.slow = True
    pause(engine.manager)
    engine.change(weights)
    context = engine.server.context("asking")
    engine.manager.on_new_request(context)
    for _ in range(3):
        assert {engine.manager.lookup(key, context) for key in KEYS} == {LookupResult.RETRY}
        assert engine.manager.prepare_store(OTHERS, context) is None
        engine.server.step()
    assert len(engine.model_executor.asked) == 1
    engine.model_executor.answer()
    assert engine.served(KEYS) == ([FIRST] * 4 if weights == FIRST else [])
    engine.server.close()


def test_when_the_workers_never_tell_their_weights_the_disk_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    engine.model_executor.slow = True
    monkeypatch.setattr("kvstore.vllm.weights.PATIENCE_S", 0.0)
    pause(engine.manager)
    assert engine.served(KEYS) == []
    engine.change(OTHER)
    engine.compute(OTHERS)
    engine.server.close()
    engine = Engine(tmp_path / "cache")
    assert engine.served(KEYS) == [FIRST] * 4
    assert engine.served(OTHERS) == []
    engine.server.close()


def test_with_eplb_a_pause_closes_the_disk_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = SimpleNamespace(enable_eplb=True)
    monkeypatch.setattr(Executor, "parallel_config", moving, raising=False)
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    pause(engine.manager)
    assert engine.served(KEYS) == []
    engine.compute(OTHERS)
    engine.server.close()
    engine = Engine(tmp_path / "cache")
    assert engine.served(KEYS) == [FIRST] * 4
    assert engine.served(OTHERS) == []
    engine.server.close()
