"""Spec: build a manager and handlers for workers from a server's configuration."""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from kvstore.assembly import rows_for
from kvstore.config import Config
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.handler import CudaHandler, HostHandler, OffloadingHandler
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvstore.connector.server import KVCacheConfigLike, KVCacheGroupLike, ServerConfigLike
from kvstore.engine.host_memory import (
    joined_region,
    private_region,
    release_region,
    share_region,
)
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion

if TYPE_CHECKING:
    import torch

    from kvstore.device import Pages

__all__ = ["Handlers", "KVStoreSpec", "OffloadingSpec", "check_vllm_values", "flag_of"]

Handlers = Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]
"""The kind of source, the kind of target, and the handler that copies between them."""

CONNECTOR_KEYS = frozenset({"spec_name", "spec_module_path", "block_size", "offload_prompt_only"})
"""Keys of ``kv_connector_extra_config`` that are not part of `kvstore.config`."""

NAMING_KEYS = ("automatic_identity", "fingerprint_weights")
"""Those that say how an engine of vLLM is named."""

BUDGET_KEY = "sync_load_budget_bytes"
"""That of a vLLM which can wait for a load within a step."""

VLLM_KEYS = CONNECTOR_KEYS.union(
    NAMING_KEYS,
    (BUDGET_KEY, "blocks_per_chunk", "self_describing_kv_events", "canonical_layout"),
)
"""The same for vLLM: those that its connector reads itself, and those that name the engine."""

FLAG_KEYS = (
    *NAMING_KEYS,
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
)
"""Of all these those that are true or false. vLLM takes "false" for true."""

SIZE_KEYS = ("block_size", "blocks_per_chunk")
"""Those that say how large a chunk is."""

ENGINE_KEYS = frozenset({"chunk_bytes", "keep_events"})
"""Keys of `kvstore.config` that vLLM knows better."""

SHAPE_BLOCKS = 1234
"""A number of blocks that no other dimension of a KV tensor has."""


