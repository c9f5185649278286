"""Which settings of a real engine take nothing of another's cache, and which find all of it.

One engine stores, then each setting has an engine of its own over the same path. What such an
engine answers is compared with what it computes for the same prompts under a salt of its own:
no block hash of these has ever been stored, so that truth needs no trust in kvstore. Then the
engine asks once more, and gets back what it has stored itself.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ONE_PROCESS, Run, run_engine

pytest.importorskip("vllm")

import torch

from examples.rounds import LLAMA
from tests.vllm.checkpoints import CONFIG, INT8, save_int8, save_llama

LENGTH = 256
PROMPTS = [[seed, LENGTH] for seed in range(3)]
NO_HIT, ALL_HIT = [0] * 3, [LENGTH] * 3
ENGINE = {
    "load_format": "auto",
    "max_model_len": 1024,
}
EMBEDDINGS = {"enable_prompt_embeds": True}

Rounds = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """An engine that differs from the first one.

    Attributes:
        told: in what, as its log says.
        beside: the setting that it differs from in this way, where that is not the first engine.
        found: tokens of a prompt that it finds of its own.
        other_tokens: some answer differs too, so a hit of the first one's chunks would show.
    """

    name: str
    told: str
    engine: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    kvstore: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    weights: str = "plain"
    beside: str | None = None
    found: int = LENGTH
    other_tokens: bool = False


def rope(**parameters: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, **parameters}}}


def longrope(length: int) -> dict[str, Any]:
    """A model whose RoPE is another one where requests may be longer than 768 tokens."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    return {
        **rope(rope_type="longrope", original_max_position_embeddings=768, **factors),
        "max_model_len": length,
    }


WINDOW = {"max_model_len": 320}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 320,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 1024}
DRAFT = {"model": "draft", "method": "draft_model", "num_speculative_tokens": 2}
ROPE = "config.rope_parameters"

SETTINGS = [
    Setting("theta", ROPE, rope(rope_type="default", rope_theta=500.0), other_tokens=True),
    Setting("yarn", ROPE, rope(**YARN), other_tokens=True),
    Setting("linear", ROPE, rope(rope_type="linear", factor=4.0), other_tokens=True),
    Setting("dynamic", ROPE, rope(**DYNAMIC), other_tokens=True),
    Setting("longrope", f"{ROPE}, model.max_model_len", longrope(1024), other_tokens=True),
    Setting("longrope, short requests", "model.max_model_len", longrope(512), beside="longrope"),
    Setting(
        "16 bits",
        "dtype, group.0.dtype, model.dtype, rank_bytes_per_block",
        {"dtype": "bfloat16"},
    ),
    Setting(
        "fp8",
        "dtype, group.0.dtype, group.0.kv_quant_mode, rank_bytes_per_block",
        {"kv_cache_dtype": "fp8"},
        other_tokens=True,
    ),
    Setting("fp8_e5m2", "dtype", {"kv_cache_dtype": "fp8_e5m2"}, beside="fp8", other_tokens=True),
    Setting(
        "block size",
        "cache.block_size, group.0.block_size, groups, rank_bytes_per_block, tokens_per_hash",
        {"block_size": 64},
    ),
    Setting("blocks per chunk", "blocks_per_chunk", kvstore={"blocks_per_chunk": 2}),
    Setting(
        "weights of 8 bits",
        "config.quantization_config, dtype, group.0.dtype, model.dtype, model.quantization, "
        "rank_bytes_per_block and 1 more",
        {"dtype": "bfloat16"},
        {"quantization_config": INT8},
        weights="int8",
    ),
    Setting("dummy weights", "weights", {"load_format": "dummy"}, other_tokens=True),
    Setting(
        "other dummy weights",
        "weights",
        {"load_format": "dummy", "seed": 1},
        beside="dummy weights",
    ),
    # With a window, vLLM's connector finds all but the last page.
    Setting("window", "cache.sliding_window, config.architectures, ", WINDOW, MISTRAL, found=224),
    Setting(
        "window disabled",
        "cache.sliding_window, config.sliding_window, group.0.extra_retained_tokens, group.0.kind",
        {**WINDOW, "disable_sliding_window": True},
        MISTRAL,
        beside="window",
    ),
    Setting("revision", "model.revision", {"revision": "v2"}),
    Setting(
        "draft model",
        "draft.config.architectures, draft.config.attention_bias, ",
        {"speculative_config": DRAFT},
    ),
]


