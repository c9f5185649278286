"""Copies between a paged KV cache and rows: every layout, every byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec
from kvstore.device import HostCopies, Pages, pages_of
from kvstore.errors import ConfigError


def bytes_of(tensor: torch.Tensor) -> bytes:
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.reshape(-1))
    return bytes(packed.view(torch.uint8).numpy().tobytes())


def held(tables: Sequence[Pages], block: int) -> bytes:
    """What a block has of all tables, read page by page."""
    whole = b""
    for pages in tables:
        at = pages.offset + block * pages.stride
        whole += bytes(pages.flat[at : at + pages.size].numpy().tobytes())
    return whole


# -- where pages lie -----------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    data=st.data(),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_the_pages_of_a_tensor_are_all_its_bytes_whatever_its_strides(
    sizes: list[int], data: st.DataObject, itemsize: int
) -> None:
    """Permuted, narrowed and padded dimensions."""
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[itemsize]
    padded = [size + data.draw(st.integers(0, 1)) for size in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    numbers = torch.arange(int(np.prod(padded)) * itemsize, dtype=torch.int64) % 251
    base = numbers.to(torch.uint8).view(dtype).reshape(padded)
    for dim, size in enumerate(sizes):
        base = base.narrow(dim, data.draw(st.integers(0, padded[dim] - size)), size)
    tensor = base.permute(order)
    block_dim = data.draw(st.integers(0, len(sizes) - 1))
    tables = pages_of(tensor, block_dim)
    for block in range(tensor.shape[block_dim]):
        whole = sorted(bytes_of(tensor.select(block_dim, block)))
        assert sorted(held(tables, block)) == whole
    assert len({(pages.offset, pages.size) for pages in tables}) == len(tables)


def test_blocks_in_one_piece_have_one_page() -> None:
    (pages,) = pages_of(torch.zeros(10, 2, 16, 4, 8, dtype=torch.bfloat16))
    assert (pages.count, pages.offset, pages.stride, pages.size) == (10, 0, 2048, 2048)


def test_keys_and_values_apart_have_a_page_each() -> None:
    first, second = pages_of(torch.zeros(2, 10, 16, 4, 8, dtype=torch.bfloat16), block_dim=1)
    assert (first.offset, first.size, first.stride) == (0, 1024, 1024)
    assert (second.offset, second.size, second.stride) == (10 * 1024, 1024, 1024)


def test_heads_outside_of_blocks_have_a_page_each() -> None:
    tables = pages_of(torch.zeros(4, 10, 16, 8, dtype=torch.float32), block_dim=1)
    assert [pages.offset for pages in tables] == [0, 5120, 10240, 15360]
    assert {pages.size for pages in tables} == {512}


def test_layers_in_one_tensor_are_told_apart_by_their_offsets() -> None:
    whole = torch.zeros(3, 10, 64, dtype=torch.uint8)
    assert [pages_of(whole[layer])[0].offset for layer in range(3)] == [0, 640, 1280]


@pytest.mark.parametrize("dim", [3, -4, 7])
def test_a_dimension_that_is_not_there_is_refused(dim: int) -> None:
    with pytest.raises(ConfigError, match=f"block_dim = {dim}: the tensor has the shape"):
        pages_of(torch.zeros(2, 3, 4), dim)


def test_pages_that_overlap_or_end_beyond_the_tensor_are_refused() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="none may overlap"):
        Pages(tensor, 4, 0, 10, 11)
    with pytest.raises(ConfigError, match="end at byte 101, but the tensor has 100 bytes"):
        Pages(tensor, 4, 1, 25, 25)
    with pytest.raises(ConfigError, match="overlap"):
        pages_of(torch.zeros(1, 8).expand(5, 8))


# -- copies --------------------------------------------------------------------------------


class Bed:
    """A KV cache of groups of layers in several layouts, and rows beside it."""

    def __init__(self, per_chunk: int, groups: int, blocks: int = 24, rows: int = 12) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = []
        self.groups: list[list[Pages]] = []
        for group in range(groups):
            tables = []
            for shape, dim in (((blocks, 2, 3, 5), 0), ((2, blocks, 7 + group), 1)):
                tensor = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
                self.tensors.append(tensor)
                tables += pages_of(tensor, dim)
            self.groups.append(tables)
        width = max(sum(pages.size for pages in tables) for tables in self.groups) * per_chunk
        self.rows = np.zeros((rows, width + 3), np.uint8)
        self.copies = HostCopies(self.groups, self.rows, per_chunk)

    def smear(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(255)

    def content(self) -> dict[tuple[int, int], bytes]:
        return {
            (group, block): held(tables, block)
            for group, tables in enumerate(self.groups)
            for block in range(tables[0].count)
        }


@settings(max_examples=100, deadline=None)
@given(
    per_chunk=st.integers(1, 4),
    firsts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    data=st.data(),
)
def test_what_was_stored_comes_back_to_any_blocks_and_nothing_else_changes(
    per_chunk: int, firsts: list[int], data: st.DataObject
) -> None:
    bed = Bed(per_chunk, len(firsts))
    sizes = [data.draw(st.integers(0, 5)) for _ in firsts]
    chunks = [
        -(-(first % per_chunk + size) // per_chunk) if size else 0
        for first, size in zip(firsts, sizes, strict=True)
    ]
    free = data.draw(st.permutations(range(24)))
    blocks, targets = free[: sum(sizes)], free[-sum(sizes) :] if sum(sizes) else []
    rows = data.draw(st.permutations(range(12)))[: sum(chunks)]
    if len(rows) < sum(chunks):
        return
    before = bed.content()
    moved = bed.copies.store(
        DeviceLoadStoreSpec(blocks, sizes, firsts), HostLoadStoreSpec(list(rows))
    )
    assert moved == sum(
        size * sum(pages.size for pages in tables)
        for size, tables in zip(sizes, bed.groups, strict=True)
    )
    bed.smear()
    smeared = bed.content()
    again = bed.copies.load(
        HostLoadStoreSpec(list(rows)), DeviceLoadStoreSpec(targets, sizes, firsts)
    )
    assert again == moved
    after = bed.content()
    at = 0
    for group, size in enumerate(sizes):
        for source, target in zip(blocks[at : at + size], targets[at : at + size], strict=True):
            assert after.pop((group, target)) == before[group, source]
        at += size
    assert all(after[place] == smeared[place] for place in after)


def test_a_chunk_that_is_stored_in_two_parts_is_loaded_whole() -> None:
    bed = Bed(per_chunk=4, groups=1)
    before = bed.content()
    bed.copies.store(DeviceLoadStoreSpec([3], [1], [4]), HostLoadStoreSpec([7]))
    bed.copies.store(DeviceLoadStoreSpec([9, 1, 5], [3], [5]), HostLoadStoreSpec([7]))
    bed.smear()
    bed.copies.load(HostLoadStoreSpec([7]), DeviceLoadStoreSpec([0, 2, 4, 6], [4], [4]))
    after = bed.content()
    assert [after[0, block] for block in (0, 2, 4, 6)] == [before[0, n] for n in (3, 9, 1, 5)]


def test_rows_hold_table_after_table() -> None:
    bed = Bed(per_chunk=2, groups=1)
    before = bed.content()
    bed.copies.store(DeviceLoadStoreSpec([8, 3]), HostLoadStoreSpec([5]))
    tables = bed.groups[0]
    begins = list(itertools.accumulate((2 * pages.size for pages in tables), initial=0))
    at = 0
    for pages, begin in zip(tables, begins, strict=False):
        row = bytes(bed.rows[5, begin : begin + 2 * pages.size])
        page = slice(at, at + pages.size)
        assert row == before[0, 8][page] + before[0, 3][page]
        at += pages.size


@pytest.mark.parametrize(
    ("blocks", "rows", "error"),
    [
        ([0, -1], [0], IndexError),
        ([0, 1], [-1], IndexError),
        ([0, 24], [0], IndexError),
        ([0, 1], [12], IndexError),
        ([0, 1, 2], [0], ValueError),
        ([0, 1], [0, 1], ValueError),
    ],
)
def test_places_that_are_not_there_or_not_as_many_are_refused(
    blocks: list[int], rows: list[int], error: type[Exception]
) -> None:
    bed = Bed(per_chunk=2, groups=1)
    with pytest.raises(error):
        bed.copies.store(DeviceLoadStoreSpec(blocks), HostLoadStoreSpec(rows))
    assert not bed.rows.any()


def test_a_chunk_larger_than_a_row_is_refused() -> None:
    pages = pages_of(torch.zeros(4, 100, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="2 pages of 100 bytes.* do not fit a row of 199 bytes"):
        HostCopies([pages], np.zeros((3, 199), np.uint8), 2)


def test_a_cache_on_another_device_is_refused() -> None:
    pages = pages_of(torch.zeros(4, 100, dtype=torch.uint8, device="meta"))
    with pytest.raises(ConfigError, match="on meta: must be in host memory"):
        HostCopies([pages], np.zeros((3, 200), np.uint8), 2)
