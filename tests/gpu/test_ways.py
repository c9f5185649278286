"""Which way a transfer goes, and how that is found out."""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec  # noqa: E402
from kvstore.device import WAYS, Pages  # noqa: E402
from kvstore.device.fragments import Fragments  # noqa: E402
from kvstore.device.lane import NOT_LAUNCHED, launcher  # noqa: E402
from kvstore.device.layout import Layout  # noqa: E402
from kvstore.device.measurement import Measurement, sizes_of  # noqa: E402
from kvstore.device.ways import Rate, Ways, in_words  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from tests.gpu.bed import Bed  # noqa: E402

KIB = 1024
PLACES = DeviceLoadStoreSpec([1, 3, 5, 7]), HostLoadStoreSpec([1, 2])


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that stands for a device is slow."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("kvstore.device.measurement.SAMPLE", 2**20)


# -- the table -------------------------------------------------------------------------------


def rates(size: int, *, store: bool, **gigabytes: float) -> list[Rate]:
    return [Rate(size, store, way, rate * 1e9) for way, rate in gigabytes.items()]


def test_the_fastest_way_is_taken_for_each_direction_and_size() -> None:
    ways = Ways(
        "each",
        [
            *rates(4 * KIB, store=True, each=1, batch=4, staged=9, kernel=7),
            *rates(4 * KIB, store=False, each=1, batch=4, staged=8, kernel=12),
            *rates(64 * KIB, store=True, each=20, batch=22, staged=21, kernel=15),
        ],
    )
    assert ways.way(4 * KIB, store=True) == "staged"
    assert ways.way(4 * KIB, store=False) == "kernel"
    assert ways.way(64 * KIB, store=True) == "batch"
    assert ways.used(store=True) == {"staged", "batch"}
    assert ways.used(store=False) == {"kernel"}
    assert str(ways) == (
        "4 KiB: store staged 9.0 GB/s, load kernel 12.0 GB/s; 64 KiB: store batch 22.0 GB/s"
    )


def test_sizes_between_go_with_the_nearest_in_proportion() -> None:
    ways = Ways(
        "each",
        rates(4 * KIB, store=True, staged=9) + rates(64 * KIB, store=True, batch=22),
    )
    found = {size: ways.way(size, store=True) for size in (1, 15 * KIB, 16 * KIB, 2**24)}
    assert found == {1: "staged", 15 * KIB: "staged", 16 * KIB: "batch", 2**24: "batch"}


def test_where_nothing_was_measured_the_default_is_taken() -> None:
    assert Ways("each").way(4 * KIB, store=True) == "each"
    assert Ways("batch", rates(9, store=True, each=1)).way(9, store=False) == "batch"


@pytest.mark.parametrize(("kernel", "way"), [(10.4, "batch"), (10.6, "kernel"), (9, "batch")])
def test_a_way_that_takes_from_the_compute_has_to_be_worth_it(kernel: float, way: str) -> None:
    for its in ({"batch": 10, "kernel": kernel}, {"kernel": kernel, "batch": 10}):
        assert Ways("each", rates(9, store=True, **its)).way(9, store=True) == way


def test_sizes_in_words() -> None:
    assert [in_words(size) for size in (30, 1024, 1536, 3 * 2**20)] == [
        "30 B", "1 KiB", "1536 B", "3 MiB",
    ]  # fmt: skip


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


class Lane:
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
        self._watch.now += fragments.bytes / self.speeds[way]
        ticket = type("Ticket", (), {"error": int(way in self.errors), "wait": lambda self: None})
        return ticket()


def measured(watch: Watch, lane: Lane, sizes: list[int], seconds: float = 10.0) -> list[Rate]:
    measurement = Measurement(torch.device("cpu"), 2**20, watch)
    return measurement.rates([lane], sizes, seconds)


@pytest.mark.parametrize("store", [True, False])
def test_rates_are_those_of_the_ways(store: bool) -> None:
    watch = Watch()
    lane = Lane(watch, store=store, each=1e9, batch=2e9, staged=3e9)
    for size in (4096, 65536, 2**20, 30, 100_003):
        found = measured(watch, lane, [size])
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
    lane = Lane(watch, store=store, each=1e9, batch=2e9)
    setattr(lane, fault, {"batch"})
    assert [rate.way for rate in measured(watch, lane, [4096])] == ["each"]
    assert "by batch of 4 KiB copies wrong: not used" in caplog.text


def test_a_hopeless_way_is_timed_once() -> None:
    watch = Watch()
    lane = Lane(watch, batch=9e9, each=1e9, kernel=8e9)
    measured(watch, lane, [4096])
    # Once more for each: whether it copies right.
    assert [lane.begun.count(way) for way in ("batch", "each", "kernel")] == [4, 2, 4]


def test_measuring_ends_when_time_is_up_with_one_way_of_each_size() -> None:
    watch = Watch()
    lane = Lane(watch, each=2**20, batch=2**20)
    found = measured(watch, lane, [4096, 65536], seconds=2.0)
    assert [(rate.size, rate.way) for rate in found] == [(4096, "batch"), (65536, "batch")]


