"""Whether vLLM's block hashes know all of a request that decides its KV bytes.

What an engine is stays out of them; that is the identity's part.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers.base import BaseRenderer
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 16
TOKENS = list(range(100, 100 + 4 * BLOCK))


def hashes(tokens: list[int] | None = TOKENS, **more: Any) -> list[bytes]:
    init_none_hash(sha256)
    request = Request(
        "1",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **more,
    )
    assert len(request.block_hashes) == len(TOKENS) // BLOCK
    return list(request.block_hashes)


def image(identifier: str, offset: int = BLOCK, length: int = 8) -> dict[str, Any]:
    place = PlaceholderRange(offset=offset, length=length)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


def embeddings(seed: int) -> torch.Tensor:
    return torch.randn(len(TOKENS), 8, generator=torch.Generator().manual_seed(seed))


def shared(one: list[bytes], other: list[bytes]) -> int:
    """How many leading blocks have the same hashes."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_an_image_is_known_in_its_blocks_and_all_after_them() -> None:
    one, other = hashes(**image("a")), hashes(**image("b"))
    assert hashes(**image("a")) == one
    assert shared(one, other) == shared(one, hashes()) == 1
    assert shared(one, hashes(**image("a", offset=BLOCK + 4))) == 1
    assert not set(one[1:]) & set(other[1:])


def test_embeddings_are_known_by_what_they_hold_beside_the_tokens() -> None:
    one = hashes(None, prompt_embeds=embeddings(0))
    assert hashes(None, prompt_embeds=embeddings(0)) == one
    assert not set(one) & set(hashes(None, prompt_embeds=embeddings(1)))
    assert not set(one) & set(hashes([0] * len(TOKENS)))
    late = embeddings(0)
    late[2 * BLOCK] += 1
    assert shared(one, hashes(None, prompt_embeds=late)) == 2


def test_a_salt_and_an_adapter_are_known_from_the_first_block_on() -> None:
    plain, salted = hashes(), hashes(cache_salt="a")
    assert hashes(cache_salt="a") == salted
    assert not set(salted) & set(plain)
    assert not set(salted) & set(hashes(cache_salt="b"))
    adapter = LoRARequest("name", 1, "path")
    assert not set(plain) & set(hashes(lora_request=adapter))


def names(number: int, *, processor_cache: float, prefix_caching: bool) -> dict[str, Any]:
    """What vLLM calls the image of the n-th request of a process, if its content does not tell."""
    multimodal = MultiModalConfig(mm_processor_cache_gb=processor_cache)
    renderer: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)),
        _validate_mm_uuids=lambda *_: None,
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    named: dict[str, Any] = BaseRenderer._process_mm_uuids(
        renderer, {}, items, {}, f"renderer0-mm-{number}"
    )
    return named


def test_without_both_of_its_caches_vllm_knows_an_image_by_a_number_alone() -> None:
    """The number begins anew with each process: such an engine must not have tiers."""
    numbered = names(1, processor_cache=0, prefix_caching=False)
    assert numbered == {"image": ["renderer0-mm-1-image-0"]}
    assert names(1, processor_cache=4, prefix_caching=False) == {}
    assert names(1, processor_cache=0, prefix_caching=True) == {}
