"""Engine: what vLLM gives to a connector class, and what the engine's workers tell.

A connector class gets the configuration of the engine. What only the workers know (the attention
backend of each layer, the weights in memory) their half of the connector reads and tells: at the
start as handshake metadata, later beside the outputs of a step.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.request import Request
from vllm.v1.worker.worker_base import WorkerBase

from kvstore.types import about
from kvstore.vllm.formats import layers_of_worker
from kvstore.vllm.weights import WeightsUnreadableError, digest_of_worker

__all__ = [
    "Engine",
    "WorkerFacts",
    "building",
    "computed_chunks",
    "current_engine",
    "has_paused",
    "has_siblings",
    "hashed_request",
    "scheduler_of",
    "weights_of",
    "worker_facts",
    "worker_of",
]

logger = logging.getLogger("kvstore")


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one worker tells at the start.

    Attributes:
        layers: by layer what decides the bytes of its pages: see `formats.layers_of_worker`;
            None if that cannot be found out.
        weights: digest of the weights in memory; None if they cannot be read.
    """

    layers: Mapping[str, Mapping[str, Any]] | None
    weights: str | None


@dataclass
class Engine:
    """One engine, as the scheduler's half of a connector knows it.

    Attributes:
        vllm_config: the `VllmConfig`. kv_cache_config: the `KVCacheConfig`.
        workers: what each worker has told, by its place; empty until then.
        request: vLLM's `Request` that is being opened.
        flushed: tells whether rows that were in use at a reset are not in use any more; always
            where vLLM keeps them from others itself.
    """

    vllm_config: Any
    kv_cache_config: Any
    workers: Mapping[tuple[int, int], WorkerFacts] = field(default_factory=dict)
    request: Any = None
    flushed: Callable[[], bool] = lambda: True

    def opened(self, name: str) -> Any:
        """Return the request that is being opened if it has this name, otherwise None."""
        found = self.request
        return found if found is not None and found.request_id == name else None

    @property
    def model_names(self) -> list[str]:
        """The names under which the model is known."""
        model = self.vllm_config.model_config
        served = model.served_model_name or []
        return list(
            dict.fromkeys([model.model, *([served] if isinstance(served, str) else served)])
        )

    @property
    def layers(self) -> dict[str, Mapping[str, Any]] | None:
        """The layers of all workers; None if a worker has not told them."""
        told = [worker.layers for worker in self.workers.values()]
        if not told or None in told:
            return None
        return {name: its for layers in told if layers for name, its in layers.items()}


_building: ContextVar[Engine | None] = ContextVar("kvstore-engine", default=None)


def current_engine() -> Engine | None:
    """Return the engine whose `KVStoreConnector` builds a part right now; None in any other case.

    For parts that vLLM's own spec builds, such as tiers.
    """
    return _building.get()


@contextlib.contextmanager
def building(engine: Engine) -> Iterator[None]:
    """Let `current_engine` return this engine meanwhile."""
    token = _building.set(engine)
    try:
        yield
    finally:
        _building.reset(token)


def worker_of(vllm_config: Any) -> Any:
    """Return the worker of this process whose engine this is; None if there is none."""
    # Connectors inside vLLM's MultiConnector get copies of the configuration, with this model.
    return _holder(vllm_config.model_config, WorkerBase)


def scheduler_of(connector: Any) -> Any:
    """Return the scheduler that owns this connector; None if there is none."""
    return _holder(connector, SchedulerInterface)


def hashed_request(
    vllm_config: Any, tokens: Sequence[int], salt: str | None, block_tokens: int
) -> Any:
    """Return a `Request` that has this prompt and the hashes of its blocks, for its keys."""
    hash_of = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    # From 0.33 on hashes may depend on tokens that follow.
    ahead = getattr(vllm_config, "num_hash_lookahead_tokens", None)
    hasher = get_request_block_hasher(block_tokens, hash_of, *(() if ahead is None else (ahead,)))
    return Request(
        "kvstore-control",
        list(tokens),
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        block_hasher=hasher,
    )


def computed_chunks(scheduler: Any, ends: Sequence[Any]) -> int:
    """Return how many of the leading chunks of a prompt the device still has.

    Args:
        scheduler: vLLM's, with one KV cache group; None where it is not known.
        ends: for each whole chunk of the prompt the hash of its last block.
    """
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    if pool is None:
        return 0
    # Blocks are given up from the end of a prompt on.
    return bisect.bisect_left(
        ends, True, key=lambda block_hash: pool.get_cached_block(block_hash, [0]) is None
    )


def has_siblings(worker: Any) -> bool:
    """Whether this worker, where it is known, has other connectors beside this one."""
    transfer = getattr(getattr(worker, "vllm_config", None), "kv_transfer_config", None)
    options = getattr(transfer, "kv_connector_extra_config", None) or {}
    return len(options.get("connectors", ())) > 1


def has_paused(scheduler: Any) -> bool:
    """Whether this scheduler, where it is known, has paused: to sleep or to get other weights."""
    return scheduler is not None and scheduler.pause_state is not PauseState.UNPAUSED


def worker_facts(worker: Any) -> WorkerFacts:
    """Return what this worker, or None, tells at the start."""
    layers: Mapping[str, Mapping[str, Any]] | None = None
    try:
        layers = layers_of_worker(worker)
    except Exception:
        logger.exception(
            "this worker cannot tell its attention backends: it takes no tiers without "
            "automatic_identity = false",
            extra=about("server.backends_unknown"),
        )
    return WorkerFacts(layers, weights_of(worker))


def weights_of(worker: Any) -> str | None:
    """Return the digest of the weights of this worker, or None; None if they cannot be read."""
    began = time.monotonic()
    try:
        digest = digest_of_worker(worker)
    except Exception as error:
        logger.error(
            "the weights in memory cannot be read: no pause keeps the cache, and slower tiers "
            "are not used after it (%s)",
            error,
            exc_info=not isinstance(error, WeightsUnreadableError),
            extra=about("weights.unreadable"),
        )
        return None
    logger.info(
        "the weights in memory were read in %.2f s",
        time.monotonic() - began,
        extra=about("weights.read"),
    )
    return digest


def _holder(held: Any, kind: type) -> Any:
    """Return the object of this kind that has `held` as an attribute; None if there is none.

    vLLM gives a connector no reference to the object that owns it. To be called while the engine
    starts: afterwards vLLM freezes the garbage collector, which then names nothing any more.
    """
    for one in gc.get_objects():
        # By its type: proxies among the objects answer `isinstance` for others.
        if issubclass(type(one), kind) and any(value is held for value in vars(one).values()):
            return one
    return None
