"""Layout: how the KV pages of a vLLM worker lie in a row of host memory.

row:   | rank 0 | rank 1 | ... | padding to a page |
rank:  | tensor 0: blocks_per_chunk pages | tensor 1 | ... |

With `canonical_layout` there are no ranks in a row, and its bytes do not tell how many there were:

row:   | tensor 0: blocks_per_chunk canonical pages | tensor 1 | ... | padding to a page |

A canonical page is what a block would have in one worker alone; each rank has its heads in it, and
vLLM certifies where (`mapping`).

`worker_region` and `manager_region` find the host memory of one engine in each of its processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvstore.config import Config
from kvstore.connector.spec import flag_of
from kvstore.engine.host_memory import (
    in_process,
    joined_region,
    private_region,
    release_region,
    share_region,
)
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion, RegionShape
from kvstore.tiers.rendezvous import OtherShapeError
from kvstore.vllm.version import CANONICAL_FORMAT, group_number

if TYPE_CHECKING:
    from kvstore.vllm.engine import Engine

__all__ = [
    "EngineShape",
    "Layout",
    "Piece",
    "has_writer",
    "manager_region",
    "pieces",
    "release_region",
    "row_pages",
    "worker_region",
]

NOT_CERTIFIED = (
    "canonical_layout = true: vLLM does not certify that the KV cache of this model has the same "
    "bytes whatever the parallel shape (%s). It does for attention and MLA layers whose KV heads "
    "are spread evenly over tensor parallel workers, without pipeline or context parallelism and "
    "without scales for each token and head. Leave out canonical_layout"
)


class Layout:
    """Sizes and identity of the chunks of one engine.

    Attributes:
        chunk_bytes: bytes of a chunk, all ranks together.
        rank_bytes: bytes of a chunk among which one rank has its own.
        one_block: whether a chunk is one block of vLLM's. Of several the key names the last one,
            and vLLM remembers the others, for 40 bytes a token, as long as a tier has it.
        copies: ranks that have bytes of their own; 1 when all hold the same bytes.
        canonical: bytes and identity are the same for every tensor parallel size.
        identity: what must be equal for chunks to be exchanged.
    """

    def __init__(self, config: Any, kv_heads: int | None = None) -> None:
        """
        Args:
            config: vLLM's `OffloadingConfig`.
            kv_heads: of the whole model, where they are known. Of more ranks than heads some
                hold the same bytes.

        Raises:
            ConfigError: if chunks cannot be laid out as the configuration demands.
        """
        parallel, cache = config.parallel, config.cache
        per_block = int(config.worker_kv_bytes_per_block)
        if per_block <= 0:
            raise ConfigError("this model has no KV cache that could be offloaded")
        self.canonical = _canonical(config)
        replicated = bool(getattr(config, "replicated_layout", False))
        self.replicated = replicated
        self.copies = 1 if replicated else int(parallel.world_size)
        if self.canonical and kv_heads:
            self.copies = min(self.copies, kv_heads)
        blocks = int(cache.blocks_per_chunk)
        self.one_block = blocks == 1
        self.chunk_bytes = per_block * blocks * self.copies
        self.rank_bytes = self.chunk_bytes if self.canonical else per_block * blocks
        self.identity: Mapping[str, Any] = {
            "engine": "vllm",
            "model": str(config.model.name),
            "dtype": str(config.model.dtype),
            "tokens_per_hash": int(cache.tokens_per_hash),
            "blocks_per_chunk": blocks,
            **(
                {"canonical": CANONICAL_FORMAT, "bytes_per_block": per_block * self.copies}
                if self.canonical
                else {
                    "rank_bytes_per_block": per_block,
                    "replicated": replicated,
                    "parallel": _sizes(parallel),
                }
            ),
            "kv_cache_layout": getattr(config, "kv_cache_layout", None),
            "groups": [
                {
                    "group": group_number(group, place),
                    "tokens_per_block": int(group.tokens_per_block),
                    "layers": list(group.layer_names),
                }
                for place, group in enumerate(config.groups)
            ],
        }

    def rank_offset(self, rank: int) -> int:
        """Where the bytes among which a rank has its own begin in a row."""
        return 0 if self.replicated or self.canonical else rank * self.rank_bytes


class EngineShape(Protocol):
    """The facts that a manager and its workers need about their engine, from vLLM's specs.

    Attributes:
        config: vLLM's `OffloadingConfig`.
        store_config: of kvstore.
        layout: of chunks.
        region_shape: of host memory.
        identity: what must be equal for chunks to be exchanged.
        worker_apart: whether a worker has a process of its own, whatever that is called.
        engine: what vLLM gave to a connector; None behind vLLM's own.
    """

    config: Any
    store_config: Config
    layout: Layout
    region_shape: RegionShape
    identity: Mapping[str, Any]
    worker_apart: bool
    engine: Engine | None


def _canonical(config: Any) -> bool:
    """Whether the canonical layout is asked for.

    Raises:
        ConfigError: if it is, and vLLM does not give it.
    """
    if not flag_of(getattr(config, "extra_config", {}), "canonical_layout"):
        return False
    if CANONICAL_FORMAT is None or not getattr(config, "canonical_layout", False):
        raise ConfigError("canonical_layout = true: this vLLM has no canonical layout")
    parallel, shape = config.parallel, _sizes(config.parallel)
    told = ", ".join(f"{name} = {size}" for name, size in shape.items())
    if not parallel.is_parallelism_agnostic or shape["world_size"] != shape["tp_size"]:
        raise ConfigError(NOT_CERTIFIED % told)
    return True


def _sizes(parallel: Any) -> dict[str, int]:
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return {name: int(getattr(parallel, name)) for name in names}


def worker_region(
    engine: str, workers: int, shape: RegionShape, *, apart: bool = False, stages: int = 1
) -> PinnedRegion:
    """The region, for a worker: private if it is the only one, in the scheduler's process.

    Args:
        apart: it has a process of its own, whatever that is called.
        stages: of the pipeline.

    Raises:
        KVStoreError: if the memory cannot be had, or stages need rows of different sizes.
    """
    if workers == 1 and not apart and "Worker" not in multiprocessing.current_process().name:
        return private_region(engine, shape)
    with _explained(stages):
        return share_region(engine, workers, shape)


def manager_region(
    engine: str, workers: int, shape: RegionShape, *, stages: int = 1
) -> PinnedRegion:
    """The region, for the scheduler: it comes last, when all workers have it.

    Raises:
        KVStoreError: if the workers do not share this machine's memory.
    """
    if in_process(engine):
        return private_region(engine, shape, scheduler=True)
    with _explained(stages):
        return joined_region(share_region(engine, workers, shape), engine, workers)


@contextlib.contextmanager
def _explained(stages: int) -> Iterator[None]:
    """A row has as many bytes for each worker, so all stages have to keep as many of a block."""
    try:
        yield
    except OtherShapeError as error:
        if stages == 1:
            raise
        raise ConfigError(
            f"pipeline_parallel_size = {stages}: stages keep different numbers of bytes of a block "
            f"({error}). Give all stages as many layers: take a size that divides their number, "
            "or set VLLM_PP_LAYER_PARTITION"
        ) from error


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
    """Return a layer's pieces of its tensor's page, in the order of vLLM's runs."""
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
