"""What of the layout of KV pages parts engines: chunks are exchanged only where all is equal."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.vllm.layout import Layout
from kvstore.vllm.version import CANONICAL_FORMAT, HAS_GROUP_NUMBERS


def config(**changes: Any) -> Any:
    """What vLLM hands to a spec, as far as the layout looks at it."""
    told = SimpleNamespace(
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            is_parallelism_agnostic=True,
        ),
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a", "b"))],
        worker_kv_bytes_per_block=4096,
        kv_cache_layout="NHD",
        replicated_layout=False,
        canonical_layout=False,
        extra_config={},
    )
    told = copy.deepcopy(told)
    for name, value in changes.items():
        *way, last = name.split("__")
        place: Any = told
        for step in way:
            place = place[int(step)] if step.isdigit() else getattr(place, step)
        setattr(place, last, value)
    return told


@pytest.mark.parametrize(
    "changes",
    [
        {"model__name": "another"},
        {"model__dtype": "float16"},
        {"cache__tokens_per_hash": 32},
        {"cache__blocks_per_chunk": 4},
        # An fp8 cache has half the bytes of a bf16 one.
        {"worker_kv_bytes_per_block": 2048},
        {"kv_cache_layout": "HND"},
        {"replicated_layout": True},
        {"parallel__tp_size": 1, "parallel__pp_size": 2},
        {"parallel__world_size": 4, "parallel__tp_size": 4},
        {"groups__0__tokens_per_block": 32},
        {"groups__0__layer_names": ("a", "c")},
        pytest.param(
            {"groups__0__group_id": 1},
            marks=pytest.mark.skipif(
                not HAS_GROUP_NUMBERS, reason="vLLM before 0.30 does not number its groups"
            ),
        ),
    ],
    ids=str,
)
def test_another_layout_of_the_pages_parts_engines(changes: dict[str, Any]) -> None:
    assert Layout(config(**changes)).identity != Layout(config()).identity
    assert Layout(config()).identity == Layout(config()).identity


needs_canonical = pytest.mark.skipif(
    CANONICAL_FORMAT is None, reason="this vLLM has no canonical layout"
)


def canonical(workers: int, **changes: Any) -> Any:
    """The same model, asked for the canonical layout, on so many tensor parallel workers."""
    return config(
        **{
            "canonical_layout": True,
            "extra_config": {"canonical_layout": True},
            "parallel__world_size": workers,
            "parallel__tp_size": workers,
            "worker_kv_bytes_per_block": 8192 // workers,
            **changes,
        }
    )


@needs_canonical
def test_a_canonical_layout_is_the_same_for_every_tensor_parallel_size() -> None:
    one, two, four = (Layout(canonical(workers)) for workers in (1, 2, 4))
    assert one.identity == two.identity == four.identity
    assert one.chunk_bytes == two.chunk_bytes == four.chunk_bytes == 16384
    assert [four.rank_offset(rank) for rank in range(4)] == [0] * 4
    assert two.rank_bytes == two.chunk_bytes, "every rank has its heads anywhere in a row"


@needs_canonical
def test_a_canonical_layout_holds_heads_that_several_ranks_have_once() -> None:
    """Two heads, of which each of eight ranks has one: eight ranks have four times the bytes."""
    two, eight = canonical(2), canonical(8, worker_kv_bytes_per_block=4096)
    assert Layout(eight, kv_heads=2).identity == Layout(two, kv_heads=2).identity
    assert Layout(eight, kv_heads=2).chunk_bytes == Layout(two, kv_heads=2).chunk_bytes
    # Nobody knows how many heads there are: more room than needed, and a cache of its own.
    assert Layout(eight).identity != Layout(two).identity


@needs_canonical
def test_replicated_pages_are_the_same_for_one_worker_as_for_two() -> None:
    """MLA: vLLM says of one worker, too, that there is one copy."""
    alike = {"replicated_layout": True, "worker_kv_bytes_per_block": 4096}
    one, two = (Layout(canonical(workers, **alike)) for workers in (1, 2))
    assert one.identity == two.identity
    assert one.chunk_bytes == two.chunk_bytes == 8192


@needs_canonical
@pytest.mark.parametrize(
    "changes",
    [
        {"canonical_layout": False, "extra_config": {}},
        {"worker_kv_bytes_per_block": 2048},
        {"kv_cache_layout": "HND"},
        {"cache__blocks_per_chunk": 4},
        {"groups__0__layer_names": ("a", "c")},
    ],
    ids=str,
)
def test_what_else_parts_engines_parts_them_with_a_canonical_layout(
    changes: dict[str, Any],
) -> None:
    assert Layout(canonical(2, **changes)).identity != Layout(canonical(2)).identity


@needs_canonical
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel__is_parallelism_agnostic": False}, "does not certify.*tp_size = 2"),
        ({"parallel__world_size": 4, "parallel__pp_size": 2}, "does not certify.*pp_size = 2"),
        # The option is there, but this vLLM does not know it.
        ({"canonical_layout": False}, "this vLLM has no canonical layout"),
        ({"extra_config": {"canonical_layout": "false"}}, "must be true or false"),
    ],
)
def test_a_canonical_layout_that_vllm_does_not_give_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Layout(canonical(2, **changes))


def test_a_row_holds_the_parts_of_all_ranks_side_by_side_unless_they_are_equal() -> None:
    layout = Layout(config())
    assert (layout.rank_bytes, layout.chunk_bytes) == (8192, 16384)
    assert [layout.rank_offset(rank) for rank in (0, 1)] == [0, 8192]
    replicated = Layout(config(replicated_layout=True))
    assert (replicated.rank_bytes, replicated.chunk_bytes) == (8192, 8192)
    assert [replicated.rank_offset(rank) for rank in (0, 1)] == [0, 0]


def test_a_model_without_a_kv_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV"):
        Layout(config(worker_kv_bytes_per_block=0))
