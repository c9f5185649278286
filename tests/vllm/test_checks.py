"""Engines whose recurrent states cannot be offloaded as asked are refused, or warned of."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvstore.errors import ConfigError
from kvstore.vllm.checks import (
    check_answers,
    check_continues,
    check_kv_cache,
    check_recurrent,
    check_windows,
)
from tests.vllm.parts import engine_like, kv_cache_config, make_spec, offloading_config

STATES = MambaSpec(
    block_size=64, shapes=((4, 16),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


def config_of(unit: int, block: int = 64, blocks_per_chunk: int = 1) -> Any:
    made = offloading_config({}, 4096, "engine", blocks_per_chunk=blocks_per_chunk)
    group = dataclasses.replace(made.groups[0], tokens_per_block=block)
    cache = dataclasses.replace(made.cache, tokens_per_hash=unit)
    return dataclasses.replace(made, groups=(group,), cache=cache)


def recurrent() -> Any:
    """An engine with recurrent layers, as vLLM configures it."""
    engine = engine_like(kv_cache_config(STATES))
    settings = engine.vllm_config
    settings.cache_config = SimpleNamespace(prefix_cache_retention_interval=0)
    settings.scheduler_config = SimpleNamespace(async_scheduling=True)
    settings.speculative_config = None
    return engine


def test_matches_inside_the_blocks_of_recurrent_layers_are_refused() -> None:
    engine = recurrent()
    with pytest.raises(ConfigError, match="every 16 tokens.*blocks of 64.*prefix_match_unit"):
        check_recurrent(config_of(16), engine)
    check_recurrent(config_of(64), engine)
    check_recurrent(config_of(16), engine_like())
    check_recurrent(config_of(16), None)


def test_states_that_are_overwritten_before_they_are_stored_are_refused() -> None:
    """By vLLM, which gives away blocks that it has just offered: found by random requests."""
    engine = recurrent()
    settings = engine.vllm_config
    settings.speculative_config = object()
    check_recurrent(config_of(64), engine)
    for interval in (None, 64):
        settings.cache_config.prefix_cache_retention_interval = interval
        settings.scheduler_config.async_scheduling = False
        check_recurrent(config_of(64), engine)
        settings.scheduler_config.async_scheduling = True
        with pytest.raises(
            ConfigError, match="use --no-async-scheduling, or prefix_cache_retention_interval = 0"
        ):
            check_recurrent(config_of(64), engine)


def test_chunks_of_several_blocks_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    engine = recurrent()
    with caplog.at_level(logging.WARNING, "kvstore"):
        check_recurrent(config_of(64), engine)
        check_recurrent(config_of(64, blocks_per_chunk=2), engine_like())
        assert caplog.text == ""
        check_recurrent(config_of(64, blocks_per_chunk=2), engine)
    assert "blocks_per_chunk = 2" in caplog.text


WINDOW = SlidingWindowSpec(
    block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=10
)


def test_chunks_of_several_blocks_are_refused_where_a_window_may_leave_a_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM would store it as the whole: see `tests/vllm/test_whole.py`."""
    window, several = engine_like(kv_cache_config(WINDOW)), config_of(64, blocks_per_chunk=2)
    layers = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": WINDOW})
    for engine in (window, engine_like(kv_cache_config(layers))):
        check_windows(config_of(64), engine)
        with pytest.raises(ConfigError, match="has layers with a sliding window"):
            check_windows(several, engine)
    check_windows(several, engine_like())
    check_windows(several, recurrent())
    two = dataclasses.replace(several, groups=several.groups * 2)
    with pytest.raises(ConfigError, match="may have layers with a sliding window"):
        check_windows(two, None)
    assert caplog.text == ""
    check_windows(several, None)
    assert "does not tell whether this model has one" in caplog.text


def test_models_that_have_to_compute_prompts_from_their_first_token_are_refused() -> None:
    """Two equal prompts ended an engine with MEAN pooling: its pooler needs all tokens."""

    def engine(supported: bool, kind: str = "decoder", mla: bool = False) -> Any:
        model = {"is_prefix_caching_supported": supported, "attn_type": kind, "use_mla": mla}
        return SimpleNamespace(
            model_config=SimpleNamespace(**model),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        )

    for fine in (None, engine(True), engine(False, "attention_free")):
        check_continues(fine)
    for kind in ("decoder", "encoder_only", "encoder_decoder"):
        with pytest.raises(ConfigError, match="from their first token"):
            check_continues(engine(False, kind))
    with pytest.raises(ConfigError, match="MLA on this CPU"):
        check_continues(engine(True, mla=True))


def test_answers_of_a_model_that_forgets_parts_of_them_are_not_stored() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "RSWASpec"):
        pytest.skip("this vLLM has no R-SWA")
    layer = interface.RSWASpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, rswa_window=64
    )
    nested = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer": layer})
    for spec in (layer, nested):
        engine = engine_like(kv_cache_config(spec))
        check_answers(True, engine)
        with pytest.raises(ConfigError, match="offload_prompt_only = false.*R-SWA"):
            check_answers(False, engine)
        engine.vllm_config.model_config = None
        spec_of = make_spec({"host": "1MiB", "offload_prompt_only": False}, 4096, engine=engine)
        with pytest.raises(ConfigError, match="R-SWA"):
            spec_of.get_manager()
    check_answers(False, engine_like())


def test_without_prefix_caching_there_are_no_states_to_offload() -> None:
    def engine(caching: bool) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))

    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        check_kv_cache(engine(False), kv_cache_config(STATES))
    check_kv_cache(engine(True), kv_cache_config(STATES))
    check_kv_cache(engine(False), kv_cache_config())


def test_ids_that_may_come_again_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
        check_kv_cache(engine, kv_cache_config())
        assert ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in caplog.text) is (value == "1")


def test_blocks_that_vllm_keeps_in_host_memory_itself_are_refused() -> None:
    config = kv_cache_config()
    config.hisparse_host_num_blocks = 7
    with pytest.raises(ConfigError, match="hisparse_config"):
        check_kv_cache(SimpleNamespace(), config)
