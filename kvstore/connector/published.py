"""Compatibility layer: the names and calls of published integrations.

A server that was written for them only changes its imports. Reports name requests instead of
transfers: a store has ended once its request has finished and all of its blocks are copied; until
then the blocks are kept. `docs/connector.md` lists the differences from kvstore's own classes.

This module is long because it restates published classes in one place.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from attrs import evolve

from kvstore.connector import manager as ours
from kvstore.connector.backend import Backend, BlockStatus, RowBackend
from kvstore.connector.contract import (
    ListManager,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    knows_requests,
)
from kvstore.connector.device_transfers import EndedLoads
from kvstore.connector.handler import OffloadingHandler, TransferResult, TransferSpec
from kvstore.connector.mediums import (
    BlockIDsLoadStoreSpec,
    ConnectorMetadata,
    ConnectorOutput,
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    LoadStoreSpec,
    TransferJob,
)
from kvstore.connector.queued import GroupSizes, QueuedKeys
from kvstore.connector.reuse import FilterReusedOffloadingManager as OurFilter
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import (
    KVCacheConfigLike,
    RequestLike,
    ServerConfigLike,
    StepOutputLike,
)
from kvstore.connector.single_tier import PolicyManager
from kvstore.connector.spec import KVStoreSpec as OurSpec
from kvstore.connector.spec import OffloadingSpec
from kvstore.connector.tracked_request import key_of
from kvstore.connector.worker import ConnectorWorker
from kvstore.errors import ConfigError, KVStoreError
from kvstore.types import short_name

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARCOffloadingManager",
    "Backend",
    "BlockIDsLoadStoreSpec",
    "BlockRemoved",
    "BlockStatus",
    "BlockStored",
    "CPUBackend",
    "CPULoadStoreSpec",
    "FilterReusedOffloadingManager",
    "GPULoadStoreSpec",
    "KVStoreManager",
    "KVStoreSpec",
    "LRUOffloadingManager",
    "LoadStoreSpec",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "PrepareStoreOutput",
    "TransferResult",
    "TransferSpec",
]

GPULoadStoreSpec = DeviceLoadStoreSpec
CPULoadStoreSpec = HostLoadStoreSpec

_M = TypeVar("_M", bound=type[OffloadingManager])

MOST_STEPS = 64
"""Steps under way, of which a server with nothing to report may report none."""

CALLS = ("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store")


def _by_hashes(cls: _M) -> _M:
    """Class decorator: let a manager's calls take ``block_hashes`` in place of ``keys``."""
    for name in CALLS:
        setattr(cls, name, _by_hash(getattr(cls, name)))
    return cls


def _by_hash(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, block_hashes: Any = None, **more: Any) -> Any:
        if block_hashes is not None:
            args = (block_hashes, *args)
        return method(self, *args, **more)

    return call


# -- managers -------------------------------------------------------------------------------


class CPUBackend(RowBackend):
    """Block numbers without memory: the workers own the memory."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, "CPU", np.empty((num_blocks, 0), np.uint8))
        self.num_blocks = num_blocks


@_by_hashes
class LRUOffloadingManager(PolicyManager):
    """`PolicyManager` with ``lru``."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, "lru", enable_events=enable_events)


