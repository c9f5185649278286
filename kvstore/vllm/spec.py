"""Offloading spec: what vLLM builds in its scheduler and in every worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.assembly import rows_for
from kvstore.config import Config, DiskConfig
from kvstore.connector.spec import BUDGET_KEY, ENGINE_KEYS, VLLM_KEYS, check_vllm_values
from kvstore.errors import ConfigError
from kvstore.gate import codecs_of, read_gate
from kvstore.observe.metrics.table import METRICS
from kvstore.types import about
from kvstore.vllm.checks import (
    check_answers,
    check_codec,
    check_continues,
    check_engine_with_tiers,
    check_recurrent,
    check_windows,
)
from kvstore.vllm.identity.naming import Naming, siblings
from kvstore.vllm.layout import Layout
from kvstore.vllm.metrics_report import LABELS, definitions
from kvstore.vllm.version import LOADS_WITHIN_STEPS, join_server_log

if TYPE_CHECKING:
    from kvstore.vllm.engine import Engine

__all__ = ["KVStoreOffloadingSpec"]

logger = logging.getLogger("kvstore")


class KVStoreOffloadingSpec(OffloadingSpec):
    """kvstore behind vLLM's OffloadingConnector; see `kvstore.config` for the keys.

    `KVStoreConnector` builds it, too, and says what vLLM has given to it.

    Attributes:
        engine: what vLLM gave; None behind vLLM's own connector, which keeps it to itself.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions(METRICS)

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Read by vLLM from 0.33 on, as is `config_info` of the manager."""
        return LABELS

    def __init__(self, config: OffloadingConfig, engine: Engine | None = None) -> None:
        super().__init__(config)
        self.engine = engine
        join_server_log()
        values = dict(config.extra_config)
        for key in ENGINE_KEYS & values.keys():
            raise ValueError(f"unknown key {key} = {values[key]!r}: vLLM decides it")
        check_vllm_values(values)
        if values.get(BUDGET_KEY) is not None and not LOADS_WITHIN_STEPS:
            raise ConfigError(f"{BUDGET_KEY} = {values[BUDGET_KEY]!r}: it needs vLLM 0.33")
        self._naming = Naming.taken_from(values)
        self.store_config = Config.from_mapping(values, ignore=VLLM_KEYS)
        vllm_config = None if engine is None else engine.vllm_config
        self.layout = Layout(config, _kv_heads(config, vllm_config))
        self.worker_apart = _is_apart(vllm_config)
        self.identity: Mapping[str, Any] = self.layout.identity
        # Read by vLLM's connector: with equal bytes on all ranks only one writes.
        self.replicated_layout = self.layout.replicated
        self.region_shape = rows_for(self.store_config, self.layout.chunk_bytes)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._build_manager()
        return self._manager

    def close(self) -> None:
        """Close the manager, if it was built: nobody will use it."""
        if self._manager is not None:
            self._manager.shutdown()

    def _build_manager(self) -> OffloadingManager:
        """The identity is determined only here: workers see rows, not keys."""
        from kvstore.vllm.manager import KVStoreOffloadingManager

        vllm_config = None if self.engine is None else self.engine.vllm_config
        check_continues(vllm_config)
        check_answers(self.offload_prompt_only, self.engine)
        check_recurrent(self.config, self.engine)
        check_windows(self.config, self.engine)
        for key in ("disk_codec", "store_codec"):
            if (path := getattr(self.store_config, key)) is not None:
                check_codec(key, read_gate(path), self.engine)
        if self.store_config.tiers:
            # Without them nothing outlives the process.
            check_engine_with_tiers(vllm_config, self.store_config.shutdown_timeout_s)
            given = self.store_config.identity or {}
            self.identity = self._naming.whole(self.identity, self.config, self.engine, given)
        self._tell_of_others()
        paths = [path for tier in self.store_config.tiers for path in tier.paths]
        size = self.layout.chunk_bytes
        codecs = codecs_of(self.store_config, size, self.identity)
        told = {name: codec.identity(size) for name, codec in codecs.items()}
        for line in siblings({**self.identity, **told}, paths):
            logger.info("kvstore: not used: %s", line, extra=about("store.not_used", reason=line))
        from kvstore.vllm.tenants import LoRATenantOffloadingManager, TenantOffloadingManager

        tenants = self.store_config.tenants is not None
        lora_config = getattr(vllm_config, "lora_config", None)
        if lora_config is None or not self._naming.fingerprint:
            return TenantOffloadingManager(self) if tenants else KVStoreOffloadingManager(self)
        # Older releases have no such key.
        if getattr(getattr(self, "kv_events_config", None), "self_describing_kv_events", False):
            raise ConfigError(
                "self_describing_kv_events = true: not for an engine with LoRA adapters, whose "
                "chunks have keys of kvstore's: vLLM would keep the tokens of each for ever. Leave "
                "it out, or know adapters by name alone with fingerprint_weights = false"
            )
        from kvstore.vllm.identity.identity import adapter_settings
        from kvstore.vllm.lora import LoRAOffloadingManager

        lora = LoRATenantOffloadingManager if tenants else LoRAOffloadingManager
        return lora(self, adapter_settings(lora_config))

    def _tell_of_others(self) -> None:
        """An operator writes down sizes once, and each data parallel engine takes them."""
        parallel, tiers = self.config.parallel, self.store_config.tiers
        if parallel.data_parallel_size == 1 and not parallel.data_parallel_index:
            return
        logger.info(
            "kvstore: data parallel engine %d takes %d bytes of host memory, and up to %d bytes "
            "on disks, for itself: each engine of the server does",
            parallel.data_parallel_index,
            self.region_shape.size,
            sum(tier.capacity_bytes for tier in tiers if isinstance(tier, DiskConfig)),
            extra=about("server.data_parallel", engine=parallel.data_parallel_index),
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            from kvstore.vllm.worker import create_worker

            self._worker = create_worker(self, kv_caches)
        return self._worker


def _kv_heads(config: OffloadingConfig, vllm_config: Any) -> int | None:
    """Return the KV heads of the model if the canonical layout is configured and they are known."""
    if vllm_config is None or not config.extra_config.get("canonical_layout", False):
        return None
    heads: int = vllm_config.model_config.get_total_num_kv_heads()
    return heads


def _is_apart(vllm_config: Any) -> bool:
    """Whether a worker has a process of its own that does not show in the name of the process."""
    parallel = getattr(vllm_config, "parallel_config", None)
    backend = getattr(parallel, "distributed_executor_backend", None)
    return backend == "ray" or bool(getattr(backend, "uses_ray", False))
