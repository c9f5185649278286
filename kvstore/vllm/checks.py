"""Checks: refuse engines whose KV cache cannot be offloaded, or not for later processes."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore.errors import ConfigError
from kvstore.tiers.codec import GROUP_BYTES
from kvstore.types import about
from kvstore.vllm.version import hashes_last

if TYPE_CHECKING:
    from kvstore.gate import Gate
    from kvstore.vllm.engine import Engine

__all__ = [
    "check_answers",
    "check_codec",
    "check_continues",
    "check_engine_with_tiers",
    "check_kv_cache",
    "check_recurrent",
    "check_windows",
]

logger = logging.getLogger("kvstore")

AT_ITS_END = 10
"""Seconds that an engine needs to end beside the copies."""


def check_continues(vllm_config: Any) -> None:
    """Make sure that this vLLM can compute the rest of a prompt whose beginning is loaded.

    Poolers of all tokens of a prompt (MEAN, CLS) end the engine if a part was not computed. Its
    reference MLA on the CPU (without AMX) attends to nothing before the tokens that a step
    computes. vLLM turns its own prefix cache off for both, but no connector.

    Raises:
        ConfigError: if it cannot.
    """
    model = getattr(vllm_config, "model_config", None)
    if model is None:
        return
    # What has recurrent layers alone counts as not supported as long as vLLM tries that out.
    if not model.is_prefix_caching_supported and model.attn_type != "attention_free":
        raise ConfigError(
            "vLLM has to compute the prompts of this model from their first token (it says that "
            "it does not support prefix caching), so nothing that is stored could be used: start "
            "it without a connector"
        )
    if not model.use_mla:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ConfigError(
            "vLLM's MLA on this CPU computes a prompt from its first token only: what is loaded "
            "would be ignored, and tokens would be wrong"
        )


def check_engine_with_tiers(vllm_config: Any, seconds: float) -> None:
    """Make sure that what this engine computes may outlive it, and say what would be lost.

    That is what an engine which is killed at its end has not copied, and everything where the next
    process has other hashes for the same blocks.

    Args:
        seconds: how long its end may take.

    Raises:
        ConfigError: if its weights are to be replaced while it runs. Connectors are not told of
            that, and engines with other weights would find chunks that are stored afterwards.
    """
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "weight_transfer_config is set: weights change while the engine runs, and chunks on "
            "disk or in a store would be taken for those of other weights; leave tiers out, or "
            "weight_transfer_config"
        )
    cache = getattr(vllm_config, "cache_config", None)
    if cache is not None and not hashes_last(algorithm := str(cache.prefix_caching_hash_algo)):
        logger.warning(
            "kvstore: this vLLM begins its block hashes (%s) with another number in each process, "
            "so nothing is found after a restart: set PYTHONHASHSEED",
            algorithm,
            extra=about("server.hashes_change"),
        )
    given = getattr(vllm_config, "shutdown_timeout", None)
    if given is not None and given <= seconds:
        logger.warning(
            "vLLM kills this engine %d s after it is told to end, and copies to tiers may take %g "
            "(shutdown_timeout_s): chunks that were not copied by then are lost, all of host "
            "memory with the flows demote and exclusive; start it with --shutdown-timeout %d",
            given,
            seconds,
            math.ceil(seconds) + AT_ITS_END,
            extra=about("server.killed_at_end"),
        )


def check_kv_cache(vllm_config: Any, kv_cache_config: Any) -> None:
    """Make sure that the blocks of recurrent layers have hashes, and that blocks are on the device.

    Raises:
        ConfigError: if they have none, as prefix caching is off; for HiSparse, which keeps blocks
            in host memory and begins loads steps after they were found.
    """
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise ConfigError("hisparse_config: vLLM's own offloading of blocks cannot be combined")
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        logger.warning(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set: if a client uses the id of a request "
            "again that it has just aborted, the connector's part in vLLM ends the engine with a "
            "KeyError. Leave it out, unless another connector needs it",
            extra=about("server.ids_repeat"),
        )
    cache = vllm_config.cache_config
    if _recurrent(kv_cache_config) and not cache.enable_prefix_caching:
        raise ConfigError(
            "this model has recurrent layers, and prefix caching is off: vLLM keeps no states at "
            "the ends of blocks then, so there is nothing to offload. Start it with "
            "--enable-prefix-caching"
        )


def check_answers(prompt_only: bool, engine: Engine | None) -> None:
    """Make sure that what is stored of answers follows from the tokens before it alone.

    Raises:
        ConfigError: if it does not: with R-SWA answers attend to their last tokens and to the
            prompt that they had, and vLLM gives blocks away amid an answer.
    """
    if prompt_only or engine is None:
        return
    if any(type(spec).__name__ == "RSWASpec" for spec in _specs(engine.kv_cache_config)):
        raise ConfigError(
            "offload_prompt_only = false, and this model has R-SWA layers: what they keep of an "
            "answer is wrong for a prompt with the same tokens. Leave it out"
        )


def check_recurrent(config: Any, engine: Engine | None) -> None:
    """Make sure that states of recurrent layers are stored where they are right, and found again.

    Args:
        config: vLLM's `OffloadingConfig`.

    Raises:
        ConfigError: if prefixes may be matched inside a block: vLLM's own prefix cache was seen to
            be wrong after such a match. If states are kept beyond the ends of prompts while steps
            with guessed tokens are under way: vLLM gives their blocks to others before they are
            stored.
    """
    if engine is None or not _recurrent(engine.kv_cache_config):
        return
    block = min(int(group.tokens_per_block) for group in config.groups)
    unit = int(config.cache.tokens_per_hash)
    if unit < block:
        raise ConfigError(
            f"this model has recurrent layers, and prefixes are matched every {unit} tokens, "
            f"inside blocks of {block}: vLLM was seen to answer wrong after such a match (Granite "
            "4), and what came of it would be stored. Leave out prefix_match_unit"
        )
    settings = engine.vllm_config
    kept = settings.cache_config.prefix_cache_retention_interval
    guesses = settings.speculative_config is not None
    if kept != 0 and guesses and settings.scheduler_config.async_scheduling:
        raise ConfigError(
            "this model has recurrent layers, and with guessed tokens, async scheduling and "
            f"prefix_cache_retention_interval = {kept} vLLM overwrites states that are still to "
            "be stored: use --no-async-scheduling, or prefix_cache_retention_interval = 0, the "
            "default from vLLM 0.30 on"
        )
    if int(config.cache.blocks_per_chunk) > 1:
        logger.warning(
            "kvstore: this model has recurrent layers, and blocks_per_chunk = %d: a prompt whose "
            "last whole block is not the last one of a chunk is not found again; use 1",
            int(config.cache.blocks_per_chunk),
            extra=about("server.states_lost"),
        )


def check_windows(config: Any, engine: Engine | None) -> None:
    """Make sure that chunks are stored whole.

    vLLM offers a chunk whose last block a request holds, also where a sliding window has passed
    the blocks before: what a shorter prompt needs of it would be stale.

    Args:
        config: vLLM's `OffloadingConfig`.

    Raises:
        ConfigError: if a chunk may have several blocks of a layer with a window.
    """
    count = int(config.cache.blocks_per_chunk)
    if count == 1:
        return
    if engine is None and len(config.groups) == 1:
        logger.warning(
            "kvstore: blocks_per_chunk = %d: with a sliding window chunks would be stored in "
            "parts, and vLLM's own connector does not tell whether this model has one; if it "
            "has, use 1, or KVStoreConnector",
            count,
            extra=about("server.window_unknown"),
        )
    elif engine is None or _has_windows(engine.kv_cache_config):
        raise ConfigError(
            f"blocks_per_chunk = {count}, and this model "
            + ("may have" if engine is None else "has")
            + " layers with a sliding window: vLLM would store what the window has left of a "
            "chunk as the whole, and tokens would be wrong. Use 1; for larger chunks raise "
            "--block-size"
        )


def check_codec(key: str, gate: Gate, engine: Engine | None) -> None:
    """Make sure that all pages of the KV cache are numbers of the type that the codec encodes.

    Args:
        key: of the configuration that names the gate.

    Raises:
        ConfigError: if they are not, or that cannot be known.
    """
    if engine is None:
        raise ConfigError(
            f"{key}: vLLM's own connector does not tell what a page holds; use KVStoreConnector"
        )
    for group in engine.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        held = str(getattr(spec, "dtype", None)).removeprefix("torch.")
        if not isinstance(spec, AttentionSpec) or held != gate.dtype:
            raise ConfigError(
                f"{key}: the codec encodes attention layers of {gate.dtype}, and a KV cache "
                f"group of this model is {type(spec).__name__} of {held}"
            )
        if spec.page_size_bytes % GROUP_BYTES:
            raise ConfigError(
                f"{key}: pages of {spec.page_size_bytes} bytes: must be a multiple of "
                f"{GROUP_BYTES}, as one scale is for as many bytes"
            )


def _specs(kv_cache_config: Any) -> list[Any]:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for spec in list(specs):
        # One group may have a specification for each of its layers.
        specs += getattr(spec, "kv_cache_specs", {}).values()
    return specs


def _has_windows(kv_cache_config: Any) -> bool:
    kinds = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    return any(isinstance(spec, kinds) for spec in _specs(kv_cache_config))


def _recurrent(kv_cache_config: Any) -> bool:
    groups = kv_cache_config.kv_cache_groups
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