@_by_hashes
class ARCOffloadingManager(PolicyManager):
    """`PolicyManager` with ``arc``."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, "arc", enable_events=enable_events)


@_by_hashes
class FilterReusedOffloadingManager(OurFilter):
    """`kvstore.connector.reuse.FilterReusedOffloadingManager`."""


def _short(keys: Any) -> Any:
    return short_name(keys) if isinstance(keys, bytes) else [short_name(key) for key in keys]


def _shortened(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, keys: Any, *args: Any, **more: Any) -> Any:
        return method(self, _short(keys), *args, **more)

    return call


@_by_hashes
class KVStoreManager(ours.KVStoreManager):
    """`kvstore.connector.manager.KVStoreManager`, for hashes of any length.

    A hash that is too long for a key is replaced by its SHA-256, also in events.
    """

    lookup = _shortened(ours.KVStoreManager.lookup)
    lookup_prefix = _shortened(ours.KVStoreManager.lookup_prefix)
    is_coming = _shortened(ours.KVStoreManager.is_coming)
    touch = _shortened(ours.KVStoreManager.touch)
    prepare_load = _shortened(ours.KVStoreManager.prepare_load)
    complete_load = _shortened(ours.KVStoreManager.complete_load)
    complete_store = _shortened(ours.KVStoreManager.complete_store)

    def most_tokens(self, groups: GroupSizes, keys: Sequence[bytes] = ()) -> int:
        return super().most_tokens(groups, _short(keys))

    def on_request_queued(self, req_context: Any, groups: Sequence[QueuedKeys]) -> None:
        groups = [replace(group, keys=_short(group.keys)) for group in groups]
        super().on_request_queued(req_context, groups)

    def prepare_store(
        self, keys: Iterable[bytes], req_context: Any = None
    ) -> PrepareStoreOutput | None:
        names = {short_name(key): key for key in keys}
        out = super().prepare_store(list(names), req_context)
        if out is not None:
            out.keys_to_store = [names[key] for key in out.keys_to_store]
        return out


# -- specs ----------------------------------------------------------------------------------


class KVStoreSpec(OurSpec):
    """`kvstore.connector.spec.KVStoreSpec`; ``kv_events_config`` of a server turns events on."""

    manager_class = KVStoreManager

    def __init__(self, vllm_config: ServerConfigLike, kv_cache_config: KVCacheConfigLike) -> None:
        super().__init__(vllm_config, kv_cache_config)
        events = getattr(vllm_config, "kv_events_config", None)
        if events is not None and events.enable_kv_cache_events:
            self.store_config = evolve(self.store_config, keep_events=True)


class OffloadingSpecFactory:
    """Creates the spec that ``spec_name`` names, by default `KVStoreSpec`."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {"KVStoreSpec": (__name__, "KVStoreSpec")}

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class under `name`; it is imported when it is first needed.

        Raises:
            ValueError: if the name is taken.
        """
        if name in cls._registry:
            raise ValueError(f"spec {name!r} is already registered")
        cls._registry[name] = module_path, class_name

    @classmethod
    def create_spec(
        cls, config: ServerConfigLike, kv_cache_config: KVCacheConfigLike
    ) -> OffloadingSpec:
        """
        Raises:
            ConfigError: if no spec has that name.
        """
        extra = config.kv_transfer_config.kv_connector_extra_config or {}
        name = extra.get("spec_name", "KVStoreSpec")
        module, class_name = cls._registry.get(name, (extra.get("spec_module_path"), name))
        if module is None:
            raise ConfigError(
                f"spec_name = {name!r}: must be one of {', '.join(sorted(cls._registry))}, or a "
                "class in the module that spec_module_path names"
            )
        try:
            made = getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"spec_name = {name!r}: {error}") from error
        spec = made(config, kv_cache_config)
        assert isinstance(spec, OffloadingSpec)
        return spec


# -- the scheduler's half -------------------------------------------------------------------


@dataclass
class OffloadingConnectorMetadata:
    """The transfers of a step, by request.

    Attributes:
        reqs_to_flush: requests whose earlier transfers must end before the step computes.
    """

    reqs_to_load: dict[str, TransferSpec]
    reqs_to_store: dict[str, TransferSpec]
    reqs_to_flush: set[str] | None = None


@dataclass
class BlockStored:
    """Event: blocks were offloaded."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    """Event: blocks are no longer offloaded."""

    block_hashes: list[bytes]
    medium: str | None = None


class OffloadingConnectorScheduler(ConnectorScheduler):
    """`ConnectorScheduler`, to which workers report requests instead of transfers.

    A manager that does not take requests is called by lists; with one KV cache group, by the
    hashes of blocks.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        manager = spec.get_manager()
        if not knows_requests(manager):
            one_group = len(spec.device_block_size) == 1
            manager = ListManager(manager, key_of(b"", 0) if one_group else b"")
        super().__init__(spec, manager)
        self._workers = spec.num_workers
        self._stored: set[str] = set()
        """Requests that have begun stores and were not reported as sent yet."""
        self._flushed: deque[tuple[int, set[int]]] = deque()
        """For each step that was not reported, its first transfer, and stores that workers end
        before it computes."""

    def build_connector_meta(  # type: ignore[override]
        self, scheduler_output: StepOutputLike
    ) -> OffloadingConnectorMetadata:
        made = self._jobs.made
        meta = super().build_connector_meta(scheduler_output)
        flush = {
            req_id
            for req_id, tracked in self._requests.items()
            if not meta.jobs_to_flush.isdisjoint(tracked.jobs)
        }
        # Nobody reports these stores, which workers end before they compute: they have ended once
        # the step is reported. Until then a tier would copy what is in host memory without them.
        self._flushed.append((made, self._stores_of(flush) - meta.store_jobs.keys()))
        if len(self._flushed) > MOST_STEPS:
            self._all_ended(self._flushed.popleft()[1])
        stores = _by_request(meta.store_jobs)
        self._stored.update(stores)
        return OffloadingConnectorMetadata(_by_request(meta.load_jobs), stores, flush)

    def update_connector_output(self, connector_output: Any) -> EndedLoads:
        """Process the requests in ``finished_sending`` and ``finished_recving`` of a step.

        A step of which a server has nothing to report need not be reported. Others are, once they
        are computed by all workers, in order.
        """
        sent = set(connector_output.finished_sending or ())
        jobs = self._stores_of(sent)
        self._stored -= sent
        for req_id in connector_output.finished_recving or ():
            tracked = self._requests.get(req_id)
            if tracked is not None and tracked.loading is not None:
                jobs.add(tracked.loading)
        return self._all_ended(jobs | self._flushed_by(max(jobs, default=-1)))

    def _flushed_by(self, job: int) -> set[int]:
        """Return the stores of steps that are computed if `job` has ended; those of one at least.

        So steps that are not reported leave nothing behind.
        """
        flushed = self._flushed
        ended = flushed.popleft()[1] if flushed else set()
        while flushed and flushed[0][0] <= job:
            ended |= flushed.popleft()[1]
        return ended

    def request_finished(
        self, request: RequestLike, block_ids: Any = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request; its blocks are kept until ``finished_sending`` names it."""
        super().request_finished(request, block_ids)
        return request.request_id in self._stored, None

    def take_events(self) -> Iterable[Any]:
        """Yield what was stored and removed since the last call."""
        for event in super().take_events():
            hashes = [key[:-4] for key in event.keys]
            if event.removed:
                yield BlockRemoved(hashes, event.medium)
            else:
                yield BlockStored(hashes, None, [], event.block_size, None, event.medium)

    def _store(
        self, req_id: str, scheduled: int | None, stores: dict[int, TransferJob]
    ) -> set[int]:
        # Store nothing of a finished request: its blocks may be gone.
        return set() if scheduled is None else super()._store(req_id, scheduled, stores)

    def _stores_of(self, requests: Collection[str]) -> set[int]:
        found: set[int] = set()
        for req_id in requests:
            if (tracked := self._requests.get(req_id)) is not None:
                found |= tracked.jobs - {tracked.loading}
        return found

    def _all_ended(self, jobs: Iterable[int]) -> EndedLoads:
        under_way = [number for number in jobs if number in self._jobs]
        output = ConnectorOutput(Counter(dict.fromkeys(under_way, self._workers)))
        return super().update_connector_output(output)


def _by_request(jobs: Mapping[int, TransferJob]) -> dict[str, TransferSpec]:
    return {job.req_id: (job.src_spec, job.dst_spec) for job in jobs.values()}


# -- the worker's half ----------------------------------------------------------------------


class OffloadingConnectorWorker:
    """`ConnectorWorker` that reports requests instead of transfers.

    The calls of a step: `handle_preemptions`, `start_kv_transfers`, computing, `prepare_store_kv`,
    `get_finished`.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        self._worker = ConnectorWorker(spec)
        self._made = 0
        self._names: dict[int, str] = {}
        """Job under way -> its request's name."""
        self._stores: dict[str, set[int]] = {}
        """Request that has stored something -> its stores under way."""
        self._finished: set[str] = set()
        """Those of them that the scheduler has reported as finished."""

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        attn_backends: Mapping[str, Any] | None = None,
    ) -> None:
        """See `ConnectorWorker.register_kv_caches`."""
        self._worker.register_kv_caches(kv_caches, attn_backends)

    def handle_preemptions(self, flush: OffloadingConnectorMetadata | Collection[str]) -> None:
        """Wait for the transfers of requests whose blocks are about to be written again.

        Args:
            flush: a step's metadata, or the names of requests.
        """
        if isinstance(flush, OffloadingConnectorMetadata):
            flush = flush.reqs_to_flush or ()
        under_way = {number for number, req_id in self._names.items() if req_id in flush}
        if under_way:
            self._worker.wait(under_way)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Begin the loads of this step and the stores of the last."""
        loads = self._jobs(metadata.reqs_to_load)
        self._worker.start_transfers(ConnectorMetadata(load_jobs=loads))

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Take the stores of this step; they begin with the next."""
        stores = self._jobs(metadata.reqs_to_store)
        for number, job in stores.items():
            self._stores.setdefault(job.req_id, set()).add(number)
        self._worker.start_transfers(ConnectorMetadata(store_jobs=stores))

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the requests that have finished and are stored, and those that are loaded.

        Raises:
            KVStoreError: if a copy failed, as the result cannot express that.
        """
        output = self._worker.get_finished()
        if output.failed_jobs:
            names = sorted({self._names[number] for number in output.failed_jobs})
            raise KVStoreError(f"copies of requests {', '.join(names)} failed; the log says why")
        received: set[str] = set()
        for number in output.completed_jobs:
            req_id = self._names.pop(number)
            stores = self._stores.get(req_id, set())
            if number in stores:
                stores.remove(number)
            else:
                received.add(req_id)
        self._finished |= self._stores.keys() & set(finished_req_ids)
        sent = {req_id for req_id in self._finished if not self._stores[req_id]}
        self._finished -= sent
        for req_id in sent:
            del self._stores[req_id]
        return sent, received

    def shutdown(self) -> None:
        """See `ConnectorWorker.shutdown`."""
        self._worker.shutdown()

    def _jobs(self, requests: Mapping[str, TransferSpec]) -> dict[int, TransferJob]:
        jobs = {}
        for req_id, (source, target) in requests.items():
            self._names[self._made] = req_id
            jobs[self._made] = TransferJob(req_id, source, target)
            self._made += 1
        return jobs
