"""Handlers that copy when they are told to, fail or refuse; a model; what a server may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvstore.connector.backend import RowBackend
from kvstore.connector.contract import OffloadingManager
from kvstore.connector.handler import OffloadingHandler, TransferResult, TransferSpec
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import DeviceLoadStoreSpec
from kvstore.connector.server import KVCacheConfig, KVCacheGroup, KVCacheSpec, ServerConfig
from kvstore.connector.single_tier import PolicyManager
from kvstore.connector.spec import Handlers, KVStoreSpec
from kvstore.tiers.pinned import PinnedRegion
from tests.connector.held import Clock, HeldEngine, Shelf

__all__ = [
    "BYTES",
    "LAYERS",
    "Device",
    "HeldSpec",
    "LateHandler",
    "Model",
    "Setup",
    "Told",
    "spec_of",
]

LAYERS = 2
BYTES = 8
"""Of one token in one layer."""
MASK = (1 << 64) - 1

Content = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Setup:
    """A server.

    Attributes:
        groups: for each the tokens of a block, and the window.
        factor: blocks in a chunk.
        blocks, rows: of the device and of host memory.
        keeps: who keeps chunks: "policy", or the store ("host" or "disk") over a tier whose moves
            end when they are told to, while time stands still.
        depth: steps that are scheduled before an earlier one is done.
        budget: tokens of a step.
        newest_first: blocks that were given back last are given out first.
    """

    groups: tuple[tuple[int, int | None], ...]
    hash_size: int = 4
    factor: int = 1
    blocks: int = 40
    rows: int = 24
    keeps: str = "policy"
    prefix_cache: bool = True
    depth: int = 0
    prompt_only: bool = False
    workers: int = 1
    budget: int = 24
    newest_first: bool = False
    policy: str = "lru"

    @property
    def one_size(self) -> bool:
        return len({size for size, _ in self.groups}) == 1

    @property
    def windowed(self) -> bool:
        return any(window is not None for _, window in self.groups)


class Model:
    """What a token's KV cache is: it follows from all tokens up to it, and the weights."""

    def __init__(self) -> None:
        self.salt = 1

    @staticmethod
    def prefixes(tokens: Sequence[int]) -> list[int]:
        """For each token a number that names it and all before it."""
        value, found = 1469598103934665603, []
        for token in tokens:
            value = ((value ^ (token + 1)) * 1099511628211 + 12345) & MASK
            found.append(value)
        return found

    def content(self, prefixes: Content, group: int, layer: int) -> Content:
        factor = np.uint64(
            (2 * (self.salt * 1000 + group * 10 + layer) + 1) * 0x9E3779B97F4A7C15 & MASK
        )
        return prefixes * factor + np.uint64(layer)


