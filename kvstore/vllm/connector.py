"""Connector: kvstore as a connector class of vLLM.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_connector_module_path": "kvstore.vllm", "kv_role": "kv_both",
      "kv_connector_extra_config": {"host": "64GiB", "disk": "/nvme/kv", "disk_bytes": "2TiB"}}'

It is vLLM's `OffloadingConnector`, with parts that know the engine: its configuration, its requests
and its resets come by the calls that vLLM makes, and what the workers know comes from their half.

Order of calls: workers register their KV caches. Then the engine passes what each of them returned
from `get_handshake_metadata` to the scheduler's half, which opens host memory and tiers only then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingSpec, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvstore.connector.queued import GroupSizes, QueuedKeys
from kvstore.errors import ConfigError
from kvstore.policies.shares import tenant_keys
from kvstore.types import about
from kvstore.vllm.checks import check_kv_cache
from kvstore.vllm.corrections import Corrections
from kvstore.vllm.engine import (
    Engine,
    WorkerFacts,
    building,
    computed_chunks,
    has_paused,
    has_siblings,
    hashed_request,
    scheduler_of,
    weights_of,
    worker_facts,
    worker_of,
)
from kvstore.vllm.manager import KVStoreOffloadingManager
from kvstore.vllm.spec import KVStoreOffloadingSpec
from kvstore.vllm.tenants import TenantOffloadingManager

__all__ = ["KVStoreConnector"]

logger = logging.getLogger("kvstore")

OUR_SPEC = {"spec_name": KVStoreOffloadingSpec.__name__, "spec_module_path": "kvstore.vllm"}


@dataclass
class StepMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    """A step's orders, and `look`: the number of a look at the weights that workers shall take."""

    look: int = 0