# -- copies that measure ---------------------------------------------------------------------


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="kvstore"):
        yield caplog


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
    assert "copies wrong" not in info.text
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
    for lane in bed.copies._lanes:
        used = bed.copies.ways.used(store=lane.store)
        assert (lane._ring is None) == ("staged" not in used)
    bed.copies.use("staged")
    assert all(lane._ring is not None for lane in bed.copies._lanes)
    bed.copies.use("each")
    assert all(lane._ring is None and lane._launch is None for lane in bed.copies._lanes)


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
    assert "copies were not measured and go as they did: out of memory" in caplog.text
    assert bed.calls is not None
    bed.copies.store(*PLACES).wait()
    assert bed.calls.ways[-1] == ("batch" if has_batch else "each")


def test_a_transfer_takes_the_way_of_its_fragments(beds: list[Bed]) -> None:
    bed = Bed("cpu", None, page=4096)
    beds.append(bed)
    assert bed.calls is not None
    bed.copies.ways = Ways(
        "batch",
        rates(KIB, store=True, each=1) + rates(2**20, store=True, batch=1),
    )
    bed.copies.store(*PLACES).wait()
    assert bed.calls.ways[-1] == "each"
    bed.copies.load(PLACES[1], PLACES[0]).wait()
    assert bed.calls.ways[-1] == "batch"


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

    for lane in bed.copies._lanes:
        lane._get_launch = none
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
    with pytest.raises(ConfigError, match="kernel does not run here: out of resources"):
        bed.copies.use("kernel")
    bed.copies.measure()
    assert bed.copies.ways.used(store=True) <= {"batch", "each"}


def test_no_batch_and_no_room_for_a_ring() -> None:
    with pytest.raises(ConfigError, match="way = 'batch': this CUDA driver copies one"):
        Bed("cpu", "batch", has_batch=False)
    with pytest.raises(ConfigError, match="way = 'staged': no ring of"):
        Bed("cpu", "staged", ring_bytes=2**60)


def test_the_ways_of_the_table_are_all_there_are() -> None:
    for way in WAYS:
        assert Ways("each", rates(9, store=True, **{way: 1})).way(9, store=True) == way


# -- the lane --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["kernel", "staged"])
def test_transfers_queue_up_and_each_reads_its_own_list(
    device: str, way: str, beds: list[Bed]
) -> None:
    """What the lists of one are made of must stay until the device has fetched it."""
    bed = Bed(device, way, page=65536)
    beds.append(bed)
    dice = random.Random(3)
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
    tickets = []
    for _ in range(12):
        blocks, rows = bed.places(dice)
        tickets.append(bed.copies.store(blocks, rows))
        bed.host.store(blocks, rows)
    tickets[-1].wait()
    assert all(ticket.done and not ticket.error for ticket in tickets)
    assert bed.same()


def test_lists_go_when_the_device_has_fetched_them(beds: list[Bed]) -> None:
    bed = Bed("cpu", "kernel")
    beds.append(bed)
    lists = bed.copies._stores._lists
    assert lists is not None
    tickets = [bed.copies.store(*PLACES) for _ in range(5)]
    assert len(lists._sent) == 5
    tickets[2].wait()
    bed.copies.store(*PLACES)
    assert len(lists._sent) == 3


def test_large_fragments_are_not_staged(beds: list[Bed]) -> None:
    bed = Bed("cpu", "staged", page=2**18, ring_bytes=2**20)
    beds.append(bed)
    assert bed.calls is not None
    assert bed.kernel is not None
    bed.kernel.words.clear()
    bed.calls.ways.clear()
    bed.copies.store(*PLACES).wait()
    bed.host.store(*PLACES)
    # Four whole pages went as they were. The halves, 1 MiB in all, fill the ring once.
    assert len(bed.kernel.words) == 1
    assert bed.calls.ways[0] == "each"
    assert bed.same()


@pytest.mark.parametrize("way", ["kernel", "staged"])
def test_a_launch_that_fails_is_an_error_of_the_ticket_which_ends_all_the_same(
    way: str, beds: list[Bed], caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed("cpu", way)
    beds.append(bed)
    assert bed.kernel is not None
    bed.kernel.fails = True
    ticket = bed.copies.load(PLACES[1], PLACES[0])
    assert ticket.error == NOT_LAUNCHED
    assert not ticket.done
    ticket.wait()
    assert ticket.done
    assert "a kernel that copies cannot be launched" in caplog.text


@pytest.mark.parametrize("way", ["kernel", "staged"])
@pytest.mark.parametrize("store", [True, False])
def test_an_error_of_the_driver_ends_a_transfer_before_its_kernel(
    way: str, store: bool, beds: list[Bed]
) -> None:
    bed = Bed("cpu", way)
    beds.append(bed)
    assert bed.calls is not None
    assert bed.kernel is not None
    bed.calls.fails_after = 0
    bed.kernel.words.clear()
    ticket = bed.copies.store(*PLACES) if store else bed.copies.load(PLACES[1], PLACES[0])
    assert ticket.error == 700
    assert not bed.kernel.words


def test_more_pieces_than_a_list_holds_are_several_launches(
    beds: list[Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.device.lane.MOST", 5)
    bed = Bed("cpu", "kernel")
    beds.append(bed)
    assert bed.kernel is not None
    bed.kernel.words.clear()
    bed.copies.store(*PLACES).wait()
    bed.host.store(*PLACES)
    # Four blocks with a page in one table and half a page in each of two: 12 pieces.
    assert len(bed.kernel.words) == 3
    assert bed.same()
