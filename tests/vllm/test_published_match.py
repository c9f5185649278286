"""Our words for the published lookup of several groups say what vLLM's own code does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as theirs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult

from tests.connector.boundaries import Case
from tests.connector.published_match import published, random_case


def answer_of_vllm(case: Case) -> int | None:
    """What vLLM's scheduler finds, with as much of it as a lookup needs."""
    half = theirs.OffloadingConnectorScheduler.__new__(theirs.OffloadingConnectorScheduler)
    groups = [_group(case, index) for index in range(len(case.groups))]
    windows = [
        index for index, one in enumerate(groups) if one.sliding_window_size_in_chunks is not None
    ]
    windows.sort(key=lambda index: groups[index].sliding_window_size_in_chunks, reverse=True)
    whole = [index for index in range(len(groups)) if index not in windows]
    half.config = SimpleNamespace(kv_group_configs=groups)
    half._sliding_window_groups = tuple(windows)
    half._lookup_groups = (*whole, *windows)
    half._mamba_align_size = None
    half._chunks_being_loaded = None
    half._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
    half.manager = SimpleNamespace(
        lookup=lambda key, _: LookupResult.HIT if key in case.hits else LookupResult.MISS
    )
    status = SimpleNamespace(
        num_locally_computed_tokens=case.computed,
        req=SimpleNamespace(num_tokens=case.tokens, request_id="r"),
        max_load_tokens=None,
        req_context=None,
        group_states=[
            SimpleNamespace(
                offload_keys=[(index, chunk) for chunk in range(case.tokens // case.chunk(index))]
            )
            for index in range(len(groups))
        ],
    )
    found: int | None = half._lookup_complete_chunks(status)
    return found


def _group(case: Case, index: int) -> Any:
    size, window = case.chunk(index), case.groups[index][1]
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    spec = (
        FullAttentionSpec(block_size=size, **sizes)
        if window is None
        else SlidingWindowSpec(block_size=size, sliding_window=window, **sizes)
    )
    group = SimpleNamespace(
        tokens_per_chunk=size,
        kv_cache_spec=spec,
        sliding_window_size_in_chunks=theirs.get_sliding_window_size_in_chunks(spec, size),
        is_eagle_group=False,
    )
    group.load_window_size_in_chunks = lambda tokens: (
        theirs.GroupOffloadConfig.load_window_size_in_chunks(group, tokens)
    )
    return group


def test_our_words_for_the_published_lookup_are_those_of_vllm() -> None:
    needed = (
        (theirs, "get_sliding_window_size_in_chunks"),
        (
            theirs.OffloadingConnectorScheduler,
            "_lookup_complete_chunks",
        ),
    )
    if not all(hasattr(holder, name) for holder, name in needed):
        pytest.skip("this release looks up in another way than 0.32")
    chance = random.Random("different chunk sizes")
    for _ in range(3000):
        case = random_case(chance)
        assert published(case) == answer_of_vllm(case), case
