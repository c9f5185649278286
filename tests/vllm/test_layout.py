"""What of the layout of KV pages parts engines: chunks are exchanged only where all is equal."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.vllm.layout import Layout


def config(**changes: Any) -> Any:
    """What vLLM hands to a spec, as far as the layout looks at it."""
    told = SimpleNamespace(
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1),
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a", "b"))],
        worker_kv_bytes_per_block=4096,
        kv_cache_layout="NHD",
        replicated_layout=False,
        canonical_layout=False,
    )
    told = copy.deepcopy(told)
    for name, value in changes.items():
        *way, last = name.split("__")
        place = told
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
        {"groups__0__group_id": 1},
    ],
    ids=str,
)
def test_another_layout_of_the_pages_parts_engines(changes: dict[str, Any]) -> None:
    assert Layout(config(**changes)).identity != Layout(config()).identity
    assert Layout(config()).identity == Layout(config()).identity


def test_a_row_holds_the_parts_of_all_ranks_side_by_side_unless_they_are_equal() -> None:
    layout = Layout(config())
    assert (layout.rank_bytes, layout.chunk_bytes) == (8192, 16384)
    assert [layout.rank_offset(rank) for rank in (0, 1)] == [0, 8192]
    replicated = Layout(config(replicated_layout=True))
    assert (replicated.rank_bytes, replicated.chunk_bytes) == (8192, 8192)
    assert [replicated.rank_offset(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"canonical_layout": True}, "canonical_layout"), ({"worker_kv_bytes_per_block": 0}, "KV")],
)
def test_a_layout_that_cannot_be_kept_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Layout(config(**changes))
