"""Resets and pauses in any order while weights change: no chunk is served to other weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_offload.base import LookupResult

from kvstore.vllm.weights import digest_of_worker
from tests.patience import until
from tests.vllm.parts import engine_like
from tests.vllm.test_manager import Server, keys_of

KEYS, OTHERS = keys_of("a", 4), keys_of("b", 4)
FIRST, OTHER = 1, 2
"""Weights, and what is computed with them."""


def pause(manager: Any) -> None:
    manager.pauses = True
    manager.reset_cache()


def reset(manager: Any) -> None:
    manager.pauses = False
    manager.reset_cache()


class Engine:
    """A scheduler and one worker, which may be `slow` to tell its weights."""

    parallel: Any = None

    def __init__(self, folder: Path, **more: Any) -> None:
        self.model = torch.nn.Linear(8, 8, bias=False)
        self.change(FIRST)
        self.slow = False
        self.asked: set[int] = set()
        engine = engine_like(weights=self.digest(), parallel=self.parallel)
        self.server = Server(folder, rows=64, engine=engine, **more)
        self.manager = self.server.manager
        self.requests = 0
        step = self.server.step

        def step_and_tell() -> None:
            step()
            look = self.manager.look
            if look:
                self.asked.add(look)
            if look and not self.slow:
                self.manager.weights_told(look, {0: self.digest()})

        setattr(self.server, "step", step_and_tell)  # noqa: B010

    def digest(self) -> str:
        runner = SimpleNamespace(get_model=lambda: self.model, drafter=None)
        return digest_of_worker(SimpleNamespace(model_runner=runner))

    def change(self, weights: int) -> None:
        self.model.weight.data.fill_(weights)

    def steps(self) -> None:
        for _ in range(3):
            self.server.step()
            self.manager.get_stats()
        self.server.settle()

        def cleared() -> bool:
            self.server.step()
            return not self.manager._core.clearing

        until(cleared)

    def compute(self, keys: list[Any]) -> None:
        """What these weights compute is stored."""
        self.requests += 1
        context = self.server.context(f"storing-{self.requests}")
        self.manager.on_new_request(context)
        out = None
        for _ in range(3):
            # vLLM offers them again in each step, and the workers' answer takes one.
            self.server.step()
            out = out or self.manager.prepare_store(keys, context)
        assert out is not None
        weights = int(self.model.weight[0, 0].item())
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


def test_what_is_kept_over_a_pause_is_told_again_to_who_follows_the_events(tmp_path: Path) -> None:
    """vLLM tells them that all blocks are cleared."""
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    first = [event for event in engine.manager.take_events() if not event.removed]
    mediums = {event.medium for event in first}
    assert len(mediums) == 2
    pause(engine.manager)
    assert engine.served(KEYS) == [FIRST] * 4
    again = [event for event in engine.manager.take_events() if not event.removed]
    for medium in mediums:
        told = [{key for event in its if event.medium == medium for key in event.keys}
                for its in (first, again)]  # fmt: skip
        assert told == [{*KEYS}, {*KEYS}]
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
    engine.slow = True
    pause(engine.manager)
    engine.change(weights)
    context = engine.server.context("asking")
    engine.manager.on_new_request(context)
    for _ in range(3):
        assert {engine.manager.lookup(key, context) for key in KEYS} == {LookupResult.RETRY}
        assert engine.manager.prepare_store(OTHERS, context) is None
        engine.server.step()
    assert len(engine.asked) == 1
    engine.slow = False
    assert engine.served(KEYS) == ([FIRST] * 4 if weights == FIRST else [])
    engine.server.close()


def test_when_the_workers_never_tell_their_weights_the_disk_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "cache")
    engine.compute(KEYS)
    engine.slow = True
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
    monkeypatch.setattr(Engine, "parallel", moving)
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