def flag_of(values: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a value that is true or false.

    Raises:
        ConfigError: for any other.
    """
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r}: must be true or false")
    return value


def check_vllm_values(values: Mapping[str, Any]) -> None:
    """Check the values of `VLLM_KEYS`.

    Raises:
        ConfigError: for one that vLLM takes for something else or refuses; says what is allowed.
    """
    for key in FLAG_KEYS:
        flag_of(values, key)
    sizes = {key: size for key in SIZE_KEYS if (size := values.get(key)) is not None}
    for key, size in sizes.items():
        _positive(key, size)
    if len(sizes) > 1:
        raise ConfigError(f"{' and '.join(SIZE_KEYS)}: only one of them is allowed")
    budget = values.get(BUDGET_KEY)
    if isinstance(budget, bool) or not isinstance(budget, int | None) or (budget or 0) < 0:
        raise ConfigError(f"{BUDGET_KEY} = {budget!r}: must be a whole number of bytes")


class OffloadingSpec(ABC):
    """Sizes of a server's blocks, and what is built from them.

    Attributes:
        extra_config: ``kv_connector_extra_config``.
        hash_block_size: tokens of a hashed block.
        device_block_size: tokens of a block of the device, for each KV cache group.
        block_size_factor: blocks of the device in an offloaded block.
        offloaded_block_size: tokens of an offloaded block, for each KV cache group.
        sliding_window: for each KV cache group the tokens that a token attends to, itself
            included, if the server frees blocks that no later token needs; None if it keeps them.
        enable_prefix_caching: whether the device keeps blocks for other requests.
        offload_prompt_only: whether only the KV cache of prompts is offloaded.
        num_workers: number of workers; each takes part in every transfer.
    """

    def __init__(self, config: ServerConfigLike, kv_cache_config: KVCacheConfigLike) -> None:
        """
        Raises:
            ConfigError: for sizes that do not fit each other; names them and what is allowed.
        """
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.extra_config: Mapping[str, Any] = (
            config.kv_transfer_config.kv_connector_extra_config or {}
        )
        self.hash_block_size = _positive("hash block size", config.cache_config.block_size)
        self.device_block_size = tuple(
            _positive("device block size", group.kv_cache_spec.block_size)
            for group in kv_cache_config.kv_cache_groups
        )
        if not self.device_block_size:
            raise ConfigError("the model has no KV cache group: there is nothing to offload")
        for number, size in enumerate(self.device_block_size):
            if size % self.hash_block_size:
                raise ConfigError(
                    f"group {number} has device blocks of {size} tokens: must be a multiple of "
                    f"the hash block size, {self.hash_block_size}"
                )
        self.sliding_window = tuple(
            None if window is None else _positive("sliding window", window)
            for window in map(self._window, kv_cache_config.kv_cache_groups)
        )
        self.enable_prefix_caching = bool(
            getattr(config.cache_config, "enable_prefix_caching", True)
        )
        self.offload_prompt_only = flag_of(self.extra_config, "offload_prompt_only")
        parallel = getattr(config, "parallel_config", None)
        self.num_workers = 1 if parallel is None else _positive("world size", parallel.world_size)
        self.block_size_factor = self._factor()
        self.offloaded_block_size = tuple(
            size * self.block_size_factor for size in self.device_block_size
        )

    @property
    def vllm_config(self) -> ServerConfigLike:
        """Published alias of `config`."""
        return self.config

    @property
    def gpu_block_size(self) -> tuple[int, ...]:
        """Published alias of `device_block_size`."""
        return self.device_block_size

    def _window(self, group: KVCacheGroupLike) -> Any:
        """Return the sliding window of a group. Overridden for servers that store it elsewhere."""
        spec = group.kv_cache_spec
        if any(each.__name__ == "FullAttentionSpec" for each in type(spec).__mro__):
            # It keeps all blocks, also where some of its layers have a window.
            return None
        return getattr(spec, "sliding_window", None)

    def _factor(self) -> int:
        configured = self.extra_config.get("block_size")
        if configured is None:
            return 1
        size = _positive("block_size", configured)
        sizes = set(self.device_block_size)
        if len(sizes) > 1:
            raise ConfigError(
                f"block_size = {configured!r}: allowed only if all groups have device blocks of "
                f"one size; here they have {', '.join(map(str, sorted(sizes)))} tokens"
            )
        (device,) = sizes
        if size % device:
            raise ConfigError(
                f"block_size = {configured!r}: must be a multiple of the device block size, "
                f"{device}"
            )
        return size // device

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager, for the scheduler; the same at each call."""

    @abstractmethod
    def get_handlers(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> Handlers:
        """Yield the handlers that copy blocks, for a worker.

        Args:
            kv_caches: the KV tensor of each layer.
            attn_backends: for each layer, which dimension of its tensor counts blocks: a number,
                or an object with ``get_kv_cache_shape(num_blocks, block_size, num_kv_heads,
                head_size)``. By default the first dimension.
        """


class KVStoreSpec(OffloadingSpec):
    """Spec that offloads to kvstore.

    ``kv_connector_extra_config`` has the keys of `kvstore.config` (except ``chunk_bytes``, which
    follows from the blocks), ``block_size`` and ``offload_prompt_only``.

    With a ``parallel_config`` each worker is a process of its own on the same machine. Each worker
    and the scheduler's process build a spec. Workers call `get_handlers` before the scheduler calls
    `get_manager`. A row of host memory has the parts of all workers side by side.

    Attributes:
        chunk_bytes: bytes of a chunk, all workers together.
        store_config: the configuration of the store.
    """

    def __init__(self, config: ServerConfigLike, kv_cache_config: KVCacheConfigLike) -> None:
        """
        Raises:
            ConfigError: as `OffloadingSpec`; for a key that is unknown or missing, or a value
                that cannot be used.
        """
        super().__init__(config, kv_cache_config)
        if "chunk_bytes" in self.extra_config:
            raise ConfigError("chunk_bytes must not be set: it follows from the device's blocks")
        checked = Config.from_mapping(self.extra_config, ignore=CONNECTOR_KEYS)
        identity = checked.given_identity
        groups = [
            (_layers(group), _positive("page_size_bytes", group.kv_cache_spec.page_size_bytes))
            for group in kv_cache_config.kv_cache_groups
        ]
        every = [layer for layers, _ in groups for layer in layers]
        if twice := {layer for layer in every if every.count(layer) > 1}:
            raise ConfigError(f"layer {min(twice)} is named twice by the KV cache groups")
        block_bytes = max(len(layers) * page for layers, page in groups)
        self._part_bytes = self.block_size_factor * _positive("bytes of a block", block_bytes)
        self.chunk_bytes = self.num_workers * self._part_bytes
        self._server, self._rank = _place(config, self.num_workers)
        self.store_config = evolve(
            checked,
            chunk_bytes=self.chunk_bytes,
            identity={
                **identity,
                "hash_block_size": self.hash_block_size,
                "block_size_factor": self.block_size_factor,
                "workers": self.num_workers,
                "groups": [
                    {"layers": layers, "page_bytes": page, "block_size": size, "window": window}
                    for (layers, page), size, window in zip(
                        groups, self.device_block_size, self.sliding_window, strict=True
                    )
                ],
            },
        )
        self._manager: KVStoreManager | None = None

    manager_class = KVStoreManager
    """Class of the manager that `get_manager` creates."""

    def get_manager(self) -> KVStoreManager:
        """
        Raises:
            KVStoreError: if memory or a path is not available, or workers are missing.
        """
        if self._manager is None:
            region = self._region(scheduler=True)
            self._manager = self.manager_class(
                self.store_config,
                region,
                block_size=self.offloaded_block_size[0],
                one_group=len(self.device_block_size) == 1,
                release=lambda: release_region(self._server, region, scheduler=True),
            )
        return self._manager

    def get_handlers(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> Handlers:
        """
        Raises:
            ConfigError: for a layer without a tensor, a tensor whose blocks differ from the
                configured sizes, and a device that is neither host memory nor CUDA.
        """
        from kvstore.device import CudaCopies, HostCopies

        groups = self._tables(kv_caches, attn_backends or {})
        devices = {pages.tensor.device.type for tables in groups for pages in tables}
        if devices not in ({"cpu"}, {"cuda"}):
            raise ConfigError(
                f"the KV cache is on {', '.join(sorted(devices))}: must be in host memory or on "
                "CUDA"
            )
        region = self._region(scheduler=False)
        first = (self._rank or 0) * self._part_bytes
        rows = region.array[:, first : first + self._part_bytes]
        try:
            if devices == {"cpu"}:
                copies = HostCopies(groups, rows, self.block_size_factor)
                release, joined = (lambda: self._release(region)), (lambda: region.complete)
                handler = HostHandler(copies, release, joined)
                return _both_ways(handler, handler)
            region.register_with_cuda()
            on_device = CudaCopies(groups, rows, self.block_size_factor)
        except BaseException:
            self._release(region)
            raise
        last = _at_last(2, lambda: self._release(region))
        return _both_ways(
            CudaHandler(on_device, store=True, release=last, joined=lambda: region.complete),
            CudaHandler(on_device, store=False, release=last, joined=lambda: region.complete),
        )

    def _tables(
        self, kv_caches: Mapping[str, torch.Tensor], attn_backends: Mapping[str, Any]
    ) -> list[list[Pages]]:
        """Return the tables of blocks of each KV cache group."""
        from kvstore.device.layout import pages_of, whole_blocks

        blocks = getattr(self.kv_cache_config, "num_blocks", None)
        groups = []
        for group in self.kv_cache_config.kv_cache_groups:
            tables: list[Pages] = []
            for layer in group.layer_names:
                if layer not in kv_caches:
                    raise ConfigError(f"layer {layer} has no KV tensor")
                dim = _block_dim(attn_backends.get(layer, 0), layer)
                pages = pages_of(kv_caches[layer], dim)
                page_bytes = int(group.kv_cache_spec.page_size_bytes)
                try:
                    its = whole_blocks(pages, page_bytes, blocks)
                except ConfigError as error:
                    raise ConfigError(f"layer {layer}: {error}") from error
                if tables and its[0].count != tables[0].count:
                    raise ConfigError(
                        f"layer {layer} has {its[0].count} blocks, others of its KV cache group "
                        f"have {tables[0].count}"
                    )
                tables += its
            groups.append(tables)
        return groups

    def _region(self, *, scheduler: bool) -> PinnedRegion:
        """Return host memory, shared if workers are processes of their own."""
        shape = rows_for(self.store_config, self.chunk_bytes)
        if shape.rows < (groups := len(self.device_block_size)):
            raise ConfigError(
                f"cpu_bytes_to_use = {self.store_config.cpu_bytes_to_use}: must hold at least one "
                f"chunk of each of the {groups} KV cache groups, {groups * shape.stride} bytes"
            )
        if self._rank is None:
            return private_region(self._server, shape, scheduler=scheduler)
        server, workers = self._server, self.num_workers
        rank = workers if scheduler else self._rank
        region = share_region(server, workers, shape, rank, self.chunk_bytes)
        return joined_region(region, server, workers) if scheduler else region

    def _release(self, region: PinnedRegion) -> None:
        release_region(self._server, region)


def _both_ways(stores: OffloadingHandler, loads: OffloadingHandler) -> Handlers:
    return iter(
        [
            (DeviceLoadStoreSpec, HostLoadStoreSpec, stores),
            (HostLoadStoreSpec, DeviceLoadStoreSpec, loads),
        ]
    )


def _at_last(calls: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `act` when it is called for the `calls`-th time."""
    left = itertools.count(calls - 1, -1)

    def called() -> None:
        if next(left) == 0:
            act()

    return called


def _layers(group: KVCacheGroupLike) -> list[str]:
    if isinstance(group.layer_names, str):
        raise ConfigError(f"layer_names = {group.layer_names!r}: must be a list of names")
    return list(group.layer_names)


def _positive(name: str, value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")
    return value


def _place(config: ServerConfigLike, workers: int) -> tuple[str, int | None]:
    """Return the server's name and the worker's rank; None if all share one process."""
    name = getattr(config.kv_transfer_config, "engine_id", None)
    parallel = getattr(config, "parallel_config", None)
    if parallel is None:
        return name or f"one-process-{uuid.uuid4()}", None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"engine_id = {name!r}: must be the name of the server, by which {workers} workers in "
            "processes of their own find each other"
        )
    rank = parallel.rank
    whole = hasattr(rank, "__index__") and not isinstance(rank, bool)
    if not whole or not 0 <= rank < workers:
        raise ConfigError(f"rank = {rank!r}: must be a whole number from 0 to {workers - 1}")
    return name, int(rank)


def _block_dim(backend: Any, layer: str) -> int:
    """Return which dimension of a layer's tensor counts blocks."""
    if isinstance(backend, int):
        return backend
    shape = tuple(backend.get_kv_cache_shape(SHAPE_BLOCKS, 16, 8, 256))
    if SHAPE_BLOCKS not in shape:
        raise ConfigError(
            f"layer {layer}: {backend!r} returns the shape {shape} for {SHAPE_BLOCKS} blocks: no "
            "dimension counts them"
        )
    return shape.index(SHAPE_BLOCKS)
