"""A whole server without a model: vLLM's scheduler, both halves of its connector, our spec.

Real are the scheduler, the connector, the manager, the worker, the rows and the disk. What a model
would compute is a number for each token, made from all tokens before it, that is written into the
token's place in its block; what it would attend to is read there and has to be right.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    make_offload_key,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstore.core.chunk import READY
from kvstore.vllm.connector import KVStoreConnector
from kvstore.vllm.engine import WorkerFacts, weights_of
from kvstore.vllm.version import VERSION
from tests.patience import until
from tests.vllm.tiny import MODEL

BLOCK = 4
"""Tokens of a block."""

PAGE = 2 * BLOCK * 16 * 4
"""Bytes of a block: keys and values, tokens, the size of a head, 32 bits."""

LONGEST = 256


@dataclass
class Served:
    """What a request got.

    Attributes:
        steps: how many the server took from its arrival to its first token.
        cached: tokens of the prompt that were not computed.
    """

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    cached: int = -1


class Server:
    """See the module's text.

    Attributes:
        scheduler, connector: vLLM's.
        manager: ours.
        worker: vLLM's half of the connector that drives ours.
        told: the statistics of the connector's scheduler half, step by step.
        events: KV events that it has handed on.
        kind: the class of the scheduler.
        excused: requests that may read what is wrong in this step.
    """

    kind: Callable[..., Scheduler] = Scheduler

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        *,
        windows: tuple[int | None, ...] = (None,),
        sizes: tuple[int, ...] = (),
        interval: int | None = 0,
        blocks: int = 256,
    ) -> None:
        """
        Args:
            options: of kvstore, as an operator writes them.
            windows: for each KV cache group its window, or None.
            sizes: for each the tokens of a block.
            interval: vLLM's `prefix_cache_retention_interval`.
        """
        self.interval = interval
        self.windows, self.sizes = windows, sizes or (BLOCK,) * len(windows)
        self.told: list[dict[str, Any]] = []
        self.events: list[Any] = []
        config, groups = self._configure(folder, options, blocks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(min(self.sizes), sha256)
        # Workers come first, as in vLLM.
        workers = KVStoreConnector(config, KVConnectorRole.WORKER, groups)
        # One memory for all groups, as in vLLM: what one gives up another may overwrite.
        self.pages = torch.zeros((blocks, PAGE), dtype=torch.int8)
        worker = workers.connector_worker
        assert worker is not None
        self.worker = worker
        self.worker.worker = worker.spec.get_worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(self.pages, PAGE)],
                [[CanonicalKVCacheRef(0, PAGE)] for _ in windows],
            )
        )
        self._workers = workers
        self.scheduler = self.kind(
            config,
            groups,
            StructuredOutputManager(config),
            block_size=max(self.sizes),
            hash_block_size=min(self.sizes),
        )
        connector = self.ours(self.scheduler)
        assert isinstance(connector, KVStoreConnector)
        self.connector = connector
        self._watch(connector)
        # As the engine does it, with a model that is none.
        model = torch.nn.Linear(1, 1, bias=False)
        workers._owner = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
        told = WorkerFacts({}, weights_of(workers._owner))
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        assert connector.connector_scheduler is not None
        self.manager: Any = connector.connector_scheduler.manager
        self.requests: dict[str, Request] = {}
        self.served: dict[str, Served] = {}
        self.steps = 0
        self.excused: set[str] = set()

    def ours(self, scheduler: Scheduler) -> Any:
        """Our connector in the scheduler."""
        return scheduler.connector

    def _watch(self, connector: KVStoreConnector) -> None:
        """Keep what the scheduler's half reports."""
        stats, events = connector.get_kv_connector_stats, connector.take_events

        def told() -> Any:
            found = stats()
            if found is not None:
                self.told.append(dict(found.data))
            return found

        def happened() -> list[Any]:
            found = list(events())
            self.events += found
            return found

        setattr(connector, "get_kv_connector_stats", told)  # noqa: B010
        setattr(connector, "take_events", happened)  # noqa: B010

    def _configure(
        self, folder: Path, options: dict[str, Any], blocks: int
    ) -> tuple[VllmConfig, KVCacheConfig]:
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        cache = CacheConfig(block_size=min(self.sizes), enable_prefix_caching=True)
        cache.num_gpu_blocks = blocks
        cache.prefix_cache_retention_interval = self.interval
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONGEST
            ),
            load_config=LoadConfig(load_format="dummy"),
            cache_config=cache,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=128,
                max_model_len=LONGEST,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
                disable_hybrid_kv_cache_manager=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="kvstore.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={"offload_prompt_only": False, **options},
            ),
        )
        config.scheduler_config.async_scheduling = False
        groups = []
        for number, (window, size) in enumerate(zip(self.windows, self.sizes, strict=True)):
            shape: dict[str, Any] = {
                "block_size": size,
                "num_kv_heads": 1,
                "head_size": PAGE // size // 8,
                "dtype": torch.float32,
            }
            spec = (
                FullAttentionSpec(**shape)
                if window is None
                else SlidingWindowSpec(sliding_window=window, **shape)
            )
            groups.append(KVCacheGroupSpec([f"layer-{number}"], spec))
        tensors: list[Any] = []
        if VERSION < (0, 30):
            # There these say how large a block is.
            size = blocks * PAGE * len(groups)
            tensors = [SimpleNamespace(size=size, shared_by=[], offset=0, block_stride=0)]
        # As the engine hands it on.
        interval: dict[str, Any] = {"prefix_cache_retention_interval": self.interval}
        if VERSION < (0, 30):
            interval = {}
        return config, KVCacheConfig(blocks, tensors, groups, **interval)

    # -- requests --------------------------------------------------------------------------------

    def add(self, prompt: list[int], tokens: int = 2) -> str:
        name = f"r{len(self.requests)}"
        self._add(name, prompt, tokens)
        return name

    def feed(self, name: str, part: list[int], tokens: int = 2) -> None:
        """Give a session the next part of its input, and serve it as far as that goes."""
        self._add(name, part, tokens, resumable=True)
        self.step()
        while self.requests[name].status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.step()

    def _add(self, name: str, prompt: list[int], tokens: int, **more: Any) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, **more)
        if name not in self.requests:
            self.requests[name] = request
            self.served[name] = Served(steps=-self.steps)
        self.scheduler.add_request(request)

    def serve(self, *prompts: list[int], tokens: int = 2) -> list[Served]:
        """Serve these at once, until the last has got all of its tokens."""
        names = [self.add(prompt, tokens) for prompt in prompts]
        for _ in range(2000):
            if all(self.requests[name].is_finished() for name in names):
                return [self.served[name] for name in names]
            if not self.step():
                time.sleep(0.001)
        raise AssertionError("it does not come to an end")

    def settle(self) -> None:
        """Steps without requests, until nothing is under way."""
        end = time.monotonic() + 20
        while self.scheduler.has_requests() or self.connector.has_pending_push_work():
            assert time.monotonic() < end, "it does not come to rest"
            if not self.step():
                time.sleep(0.001)

    def drain(self) -> None:
        """`settle`, and steps until the tiers hold no row, however slow the disk is."""

        def drained() -> bool:
            self.settle()
            self.step()
            return not self.manager._core.stats().busy_rows

        until(drained, "rows stay busy")

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step; whether anything was computed in it."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self._execute(output))
        return bool(output.num_scheduled_tokens)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """Do what the workers do in a step."""
        meta = output.kv_connector_metadata
        self._workers.bind_connector_metadata(meta)
        self.worker.handle_preemptions(meta)
        self._workers.start_load_kv(None)
        sampled = self._compute(output)
        self.worker.prepare_store_kv(meta)
        _, loaded = self._workers.get_finished(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=self._workers.build_connector_worker_meta(),
        )
        self._workers.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _compute(self, output: Any) -> list[list[int]]:
        cached = output.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            tokens = list(self.requests[name].all_token_ids)
            begin, end = begins[name], begins[name] + count
            served = self.served[name]
            if served.cached < 0:
                served.cached = begin
            marks = _marks(tokens[:end])
            self._attend(name, marks[:begin], marks[begin:])
            if end == len(tokens):
                if not served.tokens:
                    served.steps += self.steps
                served.tokens.append(marks[-1] % 90)
                sampled.append([marks[-1] % 90])
            else:
                sampled.append([])
        return sampled

    def _attend(self, name: str, before: list[int], new: list[int]) -> None:
        """Write the marks of new tokens of a request; what they attend to has to be right."""
        begin, tables = len(before), self.scheduler.kv_cache_manager.get_block_ids(name)
        its = self.pages.view(torch.int64)
        for window, size, blocks in zip(self.windows, self.sizes, tables, strict=True):
            first = 0 if window is None else max(0, begin - window + 1)
            for place in range(first, begin):
                found = int(its[blocks[place // size], place % size])
                right = found == before[place] or name in self.excused
                assert right, f"{name} reads a wrong token {place} of {begin}"
            for place, mark in enumerate(new, begin):
                its[blocks[place // size], place % size] = mark

    def check_rows(self) -> None:
        """What host memory has of any request has to be right, whether anybody reads it or not."""
        rows = self.worker.worker._region.array
        for request in self.requests.values():
            marks = _marks(list(request.all_token_ids))
            for group, size in enumerate(self.sizes):
                step = size // min(self.sizes)
                for number, name in enumerate(request.block_hashes[step - 1 :: step]):
                    chunk = self.manager._core.chunks.get(make_offload_key(name, group))
                    if chunk is not None and chunk.state >= READY:
                        held = rows[chunk.row][: 8 * size].view("int64").tolist()
                        assert held == marks[size * number : size * (number + 1)], (
                            request.request_id
                        )

    def reset(self) -> None:
        """As an operator does it: the device's prefix cache and what is offloaded."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)

    def forget(self) -> None:
        """The device's own prefix cache only."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self._workers.shutdown()
        self.scheduler.shutdown()


def _marks(tokens: list[int]) -> list[int]:
    marks: list[int] = []
    mark = 7
    for token in tokens:
        mark = (mark * 1_000_003 + token + 1) % (2**61 - 1)
        marks.append(mark)
    return marks
