"""Memory that CUDA is told of: in steps, all or nothing, and nothing left pending."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore.tiers.pinned
import kvstore.tiers.registration
from kvstore.tiers.pinned import PAGE, PinnedRegion
from kvstore.tiers.registration import STEP_BYTES, CudaRuntime, Registration

GIB = 2**30


class Cuda(CudaRuntime):
    """A runtime that keeps accounts, and refuses what it is told to refuse."""

    def __init__(self, *, refuse: int | None = None, reads: bool = True, raises: bool = False):
        self.refuse = refuse
        self.reads = reads
        self.raises = raises
        self.calls: list[tuple[int, int]] = []
        self.held: dict[int, int] = {}
        self.pending = 0
        self.keeps: set[int] = set()

    def register(self, address: int, size: int) -> int:
        self.calls.append((address, size))
        if len(self.calls) - 1 == self.refuse:
            if self.raises:
                raise RuntimeError("the driver is gone")
            self.pending = 2
            return 2
        self.held[address] = size
        return 0

    def unregister(self, address: int) -> int:
        if address in self.keeps or address not in self.held:
            self.pending = 713
            return 713
        del self.held[address]
        return 0

    def drain(self) -> None:
        self.pending = 0

    def kernels_read_host(self) -> bool:
        return self.reads


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", "kvstore")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("row", [PAGE, 3 * PAGE, 5 * 2**20 + PAGE, 40 * GIB, 80 * GIB])
@pytest.mark.parametrize("size", [PAGE, 64 * GIB, 65 * GIB, 700 * GIB])
def test_steps_cover_all_rows_and_end_where_rows_end(row: int, size: int) -> None:
    cuda = Cuda()
    rows = -(-size // row)
    registration = Registration.of(cuda, 0x7F00_0000_0000, rows, row)
    assert registration is not None
    expected = 0x7F00_0000_0000
    for address, part in cuda.calls:
        assert address == expected
        assert part % row == 0
        assert part <= max(STEP_BYTES, row)
        expected += part
    assert expected == 0x7F00_0000_0000 + rows * row
    assert len(cuda.calls) <= rows * row // (STEP_BYTES // 2 + 1) + 1
    registration.end()
    assert not cuda.held
    registration.end()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("refuse", [0, 1, 9])
def test_a_refused_step_takes_back_the_others_and_leaves_no_error_behind(
    refuse: int, raises: bool, logged: Any
) -> None:
    cuda = Cuda(refuse=refuse, raises=raises)
    assert Registration.of(cuda, GIB, 640, GIB) is None
    assert not cuda.held
    assert cuda.pending == 0
    (line,) = [line for line in logged() if "refuses" in line]
    assert f"bytes {refuse * STEP_BYTES} to {(refuse + 1) * STEP_BYTES} of {640 * GIB}" in line
    assert "slow" in line


def test_what_was_pinned_and_how_fast_is_in_the_log(logged: Any) -> None:
    assert Registration.of(Cuda(), GIB, 640, GIB) is not None
    (line,) = logged()
    assert "pinned 687.19 GB" in line
    assert "GB/s, 10 steps" in line


def test_memory_that_cannot_be_unpinned_is_told_and_costs_the_rest_nothing(logged: Any) -> None:
    cuda = Cuda()
    registration = Registration.of(cuda, GIB, 192, GIB)
    assert registration is not None
    cuda.keeps = {65 * GIB}
    registration.end()
    assert list(cuda.held) == [65 * GIB]
    assert cuda.pending == 0
    assert "could not unpin" in logged()[-1]


# -- the region ---------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A CUDA device as the region sees it."""
    cuda = Cuda()
    monkeypatch.setattr(kvstore.tiers.pinned, "cuda_runtime", lambda: cuda)
    return cuda


def test_a_region_is_registered_once_and_unregistered_when_it_closes(cuda: Cuda) -> None:
    region = PinnedRegion.private(3, PAGE)
    assert not region.registered
    assert region.register_with_cuda()
    assert region.register_with_cuda()
    assert region.registered
    assert cuda.calls == [(region.address, 3 * PAGE)]
    assert "registered with CUDA" in region.description
    region.close()
    assert not cuda.held
    assert not region.registered


def test_a_region_that_cuda_refuses_works_on(cuda: Cuda) -> None:
    cuda.refuse = 0
    region = PinnedRegion.private(3, PAGE)
    assert not region.register_with_cuda()
    assert not region.registered
    region.row(2)[:2] = b"ok"
    region.close()


