"""Identity: what decides the KV bytes of a vLLM engine. Equal identities may share a cache.

Every setting counts unless it is known not to matter. A new setting of vLLM thus costs hits at
worst. The answers are flat, so that a difference can be told in one line.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import math
import numbers
import os
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from xxhash import xxh3_128

from kvstore.errors import ConfigError
from kvstore.types import about
from kvstore.vllm.identity.fingerprint import UnreadableError, fingerprint, model_files
from kvstore.vllm.identity.settings import (
    ATTENTION_IGNORED,
    CACHE_IGNORED,
    DRAFT_IGNORED,
    ENVIRONMENT_COUNTS,
    HF_IGNORED,
    KERNEL_IGNORED,
    LOAD_IGNORED,
    LORA_IGNORED,
    MODEL_IGNORED,
    MULTIMODAL_IGNORED,
    PARALLEL_IGNORED,
    PLAIN_MODELS,
    PLAIN_ROPE,
    SECTIONS_IGNORED,
    TOKEN_IDS,
    WITHOUT_DRAFT,
)

__all__ = ["adapter_settings", "engine_identity", "plain", "shortened"]

logger = logging.getLogger("kvstore")

MAX_SHOWN = 400
"""A longer value is kept as a digest, so that a person can read the rest."""


def engine_identity(vllm_config: Any, *, fingerprint_weights: bool = True) -> dict[str, Any]:
    """All that decides the KV bytes of the engine with this `VllmConfig`, beside their layout.

    Args:
        fingerprint_weights: read the weight files; otherwise the model's name and revision
            stand for them.

    Raises:
        ConfigError: if the weights cannot be read, a setting cannot be told, or block hashes do
            not know what images hold.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    _refuse_numbered_inputs(vllm_config)
    facts: dict[str, Any] = {"vllm": _release(), **_device()}
    _add(facts, "model", model, MODEL_IGNORED)
    _add_configuration(facts, "config", model)
    if _length_matters(model):
        facts["model.max_model_len"] = model.max_model_len
    _add(facts, "multimodal", getattr(model, "multimodal_config", None), MULTIMODAL_IGNORED)
    _add_sections(facts, vllm_config)
    for name in sorted(ENVIRONMENT_COUNTS):
        facts[f"environment.{name}"] = os.environ.get(name)
    facts["block_hashes"] = _block_hashes(vllm_config.cache_config)
    facts["weights"] = _weights(model, load, fingerprint_weights)
    _add_draft(facts, vllm_config, fingerprint_weights)
    return shortened(facts)


