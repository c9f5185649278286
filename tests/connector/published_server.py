"""A small server written for the published names; only its imports say kvstore.

One KV cache group, blocks of the device with a prefix cache by hash, a scheduler and a worker that
speak by the names of requests. What a block holds follows from its hash, so every byte is checked.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstore.connector.published import (
    Backend,
    BlockRemoved,
    BlockStatus,
    BlockStored,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    OffloadingEvent,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    OffloadingSpecFactory,
    PrepareStoreOutput,
    TransferResult,
)
from tests.patience import TOO_LONG

BLOCK = 4
"""Tokens of a block of the device."""

BLOCKS = 40
LAYERS = ("first", "second")
PAGE = 64


class SlotStatus(BlockStatus):
    """A block with a number, as published backends extend it."""

    _fields_ = BlockStatus._fields_ + [("slot", ctypes.c_int64)]  # noqa: RUF005

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot


class Slots(Backend):
    """A backend that hands numbers out."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size=block_size, medium="slots")
        self.num_blocks = num_blocks
        self.unused = list(range(num_blocks))

    def get_num_free_blocks(self) -> int:
        return len(self.unused)

    def allocate_blocks(self, block_hashes: Any) -> list[BlockStatus]:
        return [SlotStatus(self.unused.pop()) for _ in block_hashes]

    def free(self, block: Any) -> None:
        self.unused.append(block.slot)

    def get_load_store_spec(self, block_hashes: Any, blocks: Any) -> LoadStoreSpec:
        return CPULoadStoreSpec([block.slot for block in blocks])


