"""The engine: a scheduler, a model, and the two halves of a connector between them and kvstore."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.paged_engine.blocks import BlockPool
from examples.paged_engine.model import Batch, Llama, ModelConfig
from examples.paged_engine.request import Request
from examples.paged_engine.scheduler import Scheduler
from kvstore.connector.scheduler import ConnectorScheduler
from kvstore.connector.server import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ServerConfig,
    StepOutput,
)
from kvstore.connector.spec import KVStoreSpec
from kvstore.connector.worker import ConnectorWorker

__all__ = ["Engine", "EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        num_blocks: blocks of the device.
        offload: keys of `kvstore.config`, and ``block_size``: tokens of an offloaded chunk. None
            offloads nothing.
        prefix_caching: the device keeps blocks for other requests. Not with a window.
    """

    model: ModelConfig
    block_tokens: int = 16
    num_blocks: int = 256
    max_tokens_per_step: int = 256
    max_running: int = 16
    prefix_caching: bool = False
    offload: Mapping[str, Any] | None = None


class Engine:
    """Serves requests, a step at a time.

    Attributes:
        connector: the scheduler's half, or None.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = Llama(config.model)
        layer_windows = config.model.layer_windows()
        self._windows: list[int | None] = list(dict.fromkeys(layer_windows))
        self.kv_caches = self.model.new_kv_caches(config.num_blocks, config.block_tokens)
        self.connector: ConnectorScheduler | None = None
        self.worker: ConnectorWorker | None = None
        if config.offload is not None:
            spec = self._spec(config.offload, layer_windows)
            self.connector = ConnectorScheduler(spec)
            self.worker = ConnectorWorker(spec)
            self.worker.register_kv_caches(
                dict(zip(_names(layer_windows), self.kv_caches, strict=True))
            )
        caching = config.prefix_caching and len(self._windows) == 1
        self.scheduler = Scheduler(
            BlockPool(config.num_blocks, prefix_caching=caching),
            self._windows,
            config.block_tokens,
            max_tokens_per_step=config.max_tokens_per_step,
            max_running=config.max_running,
            connector=self.connector,
        )
        self._made = 0
        self.steps = 0

    def _spec(self, offload: Mapping[str, Any], layer_windows: Sequence[int | None]) -> KVStoreSpec:
        size = self.config.block_tokens
        page_bytes = self.kv_caches[0][0].nbytes
        groups = []
        for window in self._windows:
            layers = [
                name
                for name, its in zip(_names(layer_windows), layer_windows, strict=True)
                if its == window
            ]
            groups.append(KVCacheGroup(layers, KVCacheSpec(size, page_bytes, window)))
        server = ServerConfig.of(size, offload, enable_prefix_caching=self.config.prefix_caching)
        return KVStoreSpec(server, KVCacheConfig(groups))

    # -- requests ----------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """A new request; it is served by the steps that follow."""
        longest = len(prompt) + max_new_tokens
        needed = len(self._windows) * (-(-longest // self.config.block_tokens) + 1)
        if not prompt or needed >= self.config.num_blocks:
            raise ValueError(
                f"a request of {longest} tokens needs {needed} blocks: there are "
                f"{self.config.num_blocks}"
            )
        request = Request(
            f"request-{self._made}", list(prompt), max_new_tokens, self.config.block_tokens
        )
        self._made += 1
        self.scheduler.waiting.append(request)
        if self.connector is not None:
            self.connector.on_new_request(request)
        return request

    def abort(self, request: Request) -> None:
        """Nobody wants its tokens any more."""
        self.scheduler.finish(request)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Serve `prompts`, and return what was generated for each."""
        requests = [self.add(prompt, max_new_tokens) for prompt in prompts]
        self.run()
        return [request.output for request in requests]

    def run(self) -> None:
        """Take steps until no request is left."""
        while self.scheduler.busy:
            self.step()

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Take a step; returns the requests that got a new token."""
        self.steps += 1
        output, scheduled = self.scheduler.schedule()
        if self.connector is not None and self.worker is not None:
            self.worker.start_transfers(self.connector.build_connector_meta(output))
        if not scheduled:
            # What they wait for comes from other threads.
            time.sleep(0.0005)
        sampled = self._compute(output, scheduled) if scheduled else []
        if self.connector is not None and self.worker is not None:
            self.connector.on_step_reported()
            ended = self.connector.update_connector_output(self.worker.get_finished())
            self.scheduler.loads_ended(ended.loaded, ended.failed)
        return sampled

    def _compute(self, output: StepOutput, scheduled: Sequence[Request]) -> list[Request]:
        counts = [output.num_scheduled_tokens[request.request_id] for request in scheduled]
        logits = self.model(self._batch(scheduled, counts), self.kv_caches)
        best = dict(zip(scheduled, logits.argmax(-1).tolist(), strict=True))
        sampled = self.scheduler.step_done(scheduled, output)
        for request in sampled:
            request.tokens.append(best[request])
            if len(request.output) == request.max_new_tokens:
                self.scheduler.finish(request)
        return sampled

    def _batch(self, scheduled: Sequence[Request], counts: Sequence[int]) -> Batch:
        size = self.config.block_tokens
        device = self.config.model.device
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        last: list[int] = []
        for row, (request, count) in enumerate(zip(scheduled, counts, strict=True)):
            begin = request.num_computed_tokens
            tokens += request.tokens[begin : begin + count]
            positions += range(begin, begin + count)
            rows += [row] * count
            columns += range(count)
            last.append(len(tokens) - 1)
        slots, tables = {}, {}
        for group, window in enumerate(self._windows):
            block_ids = [request.block_ids[group] for request in scheduled]
            longest = max(map(len, block_ids))
            table = [ids + [0] * (longest - len(ids)) for ids in block_ids]
            tables[window] = torch.tensor(table, device=device)
            blocks = [block_ids[row][at // size] for row, at in zip(rows, positions, strict=True)]
            places = [at % size for at in positions]
            slots[window] = (
                torch.tensor(blocks, device=device),
                torch.tensor(places, device=device),
            )
        return Batch(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(rows, device=device),
            torch.tensor(columns, device=device),
            (len(scheduled), max(counts)),
            slots,
            tables,
            torch.tensor(last, device=device),
        )

    # -- the end -----------------------------------------------------------------------------

    def settle(self, seconds: float = 10.0) -> None:
        """Take steps until everything that was computed is offloaded, on all tiers."""
        end = time.monotonic() + seconds
        self.step()
        while self.connector is not None and self.connector.has_pending_work():
            if time.monotonic() > end:
                return
            self.step()

    def shutdown(self) -> None:
        """Let go of everything. What is on disk stays."""
        if self.worker is not None:
            self.worker.shutdown()
        if self.connector is not None:
            self.connector.shutdown()


def _names(layer_windows: Sequence[int | None]) -> Iterator[str]:
    return (f"layer-{number}" for number in range(len(layer_windows)))
