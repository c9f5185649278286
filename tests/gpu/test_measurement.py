"""How it is found out which way is the fastest, and what is right."""

from __future__ import annotations

import ctypes
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore.device import Pages  # noqa: E402
from kvstore.device.fragments import Fragments  # noqa: E402
from kvstore.device.layout import Layout  # noqa: E402
from kvstore.device.stream import launcher  # noqa: E402
from kvstore.device.tuning import Measurement, sizes_of  # noqa: E402
from kvstore.device.ways import Rate  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from tests.gpu.bed import PLACES, Bed  # noqa: E402


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that stands for a device is slow."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("kvstore.device.tuning.SAMPLE", 2**20)


def test_the_sizes_of_a_layout_are_its_pages_and_those_of_a_row_together() -> None:
    tensor = torch.zeros(2**23, dtype=torch.uint8)
    whole = Pages(tensor, 8, 0, 4096, 4096)
    apart = Pages(tensor, 8, 0, 8192, 4096)
    large = Pages(tensor, 4, 0, 2**21, 2**21)
    assert sizes_of(Layout([[apart]], 4, 2**23, 4)) == [4096]
    assert sizes_of(Layout([[whole, apart]], 4, 2**23, 4)) == [4096, 4 * 4096]
    # What is larger is timed as of a mebibyte.
    assert sizes_of(Layout([[large]], 4, 2**23, 2)) == [2**20]
    many = [Pages(tensor, 8, 0, 5000, size) for size in (16, 32, 48, 64, 80, 96)]
    assert len(sizes_of(Layout([many], 4, 4096, 1))) == 4


# -- measuring, with ways that take as long as they are told ---------------------------------


class Watch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Direction:
    """Copies at once; each way at a rate of its own, in bytes a second."""

    def __init__(self, watch: Watch, *, store: bool = True, **speeds: float) -> None:
        self.store = store
        self.speeds = speeds
        self.wrong: set[str] = set()
        self.errors: set[str] = set()
        self.begun: list[str] = []
        self._watch = watch

    def prepare(self, way: str) -> None:
        if way not in self.speeds:
            raise ConfigError(f"way = {way!r}: not here")

    def begin(self, fragments: Fragments, way: str) -> Any:
        self.begun.append(way)
        arrays = (fragments.device, fragments.host, fragments.sizes)
        for device, host, size in zip(*(array.tolist() for array in arrays), strict=True):
            to, from_ = (host, device) if self.store else (device, host)
            ctypes.memmove(to, from_, size)
        if way in self.wrong:
            ctypes.memset(to, 13 ^ ctypes.string_at(to, 1)[0], 1)
        seconds = fragments.bytes / self.speeds[way]
        self._watch.now += seconds
        return SimpleNamespace(error=way in self.errors, seconds=seconds, wait=lambda: None)


def measured(
    watch: Watch, direction: Direction, sizes: list[int], seconds: float = 10.0
) -> list[Rate]:
    measurement = Measurement(torch.device("cpu"), 2**20, watch)
    pretended: Any = direction
    return measurement.rates([pretended], sizes, seconds)


@pytest.mark.parametrize("store", [True, False])
def test_rates_are_those_of_the_ways(store: bool) -> None:
    watch = Watch()
    direction = Direction(watch, store=store, each=1e9, batch=2e9, staged=3e9)
    for size in (4096, 65536, 2**20, 30, 100_003):
        found = measured(watch, direction, [size])
        assert {rate.way: round(rate.rate / 1e9, 3) for rate in found} == {
            "batch": 2, "each": 1, "staged": 3,
        }  # fmt: skip
        assert {(rate.size, rate.store) for rate in found} == {(size, store)}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("fault", ["wrong", "errors"])
