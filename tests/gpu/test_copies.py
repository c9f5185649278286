"""Copies on a device's streams, byte for byte beside those in host memory.

Each test runs over a pretended device, which is host memory, and over a real one if there is one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore.connector.handler import CudaHandler  # noqa: E402
from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec  # noqa: E402
from kvstore.device import Ticket  # noqa: E402
from kvstore.errors import KVStoreError  # noqa: E402
from tests.gpu.bed import BLOCKS, ROWS, Bed  # noqa: E402


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("page", [30, 512, 4096, 65536])
@pytest.mark.parametrize("has_batch", [True, False])
def test_device_copies_are_those_of_the_host(
    device: str, page: int, pinned: bool, has_batch: bool, beds: list[Bed]
) -> None:
    dice = random.Random(page)
    for per_chunk in (1, 2, 3) if pinned else (2,):
        for groups in (1, 2):
            shape: dict[str, Any] = {"per_chunk": per_chunk, "groups": groups, "page": page}
            bed = Bed(device, pinned=pinned, has_batch=has_batch, seed=per_chunk, **shape)
            beds.append(bed)
            for _ in range(12):
                blocks, rows = bed.places(dice)
                if dice.random() < 0.5:
                    size, ticket = bed.host.store(blocks, rows), bed.copies.store(blocks, rows)
                else:
                    size, ticket = bed.host.load(rows, blocks), bed.copies.load(rows, blocks)
                ticket.wait()
                assert ticket.done
                assert (ticket.size, ticket.error) == (size, 0)
                assert ticket.seconds >= 0
            assert bed.same()


def test_neighbours_are_copied_in_one_piece(device: str, beds: list[Bed]) -> None:
    bed = Bed(device, page=64, per_chunk=4)
    beds.append(bed)
    side_by_side = bed.copies._addresses.fragments(
        DeviceLoadStoreSpec(range(4, 12)), HostLoadStoreSpec([3, 4])
    )
    # Three tables: two of them of half pages. Rows are not merged.
    assert len(side_by_side) == 2 * 3
    scattered = bed.copies._addresses.fragments(
        DeviceLoadStoreSpec([9, 3, 7, 5]), HostLoadStoreSpec([3])
    )
    assert len(scattered) == 4 * 3
    assert scattered.bytes * 2 == side_by_side.bytes


def test_a_store_copies_what_the_compute_stream_was_given_before(
    device: str, beds: list[Bed]
) -> None:
    bed = Bed(device, page=65536)
    beds.append(bed)
    value = torch.full_like(bed.copied[0], 7)
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
        bed.copied[0].copy_(value, non_blocking=True)
    else:
        bed.cuda.compute.queue.append(lambda: bed.copied[0].copy_(value))
    ticket = bed.copies.store(DeviceLoadStoreSpec([2, 5]), HostLoadStoreSpec([1]))
    assert not ticket.done
    ticket.wait()
    bed.tensors[0].fill_(7)
    bed.host.store(DeviceLoadStoreSpec([2, 5]), HostLoadStoreSpec([1]))
    assert bed.same()


def test_a_load_waits_for_what_the_compute_stream_still_reads(device: str, beds: list[Bed]) -> None:
    bed = Bed(device, page=65536)
    beds.append(bed)
    blocks, rows = DeviceLoadStoreSpec([2, 5]), HostLoadStoreSpec([1])
    bed.copies.store(DeviceLoadStoreSpec([3, 4]), rows).wait()
    before = bed.copied[0].clone()
    seen = torch.zeros_like(bed.copied[0])
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
        seen.copy_(bed.copied[0], non_blocking=True)
    else:
        bed.cuda.compute.queue.append(lambda: seen.copy_(bed.copied[0]))
    ticket = bed.copies.load(rows, blocks)
    ticket.wait()
    assert torch.equal(seen, before)
    assert torch.equal(bed.copied[0][2], before[3])


def test_nothing_begins_while_a_graph_is_captured(device: str, beds: list[Bed]) -> None:
    bed = Bed(device)
    beds.append(bed)
    blocks, rows = DeviceLoadStoreSpec([2, 5]), HostLoadStoreSpec([1])
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(KVStoreError, match="graph is captured"):
            bed.copies.store(blocks, rows)
    else:
        bed.cuda.capturing = True
        with pytest.raises(KVStoreError, match="graph is captured"):
            bed.copies.store(blocks, rows)
    assert not bed.region.array.any()


@pytest.mark.parametrize(
    ("blocks", "rows", "error"),
    [
        ([0, -1], [0], IndexError),
        ([0, BLOCKS], [0], IndexError),
        ([0, 1], [ROWS], IndexError),
        ([0, 1, 2], [0], ValueError),
    ],
)
def test_places_that_are_not_there_are_refused_and_nothing_is_copied(
    device: str, blocks: list[int], rows: list[int], error: type[Exception], beds: list[Bed]
) -> None:
    bed = Bed(device)
    beds.append(bed)
    with pytest.raises(error):
        bed.copies.store(DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(rows))
    bed.copies.shutdown()
    assert not bed.region.array.any()


# -- the handler -------------------------------------------------------------------------------


def test_a_handler_reports_in_order_and_only_what_has_ended(device: str, beds: list[Bed]) -> None:
    bed = Bed(device, page=65536)
    beds.append(bed)
    handler = CudaHandler(bed.copies, store=True)
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
    for job in range(4):
        spec = DeviceLoadStoreSpec([job, 10]), HostLoadStoreSpec([job])
        assert handler.transfer_async(job, spec)
    assert handler.get_finished() == []
    handler.wait([1])
    ended = [result.job_id for result in handler.get_finished()]
    assert ended[:2] == [0, 1]
    handler.wait([3])
    ended += [result.job_id for result in handler.get_finished()]
    assert ended == [0, 1, 2, 3]
    handler.shutdown()
    assert not handler.transfer_async(5, (DeviceLoadStoreSpec([1]), HostLoadStoreSpec([1])))


def test_a_job_that_cannot_begin_is_reported_as_failed_in_its_turn(
    device: str, beds: list[Bed]
) -> None:
    bed = Bed(device)
    beds.append(bed)
    handler = CudaHandler(bed.copies, store=False)
    assert handler.transfer_async(0, (HostLoadStoreSpec([1]), DeviceLoadStoreSpec([1, 2])))
    assert handler.transfer_async(1, (HostLoadStoreSpec([1]), DeviceLoadStoreSpec([1, 99])))
    assert handler.transfer_async(2, (HostLoadStoreSpec([2]), DeviceLoadStoreSpec([3, 4])))
    handler.wait([2])
    results = handler.get_finished()
    assert [(result.job_id, result.success) for result in results] == [
        (0, True),
        (1, False),
        (2, True),
    ]
    handler.shutdown()


def test_a_job_of_which_the_driver_refuses_a_part_fails_once_the_rest_has_ended(
    beds: list[Bed],
) -> None:
    bed = Bed("cpu")
    beds.append(bed)
    assert bed.calls is not None
    bed.calls.fails_after = 2
    handler = CudaHandler(bed.copies, store=True)
    assert handler.transfer_async(0, (DeviceLoadStoreSpec([1, 9]), HostLoadStoreSpec([1])))
    assert handler.get_finished() == []
    handler.wait([0])
    (result,) = handler.get_finished()
    assert not result.success
    handler.shutdown()


def test_jobs_on_a_device_that_fails_for_good_are_reported_as_failed(
    beds: list[Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed("cpu")
    beds.append(bed)
    handler = CudaHandler(bed.copies, store=True)
    for job in range(2):
        spec = DeviceLoadStoreSpec([1, 9]), HostLoadStoreSpec([job])
        assert handler.transfer_async(job, spec)

    def broken(self: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "wait", broken)
        patch.setattr(Ticket, "done", property(broken))
        handler.wait([0, 1])
        results = handler.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(0, False), (1, False)]
    assert handler.get_finished() == []
    handler.shutdown()


@pytest.mark.parametrize("has_batch", [True, False])
def test_few_fragments_are_queued_one_by_one(beds: list[Bed], has_batch: bool) -> None:
    bed = Bed("cpu", has_batch=has_batch)
    beds.append(bed)
    assert bed.calls is not None
    bed.copies.store(DeviceLoadStoreSpec([1, 2]), HostLoadStoreSpec([1]))
    bed.copies.store(DeviceLoadStoreSpec([1, 3, 5, 7]), HostLoadStoreSpec([1, 2]))
    assert bed.calls.batches == [False, has_batch]


@pytest.mark.parametrize("store", [True, False])
def test_a_handler_does_not_take_what_goes_the_other_way(beds: list[Bed], store: bool) -> None:
    bed = Bed("cpu")
    beds.append(bed)
    handler = CudaHandler(bed.copies, store=store)
    blocks, rows = DeviceLoadStoreSpec([1, 2]), HostLoadStoreSpec([1])
    assert not handler.transfer_async(0, (rows, blocks) if store else (blocks, rows))
    assert handler.get_finished() == []
    handler.shutdown()
