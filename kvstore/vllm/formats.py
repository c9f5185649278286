"""Page formats in use: the spec of each KV cache group, and the backend of each layer.

A configuration says what was asked for, which may be "auto". What vLLM chose is in the specs
of its KV cache groups, of which every field counts, unknown ones included.
Only the workers know which backend writes a layer's pages, and in which order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvstore.vllm.identity.identity import plain, shortened
from kvstore.vllm.version import group_number

__all__ = ["layers_of_worker", "page_formats"]

OF_ONE_RANK = frozenset({"num_kv_heads", "num_head_slots", "max_tp_shards", "page_size_padded"})
"""Fields that tell the parallel shape, which does not show in canonical pages."""


def page_formats(
    config: Any, kv_cache_config: Any, layers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the facts that decide the order and meaning of bytes in each group's pages, flat.

    Args:
        config: vLLM's `OffloadingConfig`.
        kv_cache_config: the scheduler's `KVCacheConfig`.
        layers: what the workers told of each: see `layers_of_worker`.

    Raises:
        ConfigError: for a field that says nothing about itself.
    """
    ignored = OF_ONE_RANK if getattr(config, "canonical_layout", False) else frozenset()
    facts: dict[str, Any] = {}
    for place, group in enumerate(config.groups):
        number = group_number(group, place)
        spec = _told(kv_cache_config.kv_cache_groups[number].kv_cache_spec, f"group.{number}")
        its = {
            name: {key: value for key, value in told.items() if key not in ignored}
            for name, told in layers.items()
            if name in group.layer_names
        }
        told = {json.dumps(one, sort_keys=True) for one in its.values()}
        # One answer where all layers have the same, which is nearly always.
        spec |= next(iter(its.values())) if len(told) == 1 else {"layers": its}
        facts |= {f"group.{number}.{key}": spec[key] for key in spec.keys() - ignored}
    return shortened(facts)


def layers_of_worker(worker: Any) -> dict[str, dict[str, Any]]:
    """By layer the attention backend and the runner, each of which has a say in a page's order.

    And the spec, where those of a group are not all equal.
    """
    runner = _name(type(worker.model_runner))
    context = worker.vllm_config.compilation_config.static_forward_context
    told: dict[str, dict[str, Any]] = {}
    for name, layer in context.items():
        if callable(getattr(layer, "get_attn_backend", None)):
            told[name] = {"backend": _name(layer.get_attn_backend()), "runner": runner}
    config = getattr(worker.model_runner, "kv_cache_config", None)
    for group in getattr(config, "kv_cache_groups", ()):
        specs: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name, spec in specs.items():
            told.setdefault(name, {}).update(_told(spec, name))
    return told


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _told(spec: Any, where: str) -> dict[str, Any]:
    """The kind of a spec, and all of its fields."""
    return {"kind": type(spec).__qualname__, **plain(spec, where)}
