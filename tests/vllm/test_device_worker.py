"""DeviceCopyWorker without a device: what it asks of vLLM's handlers, and what it owns."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import kvstore.tiers.pinned  # noqa: E402
from kvstore.engine import host_memory as held  # noqa: E402
from kvstore.errors import ConfigError, KVStoreError  # noqa: E402
from kvstore.tiers.pinned import PinnedRegion, RegionShape  # noqa: E402
from kvstore.vllm import layout as regions  # noqa: E402
from kvstore.vllm import worker as workers  # noqa: E402
from kvstore.vllm.worker import DeviceCopyWorker, HostCopyWorker, create_worker  # noqa: E402
from tests.vllm.parts import make_spec  # noqa: E402


@pytest.fixture(autouse=True)
def no_other_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process still hold is not looked at."""
    monkeypatch.setattr(held, "_in_process", {})


class Cuda:
    """A runtime that registers whatever it is given."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def register(self, address: int, size: int) -> int:
        self.held.append(address)
        return 0

    def unregister(self, address: int) -> int:
        self.held.remove(address)
        return 0

    def drain(self) -> None:
        return

    def kernels_read_host(self) -> bool:
        return True


KERNEL: Any = object()
"""The way of copying in which a kernel reads host memory."""


class Handler:
    """In the place of vLLM's handler of one direction, with its parameters."""

    made: list[Handler] = []  # noqa: RUF012
    fails_at: int | None = None

    def __init__(
        self,
        gpu_tensors: Any,
        cpu_tensors: Any,
        blocks_per_chunk: int,
        layer_refs_per_group: Any,
        gpu_to_cpu: bool,
        canonical_layout: bool = False,
        host_memory_is_pinned: bool = True,
    ) -> None:
        if len(Handler.made) == Handler.fails_at:
            raise RuntimeError("no stream left")
        self.stores = gpu_to_cpu
        self._swap_blocks_batch = KERNEL if host_memory_is_pinned else None
        self.views = [*cpu_tensors]
        self.jobs: list[int] = []
        self.waited: set[int] = set()
        self.ended = False
        self.raises = False
        Handler.made.append(self)

    @property
    def kernel_may_read(self) -> bool:
        return self._swap_blocks_batch is KERNEL

    def transfer_async(self, job_id: int, src: Any, dst: Any) -> bool:
        self.jobs.append(job_id)
        return True

    def get_finished(self) -> list[int]:
        done, self.jobs = self.jobs, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids

    def shutdown(self) -> None:
        self.ended = True
        self.views.clear()
        if self.raises:
            raise RuntimeError("an illegal memory access was encountered")


class Unasked(Handler):
    """The same before vLLM 0.31: it is not told whether memory is pinned, and takes it for that."""

    def __init__(
        self,
        gpu_tensors: Any,
        cpu_tensors: Any,
        blocks_per_chunk: int,
        layer_refs_per_group: Any,
        gpu_to_cpu: bool,
        canonical_layout: bool = False,
    ) -> None:
        super().__init__(
            gpu_tensors, cpu_tensors, blocks_per_chunk, layer_refs_per_group, gpu_to_cpu
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    from vllm.v1.kv_offload.cpu import gpu_worker

    cuda = Cuda()
    real = inspect.signature(gpu_worker.SingleDirectionOffloadingHandler).parameters
    kind = Handler if "host_memory_is_pinned" in real else Unasked
    assert set(inspect.signature(kind).parameters) <= set(real)
    assert hasattr(gpu_worker.ops, "swap_blocks_batch")
    assert "_swap_blocks_batch" in inspect.getsource(gpu_worker.SingleDirectionOffloadingHandler)
    monkeypatch.setattr(gpu_worker, "SingleDirectionOffloadingHandler", kind)
    monkeypatch.setattr(kvstore.tiers.pinned, "cuda_runtime", lambda: cuda)
    # Only a device gets this kind of worker; the tensors of this test are in host memory.
    monkeypatch.setattr(workers, "HostCopyWorker", DeviceCopyWorker)
    monkeypatch.setattr(Handler, "made", [])
    monkeypatch.setattr(Handler, "fails_at", None)
    return cuda


def build(pages: list[int], *, stride: int | None = None, used: int | None = None) -> Any:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    tensors = [torch.zeros((8, stride or page), dtype=torch.int8)[:, :page] for page in pages]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)],
        [[CanonicalKVCacheRef(i, used or page) for i, page in enumerate(pages)]],
    )
    spec = make_spec({"cpu_bytes_to_use": "1MiB"}, sum(pages))
    return spec, caches


