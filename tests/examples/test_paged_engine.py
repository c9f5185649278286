"""The paged engine gives the same tokens with and without offload, whatever happens."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from examples.paged_engine.engine import Engine, EngineConfig
from examples.paged_engine.model import ModelConfig
from examples.paged_engine.request import Request, State
from examples.paged_engine.stream import Stream
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.core.statistics import TierStats
from tests.faults.conftest import EIO, FaultyDisk, Rule

REQUESTS = int(os.environ.get("KVSTORE_REQUESTS", "300"))
"""How many requests each stream has."""

# Rounding must never decide which token is best.
MODEL = ModelConfig(
    layers=2, width=32, heads=2, kv_heads=1, head_size=16, max_tokens=256, dtype=torch.float64
)
WINDOWED = dataclasses.replace(MODEL, window=10)

DISK_RULES: Sequence[Sequence[Rule]] = (
    [{"op": "read", "path": "segment-", "delay": 0.02}],
    [{"op": "read", "path": "segment-", **EIO}],
    [{"op": "write", "path": "segment-", **EIO}],
    [{"op": "write", "path": "segment-", "delay": 0.05}],
    [],
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def offload(folder: Path | None = None, rows: int = 40, **more: Any) -> dict[str, Any]:
    row_bytes = 4096
    config: dict[str, Any] = {
        "cpu_bytes_to_use": rows * row_bytes,
        "identity": {"model": "tiny"},
        "deadline_s": 10,
        # A busy disk is slower than so small a model: what it has is to be loaded all the same.
        "recompute_s": 0,
        "block_size": 8,
        **more,
    }
    if folder is not None:
        tier = {"type": "disk", "path": str(folder), "capacity_bytes": "4MiB"}
        config["tiers"] = [{**tier, "segment_bytes": "512KiB"}]
    return config


def tiny(model: ModelConfig, **more: Any) -> EngineConfig:
    """An engine whose pool is too small for what it has to do at once."""
    sizes = {"num_blocks": 72, "max_running": 12, "max_tokens_per_step": 64, **more}
    return EngineConfig(model, block_tokens=4, **sizes)


def stream_for(model: ModelConfig, count: int = REQUESTS, seed: int = 0) -> Stream:
    """Requests, and what an engine without offload generates for them."""
    config = EngineConfig(model, block_tokens=4, num_blocks=4000, max_running=32)
    engine = Engine(config)
    stream = Stream(seed)
    while len(stream.prompts) < count:
        stream.extend(min(250, count - len(stream.prompts)), lambda them: engine.generate(them, 8))
    return stream


@dataclass
class Served:
    """What an engine has done with a stream.

    Attributes:
        wrong: requests with another token than without offload.
        aborted: in which state requests were aborted.
    """

    wrong: list[int]
    aborted: dict[State, int]
    resets: int


def serve(
    engine: Engine,
    stream: Stream,
    seed: int = 0,
    *,
    aborts: float = 0.02,
    resets: float = 0.0,
    between: Callable[[random.Random], None] = lambda dice: None,
) -> Served:
    """Serve all of a stream, with aborts and resets at random."""
    dice = random.Random(seed)
    left = list(range(len(stream.prompts)))[::-1]
    live: dict[int, Request] = {}
    served = Served([], dict.fromkeys(State, 0), 0)
    while left or live:
        while left and len(live) < 24 and dice.random() < 0.6:
            number = left.pop()
            live[number] = engine.add(stream.prompts[number], stream.lengths[number])
        engine.step()
        between(dice)
        if live and dice.random() < aborts:
            number = dice.choice(list(live))
            served.aborted[live[number].state] += 1
            engine.abort(live[number])
        if dice.random() < resets and engine.connector is not None:
            engine.connector.reset()
            served.resets += 1
        for number in [number for number, request in live.items() if request.is_finished()]:
            output, expected = live.pop(number).output, stream.outputs[number]
            if output != expected[: len(output)]:
                served.wrong.append(number)
    return served


class Audit:
    """Compares what an engine loads with what another one computes.

    Attributes:
        places: tokens of groups that were compared. wrong: those that differ.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        config = dataclasses.replace(engine.config, offload=None, max_tokens_per_step=256)
        self._other = Engine(dataclasses.replace(config, num_blocks=200))
        self._computed: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._loads_ended = engine.scheduler.loads_ended
        engine.scheduler.loads_ended = self._look  # type: ignore[method-assign]
        self.places = 0
        self.wrong: list[tuple[str, int, int]] = []

    def _look(self, loaded: Sequence[str], failed: Sequence[str]) -> None:
        requests = self._engine.scheduler._loading
        for request in [requests[req_id] for req_id in loaded if req_id in requests]:
            end = request.num_computed_tokens
            for layer, expected in enumerate(self._expected(tuple(request.tokens))):
                window = self._engine.config.model.layer_windows()[layer]
                blocks = request.block_ids[self._engine._windows.index(window)]
                for place in range(max(0, end - window + 1) if window else 0, end):
                    block, at = divmod(place, 4)
                    got = self._engine.kv_caches[layer][blocks[block], :, at]
                    self.places += 1
                    if not torch.allclose(got, expected[:, place], atol=1e-9):
                        self.wrong.append((request.request_id, layer, place))
        self._loads_ended(loaded, failed)

    def _expected(self, tokens: tuple[int, ...]) -> list[torch.Tensor]:
        """For each layer keys and values of all tokens: (2, tokens, heads, size)."""
        if tokens not in self._computed:
            request = self._other.add(tokens, 2)
            self._other.step()
            self._computed[tokens] = [
                torch.cat([cache[block] for block in request.block_ids[layer % 2]], dim=1)
                for layer, cache in enumerate(self._other.kv_caches)
            ]
            self._other.abort(request)
        return self._computed[tokens]


