"""Secondary tier: kvstore's disk tier below vLLM's own `TieringOffloadingSpec`.

    "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.vllm",
    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
      "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.vllm",
                           "path": "/nvme/kv", "capacity_bytes": "2TiB"}]}

Behind vLLM's own `OffloadingConnector` it works as well, but knows nothing of the engine there: the
operator names the identity.

How vLLM's tiering calls it, as of 0.32 and 0.33; all calls are made in the scheduler's process, one
at a time:

* In each step `lookup` is asked for what vLLM's host memory lacks. After a hit vLLM gives the chunk
  a row at once, and the request waits. `on_schedule_end` comes after the loads of the step have
  been handed over by `submit_load`, one job for each request.
* `submit_store` comes when the device's bytes are in the rows, between two steps (some in a step):
  the rows stay as they are until the job is told to have ended.
* Neither names the keys of a job in the order of the prompt.
* `get_finished_jobs` is asked at least once a step. A load may say which of its chunks have come:
  the others are misses, and looked up again. A row of a job that has ended may be given to others,
  so a job cannot end while a copy from or to its rows may still run.
* As long as a job has not ended, vLLM goes on making steps.
* `drain_jobs` waits for all jobs: vLLM resets its host memory then, and keeps what tiers hold.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.assembly import namespace_of
from kvstore.config import Config, DiskConfig
from kvstore.connector.spec import NAMING_KEYS, flag_of
from kvstore.core import CoreStats, Flow
from kvstore.core.tier_only import Job
from kvstore.engine.job_steps import JobRunner
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.lent import LentRegion
from kvstore.types import about
from kvstore.vllm.adapters import AdapterKeys
from kvstore.vllm.checks import (
    check_answers,
    check_engine_with_tiers,
    check_recurrent,
    check_windows,
)
from kvstore.vllm.engine import current_engine
from kvstore.vllm.identity.identity import adapter_settings
from kvstore.vllm.identity.naming import Naming, siblings
from kvstore.vllm.layout import Layout
from kvstore.vllm.metrics_report import TIERS_ALONE, Reporter, definitions
from kvstore.vllm.signals import ending, outlive_signals
from kvstore.vllm.version import join_server_log, position_of

__all__ = ["KVStoreTier", "TierOptions"]

logger = logging.getLogger("kvstore")

STORE_KEYS = (
    "identity",
    "namespace",
    "deadline_s",
    "max_wait_s",
    "write_queue_bytes",
    "shutdown_timeout_s",
    "spans",
)
"""Keys that elsewhere stand beside the tiers."""

OWN_KEYS = (*NAMING_KEYS, "enable_kv_events", "locality")
"""Keys that only a vLLM server has."""

MOST_LOADS = 3
"""How often a request may load a chunk. vLLM's host memory may give up one part of a prompt for
another, again and again, while the request waits for both: then it computes them."""

UNALIGNED_IO = ("buffered", "mmap", "portable")
"""I/O backends that move bytes from and to any address."""


@dataclass(frozen=True)
class TierOptions:
    """The options of one tier, checked; the same names and messages as in `kvstore.config`.

    Attributes:
        config: with one disk tier.
        naming: how the namespace is found.
        events: whether vLLM is told what the tier stores and gives up.
        locality: where the disk is, seen from this server.
    """

    config: Config
    naming: Naming
    events: bool
    locality: Locality

    @classmethod
    def of(
        cls, options: Mapping[str, Any], name: str, memory_bytes: int, *, aligned: bool
    ) -> TierOptions:
        """
        Args:
            name: what the tier is called in messages.
            memory_bytes: size of vLLM's host memory.
            aligned: whether direct I/O can use it.

        Raises:
            ConfigError: for an unknown key or a value that cannot be used.
        """
        values = dict(options)
        try:
            naming = Naming.taken_from(values)
            events = flag_of(values, "enable_kv_events")
            values.pop("enable_kv_events", None)
            locality = _locality(values.pop("locality", Locality.LOCAL.value))
            beside = {key: values.pop(key) for key in STORE_KEYS if key in values}
            disk = DiskConfig.from_mapping(_io(values, aligned), "", (*STORE_KEYS, *OWN_KEYS))
            if disk.flow is not Flow.WRITE_THROUGH:
                raise ConfigError(
                    f"flow = {disk.flow.value!r}: must be 'write-through', since vLLM says when "
                    "chunks are stored, and not when its host memory gives them up"
                )
            config = Config.from_mapping(
                {"cpu_bytes_to_use": memory_bytes, "tiers": [disk], **beside}
            )
        except ConfigError as error:
            raise ConfigError(f"secondary tier {name}: {error}") from error
        return cls(config, naming, events, locality)


def _locality(value: object) -> Locality:
    try:
        return Locality(value)
    except ValueError:
        allowed = ", ".join(each.value for each in Locality)
        raise ConfigError(f"locality = {value!r}: must be one of: {allowed}") from None


def _io(values: dict[str, Any], aligned: bool) -> dict[str, Any]:
    """`values` with an I/O backend that can use vLLM's host memory."""
    if aligned or values.get("io") in UNALIGNED_IO:
        return values
    if values.get("io", "auto") == "auto":
        return {**values, "io": "buffered"}
    raise ConfigError(
        f"io = {values['io']!r}: vLLM's host memory does not begin at a page here; "
        f"must be one of: auto, {', '.join(UNALIGNED_IO)}"
    )