def started(pages: list[int], **options: Any) -> Any:
    worker = create_worker(*build(pages, **options))
    assert isinstance(worker, DeviceCopyWorker)
    return worker


def test_stores_loads_and_expedited_loads_have_queues_of_their_own(cuda: Cuda) -> None:
    worker = started([512])
    stores, loads, expedited = Handler.made
    assert [handler.stores for handler in Handler.made] == [True, False, False]
    assert worker.submit_store(1, None, None)
    assert worker.submit_load(2, None, None)
    assert worker.submit_load(3, None, None, False)
    assert worker.submit_load(4, None, None, True)
    assert worker.submit_load(5, None, None, expedited=True)
    assert (stores.jobs, loads.jobs, expedited.jobs) == ([1], [2, 3], [4, 5])
    worker.wait({2, 4})
    assert all(handler.waited == {2, 4} for handler in Handler.made)
    assert sorted(worker.get_finished()) == [1, 2, 3, 4, 5]
    worker.shutdown()


@pytest.mark.parametrize(
    ("pages", "options", "in_words"),
    [
        pytest.param([512, 1024], {}, True, id="words"),
        pytest.param([8, 1000], {}, True, id="small words"),
        pytest.param([1001], {}, False, id="odd pages"),
        pytest.param([516], {"used": 512}, False, id="padding that ends between words"),
        pytest.param([512, 516], {"used": 512}, False, id="one padded page of two"),
    ],
)
def test_pages_that_do_not_begin_at_words_are_left_to_the_copy_engine(
    cuda: Cuda, pages: list[int], options: dict[str, int], in_words: bool
) -> None:
    worker = started(pages, **options)
    assert [handler.kernel_may_read for handler in Handler.made] == [in_words] * 3
    assert cuda.held, "the memory is pinned in any case"
    worker.shutdown()


def test_memory_that_could_not_be_pinned_is_left_to_the_copy_engine(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PinnedRegion, "register_with_cuda", lambda self: False)
    worker = started([512])
    assert [handler.kernel_may_read for handler in Handler.made] == [False] * 3
    worker.shutdown()


