"""KV computed with one model is never served to another, and is there when the first comes back.

Real engines, one after the other over one path. Between them one thing changes: the model's
configuration, the weights under its path, the weights of an adapter under its name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ONE_PROCESS, Run, run_engine

pytest.importorskip("vllm")

from tests.vllm.checkpoints import CONFIG, save_adapter, save_llama

LENGTH = 256
PROMPTS = [[seed, LENGTH] for seed in range(3)]
NO_HIT, ALL_HIT = [0] * 3, [LENGTH] * 3
ADAPTER = {"lora_name": "adapter", "lora_int_id": 1, "lora_path": "adapter"}

Rounds = list[dict[str, Any]]


class Place:
    """A folder with a model, an adapter and a cache, and what may take their places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for seed, name in enumerate(("first", "second")):
            save_llama(folder / "weights" / name, seed)
            save_adapter(folder / "adapters" / name, seed)

    def use(self, weights: str, adapter: str) -> None:
        for kind, name, place in (
            ("weights", weights, "tiny-model"),
            ("adapters", adapter, "adapter"),
        ):
            shutil.copytree(self.folder / kind / name, self.folder / place, dirs_exist_ok=True)

    def run(
        self,
        rounds: Rounds,
        *,
        weights: str = "first",
        adapter: str = "first",
        offload: bool = True,
        launcher: int = 0,
        tenants: dict[str, Any] | None = None,
        **engine: Any,
    ) -> Run:
        self.use(weights, adapter)
        tier = {
            "type": "disk",
            "path": str(self.folder / "cache"),
            "capacity_bytes": "512MiB",
            "segment_bytes": "4MiB",
        }
        return run_engine(
            self.folder,
            {
                "config": CONFIG,
                "engine": {
                    "load_format": "auto",
                    "max_model_len": 1024,
                    "enable_lora": True,
                    "max_lora_rank": 8,
                    **engine,
                },
                "kvstore": {"cpu_bytes_to_use": "32MiB", "tiers": [tier], "tenants": tenants}
                if offload
                else None,
                "max_tokens": 6,
                "rounds": rounds,
            },
            ONE_PROCESS,
            launcher=launcher,
        )


def plain(name: str = "plain") -> dict[str, Any]:
    return {"name": name, "prompts": PROMPTS}


def adapted(name: str = "adapted", **lora: Any) -> dict[str, Any]:
    return {"name": name, "prompts": PROMPTS, "lora": {**ADAPTER, **lora}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("identity"))


@pytest.fixture(scope="module")
def truth(place: Place) -> Run:
    """The first model and both adapters, without offload."""
    second = {"lora_name": "other", "lora_int_id": 2, "lora_path": "adapters/second"}
    return place.run([plain(), adapted(), adapted("second adapter", **second)], offload=False)


@pytest.fixture(scope="module")
def stored(place: Place) -> Run:
    """The first engine over the path: it stores all that later ones may and may not take."""
    return place.run([plain(), adapted()], launcher=1)


def told(run: Run) -> list[str]:
    """What kvstore has logged."""
    return [line for line in run.log.splitlines() if "kvstore" in line]


def tokens(run: Run, name: str = "plain") -> list[list[int]]:
    return run.rounds[name].tokens


def test_the_first_engine_answers_as_one_without_offload(truth: Run, stored: Run) -> None:
    assert tokens(stored) == tokens(truth)
    assert tokens(stored, "adapted") == tokens(truth, "adapted")
    assert tokens(truth, "adapted") != tokens(truth, "second adapter")


def test_the_namespace_tells_the_backend_and_the_pages_in_use(place: Place, stored: Run) -> None:
    (told,) = (place.folder / "cache").glob("*/namespace.json")
    identity = json.loads(told.read_text())["identity"]
    assert identity["group.0.kind"] == "FullAttentionSpec"
    assert identity["group.0.backend"].endswith(".CPUAttentionBackend")
    assert identity["group.0.runner"].endswith(".CPUModelRunner")
    assert identity["group.0.num_kv_heads"] == CONFIG["num_key_value_heads"]


def test_other_weights_under_one_path_take_nothing_of_the_cache(place: Place, stored: Run) -> None:
    # Of a salt of its own nothing was stored: this is what it computes.
    changed = place.run([plain(), plain("computed") | {"salt": "its"}], weights="second")
    assert changed.rounds["plain"].cached == changed.rounds["computed"].cached == NO_HIT
    assert tokens(changed) == tokens(changed, "computed")
    assert all(a != b for a, b in zip(tokens(changed), tokens(stored), strict=True))


def test_other_adapter_weights_under_one_name_take_nothing_of_the_first(
    place: Place, truth: Run, stored: Run
) -> None:
    """The base model is the same, so its chunks are hits."""
    changed = place.run([plain(), adapted()], adapter="second")
    assert changed.rounds["plain"].cached == ALL_HIT
    assert tokens(changed) == tokens(truth)
    assert changed.rounds["adapted"].cached == NO_HIT
    assert tokens(changed, "adapted") == tokens(truth, "second adapter")


def test_the_first_model_finds_its_chunks_again_and_an_adapter_may_be_replaced_while_it_runs(
    place: Place, truth: Run, stored: Run
) -> None:
    """On the way back everything is there, whatever came between; irrelevant settings differ."""
    found = place.run(
        [
            plain(),
            adapted(),
            adapted("overwritten") | {"replace": ["adapters/second", "adapter"]},
            adapted("reloaded", load_inplace=True),
            adapted("again"),
        ],
        num_gpu_blocks_override=200,
        max_num_seqs=7,
        max_model_len=768,
        seed=3,
    )
    for name in ("plain", "adapted"):
        assert found.rounds[name].cached == ALL_HIT, (name, told(stored), told(found))
        assert tokens(found, name) == tokens(truth, name)
    # vLLM goes on with what it has loaded until it is told to read the files again.
    assert tokens(found, "overwritten") == tokens(truth, "adapted")
    for name in ("reloaded", "again"):
        assert tokens(found, name) == tokens(truth, "second adapter"), name
    for name in ("overwritten", "reloaded", "again"):
        assert found.rounds[name].cached == NO_HIT
    assert "other files than vLLM has loaded" in found.log
    assert "was loaded in place" in found.log


def test_an_adapter_is_one_of_a_tenant(place: Place) -> None:
    def of(tenant: str, name: str) -> dict[str, Any]:
        return {**adapted(name), "kv_transfer_params": {"kvstore": {"tenant": tenant}}}

    run = place.run([of("a", "a"), of("b", "b"), of("a", "a again"), plain()], tenants={})
    again = place.run([of("b", "b"), of("c", "c")], adapter="second", tenants={})
    assert run.rounds["a"].cached == run.rounds["b"].cached == run.rounds["plain"].cached
    assert not any(run.rounds["b"].cached)
    assert all(run.rounds["a again"].cached)
    assert not any([*again.rounds["b"].cached, *again.rounds["c"].cached])
    assert run.rounds["a"].tokens == run.rounds["b"].tokens == run.rounds["a again"].tokens