def test_a_way_that_copies_wrong_is_not_taken(
    store: bool, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    direction = Direction(watch, store=store, each=1e9, batch=2e9)
    setattr(direction, fault, {"batch"})
    assert [rate.way for rate in measured(watch, direction, [4096])] == ["each"]
    assert "by batch of 4 KiB copies incorrectly and is not used" in caplog.text


def test_a_hopeless_way_is_timed_once() -> None:
    watch = Watch()
    direction = Direction(watch, batch=9e9, each=1e9, kernel=8e9)
    measured(watch, direction, [4096])
    # Once more for each: whether it copies right.
    assert [direction.begun.count(way) for way in ("batch", "each", "kernel")] == [4, 2, 4]


def test_measuring_ends_when_time_is_up_with_one_way_of_each_size() -> None:
    watch = Watch()
    direction = Direction(watch, each=2**20, batch=2**20)
    found = measured(watch, direction, [4096, 65536], seconds=2.0)
    assert [(rate.size, rate.way) for rate in found] == [(4096, "batch"), (65536, "batch")]


# -- copies that measure ---------------------------------------------------------------------


def test_measured_copies_are_those_of_the_host(
    device: str, beds: list[Bed], info: pytest.LogCaptureFixture
) -> None:
    bed = Bed(device, None, page=4096, per_chunk=3, ring_bytes=2**20)
    beds.append(bed)
    rows, tensors = bed.region.array.copy(), [tensor.clone() for tensor in bed.copied]
    bed.copies.measure()
    # Neither rows nor blocks were touched.
    assert (bed.region.array == rows).all()
    assert all(map(torch.equal, tensors, bed.copied))
    (line,) = [line for line in info.messages if line.startswith("kvstore: copies of ")]
    # Pages that are whole, halves of pages, and the three of a row.
    assert all(f"{size} KiB: store " in line for size in (2, 4, 6, 12))
    assert "copies incorrectly" not in info.text
    dice = random.Random(0)
    for _ in range(10):
        blocks, places = bed.places(dice)
        bed.copies.store(blocks, places).wait()
        bed.host.store(blocks, places)
        assert bed.same()


def test_after_measuring_only_what_is_used_is_kept(beds: list[Bed]) -> None:
    bed = Bed("cpu", None)
    beds.append(bed)
    bed.copies.measure()
    for direction in bed.copies._directions:
        used = bed.copies.ways.used(store=direction.store)
        assert (direction._ring is None) == ("staged" not in used)
    bed.copies.use("staged")
    assert all(direction._ring is not None for direction in bed.copies._directions)
    bed.copies.use("each")
    assert all(
        direction._ring is None and direction._launch is None
        for direction in bed.copies._directions
    )


@pytest.mark.parametrize("has_batch", [True, False])
def test_where_measuring_fails_copies_go_as_before(
    beds: list[Bed],
    has_batch: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = Bed("cpu", None, has_batch=has_batch)
    beds.append(bed)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Measurement, "__init__", fails)
    bed.copies.measure()
    assert (
        "device copies could not be measured; the way of copying stays as it was: out of memory"
        in caplog.text
    )
    assert bed.calls is not None
    bed.copies.store(*PLACES).wait()
    assert bed.calls.ways[-1] == ("batch" if has_batch else "each")


# -- ways that are not here ------------------------------------------------------------------


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvstore.device.kernel", raising=False)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        launcher()


@pytest.mark.parametrize("way", ["kernel", "staged"])
def test_ways_with_a_kernel_need_triton(
    way: str, beds: list[Bed], info: pytest.LogCaptureFixture
) -> None:
    bed = Bed("cpu", None)
    beds.append(bed)

    def none() -> Any:
        raise ConfigError("Triton is not installed")

    for direction in bed.copies._directions:
        direction._get_launch = none
    with pytest.raises(ConfigError, match=f"way = '{way}': Triton is not installed"):
        bed.copies.use(way)
    bed.copies.measure()
    assert bed.copies.ways.used(store=True) <= {"batch", "each"}
    assert "store: way = 'staged': Triton is not installed" in info.text


def test_a_kernel_that_cannot_be_launched_is_no_way(beds: list[Bed]) -> None:
    bed = Bed("cpu", None)
    beds.append(bed)
    assert bed.kernel is not None
    bed.kernel.fails = True
    with pytest.raises(ConfigError, match="kernel does not run: out of resources"):
        bed.copies.use("kernel")
    bed.copies.measure()
    assert bed.copies.ways.used(store=True) <= {"batch", "each"}


def test_no_batch_and_no_room_for_a_ring() -> None:
    with pytest.raises(ConfigError, match="way = 'batch': this CUDA driver copies one"):
        Bed("cpu", "batch", has_batch=False)
    with pytest.raises(ConfigError, match="way = 'staged': cannot allocate a ring of"):
        Bed("cpu", "staged", ring_bytes=2**60)