class Device:
    """The KV cache of one worker. Groups whose blocks are of one size share their memory."""

    def __init__(self, setup: Setup) -> None:
        by_size = {
            size: [torch.zeros(setup.blocks, size, BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
            for size, _ in setup.groups
        }
        self.layers: dict[str, torch.Tensor] = {}
        self.tables: list[list[npt.NDArray[np.uint64]]] = []
        for group, (size, _) in enumerate(setup.groups):
            for layer, tensor in enumerate(by_size[size]):
                self.layers[f"{group}-{layer}"] = tensor
            self.tables.append([t.numpy().view(np.uint64)[..., 0] for t in by_size[size]])

    def poison(self, group: int, blocks: Collection[int], value: int) -> None:
        for table in self.tables[group]:
            table[list(blocks)] = np.uint64(value)


@dataclass
class Told:
    """Transfers end when they are told to.

    Attributes:
        calm: they end at once.
        refusing: handlers take nothing.
    """

    calm: bool = False
    refusing: bool = False


@dataclass
class Late:
    """A transfer that was taken: it is copied when it ends."""

    job: int
    spec: TransferSpec
    ends: bool
    fails: bool = False


class LateHandler(OffloadingHandler):
    """Takes transfers now and copies them when they end. Reports them in the order of taking."""

    def __init__(self, inner: OffloadingHandler, told: Told, device: Device) -> None:
        self.inner = inner
        self.told = told
        self.device = device
        self.queue: deque[Late] = deque()
        self.ended: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self.told.refusing and not self.told.calm:
            return False
        self.queue.append(Late(job_id, spec, self.told.calm))
        target = spec[1]
        if isinstance(target, DeviceLoadStoreSpec):
            # The copy may write at any time from now on.
            self._spoil(target)
        return True

    def _spoil(self, target: DeviceLoadStoreSpec) -> None:
        at = 0
        for group, size in enumerate(target.group_sizes):
            self.device.poison(group, target.block_ids[at : at + size].tolist(), 0xDEAD)
            at += size

    def get_finished(self) -> list[TransferResult]:
        while self.queue and self.queue[0].ends:
            self.end_first()
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        while self.queue and any(late.job in job_ids for late in self.queue):
            self.end_first()

    def end_first(self) -> None:
        """The one that was taken first is copied now, or fails."""
        late = self.queue.popleft()
        if late.fails:
            self.ended.append(TransferResult(late.job, False))
            return
        assert self.inner.transfer_async(late.job, late.spec)
        ended = self.inner.get_finished()
        assert all(each.success for each in ended), "it does not fit"
        self.ended += ended

    def blocks(self) -> set[int]:
        """Blocks of the device that are yet to be read or written."""
        return {
            int(block)
            for late in self.queue
            for side in late.spec
            if isinstance(side, DeviceLoadStoreSpec)
            for block in side.block_ids
        }

    def shutdown(self) -> None:
        self.inner.shutdown()


class ChaosSpec(KVStoreSpec):
    """The store behind late handlers."""

    told: Told
    devices: list[Device]
    handlers: list[list[LateHandler]]
    _host: PinnedRegion | None = None

    def host_memory(self) -> PinnedRegion:
        """What the handlers copy from and to."""
        if self._host is None:
            self._host = self._region(scheduler=False)
        return self._host

    def close(self) -> None:
        """Nobody looks at host memory any more."""
        if self._host is not None:
            self._release(self._host)

    def get_handlers(
        self, kv_caches: Mapping[str, torch.Tensor], attn_backends: Mapping[str, Any] | None = None
    ) -> Handlers:
        device = self.devices[len(self.handlers)]
        ways = [
            (source, target, LateHandler(inner, self.told, device))
            for source, target, inner in super().get_handlers(kv_caches, attn_backends)
        ]
        self.handlers.append([handler for _, _, handler in ways])
        return iter(ways)


class PolicySpec(ChaosSpec):
    """One policy over host memory, behind late handlers."""

    policy = "lru"
    _one: PolicyManager | None = None

    def get_manager(self) -> OffloadingManager:  # type: ignore[override]
        if self._one is None:
            rows = RowBackend(self.offloaded_block_size[0], "host", self.host_memory().array)
            self._one = PolicyManager(rows, self.policy, enable_events=True)
        return self._one


class HeldSpec(ChaosSpec):
    """The store over a tier whose moves are held; until it is closed time stands still."""

    clock: Clock
    engine: HeldEngine
    _patches: ExitStack | None = None

    def get_manager(self) -> KVStoreManager:
        if self._manager is None:
            self.clock = Clock()
            self._patches = ExitStack()
            for module in ("kvstore.engine.scheduler_steps", "kvstore.connector.manager"):
                self._patches.enter_context(patch(f"{module}.time", self.clock))
            with (
                patch("kvstore.engine.scheduler_steps.EngineThread", HeldEngine),
                patch("kvstore.assembly._tiers_of", lambda *args: [Shelf()]),
            ):
                engine = super().get_manager().stepper.engine
            assert isinstance(engine, HeldEngine)
            self.engine = engine
            engine.clock = self.clock
        return super().get_manager()

    def close(self) -> None:
        super().close()
        if self._patches is not None:
            self._patches.close()


def spec_of(setup: Setup, told: Told) -> ChaosSpec:
    """What `setup` says; with as many devices as workers."""
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": setup.rows * 4096,
        "identity": {"model": "m"},
        "deadline_s": 0.2,
        "keep_events": True,
        "eviction_policy": setup.policy,
        "offload_prompt_only": setup.prompt_only,
    }
    if setup.factor > 1:
        extra["block_size"] = setup.groups[0][0] * setup.factor
    groups = [
        KVCacheGroup(
            [f"{number}-{layer}" for layer in range(LAYERS)],
            KVCacheSpec(size, size * BYTES, window),
        )
        for number, (size, window) in enumerate(setup.groups)
    ]
    spec = (PolicySpec if setup.keeps == "policy" else HeldSpec)(
        ServerConfig.of(setup.hash_size, extra, enable_prefix_caching=setup.prefix_cache),
        KVCacheConfig(groups),
    )
    if isinstance(spec, PolicySpec):
        spec.policy = setup.policy
    spec.told = told
    spec.handlers = []
    spec.devices = [Device(setup) for _ in range(setup.workers)]
    spec.num_workers = setup.workers
    return spec