def serve_until_loaded(engine: Engine, stream: Stream, *, resets: float) -> Served:
    """Serve a stream, again where a disk that stalled left little to load, and check the rest."""
    for seed in range(10):
        served = serve(engine, stream, seed, resets=resets)
        assert served.wrong == []
        if connector(engine).stats.loads > REQUESTS // 4:
            break
        engine.settle()
    assert connector(engine).stats.loads > REQUESTS // 4
    return served


def connector(engine: Engine) -> ConnectorScheduler:
    """The scheduler's half of an engine with offload."""
    assert engine.connector is not None
    return engine.connector


def disk(engine: Engine) -> TierStats:
    """What its only tier has counted so far."""
    manager = connector(engine).manager
    assert isinstance(manager, KVStoreManager)
    return manager.stats().tiers[0]


@pytest.fixture(scope="module")
def full() -> Stream:
    return stream_for(MODEL)


@pytest.fixture(scope="module")
def windowed() -> Stream:
    return stream_for(WINDOWED)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_token_is_the_same_with_a_tiny_pool_aborts_and_resets(
    full: Stream, tmp_path: Path, prefix_caching: bool
) -> None:
    engine = Engine(tiny(MODEL, offload=offload(tmp_path), prefix_caching=prefix_caching))
    served = serve_until_loaded(engine, full, resets=0.01)
    stats = connector(engine).stats
    tier = disk(engine)
    assert engine.scheduler.preempted > 0
    assert sum(served.aborted.values()) > 0
    assert served.resets > 0
    assert stats.deferred > 0
    assert tier.promoted > 0, "nothing came from disk"
    assert stats.failed_loads == stats.failed_stores == stats.unknown_jobs == 0
    engine.settle()
    assert not connector(engine).has_pending_work()
    engine.shutdown()


def test_every_token_and_all_that_is_loaded_is_the_same_where_layers_have_a_window(
    windowed: Stream, tmp_path: Path
) -> None:
    engine = Engine(tiny(WINDOWED, offload=offload(tmp_path)))
    # Few tokens tell whether one place in the KV cache is right: it is looked at itself.
    audit = Audit(engine)
    serve_until_loaded(engine, windowed, resets=0.005)
    assert audit.wrong == []
    assert audit.places > REQUESTS
    assert engine.scheduler.preempted > 0
    engine.shutdown()


def test_every_token_is_the_same_while_the_disk_is_slow_and_fails(
    full: Stream, faulty: FaultyDisk
) -> None:
    engine = Engine(tiny(MODEL, offload=offload(faulty.path, deadline_s=0.3)))

    def another_rule(dice: random.Random) -> None:
        if dice.random() < 0.02:
            faulty.obey(*dice.choice(DISK_RULES))

    # A disk that is only slow for a while gets nothing to do: it may not have failed yet.
    for seed in range(5):
        assert serve(engine, full, seed, between=another_rule).wrong == []
        tier = disk(engine)
        if tier.failed_reads + tier.failed_writes and connector(engine).stats.loads:
            break
    assert tier.failed_reads + tier.failed_writes > 0
    assert connector(engine).stats.loads > 0
    faulty.obey()
    engine.shutdown()


def test_what_was_computed_is_found_on_disk_after_a_restart(tmp_path: Path) -> None:
    stream = stream_for(MODEL, 60)
    first = Engine(tiny(MODEL, offload=offload(tmp_path, rows=200)))
    assert serve(first, stream, aborts=0).wrong == []
    computed = first.scheduler.computed
    first.settle()
    first.shutdown()
    second = Engine(tiny(MODEL, offload=offload(tmp_path, rows=200)))
    assert serve(second, stream, aborts=0).wrong == []
    assert second.scheduler.computed < computed / 2
    assert disk(second).promoted > 0
    second.shutdown()