class KVStoreTier(SecondaryTierManager):
    """A secondary tier of vLLM on kvstore's disk tier; for options see `TierOptions`, docs/vllm.md.

    Copies go directly between vLLM's rows and the disk.

    Raises:
        KVStoreError: for options, a model or a path that cannot be used; nothing is left then.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions(TIERS_ALONE)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_server_log()
        region = LentRegion(primary_kv_view)
        try:
            self._open(offloading_spec, region, tier_type, options)
        except BaseException:
            region.close()
            raise

    def _open(self, spec: Any, region: LentRegion, tier_type: str, options: dict[str, Any]) -> None:
        told = TierOptions.of(options, tier_type, region.size, aligned=region.aligned)
        config = told.config
        layout = Layout(spec.config)
        if layout.canonical:
            raise ConfigError(
                f"secondary tier {tier_type}: canonical_layout = true has not been tried with "
                "vLLM's tiering. Leave it out, or use kvstore without spec_name"
            )
        if layout.chunk_bytes > region.row_bytes:
            raise ConfigError(
                f"secondary tier {tier_type}: vLLM's rows have {region.row_bytes} bytes, its "
                f"chunks {layout.chunk_bytes}"
            )
        self._engine = engine = current_engine()
        check_answers(bool(spec.offload_prompt_only), engine)
        check_windows(spec.config, engine)
        vllm_config = None if engine is None else engine.vllm_config
        check_engine_with_tiers(vllm_config, config.shutdown_timeout_s)
        check_recurrent(spec.config, engine)
        given = config.identity or {}
        identity = told.naming.whole(layout.identity, spec.config, engine, given)
        for line in siblings(identity, config.tiers[0].paths):
            logger.info("kvstore: not used: %s", line, extra=about("store.not_used", reason=line))
        label = str(spec.config.model.name).rstrip("/").rsplit("/", 1)[-1]
        namespace = namespace_of(config, layout.chunk_bytes, region.row_bytes, label, identity)
        self.locality = told.locality
        self._wait_s = config.shutdown_timeout_s
        self._chunk_bytes = layout.chunk_bytes
        self._reporter = Reporter(TIERS_ALONE)
        self._events = told.events and bool(spec.kv_events_config.enable_kv_cache_events)
        self._one_block = layout.one_block
        self._names: dict[int, dict[bytes, OffloadKey]] = {}
        """vLLM's keys of the chunks of each load, by ours."""
        self._loads: dict[str, Counter[OffloadKey]] = {}
        """How often each request has loaded its chunks."""
        lora = getattr(vllm_config, "lora_config", None)
        self._adapters = None
        if lora is not None and told.naming.fingerprint:
            self._adapters = AdapterKeys(adapter_settings(lora), config.deadline_s)
        self._closed = False
        try:
            self._runner = JobRunner(
                config, region, layout.chunk_bytes, namespace, events=self._events
            )
        except BaseException:
            if self._adapters is not None:
                self._adapters.close()
            raise
        outlive_signals(self)
        logger.info(
            "kvstore: in vLLM's tiering, %s",
            self._runner.description,
            extra=about("store.opened", description=self._runner.description),
        )

    # -- lookups ---------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._engine is not None and not self._engine.flushed():
            # The row that vLLM would give to the chunk may be one that a worker still writes.
            return LookupResult.MISS
        loads = self._loads.get(req_context.req_id)
        if loads is not None and loads[key] >= MOST_LOADS:
            return LookupResult.MISS
        if self._adapters is not None:
            use = self._adapters.use(req_context)
            if use is not None:
                if use.waiting:
                    return LookupResult.RETRY
                if use.doubtful:
                    return LookupResult.MISS
                (key,) = self._adapters.named([key], req_context)
        return LookupResult.HIT if self._runner.lookup(key) else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._runner.touch(self._named(keys, req_context))

    # -- jobs ------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, rows = _in_order(job_metadata)
        if self._in_doubt(job_metadata.req_context):
            keys, rows = [], []
        named = self._named(keys, job_metadata.req_context)
        self._runner.store(job_metadata.job_id, named, rows, job_metadata.req_context.req_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, rows = _in_order(job_metadata)
        self._loads.setdefault(job_metadata.req_context.req_id, Counter()).update(keys)
        named = self._named(keys, job_metadata.req_context)
        self._names[job_metadata.job_id] = dict(zip(named, keys, strict=True))
        self._runner.load(job_metadata.job_id, named, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(end) for end in self._runner.poll()]

    def drain_jobs(self) -> None:
        self._runner.drain()

    # -- requests and steps ----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._adapters is not None:
            self._adapters.arrived(req_context, self._engine)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._loads.pop(req_context.req_id, None)
        self._runner.finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._adapters is not None:
            self._adapters.settle()
        self._runner.end_step()

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return []
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key, _ in run],
                medium=self.medium,
                removed=left,
                locality=self.locality,
                # As in `KVStoreOffloadingManager.take_events`.
                removal_expected=not self._one_block,
            )
            for left, run in groupby(self._runner.take_history(), key=itemgetter(1))
        ]

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._reporter.report(CoreStats(tiers=self._runner.stats()))

    def shutdown(self) -> None:
        """Finish the stores, within ``shutdown_timeout_s``, and close the disk.

        Raises:
            KVStoreError: if the disk does not answer and may still use vLLM's host memory.
        """
        if self._closed:
            return
        self._closed = True
        if self._adapters is not None:
            self._adapters.close()
        # vLLM releases its memory after this, and cannot while it is lent.
        self._primary_kv_view = memoryview(b"")
        with ending(self):
            closed = self._runner.close(self._wait_s)
        if not closed:
            raise KVStoreError(
                f"the disk did not answer within {self._wait_s:g} s: host memory is still in use"
            )

    # -- inside ----------------------------------------------------------------------------

    def _in_doubt(self, req_context: ReqContext) -> bool:
        """Whether it is unknown with which adapter the chunks of the request were computed."""
        use = None if self._adapters is None else self._adapters.use(req_context)
        return use is not None and (use.waiting or use.doubtful)

    def _named(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """Return the keys under which the chunks of a request are kept."""
        return list(keys) if self._adapters is None else self._adapters.named(keys, req_context)

    def _result(self, end: Job) -> JobResult:
        names = self._names.pop(end.number, {})
        return JobResult(
            end.number,
            success=end.whole,
            successful_keys=tuple(names[key] for key in end.loaded) or None,
            transfer_time=end.seconds,
            transfer_bytes=end.moved * self._chunk_bytes,
        )


def _in_order(job: TransferJob) -> tuple[list[OffloadKey], list[int]]:
    """Return the keys and rows of a job in the order of the prompt.

    vLLM takes the keys of a store from a set, and asks for windows from their ends.
    """
    position = position_of(job.req_context)
    pairs = [*zip(job.keys, job.chunk_ids.tolist(), strict=True)]
    if position is not None:
        pairs.sort(key=lambda pair: position(pair[0]) or 0)
    return [key for key, _ in pairs], [row for _, row in pairs]