class Place:
    """A folder with models and a cache, and who has made what in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.made: dict[str | None, str] = {}
        """The namespace of each engine, by its setting; of the first by None."""
        save_llama(folder / "weights" / "plain", 0)
        save_int8(folder / "weights" / "plain", folder / "weights" / "int8")
        save_llama(folder / "draft", 1)
        (folder / "draft" / "config.json").write_text(json.dumps({**LLAMA, **CONFIG}))

    def run(self, setting: Setting, rounds: Rounds, launcher: int = 0) -> Run:
        weights = self.folder / "weights" / setting.weights
        shutil.copytree(weights, self.folder / "tiny-model", dirs_exist_ok=True)
        tier = {
            "type": "disk",
            "path": str(self.cache),
            "capacity_bytes": "512MiB",
            "segment_bytes": "4MiB",
        }
        return run_engine(
            self.folder,
            {
                "config": {**CONFIG, **setting.config},
                "engine": {**ENGINE, **setting.engine},
                "kvstore": {"cpu_bytes_to_use": "32MiB", "tiers": [tier], **setting.kvstore},
                "max_tokens": 6,
                "rounds": rounds,
            },
            setting.environment or ONE_PROCESS,
            launcher=launcher,
        )

    def namespace(self, name: str) -> str:
        """The one that an engine with this setting has made; with it alone, one is started."""
        if name not in self.made:
            setting = next(each for each in SETTINGS if each.name == name)
            self.remember(name, lambda: self.run(setting, [asked("asked")]))
        return self.made[name]

    def remember(self, name: str | None, run: Callable[[], Run]) -> Run:
        before = self._namespaces()
        found = run()
        made = self._namespaces() - before
        # An engine that is taken for another makes none.
        if made:
            (self.made[name],) = made
        return found

    def _namespaces(self) -> set[str]:
        return {path.name for path in self.cache.iterdir()} if self.cache.exists() else set()


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "prompts": PROMPTS, **more}


def three_times(setting: str) -> Rounds:
    return [asked("asked"), asked("computed", salt=setting), asked("again")]


def differences(run: Run) -> dict[str, str]:
    """For each namespace that the log of a cold start names, what differs."""
    line = r"not used: \S*/(\S+) is of the same model and differs in (.*)"
    return dict(re.findall(line, run.log))


def check_that_nothing_was_taken(run: Run, own: int = LENGTH) -> None:
    rounds = run.rounds
    assert rounds["asked"].cached == rounds["computed"].cached == NO_HIT, differences(run)
    assert rounds["asked"].tokens == rounds["computed"].tokens
    assert rounds["again"].cached == [own] * len(PROMPTS)
    assert rounds["again"].tokens == rounds["computed"].tokens


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def stored(place: Place) -> Run:
    """The first engine over the path."""
    rounds = [
        *three_times("first"),
        asked("salted", salt="mine"),
        asked("embedded", embeddings=True),
        asked("embedded again", embeddings=True),
    ]
    setting = Setting("first", "", EMBEDDINGS)
    found = place.remember(None, lambda: place.run(setting, rounds, launcher=1))
    check_that_nothing_was_taken(found)
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_engine_that_computes_other_bytes_takes_nothing_of_the_cache(
    place: Place, stored: Run, setting: Setting
) -> None:
    wide = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    if "fp8" in setting.engine.get("kv_cache_dtype", "") and not wide:
        pytest.skip("vLLM has no FP8 KV cache on this processor")
    other = place.namespace(setting.beside) if setting.beside else place.made[None]
    rounds = three_times(setting.name)
    found = place.remember(setting.name, lambda: place.run(setting, rounds))
    check_that_nothing_was_taken(found, setting.found)
    assert differences(found)[other].startswith(setting.told)
    if setting.other_tokens:
        assert found.rounds["asked"].tokens != stored.rounds["asked"].tokens


def test_another_way_to_hash_blocks_finds_what_it_has_stored_and_nothing_else(
    place: Place, stored: Run
) -> None:
    """The bytes are the same; the names of the blocks are others, so is the namespace."""
    setting = Setting("hash", "", {"prefix_caching_hash_algo": "sha256_cbor"})
    found = place.run(setting, three_times("cbor"))
    check_that_nothing_was_taken(found)
    assert found.rounds["asked"].tokens == stored.rounds["asked"].tokens
    found = place.run(setting, three_times("cbor again"), launcher=1)
    assert found.rounds["asked"].cached == ALL_HIT
    assert found.rounds["asked"].tokens == stored.rounds["asked"].tokens


def check_that_all_is_found(found: Run, stored: Run) -> None:
    assert found.rounds["asked"].cached == ALL_HIT, differences(found)
    assert found.rounds["computed"].cached == NO_HIT
    for name in ("asked", "computed", "again"):
        assert found.rounds[name].tokens == stored.rounds["asked"].tokens, name


def test_settings_that_change_no_bytes_find_all_of_it_after_all_the_others(
    place: Place, stored: Run
) -> None:
    """So do equal salts and equal embeddings, and no others."""
    rounds = [
        *three_times("second"),
        asked("salted", salt="mine"),
        asked("other salt", salt="yours"),
        asked("embedded", embeddings=True),
        {"name": "other embeddings", "prompts": [[7, LENGTH]], "embeddings": True},
    ]
    engine = {
        **EMBEDDINGS,
        "max_model_len": 768,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 128,
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 200,
        "gpu_memory_utilization": 0.5,
        "seed": 3,
        "max_logprobs": 5,
        "served_model_name": "other",
        "generation_config": "vllm",
        "enable_lora": True,
        "max_lora_rank": 8,
        "load_format": "safetensors",
        "hf_overrides": {"eos_token_id": 7, "transformers_version": "1"},
    }
    environment = {**ONE_PROCESS, "VLLM_KV_CACHE_LAYOUT": "HND"}
    found = place.run(Setting("same", "", engine, environment=environment), rounds)
    check_that_all_is_found(found, stored)
    rounds_of = found.rounds
    assert rounds_of["salted"].cached == rounds_of["embedded"].cached == ALL_HIT
    assert rounds_of["salted"].tokens == stored.rounds["salted"].tokens
    assert rounds_of["embedded"].tokens == stored.rounds["embedded"].tokens
    assert rounds_of["other salt"].cached == NO_HIT
    assert rounds_of["other embeddings"].cached == [0]


def test_salts_and_embeddings_part_requests_of_one_engine(stored: Run) -> None:
    rounds = stored.rounds
    assert rounds["salted"].cached == rounds["embedded"].cached == NO_HIT
    assert rounds["embedded again"].cached == ALL_HIT
    assert rounds["embedded again"].tokens == rounds["embedded"].tokens


def test_a_compiled_model_and_guesses_of_tokens_find_all_of_it(place: Place, stored: Run) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    engine = {
        "enforce_eager": False,
        "speculative_config": speculative,
        "async_scheduling": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 2048,
    }
    # Traced, and not compiled by a C++ compiler, which would take a minute.
    environment = {**ONE_PROCESS, "VLLM_CPU_CI_ENV": "1"}
    found = place.run(
        Setting("compiled", "", engine, environment=environment), three_times("third")
    )
    check_that_all_is_found(found, stored)
