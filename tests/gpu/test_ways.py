"""Which way a transfer goes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore.device import WAYS  # noqa: E402
from kvstore.device.ways import Rate, Ways, in_words  # noqa: E402
from tests.gpu.bed import PLACES, Bed  # noqa: E402

KIB = 1024


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


def test_the_ways_of_the_table_are_all_there_are() -> None:
    for way in WAYS:
        assert Ways("each", rates(9, store=True, **{way: 1})).way(9, store=True) == way


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