class Recent(OffloadingManager):
    """A manager whose calls are those of the published text, by lists; the coldest leaves."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.blocks: OrderedDict[bytes, BlockStatus] = OrderedDict()
        self.events: list[OffloadingEvent] = []

    def lookup(self, block_hashes: Iterable[bytes]) -> int:  # type: ignore[override]
        count = 0
        for one in block_hashes:
            block = self.blocks.get(one)
            if block is None or not block.is_ready:
                break
            count += 1
        return count

    def prepare_load(self, block_hashes: Iterable[bytes]) -> LoadStoreSpec:  # type: ignore[override]
        block_hashes = list(block_hashes)
        blocks = [self.blocks[one] for one in block_hashes]
        for block in blocks:
            assert block.is_ready
            block.ref_cnt += 1
        return self.backend.get_load_store_spec(block_hashes, blocks)

    def touch(self, block_hashes: Iterable[bytes]) -> None:  # type: ignore[override]
        for one in reversed(list(block_hashes)):
            if one in self.blocks:
                self.blocks.move_to_end(one)

    def complete_load(self, block_hashes: Iterable[bytes]) -> None:  # type: ignore[override]
        for one in block_hashes:
            assert self.blocks[one].ref_cnt > 0
            self.blocks[one].ref_cnt -= 1

    def prepare_store(self, block_hashes: Iterable[bytes]) -> PrepareStoreOutput | None:  # type: ignore[override]
        new = [one for one in block_hashes if one not in self.blocks]
        missing = max(0, len(new) - self.backend.get_num_free_blocks())
        cold = [one for one, block in self.blocks.items() if block.ref_cnt == 0][:missing]
        if len(cold) < missing:
            return None
        for one in cold:
            self.backend.free(self.blocks.pop(one))
        if cold:
            self.tell(cold, removed=True)
        blocks = self.backend.allocate_blocks(new)
        self.blocks.update(zip(new, blocks, strict=True))
        return PrepareStoreOutput(
            block_hashes_to_store=new,
            store_spec=self.backend.get_load_store_spec(new, blocks),
            block_hashes_evicted=cold,
        )

    def complete_store(self, block_hashes: Iterable[bytes], success: bool = True) -> None:  # type: ignore[override]
        assert success
        stored = [one for one in block_hashes if not self.blocks[one].is_ready]
        for one in stored:
            self.blocks[one].ref_cnt = 0
        self.tell(stored, removed=False)

    def tell(self, hashes: list[bytes], *, removed: bool) -> None:
        self.events.append(
            OffloadingEvent(
                block_hashes=hashes,
                block_size=self.backend.block_size,
                medium=self.backend.medium,
                removed=removed,
            )
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        yield from self.events
        self.events.clear()


class Copier(OffloadingHandler):
    """Copies between the device and slots, at the latest when it is waited for."""

    def __init__(self, caches: list[torch.Tensor], slots: torch.Tensor, factor: int) -> None:
        self.caches, self.slots, self.factor = caches, slots, factor
        self.queue: dict[int, Any] = {}
        self.done: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        self.queue[job_id] = spec
        return True

    def get_finished(self) -> list[TransferResult]:
        self.wait(list(self.queue))
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: Any) -> None:
        for job in sorted(self.queue.keys() & set(job_ids)):
            self.done.append(self.copy(job, *self.queue.pop(job)))

    def copy(self, job: int, source: Any, target: Any) -> TransferResult:
        store = isinstance(source, GPULoadStoreSpec)
        device, host = (source, target) if store else (target, source)
        first = -len(device.block_ids) % self.factor
        for place, block in enumerate(device.block_ids.tolist(), first):
            slot = host.block_ids[place // self.factor]
            for number, cache in enumerate(self.caches):
                row = self.slots[slot, place % self.factor, number]
                if store:
                    row.copy_(cache[block])
                else:
                    cache[block].copy_(row)
        return TransferResult(job_id=job, success=True)


class OwnSpec(OffloadingSpec):
    """Manager, backend and handlers of the published texts."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self.slots = int(self.extra_config["slots"])
        self.manager: OffloadingManager | None = None
        cache_config: Any = self.vllm_config.cache_config
        assert cache_config.enable_prefix_caching

    def get_manager(self) -> OffloadingManager:
        if self.manager is None:
            self.manager = Recent(Slots(BLOCK * self.block_size_factor, self.slots))
        return self.manager

    def get_handlers(
        self, kv_caches: Any, attn_backends: Any = None
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        memory = torch.zeros(self.slots, self.block_size_factor, len(LAYERS), PAGE).to(torch.uint8)
        stores = Copier(list(kv_caches.values()), memory, self.block_size_factor)
        loads = Copier(list(kv_caches.values()), memory, self.block_size_factor)
        yield GPULoadStoreSpec, CPULoadStoreSpec, stores
        yield CPULoadStoreSpec, GPULoadStoreSpec, loads


@dataclass(eq=False)
class Request:
    """A prompt; its hashes are `hash_bytes` long."""

    request_id: str
    tokens: list[int]
    hash_bytes: int = 32
    num_computed_tokens: int = 0
    blocks: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    num_prompt_tokens = num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        hasher = hashlib.sha512 if self.hash_bytes == 64 else hashlib.sha256
        ends = range(BLOCK, len(self.tokens) + 1, BLOCK)
        return [hasher(repr(self.tokens[:end]).encode()).digest() for end in ends]

    def is_finished(self) -> bool:
        return False


class Server:
    """One step after the other; requests are computed in one step each, or preempted.

    Attributes:
        stored, removed: (medium, hash), as events tell.
    """

    def __init__(self, factor: int = 1, **extra: Any) -> None:
        extra["block_size"] = BLOCK * factor
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        )
        group = SimpleNamespace(
            layer_names=list(LAYERS),
            kv_cache_spec=SimpleNamespace(block_size=BLOCK, page_size_bytes=PAGE),
        )
        caches = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
        spec = OffloadingSpecFactory.create_spec(config, caches)
        self.caches = {name: torch.zeros(BLOCKS, PAGE, dtype=torch.uint8) for name in LAYERS}
        self.worker = OffloadingConnectorWorker(spec)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = OffloadingConnectorScheduler(spec)
        self.free = list(range(1, BLOCKS))
        self.kept: dict[str, list[Any]] = {}
        self.finished: set[str] = set()
        self.received: set[str] = set()
        self.stored: set[tuple[str, bytes]] = set()
        self.removed: set[tuple[str, bytes]] = set()
        self.loaded = 0

    def step(self, new: Request | None = None, preempted: Iterable[str] = ()) -> None:
        """A step in which `new` is computed, or nobody."""
        count = 0 if new is None else new.num_tokens - new.num_computed_tokens
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
            ),
            num_scheduled_tokens={},
            finished_req_ids=self.finished,
            preempted_req_ids=set(preempted),
        )
        if new is not None:
            ids = [block.block_id for block in new.blocks]
            output.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=new.request_id,
                    block_ids=[ids],
                    num_computed_tokens=new.num_computed_tokens,
                )
            )
            output.num_scheduled_tokens[new.request_id] = count
        meta = self.scheduler.build_connector_meta(output)
        if meta.reqs_to_flush:
            self.worker.handle_preemptions(meta)
        self.worker.start_kv_transfers(meta)
        if new is not None:
            self.compute(new)
        self.worker.prepare_store_kv(meta)
        sent, received = self.worker.get_finished(self.finished)
        self.finished = set()
        self.scheduler.update_connector_output(
            SimpleNamespace(finished_sending=sent, finished_recving=received)
        )
        for name in sent:
            self.free += self.kept.pop(name)
        self.received |= received
        for event in self.scheduler.take_events():
            named = {(event.medium, one) for one in event.block_hashes}
            if isinstance(event, BlockRemoved):
                assert named <= self.stored
                self.stored -= named
                self.removed |= named
            else:
                assert isinstance(event, BlockStored)
                self.stored |= named

    def serve(self, request: Request) -> int:
        """Load what is found of a request and compute the rest; returns tokens that were found."""
        end = time.monotonic() + TOO_LONG
        while (answer := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            assert time.monotonic() < end, "deferred for ever"
            self.step()
        found, waits = answer
        assert found is not None
        assert waits == (found > 0)
        self.allocate(request)
        self.scheduler.update_state_after_alloc(
            request,
            SimpleNamespace(blocks=[request.blocks[: found // BLOCK]]),
            found,
        )
        if found:
            while request.request_id not in self.received:
                assert time.monotonic() < end, "never loaded"
                self.step()
            self.check(request, found // BLOCK)
        request.num_computed_tokens = found
        self.step(request)
        request.num_computed_tokens = request.num_tokens
        self.loaded += found
        return found

    def allocate(self, request: Request) -> None:
        """All blocks of a request; those that were given back last first."""
        request.blocks = [
            SimpleNamespace(block_id=self.free.pop(0), is_null=False, block_hash=None)
            for _ in request.block_hashes
        ]

    def preempt(self, request: Request) -> None:
        """`request` loses its blocks; the next request gets them."""
        self.free = [block.block_id for block in request.blocks] + self.free
        request.blocks, request.num_computed_tokens = [], 0

    def finish(self, request: Request) -> None:
        ids = [block.block_id for block in request.blocks]
        keeps, params = self.scheduler.request_finished(request, ids)
        assert params is None
        if keeps:
            self.kept[request.request_id] = ids
        else:
            self.free += ids
        self.finished.add(request.request_id)

    def compute(self, request: Request) -> None:
        for place in range(request.num_computed_tokens // BLOCK, len(request.blocks)):
            for name, cache in self.caches.items():
                cache[request.blocks[place].block_id] = _content(request, place, name)

    def check(self, request: Request, blocks: int) -> None:
        for place in range(blocks):
            for name, cache in self.caches.items():
                held = cache[request.blocks[place].block_id]
                assert torch.equal(held, _content(request, place, name)), "wrong bytes"


def _content(request: Request, place: int, layer: str) -> torch.Tensor:
    seed = hashlib.sha256(request.block_hashes[place] + layer.encode()).digest()
    return torch.from_numpy(np.frombuffer(seed * (PAGE // 32), np.uint8).copy())
