"""Spec: build a manager and handlers for workers from a server's configuration."""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.assembly import rows_for
from kvstore.config import Config
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.handler import CudaHandler, HostHandler, OffloadingHandler
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvstore.connector.server import KVCacheConfigLike, KVCacheGroupLike, ServerConfigLike
from kvstore.engine.host_memory import join_region, private_region, release_region, share_region
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion, RegionShape

if TYPE_CHECKING:
    import torch

    from kvstore.device import CudaCopies, Pages

__all__ = ["Handlers", "KVStoreSpec", "OffloadingSpec"]

Handlers = Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]
"""From which kind of place to which, and who moves it."""

CONNECTOR_KEYS = frozenset(
    {"spec_name", "spec_module_path", "block_size", "offload_prompt_only", "copy_way"}
)
"""Keys of ``kv_connector_extra_config`` that are not the store's."""

AUTO = "auto"
"""The fastest way to copy."""

SHAPE_BLOCKS = 1234
"""A number of blocks that no other dimension of a KV tensor has."""


class OffloadingSpec(ABC):
    """Sizes of a server's blocks, and what is built from them.

    Attributes:
        extra_config: what the operator has configured.
        hash_block_size: tokens of a hashed block.
        device_block_size: tokens of a block of the device, for each KV cache group.
        block_size_factor: blocks of the device in an offloaded one.
        offloaded_block_size: tokens of an offloaded block, for each KV cache group.
        sliding_window: for each KV cache group the tokens that a token attends to, itself
            included, where the server gives back blocks that no later token needs; None where
            it keeps them.
        enable_prefix_caching: whether the device keeps blocks for other requests.
        offload_prompt_only: whether only what was computed of prompts is offloaded.
        num_workers: workers that each end every transfer.
    """

    def __init__(self, config: ServerConfigLike, kv_cache_config: KVCacheConfigLike) -> None:
        """
        Raises:
            ConfigError: for sizes that do not fit each other; it says which, and what is allowed.
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
        only = self.extra_config.get("offload_prompt_only", False)
        if not isinstance(only, bool):
            raise ConfigError(f"offload_prompt_only = {only!r}: must be true or false")
        self.offload_prompt_only = only
        parallel = getattr(config, "parallel_config", None)
        self.num_workers = 1 if parallel is None else _positive("world size", parallel.world_size)
        self.block_size_factor = self._factor()
        self.offloaded_block_size = tuple(
            size * self.block_size_factor for size in self.device_block_size
        )

    @property
    def vllm_config(self) -> ServerConfigLike:
        """`config`, as published integrations call it."""
        return self.config

    @property
    def gpu_block_size(self) -> tuple[int, ...]:
        """`device_block_size`, as published integrations call it."""
        return self.device_block_size

    def _window(self, group: KVCacheGroupLike) -> Any:
        """The sliding window of a group, for servers whose specs say it in another way."""
        return getattr(group.kv_cache_spec, "sliding_window", None)

    def _factor(self) -> int:
        told = self.extra_config.get("block_size")
        if told is None:
            return 1
        size = _positive("block_size", told)
        sizes = set(self.device_block_size)
        if len(sizes) > 1:
            raise ConfigError(
                f"block_size = {told!r}: allowed only where all groups have device blocks of one "
                f"size; here they have {', '.join(map(str, sorted(sizes)))} tokens"
            )
        (device,) = sizes
        if size % device:
            raise ConfigError(
                f"block_size = {told!r}: must be a multiple of the device block size, {device}"
            )
        return size // device

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The manager, for the scheduler. The same at each call."""

    @abstractmethod
    def get_handlers(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> Handlers:
        """Who moves blocks, for a worker.

        Args:
            kv_caches: the KV tensor of each layer.
            attn_backends: for each layer what says where blocks are in the shape of its
                tensor: the number of that dimension, or an object whose ``get_kv_cache_shape(
                num_blocks, block_size, num_kv_heads, head_size)`` tells. By default the first.
        """


class KVStoreSpec(OffloadingSpec):
    """kvstore behind a server.

    ``kv_connector_extra_config`` has the keys of `kvstore.config`, ``chunk_bytes`` excepted, which
    follows from the blocks, ``block_size`` and ``offload_prompt_only``. ``copy_way`` says which
    way copies to and from a CUDA device go: one of `kvstore.device.WAYS`, or ``auto``, the default:
    the fastest on this machine, which `get_handlers` measures.

    With a ``parallel_config`` workers are processes of their own on one machine. Each of them, and
    the scheduler's process, builds a spec. Workers call `get_handlers` before the scheduler calls
    `get_manager`. A row of host memory has the parts of all workers side by side.

    Attributes:
        chunk_bytes: of a chunk, all workers together.
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
            raise ConfigError("unknown key chunk_bytes: it follows from the blocks of the device")
        checked = Config.from_mapping(self.extra_config, ignore=CONNECTOR_KEYS)
        identity = checked.given_identity
        groups = [
            (list(group.layer_names), int(group.kv_cache_spec.page_size_bytes))
            for group in kv_cache_config.kv_cache_groups
        ]
        block_bytes = max(len(layers) * page for layers, page in groups)
        self._part_bytes = self.block_size_factor * _positive("bytes of a block", block_bytes)
        self.chunk_bytes = self.num_workers * self._part_bytes
        self._copy_way = _copy_way(self.extra_config.get("copy_way", AUTO))
        self._server, self._rank = _place(config, self.num_workers)
        self.store_config = replace(
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
    """What `get_manager` makes."""

    def get_manager(self) -> KVStoreManager:
        """
        Raises:
            KVStoreError: if memory or a path cannot be had, or workers are missing.
        """
        if self._manager is None:
            region = self._region(join_region)
            self._manager = self.manager_class(
                self.store_config,
                region,
                block_size=self.offloaded_block_size[0],
                one_group=len(self.device_block_size) == 1,
                release=lambda: self._release(region),
            )
        return self._manager

    def get_handlers(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> Handlers:
        """
        Raises:
            ConfigError: for a layer that has no tensor, a tensor whose blocks have
                other sizes than was announced, a device that is neither host memory nor CUDA,
                and a ``copy_way`` that is not to be had on it.
        """
        from kvstore.device import CudaCopies, HostCopies

        groups = self._tables(kv_caches, attn_backends or {})
        devices = {pages.tensor.device.type for tables in groups for pages in tables}
        if devices not in ({"cpu"}, {"cuda"}):
            raise ConfigError(
                f"a KV cache on {', '.join(sorted(devices))}: must be in host memory or on CUDA"
            )
        region = self._region(share_region)
        first = (self._rank or 0) * self._part_bytes
        rows = region.array[:, first : first + self._part_bytes]
        try:
            if devices == {"cpu"}:
                copies = HostCopies(groups, rows, self.block_size_factor)
                handler = HostHandler(copies, lambda: self._release(region))
                return _both_ways(handler, handler)
            kernels_read = region.register_with_cuda()
            on_device = CudaCopies(groups, rows, self.block_size_factor, kernels_read=kernels_read)
            self._choose_way(on_device)
        except BaseException:
            self._release(region)
            raise
        last = _at_last(2, lambda: self._release(region))
        return _both_ways(
            CudaHandler(on_device, store=True, release=last),
            CudaHandler(on_device, store=False, release=last),
        )

    def _choose_way(self, copies: CudaCopies) -> None:
        if self._copy_way == AUTO:
            copies.measure()
            return
        try:
            copies.use(self._copy_way)
        except ConfigError as error:
            raise ConfigError(f"copy_way = {self._copy_way!r} cannot be had: {error}") from error

    def _tables(
        self, kv_caches: Mapping[str, torch.Tensor], attn_backends: Mapping[str, Any]
    ) -> list[list[Pages]]:
        """For each KV cache group the tables of its blocks."""
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
                    tables += whole_blocks(pages, page_bytes, blocks)
                except ConfigError as error:
                    raise ConfigError(f"layer {layer}: {error}") from error
            groups.append(tables)
        return groups

    def _region(self, meet: Callable[[str, int, RegionShape], PinnedRegion]) -> PinnedRegion:
        """Host memory: where workers have processes of their own, they `meet` there."""
        shape = rows_for(self.store_config, self.chunk_bytes)
        if self._rank is None:
            return private_region(self._server, shape)
        return meet(self._server, self.num_workers, shape)

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
    """What acts when it is called for the last of so many times."""
    left = itertools.count(calls - 1, -1)

    def called() -> None:
        if next(left) == 0:
            act()

    return called


def _positive(name: str, value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} = {value!r}: must be a whole number, 1 at least")
    return value


def _copy_way(value: object) -> str:
    if value == AUTO:
        return AUTO
    # Needs torch, which only who configures a way has to have here.
    from kvstore.device.ways import WAYS

    if value not in WAYS:
        raise ConfigError(f"copy_way = {value!r}: must be one of {', '.join((AUTO, *WAYS))}")
    return str(value)


def _place(config: ServerConfigLike, workers: int) -> tuple[str, int | None]:
    """The server's name, and which of its workers this is; None where all are one process."""
    name = getattr(config.kv_transfer_config, "engine_id", None)
    parallel = getattr(config, "parallel_config", None)
    if parallel is None:
        return name or f"one-process-{uuid.uuid4()}", None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"engine_id = {name!r}: {workers} workers in processes of their own meet under the "
            "name of their server"
        )
    if not 0 <= parallel.rank < workers:
        raise ConfigError(f"rank = {parallel.rank!r}: there are {workers} workers, from 0 on")
    return name, int(parallel.rank)


def _block_dim(backend: Any, layer: str) -> int:
    """Which dimension of a layer's tensor counts blocks."""
    if isinstance(backend, int):
        return backend
    shape = tuple(backend.get_kv_cache_shape(SHAPE_BLOCKS, 16, 8, 256))
    if SHAPE_BLOCKS not in shape:
        raise ConfigError(
            f"layer {layer}: {backend!r} gives the shape {shape} for {SHAPE_BLOCKS} blocks, in "
            "which no dimension counts them"
        )
    return shape.index(SHAPE_BLOCKS)
