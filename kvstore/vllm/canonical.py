"""Which bytes of a worker's pages go where in the pages of a row.

With the canonical layout a page of a row holds the heads of all ranks, in an order that does not
depend on how many ranks there are; vLLM certifies where each rank has its own (`mapping`).
Otherwise a page of a row is a page of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvstore.errors import ConfigError

__all__ = ["Piece", "has_writer", "pieces", "row_pages"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes in one piece: `local` in a page of the worker, `canonical` in a page of the row."""

    local: int
    canonical: int
    size: int


def row_pages(caches: CanonicalKVCaches, canonical: bool) -> list[int]:
    """Bytes that one block has in a row, tensor by tensor.

    Raises:
        ConfigError: if pages shall be canonical, and vLLM does not certify how.
    """
    if not canonical:
        return [int(tensor.page_size_bytes) for tensor in caches.tensors]
    sizes = [0] * len(caches.tensors)
    for refs in caches.group_data_refs:
        for ref in refs:
            size = int(_mapping(ref).canonical_page_size_bytes)
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], size)
    return sizes


def pieces(ref: Any, canonical: bool) -> list[Piece]:
    """What a layer has of its tensor's page; the pieces are in the order of vLLM's runs."""
    if not canonical:
        return [Piece(0, 0, int(ref.page_size_bytes))]
    return [
        Piece(
            run.local_offset + number * run.local_stride,
            run.canonical_offset + number * run.canonical_stride,
            run.fragment_size,
        )
        for run in _mapping(ref).runs
        for number in range(run.num_fragments)
    ]


def has_writer(ref: Any, canonical: bool) -> bool:
    """Whether this rank stores a layer. Of ranks that hold the same bytes the first does."""
    return not canonical or _mapping(ref).writer_index == 0


def _mapping(ref: Any) -> Any:
    mapping = getattr(ref, "mapping", None)
    if mapping is None or not mapping.parallelism_agnostic:
        raise ConfigError(
            "canonical_layout = true: vLLM does not certify how the KV cache of this worker lies "
            "in pages of every parallel shape, as it would have to for all layers (packed KV "
            "caches and layers other than attention are not certified). Leave out "
            "canonical_layout"
        )
    return mapping