def test_copies_during_the_capture_of_a_graph_are_refused(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = started([512])
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert not worker.submit_store(1, None, None)
    assert not worker.submit_load(2, None, None)
    assert not worker.submit_load(3, None, None, True)
    assert worker.get_finished() == []
    told = [record for record in caplog.records if "is captured" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.ERROR] * 3
    capturing = False
    assert worker.submit_store(4, None, None)
    worker.shutdown()


# -- what it owns ----------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[PinnedRegion]:
    """The regions that were closed."""
    closed: list[PinnedRegion] = []
    close = PinnedRegion.close

    def watch(self: PinnedRegion) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(PinnedRegion, "close", watch)
    return closed


@pytest.mark.parametrize("raising", [[0], [1], [2], [0, 1, 2]])
def test_a_handler_that_does_not_end_well_costs_neither_the_others_nor_the_region(
    cuda: Cuda,
    closed: list[PinnedRegion],
    raising: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = started([512])
    region = worker._region
    at_sync = []

    def synchronize() -> None:
        at_sync.append((region.address, [*closed]))
        raise RuntimeError("the device is gone, too")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    for index in raising:
        Handler.made[index].raises = True
    worker.shutdown()
    assert all(handler.ended for handler in Handler.made)
    assert len(at_sync) == 1, "copies under way were not waited for"
    assert at_sync[0][1] == [], "the rows went before the copies ended"
    assert closed == [region]
    assert not cuda.held
    assert not held._in_process
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == len(raising) + 1


def test_a_worker_that_ends_twice_ends_once(cuda: Cuda, closed: list[PinnedRegion]) -> None:
    spec, caches = build([512])
    worker = create_worker(spec, caches)
    other = create_worker(spec, caches)
    assert worker._region is other._region
    worker.shutdown()
    worker.shutdown()
    assert closed == [], "the region of the other was taken away"
    other.shutdown()
    assert len(closed) == 1


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_worker_that_cannot_be_built_keeps_nothing(
    cuda: Cuda, closed: list[PinnedRegion], fails_at: int
) -> None:
    Handler.fails_at = fails_at
    with pytest.raises(RuntimeError, match="no stream left"):
        started([512])
    assert len(closed) == 1
    assert not cuda.held
    assert not held._in_process


def test_a_host_worker_that_cannot_be_built_keeps_nothing(
    closed: list[PinnedRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such view")

    monkeypatch.setattr(workers, "HostCopies", refuse)
    with pytest.raises(ValueError, match="no such view"):
        create_worker(*build([512]))
    assert len(closed) == 1
    assert not held._in_process


def test_a_host_worker_that_ends_twice_ends_once(closed: list[PinnedRegion]) -> None:
    spec, caches = build([512])
    first, second = create_worker(spec, caches), create_worker(spec, caches)
    assert isinstance(first, HostCopyWorker)
    first.shutdown()
    first.shutdown()
    assert closed == []
    second.shutdown()
    assert len(closed) == 1


# -- the scheduler's side --------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("kvstore.connector.manager.assemble", id="tiers"),
        pytest.param("kvstore.engine.scheduler_steps.EngineThread", id="engine"),
    ],
)
def test_a_manager_that_cannot_be_built_keeps_nothing(
    closed: list[PinnedRegion], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, broken: str
) -> None:
    disk = {"type": "disk", "path": str(tmp_path / "cache"), "capacity_bytes": "300MiB"}
    spec = make_spec({"cpu_bytes_to_use": "1MiB", "tiers": [disk]}, 4096)
    engine = spec.config.engine_id
    region = regions.worker_region(engine, 1, spec.region_shape)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no thread left")

    monkeypatch.setattr(broken, refuse)
    descriptors = []
    for _ in range(5):
        with pytest.raises(RuntimeError, match="no thread left"):
            spec.get_manager()
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    # The first may open what a process has once; what earlier tests left may go at any time.
    assert any(after <= before for before, after in itertools.pairwise(descriptors[1:]))
    assert held._in_process[engine].parts == 1
    regions.release_region(engine, region)
    assert closed == [region]


@pytest.mark.parametrize(
    ("broken", "released"),
    [
        pytest.param("core.save", True, id="saving"),
        pytest.param("engine.close", False, id="engine"),
    ],
)
def test_a_manager_that_does_not_end_well_ends_the_rest(
    closed: list[PinnedRegion],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    released: bool,
) -> None:
    spec = make_spec({"cpu_bytes_to_use": "1MiB"}, 4096)
    engine = spec.config.engine_id
    region = regions.worker_region(engine, 1, spec.region_shape)
    manager = spec.get_manager()
    close = manager._stepper.engine.close

    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    owner, name = broken.split(".")
    monkeypatch.setattr(getattr(manager._stepper, owner), name, refuse, raising=False)
    manager.shutdown()
    assert held._in_process[engine].parts == (1 if released else 2)
    assert "no space left" in caplog.text
    if not released:
        close([], 1.0)
        regions.release_region(engine, region)
    regions.release_region(engine, region)
    assert closed == [region]


def test_a_scheduler_that_some_worker_does_not_share_memory_with_is_refused(
    closed: list[PinnedRegion],
) -> None:
    workers_region = PinnedRegion.shared("an engine of two", 4, 4096, mappers=3)
    with pytest.raises(KVStoreError, match="not all 2 workers share"):
        regions.manager_region("an engine of two", 2, RegionShape(4, 4096))
    assert len(closed) == 1
    other = PinnedRegion.shared("an engine of two", 4, 4096, mappers=3)
    managers = regions.manager_region("an engine of two", 2, RegionShape(4, 4096))
    assert managers.complete
    for region in (workers_region, other, managers):
        region.close()


def test_a_device_of_another_kind_is_refused_before_memory_is_taken(
    closed: list[PinnedRegion],
) -> None:
    spec, caches = build([512])
    caches.tensors[0].tensor = torch.empty((8, 512), dtype=torch.int8, device="meta")
    with pytest.raises(ConfigError, match="not on 'meta'"):
        create_worker(spec, caches)
    assert not held._in_process