@dataclass
class StepReport(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What workers report of a step.

    Attributes:
        look: number of the look at the weights that they took; 0 for none.
        weights: the digests that they found, by rank.
    """

    look: int = 0
    weights: dict[int, str | None] = field(default_factory=dict)

    def aggregate(self, other: Any) -> StepReport:
        """Merge the reports of two workers."""
        merged = _values(super().aggregate(other))
        look = getattr(other, "look", 0)
        weights = getattr(other, "weights", {})
        return StepReport(**merged, look=self.look or look, weights=self.weights | weights)


class KVStoreConnector(OffloadingConnector):  # type: ignore[misc]
    """See the module's text; for the keys of its configuration `kvstore.config`.

    With `spec_name` it drives another offloading spec, such as vLLM's tiering over `KVStoreTier`,
    which then knows the engine, too.

    Raises:
        ConfigError: for a key or a value that cannot be used.
        KVStoreError: if memory or a path is not available.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not of OffloadingConnector, which would build its parts at once.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        _name_spec(vllm_config)
        self._vllm_config, self._groups = vllm_config, kv_cache_config
        self._engine = Engine(vllm_config, kv_cache_config)
        check_kv_cache(vllm_config, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = getattr(config, "canonical_layout", False)
        self._rank = int(config.parallel.rank)
        self._spec = _spec(config, self._engine)
        self._scheduler: OffloadingConnectorScheduler | None = None
        self._corrections: Corrections | None = None
        self._sizes: GroupSizes = ()
        self._look = self._looked = 0
        self._told = False
        self._pause_told = False
        """The engine has paused, and the reset that belongs to the pause has come."""
        self._owner: Any = None
        """The worker, or the scheduler, whose connector this is, once it is known."""
        self.connector_worker: OffloadingConnectorWorker | None = None
        if role is KVConnectorRole.WORKER:
            self.connector_worker = OffloadingConnectorWorker(
                self._spec, vllm_config, kv_cache_config
            )

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    # -- the worker's half ---------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._owner = self._owner or worker_of(self._vllm_config)
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> WorkerFacts | None:
        """Return what the scheduler's half has to know about this worker; None if it was told.

        vLLM asks again when an engine wakes up. Its MultiConnector hands the answer of one
        connector to all, so beside others there is none.
        """
        told, self._told = self._told, True
        return None if told or has_siblings(self._owner) else worker_facts(self._owner)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        look = getattr(self._connector_metadata, "look", 0)
        if look > self._looked:
            self._look = self._looked = look
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        told = super().build_connector_worker_meta()
        look, self._look = self._look, 0
        if not look:
            return told
        values = {} if told is None else _values(told)
        return StepReport(**values, look=look, weights={self._rank: weights_of(self._owner)})

    # -- the scheduler's half --------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take in what the workers tell; memory and tiers are opened then."""
        if self._scheduler is None:
            # Inside vLLM's MultiConnector they may be another connector's.
            self._engine.workers = {
                place: told for place, told in metadata.items() if isinstance(told, WorkerFacts)
            }
            self._owner = scheduler_of(self)
            self._open()

    @property
    def connector_scheduler(self) -> OffloadingConnectorScheduler | None:
        """The scheduler's half; None in a worker."""
        if self._scheduler is None and self.role is KVConnectorRole.SCHEDULER:
            # No worker has told anything.
            self._open()
        return self._scheduler

    def _open(self) -> None:
        try:
            with building(self._engine):
                self._scheduler = OffloadingConnectorScheduler(
                    self._spec, self._vllm_config, self._groups
                )
        except BaseException:
            if isinstance(self._spec, KVStoreOffloadingSpec):
                self._spec.close()
            raise

        self._corrections = Corrections(self._scheduler)
        self._engine.flushed = self._corrections.flushed
        self._sizes = tuple(
            (group.tokens_per_chunk, group.sliding_window_size_in_chunks)
            for group in self._scheduler.config.kv_group_configs
        )
        manager = self._manager
        if manager is None:
            return
        most = manager.most_tokens(self._sizes)
        longest = self._vllm_config.model_config.max_model_len
        if most < longest:
            logger.warning(
                "host memory has room for %d tokens of a prompt with all groups of layers: of a "
                "longer prefix on a slower tier only that much is loaded (max_model_len is %d)",
                most,
                longest,
                extra=about("store.small", tokens=most, max_model_len=longest),
            )
        if manager.commands is not None:
            manager.commands.name_keys(self._keys_of_prompt)

    def _keys_of_prompt(self, tokens: Sequence[int], named: Mapping[str, Any]) -> list[bytes]:
        """Return the keys of a prompt of the model itself, without adapters or images."""
        known = self._engine.model_names
        model = named.get("model")
        if model is not None and model not in known:
            raise ConfigError(f"model = {model!r}: this server has {', '.join(known)}")
        salt = named.get("cache_salt")
        tenant = named.get("tenant", salt or "")
        if not isinstance(salt, str | None) or not isinstance(tenant, str):
            raise ConfigError("cache_salt and tenant must be text")
        assert self.connector_scheduler is not None
        group = self.connector_scheduler.config.kv_group_configs[0]
        request = hashed_request(
            self._vllm_config, tokens, salt, group.tokens_per_chunk // group.hashes_per_chunk
        )
        keys = [key for its in self._keys(request) for key in its.keys]
        own = isinstance(self._manager, TenantOffloadingManager)
        return tenant_keys(tenant, keys) if own else keys

    @property
    def _correct(self) -> Corrections:
        assert self.connector_scheduler is not None
        assert self._corrections is not None
        return self._corrections

    @property
    def _manager(self) -> KVStoreOffloadingManager | None:
        """The manager, if it is ours."""
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        return manager if isinstance(manager, KVStoreOffloadingManager) else None

    def on_new_request(self, request: Any) -> None:
        self._engine.request = request
        try:
            super().on_new_request(request)
        finally:
            self._engine.request = None
        manager = self._manager
        if manager is not None and _may_be_fetched(request):
            groups = self._keys(request)
            if len(groups) == 1:
                # vLLM asks for what follows that.
                (group,) = groups
                assert self.connector_scheduler is not None
                (its,) = self.connector_scheduler.config.kv_group_configs
                computed = computed_chunks(self._owner, _ends(request, its.hashes_per_chunk))
                groups = [replace(group, keys=group.keys[computed:])]
            manager.on_request_queued(request.request_id, groups)

    def _keys(self, request: Any) -> list[QueuedKeys]:
        """Return the keys of a prompt, for each KV cache group."""
        groups = []
        assert self.connector_scheduler is not None
        for group in self.connector_scheduler.config.kv_group_configs:
            hashes = _ends(request, group.hashes_per_chunk)
            keys = [make_offload_key(block_hash, group.group_idx) for block_hash in hashes]
            window = group.sliding_window_size_in_chunks
            groups.append(QueuedKeys(keys, group.tokens_per_chunk, window))
        return groups

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._manager is not None:
            self._manager.on_request_turn(request.request_id)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if self._manager is not None and found[0] is not None:
            start = num_computed_tokens + found[0]
            self._manager.on_request_decided(request.request_id, loads=found[0] > 0, start=start)
        return found

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        # Called from 0.30 on. vLLM looks for a state at the largest boundary up to which attention
        # is found. That much may not fit into host memory together.
        most: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        manager, fits = self._manager, sys.maxsize
        if manager is not None:
            fits = manager.most_tokens(self._sizes, request.request_id)
        if fits == sys.maxsize:
            return most
        # vLLM takes the last token off where a group has a window.
        fits += any(window is not None for _, window in self._sizes)
        return fits if most is None else min(most, fits)

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        if self._manager is not None:
            self._manager.step_computes(_computes_prompts(scheduler_output))
        with self._correct.scheduled(scheduler_output):
            orders = super().build_connector_meta(scheduler_output)
        self._pause_told = self._pause_told and has_paused(self._owner)
        look = 0 if self._manager is None else self._manager.look
        return StepMetadata(**_values(orders), look=look) if look else orders

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens and self._owner is None:
            # Inside vLLM's MultiConnector: no scheduler has this connector itself.
            self._correct.allocated(blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._correct.finished(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._correct.finished(request)
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport) and self._manager is not None:
            self._manager.weights_told(report.look, report.weights)
        with self._correct.reported(connector_output):
            super().update_connector_output(connector_output)

    def reset_cache(self) -> Any:
        paused = has_paused(self._owner)
        if self._manager is not None:
            # Whoever resets an engine that has paused before wants it to forget.
            self._manager.pauses = paused and not self._pause_told
        self._pause_told = paused
        with self._correct.reset():
            return super().reset_cache()

    def shutdown(self) -> None:
        # Nothing to release where nothing was opened.
        if self.connector_worker is not None or self._scheduler is not None:
            super().shutdown()
        self._owner = None


def _ends(request: Any, hashes_per_chunk: int) -> Sequence[Any]:
    """Return the hash of the last block of each whole chunk of a prompt."""
    hashes: Sequence[Any] = request.block_hashes[hashes_per_chunk - 1 :: hashes_per_chunk]
    return hashes


def _computes_prompts(scheduler_output: Any) -> bool:
    """Whether any request computes more than its next token, and tokens that were guessed."""
    guessed = scheduler_output.scheduled_spec_decode_tokens
    return any(
        tokens > 1 + len(guessed.get(name, ()))
        for name, tokens in scheduler_output.num_scheduled_tokens.items()
    )


def _may_be_fetched(request: Any) -> bool:
    """Whether a request may load anything, under keys that are known when it arrives."""
    params = request.kv_transfer_params or {}
    unread = getattr(request, "skip_reading_prefix_cache", False)
    return request.lora_request is None and not unread and "kv_load_tiers" not in params


def _name_spec(vllm_config: Any) -> None:
    """Name our spec in the options, where vLLM looks for the spec's metrics."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    if options.get("spec_name", OUR_SPEC["spec_name"]) == OUR_SPEC["spec_name"]:
        options.update(OUR_SPEC)


def _spec(config: Any, engine: Engine) -> OffloadingSpec:
    if config.extra_config["spec_name"] == KVStoreOffloadingSpec.__name__:
        return KVStoreOffloadingSpec(config, engine)
    with building(engine):
        return OffloadingSpecFactory.create_spec(config)


def _values(of: Any) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(of)}


def _register() -> None:
    """Make the class known by its name, by which vLLM's MultiConnector finds its statistics."""
    with contextlib.suppress(ValueError):
        # Registered before.
        KVConnectorFactory.register_connector(
            KVStoreConnector.__name__, __name__, KVStoreConnector.__name__
        )


_register()
