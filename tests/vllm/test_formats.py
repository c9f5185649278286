"""The page format in use parts engines, whatever was asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
)

from kvstore.errors import ConfigError
from kvstore.vllm.formats import layers_of_worker, page_formats
from tests.vllm.parts import engine_like, kv_cache_config, make_spec, offloading_config

BLOCK = 4096
PLAIN = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def told(backends: dict[str, Any], groups: Any = None) -> dict[str, dict[str, Any]]:
    """What a worker tells of its layers, which have these backends."""
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda found=backend: found)
        for name, backend in backends.items()
    }
    compilation = SimpleNamespace(static_forward_context={**layers, "moe": object()})
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compilation),
        model_runner=SimpleNamespace(kv_cache_config=groups),
    )
    return layers_of_worker(worker)


def formats(
    spec: Any = PLAIN, told: Any = None, layers: tuple[str, ...] = ("layer-0",), **more: Any
) -> dict[str, Any]:
    config = offloading_config(more, BLOCK, "engine")
    group = dataclasses.replace(config.groups[0], layer_names=layers)
    return page_formats(
        dataclasses.replace(config, groups=(group,)), kv_cache_config(spec, layers), told or {}
    )


def differs(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


OTHERS = {
    "block_size": 32,
    "num_kv_heads": 4,
    "head_size": 128,
    "head_size_v": 32,
    "dtype": torch.float16,
    "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    "page_size_padded": 2**20,
    "num_head_slots": 1,
    "state_content_bytes": 300,
    "tokens_per_state": Fraction(1, 2),
    "sliding_window": 64,
    "attention_chunk_size": 64,
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_field_of_a_spec_parts_engines(name: str) -> None:
    if name not in {each.name for each in dataclasses.fields(PLAIN)}:
        pytest.skip(f"this vLLM has no {name}")
    object.__setattr__(spec := dataclasses.replace(PLAIN), name, OTHERS[name])
    assert differs(formats(), formats(spec)) == {f"group.0.{name}"}
    assert json.loads(json.dumps(formats(spec), allow_nan=False)) == formats(spec)


def test_a_field_that_nobody_has_heard_of_parts_engines() -> None:
    kind = dataclasses.make_dataclass(
        "FullAttentionSpec",
        [("swizzle", int, dataclasses.field(default=7, kw_only=True))],
        bases=(FullAttentionSpec,),
        frozen=True,
    )
    values = {each.name: getattr(PLAIN, each.name) for each in dataclasses.fields(PLAIN)}
    one, other = formats(kind(**values)), formats(kind(**values, swizzle=8))
    assert differs(one, other) == {"group.0.swizzle"}


def test_a_field_that_says_nothing_about_itself_is_refused() -> None:
    object.__setattr__(spec := dataclasses.replace(PLAIN), "dtype", object())
    with pytest.raises(ConfigError, match=r"group\.0\.dtype"):
        formats(spec)


def test_the_backend_that_a_group_uses_parts_engines() -> None:
    cpu, triton = (
        formats(told=told({"layer-0": backend}))
        for backend in (CPUAttentionBackend, TritonAttentionBackend)
    )
    assert cpu["group.0.backend"].endswith(".CPUAttentionBackend")
    assert differs(cpu, triton) == {"group.0.backend"}


def test_which_layer_uses_which_backend_counts() -> None:
    a, b = CPUAttentionBackend, TritonAttentionBackend
    layers = ("one", "two")
    first, second, same = (
        formats(told=told(dict(zip(layers, its, strict=True))), layers=layers)
        for its in ((a, b), (b, a), (a, a))
    )
    assert differs(first, second) == {"group.0.layers"}
    assert same["group.0.backend"].endswith(".CPUAttentionBackend")


def test_layers_of_one_group_count_each_with_its_own_spec() -> None:
    """The scheduler's configuration has one spec for all of them."""

    def its(head_size: int) -> dict[str, Any]:
        specs = {"one": PLAIN, "two": dataclasses.replace(PLAIN, head_size=head_size)}
        uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
        worker = kv_cache_config(uniform, ("one", "two"))
        backends = dict.fromkeys(specs, CPUAttentionBackend)
        return formats(told=told(backends, worker), layers=("one", "two"))

    assert differs(its(32), its(128)) == {"group.0.layers"}


def test_canonical_pages_do_not_tell_how_many_ranks_there_are() -> None:
    half = dataclasses.replace(PLAIN, num_kv_heads=1)
    assert differs(formats(), formats(half)) == {"group.0.num_kv_heads"}
    assert formats(canonical_layout=True) == formats(half, canonical_layout=True)


@contextmanager
def manager(folder: Path, engine: Any) -> Iterator[Any]:
    from kvstore.vllm.layout import worker_region

    disk = {"type": "disk", "path": str(folder), "capacity_bytes": "300MiB"}
    extra = {"cpu_bytes_to_use": 64 * BLOCK, "tiers": [disk], "automatic_identity": True}
    spec = make_spec({**extra, "identity": {}}, BLOCK, engine=engine)
    worker_region(spec.config.engine_id, 1, spec.region_shape)
    found = spec.get_manager()
    try:
        yield found
    finally:
        found.shutdown()


def test_engines_with_equal_settings_and_other_pages_have_a_namespace_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvstore.vllm.identity.identity.engine_identity", lambda config, **more: {"a": 1}
    )
    quantised = dataclasses.replace(PLAIN, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    for spec, backend in (
        (PLAIN, CPUAttentionBackend),
        (PLAIN, TritonAttentionBackend),
        (quantised, CPUAttentionBackend),
        (PLAIN, CPUAttentionBackend),
    ):
        engine = engine_like(kv_cache_config(spec), layers=told({"layer-0": backend}))
        with manager(tmp_path, engine):
            pass
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == 3
