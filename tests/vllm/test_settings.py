"""Which settings of vLLM part two engines, and which do not."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvstore.errors import ConfigError
from kvstore.vllm.checks import check_engine_with_tiers
from kvstore.vllm.identity import identity as module
from kvstore.vllm.identity.identity import adapter_settings, engine_identity
from kvstore.vllm.version import VERSION
from tests.vllm.checkpoints import CONFIG, save_llama

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    **CONFIG,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
ROPE = "config.rope_parameters"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, 0)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def engine(model: Path, **arguments: Any) -> Any:
    """The configuration of an engine with these arguments, as vLLM makes it."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=1024, **arguments
    ).create_engine_config()


@pytest.fixture(scope="module")
def base(model: Path) -> dict[str, Any]:
    return engine_identity(engine(model))


def differs(base: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}


def test_the_same_engine_has_the_same_identity_again_and_it_is_json(
    model: Path, base: dict[str, Any]
) -> None:
    assert engine_identity(engine(model)) == base
    assert json.loads(json.dumps(base, allow_nan=False)) == base


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"hf_overrides": {"rope_theta": 5.0}}, "config.rope_theta"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, ROPE),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, ROPE),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "config.rms_norm_eps"),
        ({"hf_overrides": {"sliding_window": 64}}, "config.sliding_window"),
        ({"hf_overrides": {"max_position_embeddings": 4096}}, "config.max_position_embeddings"),
        ({"hf_overrides": {"something_new": {"a": [1]}}}, "config.something_new"),
        ({"revision": "v2"}, "model.revision"),
        ({"code_revision": "v2"}, "model.code_revision"),
        ({"dtype": "float32"}, "model.dtype"),
        ({"block_size": 64}, "cache.block_size"),
        ({"load_format": "dummy"}, "weights"),
        ({"additional_config": {"plugin": 1}}, "additional"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "block_hashes"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_changes_kv_bytes_parts_engines(
    model: Path, base: dict[str, Any], arguments: dict[str, Any], told: str
) -> None:
    assert told in differs(base, engine_identity(engine(model, **arguments)))


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpu_memory_utilization": 0.5},
        {"num_gpu_blocks_override": 100},
        {"max_num_seqs": 7},
        {"max_num_batched_tokens": 2048},
        {"enforce_eager": True},
        {"seed": 5},
        {"served_model_name": "other"},
        {"max_logprobs": 5},
        {"tokenizer_revision": "v2"},
        {"generation_config": "vllm"},
        {"override_generation_config": {"temperature": 0.5}},
        {"enable_prefix_caching": False},
        {"hf_overrides": {"transformers_version": "1", "eos_token_id": 7}},
        {"enable_lora": True, "max_lora_rank": 8},
        {"load_format": "safetensors"},
        {"disable_log_stats": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_change_kv_bytes_costs_no_hits(
    model: Path, base: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert differs(base, engine_identity(engine(model, **arguments))) == set()


def test_another_hash_seed_is_told_as_what_parts_engines_and_stays_secret(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in (None, "0", "a secret", "a secret"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(engine_identity(engine(model)))
    default, zero, secret, again = found
    for one, other in ((default, zero), (default, secret), (zero, secret)):
        assert differs(one, other) == {"block_hashes"}
    assert secret == again
    assert "a secret" not in json.dumps(secret)


def test_weights_that_are_replaced_while_the_engine_runs_go_with_no_tier(model: Path) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    check_engine_with_tiers(engine(model), 30.0)
    with pytest.raises(ConfigError, match="weight_transfer_config is set: .* leave tiers out"):
        check_engine_with_tiers(engine(model, weight_transfer_config=WeightTransferConfig()), 30)


@pytest.mark.parametrize("seconds", [0, 30, 40])
def test_an_engine_that_is_killed_when_it_is_told_to_end_says_so_at_its_start(
    model: Path, caplog: pytest.LogCaptureFixture, seconds: int
) -> None:
    check_engine_with_tiers(engine(model, shutdown_timeout=seconds), 30.0)
    told = [record for record in caplog.records if "--shutdown-timeout 40" in record.getMessage()]
    assert len(told) == (seconds < 40)


def change(model: Path, changing: Callable[[Any], None]) -> dict[str, Any]:
    config = engine(model)
    changing(config)
    return engine_identity(config)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model_config", "quantization", "fp8"),
        ("model_config", "disable_sliding_window", True),
        ("model_config", "model_impl", "transformers"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config", "sliding_window", 128),
        ("cache_config", "mamba_cache_dtype", "float32"),
        ("attention_config", "indexer_kv_dtype", "fp8"),
        ("parallel_config", "cp_kv_cache_interleave_size", 16),
    ],
)
def test_settings_that_this_model_cannot_have_part_engines_too(
    model: Path, base: dict[str, Any], section: str, name: str, value: Any
) -> None:
    def set_it(config: Any) -> None:
        object.__setattr__(getattr(config, section), name, value)

    assert differs(base, change(model, set_it)) == {f"{section.removesuffix('_config')}.{name}"}


def test_variables_that_change_kv_part_engines(
    model: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_MHA", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    names = (
        "VLLM_PP_LAYER_PARTITION",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "VLLM_ROCM_USE_AITER_MHA",
    )
    assert differs(base, engine_identity(engine(model))) == {
        f"environment.{name}" for name in names
    }


def test_the_attention_backend_parts_engines(model: Path, base: dict[str, Any]) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def set_it(config: Any) -> None:
        object.__setattr__(config.attention_config, "backend", AttentionBackendEnum.FLASHINFER)

    assert differs(base, change(model, set_it)) == {"attention.backend"}


@pytest.mark.parametrize(
    ("overrides", "matters"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_parameters": LONG}, True),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_parameters": {"full_attention": LONG, "sliding_attention": {}}}, True),
        ({"model_type": "llama4_text"}, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_longest_request_counts_where_kv_may_depend_on_it(
    model: Path, overrides: dict[str, Any], matters: bool
) -> None:
    def identity(length: int) -> dict[str, Any]:
        def set_it(config: Any) -> None:
            config.model_config.max_model_len = length
            for name, value in overrides.items():
                object.__setattr__(config.model_config.hf_text_config, name, value)

        return change(model, set_it)

    expected = {"model.max_model_len"} if matters else set()
    assert differs(identity(512), identity(1024)) == expected


@pytest.mark.parametrize("kind", ["longcat_flash_ngram", "qwen4_exp_text"])
@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_ids_of_tokens_count_where_a_model_may_compute_with_them(
    model: Path, kind: str, name: str
) -> None:
    """Models of n-grams end one, or fill it up, with an id of their configuration."""

    def identity(token: int) -> dict[str, Any]:
        def set_it(config: Any) -> None:
            text = config.model_config.hf_text_config
            object.__setattr__(text, "model_type", kind)
            object.__setattr__(text, name, token)

        return change(model, set_it)

    assert differs(identity(2), identity(7)) == {f"config.{name}"}


@pytest.mark.parametrize("part", ["text", "vision_config"])
def test_labels_do_not_count_in_a_part_of_a_model_either(model: Path, part: str) -> None:
    def identity(name: str, value: object) -> dict[str, Any]:
        def set_it(config: Any) -> None:
            whole = config.model_config.hf_config
            its = copy.deepcopy(whole)
            setattr(its, name, value)
            if part == "text":
                config.model_config.hf_text_config = its
            else:
                whole.vision_config = its.to_dict()

        return change(model, set_it)

    base = identity("temperature", 0.5)
    assert differs(base, identity("temperature", 0.7)) == set()
    assert differs(base, identity("rope_theta", 7.0)) == {f"config.{part}"}


@pytest.mark.parametrize("kind", ["language", "text part", "images"])
def test_weights_below_the_folder_count_for_models_of_several_parts(
    tmp_path: Path, kind: str
) -> None:
    from vllm.config.multimodal import MultiModalConfig

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_llama(tmp_path, 0)
    for name in ("tower", "adapter", "unreadable"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "unreadable").chmod(0)
    (tmp_path / "link").symlink_to(tmp_path)

    def identity(name: str, content: bytes) -> dict[str, Any]:
        (tmp_path / name / "model.safetensors").write_bytes(content)
        config = engine(tmp_path)
        if kind == "text part":
            config.model_config.hf_text_config = copy.deepcopy(config.model_config.hf_config)
        elif kind == "images":
            config.model_config.multimodal_config = MultiModalConfig()
        return engine_identity(config)

    base = identity("tower", b"1")
    expected = set() if kind == "language" else {"weights"}
    assert differs(base, identity("tower", b"2")) == expected
    base = identity("tower", b"1")
    assert differs(base, identity("adapter", b"3")) == set()


NEWER = {
    "simple_cpu_offload_num_blocks",
    "trtllm_ragged_backend",
    "indexer_tp_shard_min_rows",
    "monokernel",
    "watchdog_config",
    "disable_lookahead_block_hashes",
    "draft_lm_head_quantization",
    "fly_entropy_threshold",
    "fly_entropy_top_k",
    "fly_window_size",
    "xpress_topc",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
}
"""Settings of 0.33 that 0.32 does not have."""

INITIAL = {"mm_processor_device", "model_arch_config"}
"""Fields that are set only when a configuration is made."""


def sections() -> dict[str, tuple[type, frozenset[str]]]:
    """By its name in the identity, each class of settings and what is ignored of it."""
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        KernelConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.config.lora import LoRAConfig
    from vllm.config.multimodal import MultiModalConfig

    from kvstore.vllm.identity import settings

    return {
        "model": (ModelConfig, settings.MODEL_IGNORED),
        "cache": (CacheConfig, settings.CACHE_IGNORED),
        "attention": (AttentionConfig, settings.ATTENTION_IGNORED),
        "multimodal": (MultiModalConfig, settings.MULTIMODAL_IGNORED),
        "parallel": (ParallelConfig, settings.PARALLEL_IGNORED),
        "kernel": (KernelConfig, settings.KERNEL_IGNORED),
        "load": (LoadConfig, settings.LOAD_IGNORED),
        "draft": (SpeculativeConfig, settings.DRAFT_IGNORED),
        "lora": (LoRAConfig, settings.LORA_IGNORED),
        "": (VllmConfig, settings.SECTIONS_IGNORED),
    }


def test_what_is_ignored_exists() -> None:
    """A name that vLLM does not have any more is a slip, or a reason to look again."""
    if VERSION != (0, 32):
        pytest.skip("the names are of 0.32, and of what is newer")
    import vllm.envs

    from kvstore.vllm.identity import settings

    for config, ignored in sections().values():
        known = {field.name for field in dataclasses.fields(config)}
        assert ignored - known - NEWER - INITIAL == set(), config
    assert settings.ENVIRONMENT_COUNTS - vllm.envs.environment_variables.keys() - NEWER == set()


COUNTED = {
    "cache": "block_size sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded "
    "skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
    "mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm "
    "use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay",
    "model": "runner convert dtype is_submodel_config word_embeddings_untied_by_checkpoint "
    "revision code_revision quantization quantization_config disable_sliding_window "
    "model_class_overrides model_impl",
    "attention": "backend minimax_m3_msa_decode_backend backend_per_kind indexer_kv_dtype "
    "indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa "
    "use_prefill_query_quantization use_trtllm_attention disable_flashinfer_q_quantization",
    "parallel": "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size",
    "kernel": "moe_backend linear_backend linear_backend_per_quant",
    "load": "model_loader_extra_config ignore_patterns",
}
"""Of 0.32, all that counts and is there in an engine on the CPU with a plain model."""


@pytest.mark.parametrize("section", COUNTED)
def test_each_setting_is_either_ignored_or_parts_engines(
    model: Path, base: dict[str, Any], section: str
) -> None:
    """Every field of vLLM's own classes, one after the other; none is left out."""
    if VERSION != (0, 32):
        pytest.skip("these are the fields of 0.32; others count, as the next test shows")
    config, ignored = sections()[section]
    parting = [
        each.name
        for each in dataclasses.fields(config)
        if each.name not in ignored and not each.name.startswith("_")
    ]
    assert set(parting) == set(COUNTED[section].split())
    for name in parting:

        def set_it(changed: Any, name: str = name) -> None:
            object.__setattr__(getattr(changed, f"{section}_config"), name, "another")

        assert differs(base, change(model, set_it)) == {f"{section}.{name}"}, name


def test_settings_and_sections_that_nobody_has_heard_of_part_engines(
    model: Path, base: dict[str, Any]
) -> None:
    """As another version of vLLM may have: real configurations with one field more."""

    def extended(config: Any) -> Any:
        kind = dataclasses.make_dataclass("Extended", [("new", int, 7)], bases=(type(config),))
        made: Any = object.__new__(kind)
        made.__dict__.update(config.__dict__, new=7)
        return made

    @dataclasses.dataclass
    class New:
        deep: int = 1

    for section in COUNTED:

        def set_it(changed: Any, section: str = section) -> None:
            name = f"{section}_config"
            object.__setattr__(changed, name, extended(getattr(changed, name)))

        assert differs(base, change(model, set_it)) == {f"{section}.new"}
    whole = extended(engine(model))
    assert differs(base, engine_identity(whole)) == {"new"}
    whole.new = New()
    assert differs(base, engine_identity(whole)) == {"new.deep"}


@pytest.mark.parametrize(
    ("processor_cache", "prefix_caching", "refused"),
    [(0, False, True), (4, False, False), (0, True, False)],
)
def test_an_engine_that_numbers_its_images_is_refused(
    model: Path, processor_cache: float, prefix_caching: bool, refused: bool
) -> None:
    """The first image of one process would be taken for the first of the next."""
    from vllm.config.multimodal import MultiModalConfig

    def set_it(config: Any) -> None:
        multimodal = MultiModalConfig(mm_processor_cache_gb=processor_cache)
        config.model_config.multimodal_config = multimodal
        config.cache_config.enable_prefix_caching = prefix_caching

    if refused:
        with pytest.raises(ConfigError, match=r"mm_processor_cache_gb.*enable_prefix_caching"):
            change(model, set_it)
    else:
        assert change(model, set_it)


def draft(config: Any, model: Path, **more: Any) -> None:
    from vllm.config import SpeculativeConfig

    speculative = object.__new__(SpeculativeConfig)
    told = {each.name: None for each in dataclasses.fields(SpeculativeConfig)}
    mine = {"method": "eagle", "num_speculative_tokens": 2}
    speculative.__dict__.update(told | mine, draft_model_config=engine(model).model_config)
    speculative.__dict__.update(more)
    object.__setattr__(config, "speculative_config", speculative)


def test_a_draft_model_counts_with_its_weights(
    model: Path, base: dict[str, Any], tmp_path: Path
) -> None:
    def identity(**more: Any) -> dict[str, Any]:
        return change(model, lambda config: draft(config, tmp_path, **more))

    save_llama(tmp_path, 1)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    one = identity()
    assert {"draft.method", "draft.model", "draft.weights"} <= differs(base, one)
    assert differs(one, identity(num_speculative_tokens=3)) == {"draft.num_speculative_tokens"}
    save_llama(tmp_path, 2)
    assert differs(one, identity()) == {"draft.weights"}


def test_of_dummy_weights_the_seed_counts(model: Path) -> None:
    one, two = (engine_identity(engine(model, load_format="dummy", seed=seed)) for seed in (0, 1))
    assert differs(one, two) == {"weights"}


def test_other_weights_part_engines_and_a_copied_folder_does_not(
    model: Path, base: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_llama(tmp_path, 0)
    assert differs(base, engine_identity(engine(tmp_path))) == set()
    save_llama(tmp_path, 1)
    assert differs(base, engine_identity(engine(tmp_path))) == {"weights"}


def test_weights_that_cannot_be_read_stop_the_start_and_the_key_is_named(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine(model)
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError, match="fingerprint_weights = false.*identity"):
        engine_identity(config)
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert "weights" not in engine_identity(config, fingerprint_weights=False)
    assert "other weights go unnoticed" in caplog.text


def test_a_setting_that_cannot_be_told_stops_the_start_and_is_named(model: Path) -> None:
    config = engine(model)
    object.__setattr__(config.model_config, "quantization_config", object())
    with pytest.raises(ConfigError, match=r"model\.quantization_config.*automatic_identity"):
        engine_identity(config)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Paint:
    colour: Colour = Colour.RED
    path: Path = Path("/a")


def test_values_of_every_kind_become_json() -> None:
    import torch

    value = {
        "enum": Colour.RED,
        "object": Paint(),
        "type": Paint,
        "dtype": torch.bfloat16,
        "infinite": [float("inf"), 1.5],
        "set": {"b", "a"},
        "bytes": b"\1",
        3: None,
    }
    assert module.plain(value, "x") == {
        "enum": "RED",
        "object": {"colour": "RED", "path": "/a"},
        "type": f"{__name__}.Paint",
        "dtype": "bfloat16",
        "infinite": ["inf", 1.5],
        "set": ["a", "b"],
        "bytes": "01",
        "3": None,
    }


def test_long_values_are_kept_as_digests(model: Path) -> None:
    def identity(end: int) -> Any:
        def set_it(config: Any) -> None:
            config.model_config.hf_config.layers_left_out = [*range(1000), end]

        return change(model, set_it)["config.layers_left_out"]

    assert identity(0).startswith("xxh3:")
    assert identity(0) != identity(1)


def test_of_lora_only_what_changes_kv_counts_and_only_for_adapters(model: Path) -> None:
    def settings(**arguments: Any) -> str:
        return adapter_settings(engine(model, enable_lora=True, **arguments).lora_config)

    base = settings()
    assert settings(max_loras=3, max_lora_rank=64, max_cpu_loras=5) == base
    assert settings(lora_target_modules=["o_proj"]) != base


def test_a_patch_release_keeps_the_cache_and_a_minor_or_own_build_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm

    def release(version: str) -> str:
        monkeypatch.setattr(vllm, "__version__", version)
        return module._release()

    assert release("0.32.0") == release("0.32.1") == release("0.32.0+cpu") == "0.32"
    assert release("0.33.0.dev12+gabc") == "0.33.0.dev12+gabc"
