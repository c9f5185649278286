"""The offloading spec: what vLLM builds in its scheduler and in every worker."""

from __future__ import annotations

import logging
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
from kvstore.vllm.layout import Layout
from kvstore.vllm.metrics import Reporter

__all__ = ["KVStoreOffloadingSpec"]

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
        self.store_config = Config.from_mapping(values, ignore=CONNECTOR_KEYS)
        self.layout = Layout(config)
        # Read by vLLM's connector: with equal bytes on all ranks only one writes.
        self.replicated_layout = self.layout.replicated
        self.rows, self.row_bytes = rows_for(self.store_config, self.layout.chunk_bytes)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            from kvstore.vllm.manager import KVStoreOffloadingManager

            self._manager = KVStoreOffloadingManager(self)
        return self._manager

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