def test_without_a_device_nothing_is_registered(
    monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.setattr(kvstore.tiers.pinned, "cuda_runtime", lambda: None)
    region = PinnedRegion.private(3, PAGE)
    assert not region.register_with_cuda()
    assert not region.registered
    assert "not pinned" in logged()[-1]
    region.close()


def test_where_kernels_cannot_read_it_memory_is_pinned_for_copies_alone(
    cuda: Cuda, logged: Any
) -> None:
    cuda.reads = False
    region = PinnedRegion.private(3, PAGE)
    assert not region.register_with_cuda()
    assert region.registered
    assert "kernels cannot read" in logged()[-1]
    region.close()
    assert not cuda.held


@pytest.mark.parametrize("pinned", [False, True])
def test_pinned_memory_is_left_out_of_forks(cuda: Cuda, pinned: bool) -> None:
    region = PinnedRegion.private(3, PAGE)
    if pinned:
        region.register_with_cuda()
    forked = os.fork()
    if not forked:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(0 if mapped(region.address) else 1)
    _, status = os.waitpid(forked, 0)
    assert os.waitstatus_to_exitcode(status) == pinned
    region.close()


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


# -- the runtime --------------------------------------------------------------------------------


class Library:
    """What is used of libcudart."""

    def __init__(self, *, attribute: int = 1, code: int = 0) -> None:
        self.attribute = attribute
        self.code = code
        self.pending = 0
        self.asked: list[tuple[int, int]] = []

    def cudaGetLastError(self) -> int:  # noqa: N802
        last, self.pending = self.pending, 0
        return last

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        self.asked.append((attribute, device))
        if self.code:
            self.pending = self.code
            return self.code
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attribute
        return 0


def fake_torch(cudart: Any, **more: Any) -> Any:
    cuda = SimpleNamespace(
        cudart=lambda: cudart, is_available=lambda: True, current_device=lambda: 3
    )
    return SimpleNamespace(cuda=cuda, **more)


def test_the_runtime_passes_addresses_sizes_and_codes_on() -> None:
    seen: list[tuple[Any, ...]] = []

    def register(*arguments: Any) -> int:
        seen.append(arguments)
        return 2

    def unregister(*arguments: Any) -> int:
        seen.append(arguments)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    runtime = CudaRuntime(fake_torch(cudart), Library())
    assert runtime.register(PAGE, GIB) == 2
    assert runtime.unregister(PAGE) == 0
    assert seen == [(PAGE, GIB, 0), (PAGE,)]


def test_the_runtime_drains_the_error_of_the_library_that_is_loaded() -> None:
    library = Library()
    library.pending = 2
    CudaRuntime(fake_torch(None), library).drain()
    assert library.pending == 0


def test_without_the_library_torch_itself_is_made_to_raise_the_pending_error() -> None:
    raised = []

    def zeros(size: int, *, device: str) -> None:
        raised.append(device)
        raise RuntimeError("CUDA error: out of memory")

    CudaRuntime(fake_torch(None, zeros=zeros), None).drain()
    assert raised == ["cuda"]


@pytest.mark.parametrize("attribute", [0, 1])
def test_the_device_of_this_process_is_asked_whether_its_kernels_read_host_memory(
    attribute: int,
) -> None:
    library = Library(attribute=attribute)
    assert CudaRuntime(fake_torch(None), library).kernels_read_host() == bool(attribute)
    assert library.asked == [(91, 3)]


def test_a_device_that_does_not_say_is_taken_to_read_host_memory() -> None:
    library = Library(code=1)
    assert CudaRuntime(fake_torch(None), library).kernels_read_host()
    assert library.pending == 0
    assert CudaRuntime(fake_torch(None), None).kernels_read_host()


def test_the_library_is_the_one_that_is_mapped_already(tmp_path: Path) -> None:
    libc = next(
        line.split()[-1] for line in open("/proc/self/maps") if "libc.so" in line or "libc-" in line
    )
    library = tmp_path / "a folder" / "libcudart.so.12"
    library.parent.mkdir()
    library.symlink_to(libc)
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 00:00 0\n"
        "7f02-7f03 r-xp 00000000 08:01 12   /libcudart/other.so\n"
        f"7f04-7f05 r-xp 00000000 08:01 12   {library}\n"
    )
    found = kvstore.tiers.registration._loaded_library(str(maps))
    assert found.getpid() == os.getpid()
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0\n")
    assert kvstore.tiers.registration._loaded_library(str(maps)) is None


def test_this_machine_has_no_device_or_pins_for_real() -> None:
    torch = pytest.importorskip("torch")
    runtime = kvstore.tiers.registration.cuda_runtime()
    assert (runtime is not None) == torch.cuda.is_available()
    if runtime is None:
        pytest.skip("no CUDA device")
    with mmap.mmap(-1, 4 * PAGE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        registration = Registration.of(runtime, address, 2, 2 * PAGE)
        assert registration is not None
        assert runtime.register(address, PAGE) != 0
        runtime.drain()
        torch.zeros(1, device="cuda").add_(1)
        registration.end()
