"""What a direction queues on its stream."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from kvstore.device.stream import NOT_LAUNCHED  # noqa: E402
from tests.gpu.bed import PLACES, Bed  # noqa: E402


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
    assert "the copy kernel cannot be launched" in caplog.text


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
    monkeypatch.setattr("kvstore.device.stream.MOST", 5)
    bed = Bed("cpu", "kernel")
    beds.append(bed)
    assert bed.kernel is not None
    bed.kernel.words.clear()
    bed.copies.store(*PLACES).wait()
    bed.host.store(*PLACES)
    # Four blocks with a page in one table and half a page in each of two: 12 pieces.
    assert len(bed.kernel.words) == 3
    assert bed.same()


@pytest.mark.parametrize(("way", "programs"), [("kernel", 16), ("staged", 64)])
def test_only_what_is_brief_takes_many_multiprocessors(
    way: str, programs: int, beds: list[Bed]
) -> None:
    bed = Bed("cpu", way)
    beds.append(bed)
    assert bed.kernel is not None
    bed.kernel.programs.clear()
    bed.copies.store(*PLACES)
    assert bed.kernel.programs == [programs]
