"""The offloading spec: what vLLM builds in its scheduler and in every worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.assembly import rows_for
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.vllm.layout import Layout
from kvstore.vllm.metrics import Reporter

__all__ = ["KVStoreOffloadingSpec"]

logger = logging.getLogger("kvstore")

CONNECTOR_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
    }
)
"""Keys of ``kv_connector_extra_config`` that vLLM's connector reads itself."""

ENGINE_KEYS = frozenset({"chunk_bytes", "keep_events"})
"""Keys that vLLM knows better."""

IDENTITY_KEYS = ("automatic_identity", "fingerprint_weights")
"""Keys that only a server has: see `kvstore.vllm.identity`."""

UNSEEN = (
    "this vLLM does not let kvstore see its configuration, so nobody can tell whose chunks may "
    "be used"
)
BY_HAND = (
    "Set automatic_identity = false and name in identity what engines must have in common, such "
    'as {"model": "m", "weights": "v1"}'
)


class KVStoreOffloadingSpec(OffloadingSpec):
    """kvstore behind vLLM's OffloadingConnector; see `kvstore.config` for the keys."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        counters, gauges = Reporter.documentation()
        definitions: dict[str, OffloadingMetricMetadata] = {}
        for name, text in counters.items():
            definitions[name] = OffloadingCounterMetadata(documentation=text)
        for name, text in gauges.items():
            definitions[name] = OffloadingGaugeMetadata(documentation=text)
        return definitions

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        _join_server_log()
        values = dict(config.extra_config)
        for key in ENGINE_KEYS & values.keys():
            raise ValueError(f"unknown key {key} = {values[key]!r}: vLLM decides it")
        switches = [values.pop(key, True) for key in IDENTITY_KEYS]
        for key, value in zip(IDENTITY_KEYS, switches, strict=True):
            if not isinstance(value, bool):
                raise ConfigError(f"{key} = {value!r}: must be true or false")
        self._automatic, self._fingerprint = switches
        self.store_config = Config.from_mapping(values, ignore=CONNECTOR_KEYS)
        self.layout = Layout(config)
        self.identity: Mapping[str, Any] = self.layout.identity
        # Read by vLLM's connector: with equal bytes on all ranks only one writes.
        self.replicated_layout = self.layout.replicated
        self.rows, self.row_bytes = rows_for(self.store_config, self.layout.chunk_bytes)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._build_manager()
        return self._manager

    def _build_manager(self) -> OffloadingManager:
        """The identity is determined only here: workers see rows, not keys."""
        from kvstore.vllm.caller import vllm_config_of
        from kvstore.vllm.manager import KVStoreOffloadingManager
        from kvstore.vllm.siblings import siblings

        vllm_config = vllm_config_of(self.config.extra_config)
        self.identity = {
            **self.layout.identity,
            **self._engine_identity(vllm_config),
            **self.store_config.identity,
        }
        paths = [path for tier in self.store_config.tiers for path in tier.paths]
        for line in siblings(self.identity, paths):
            logger.info("kvstore: not used: %s", line)
        lora_config = getattr(vllm_config, "lora_config", None)
        if lora_config is None or not self._fingerprint:
            return KVStoreOffloadingManager(self)
        from kvstore.vllm.identity import adapter_settings
        from kvstore.vllm.lora import LoRAOffloadingManager

        return LoRAOffloadingManager(self, adapter_settings(lora_config))

    def _engine_identity(self, vllm_config: Any) -> dict[str, Any]:
        from kvstore.vllm.identity import engine_identity

        if not self._automatic:
            if self.store_config.tiers and not self.store_config.identity:
                raise ConfigError(
                    "automatic_identity = false: name in identity what engines must have in "
                    'common to share chunks, such as {"model": "m", "weights": "v1"}'
                )
            return {}
        if not self.store_config.tiers:
            # Nothing outlives the process.
            return {}
        if vllm_config is not None:
            try:
                return engine_identity(vllm_config, fingerprint_weights=self._fingerprint)
            except (AttributeError, TypeError) as error:
                raise ConfigError(f"{UNSEEN} ({error}). {BY_HAND}") from error
        raise ConfigError(f"{UNSEEN}. {BY_HAND}")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            from kvstore.vllm.worker import create_worker

            self._worker = create_worker(self, kv_caches)
        return self._worker


def _join_server_log() -> None:
    """Let kvstore's log lines appear in the server's log."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