def shortened(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that are not empty, with digests for long values."""
    return {key: _short(value) for key, value in facts.items() if value not in (None, {}, [], "")}


def adapter_settings(lora_config: Any) -> str:
    """Return the settings that, besides its files, decide the KV of a request with an adapter."""
    told: dict[str, Any] = {}
    _add(told, "lora", lora_config, LORA_IGNORED)
    return json.dumps(told, sort_keys=True)


def _refuse_numbered_inputs(vllm_config: Any) -> None:
    """Without both of its caches vLLM knows an image by a number, which the next process reuses."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or vllm_config.cache_config.enable_prefix_caching:
        return
    if multimodal.mm_processor_cache_gb == 0:
        raise ConfigError(
            "mm_processor_cache_gb = 0 and enable_prefix_caching = false: vLLM's block hashes do "
            "not know what an image holds, and a tier would take it for another process's. Set "
            "either, or leave out the tiers"
        )


def _block_hashes(cache_config: Any) -> str | None:
    """What decides the keys of chunks, so that others find nothing by theirs; None by default."""
    algorithm, seed = str(cache_config.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED")
    if seed is None:
        return None if algorithm == "sha256" else algorithm
    # Whoever knows the seed can make prompts whose hashes collide.
    return f"{algorithm} with seed {xxh3_128(seed.encode()).hexdigest()[:8]}"


SECTIONS: Mapping[str, Collection[str]] = {
    "cache_config": CACHE_IGNORED,
    "attention_config": ATTENTION_IGNORED,
    "parallel_config": PARALLEL_IGNORED,
    "kernel_config": KERNEL_IGNORED,
    "load_config": LOAD_IGNORED,
}
"""Of `VllmConfig`, and what does not count in each."""

ADDED_APART = ("model_config", "speculative_config")


def _add_sections(facts: dict[str, Any], vllm_config: Any) -> None:
    """Add all sections, unknown ones included, except those known not to matter."""
    for each in dataclasses.fields(vllm_config):
        if each.name in SECTIONS_IGNORED or each.name in ADDED_APART or each.name[0] == "_":
            continue
        section, value = each.name.removesuffix("_config"), getattr(vllm_config, each.name, None)
        if dataclasses.is_dataclass(value):
            _add(facts, section, value, SECTIONS.get(each.name, ()))
        else:
            facts[section] = plain(value, each.name)


def _add(facts: dict[str, Any], section: str, config: Any, ignored: Collection[str]) -> None:
    if config is None:
        return
    for each in dataclasses.fields(config):
        if each.name not in ignored and not each.name.startswith("_"):
            value = getattr(config, each.name, None)
            facts[f"{section}.{each.name}"] = plain(value, f"{section}.{each.name}")


def _add_configuration(facts: dict[str, Any], section: str, model: Any) -> None:
    """The model's own configuration, with all that has been changed in it."""
    ignored = HF_IGNORED | TOKEN_IDS if _is_plain(model) else HF_IGNORED
    told = _without(plain(model.hf_config, section), ignored)
    text = getattr(model, "hf_text_config", None)
    if text is not None and text is not model.hf_config:
        told["text"] = plain(text, section)
    for name, value in told.items():
        # Models of several parts have a configuration for each, which names the same.
        is_part = isinstance(value, dict) and "model_type" in value
        facts[f"{section}.{name}"] = _without(value, ignored) if is_part else value


def _without(told: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in ignored}


def _is_plain(model: Any) -> bool:
    return getattr(_text_config(model), "model_type", None) in PLAIN_MODELS


def _text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or model.hf_config


def _length_matters(model: Any) -> bool:
    """Whether the KV depends on the longest request that is allowed, for all we know."""
    if not _is_plain(model):
        return True
    config = _text_config(model)
    kinds = _rope_kinds(getattr(config, "rope_parameters", None))
    kinds |= _rope_kinds(getattr(config, "rope_scaling", None))
    return not kinds <= PLAIN_ROPE


def _rope_kinds(rope: Any) -> set[str]:
    if not isinstance(rope, Mapping):
        return set()
    # One table, or one for each kind of layer.
    tables = [rope, *(table for table in rope.values() if isinstance(table, Mapping))]
    return {str(table[key]) for table in tables for key in ("rope_type", "type") if table.get(key)}


def _add_draft(facts: dict[str, Any], vllm_config: Any, read_weights: bool) -> None:
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or speculative.method in WITHOUT_DRAFT:
        return
    _add(facts, "draft", speculative, DRAFT_IGNORED)
    facts["draft.model"] = str(draft.model)
    _add_configuration(facts, "draft.config", draft)
    target = vllm_config.model_config
    if _length_matters(draft):
        facts["draft.max_model_len"] = target.max_model_len
    if (draft.model, draft.revision) != (target.model, target.revision):
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        facts["draft.weights"] = _weights(draft, load, read_weights)


def _weights(model: Any, load: Any, read: bool) -> Any:
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy":
        return {"dummy": int(model.seed or 0)}
    if not read:
        logger.warning(
            "kvstore: fingerprint_weights = false: other weights go unnoticed",
            extra=about("weights.not_checked"),
        )
        return None
    began = time.monotonic()
    try:
        # A language model alone lies in one folder.
        images = getattr(model, "multimodal_config", None) is not None
        several = images or _text_config(model) is not model.hf_config
        files = model_files(model, load_format, load.download_dir, several=several)
        found = fingerprint(files)
    except UnreadableError as error:
        raise ConfigError(
            f"fingerprint_weights = true: the weights of {model.model} cannot be read ({error}). "
            'Set fingerprint_weights = false and name them yourself, as identity = {"weights": '
            '"v1"}: a new name for new weights'
        ) from error
    logger.info(
        "kvstore: %d weight files of %d bytes known by %s after %.1f s",
        len(files),
        found.total_bytes,
        found.digest,
        time.monotonic() - began,
        extra=about("weights.known", files=len(files), bytes=found.total_bytes),
    )
    return {"fingerprint": found.digest, "bytes": found.total_bytes}


def _release() -> str:
    """The minor release of vLLM, which keeps the layout of pages; of other builds the version."""
    from vllm import __version__

    match = re.match(r"(\d+\.\d+)\.\d+(\+\w+)?$", __version__)
    return match[1] if match else str(__version__)


def _device() -> dict[str, Any]:
    """Return facts that decide the choice of kernels, and so the order of bytes in a page."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return {"device": f"cpu {platform.machine()}", "device.amx": _has_amx()}
    try:
        capability = current_platform.get_device_capability()
    except (NotImplementedError, RuntimeError):
        capability = None
    return {"device": kind, "device.capability": str(capability) if capability else None}


def _has_amx() -> bool:
    """vLLM's kernels pack keys in another order where the processor has AMX."""
    import torch

    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe()) if probe is not None else False


def plain(value: Any, where: str) -> Any:
    """`value` as JSON can hold it, always the same for the same.

    Raises:
        ConfigError: for an object that says nothing about itself.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, numbers.Rational):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, Mapping):
        return {
            str(key): plain(item, f"{where}.{key}")
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))
        }
    if isinstance(value, Set):
        return sorted((plain(item, where) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [plain(item, where) for item in value]
    return _plain_object(value, where)


def _plain_object(value: Any, where: str) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch":
        # A data type, for one.
        return str(value).removeprefix("torch.")
    if callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict(), where)
    if dataclasses.is_dataclass(value):
        return {
            each.name: plain(getattr(value, each.name), f"{where}.{each.name}")
            for each in dataclasses.fields(value)
        }
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise ConfigError(
        f"vLLM's setting {where} is a {type(value).__name__}: kvstore cannot tell whether two "
        "engines have the same. Set automatic_identity = false and name what may be shared "
        "yourself, in identity"
    )


def _short(value: Any) -> Any:
    told = json.dumps(value, sort_keys=True)
    if len(told) <= MAX_SHOWN:
        return value
    return f"xxh3:{xxh3_128(told.encode()).hexdigest()}"
