"""Fragments are cut into pieces, and the pieces are what was cut."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvstore.device import Pages  # noqa: E402
from kvstore.device.fragments import Addresses, Fragments, cut  # noqa: E402
from kvstore.device.layout import Layout  # noqa: E402
from kvstore.device.staging import STEP, Ring  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402


def fragments_of(places: list[tuple[int, int, int, int]]) -> Fragments:
    """From (device, host, size, row)."""
    return Fragments(*np.array(places, np.int64).reshape(-1, 4).T.copy())


def columns(fragments: Fragments) -> list[tuple[int, int, int]]:
    """Of (device, host, size)."""
    arrays = (fragments.device, fragments.host, fragments.sizes)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def bytes_of(fragments: Fragments) -> dict[int, int]:
    """For each byte of the device the host's."""
    found: dict[int, int] = {}
    for device, host, size in columns(fragments):
        assert size > 0
        its = dict(zip(range(device, device + size), range(host, host + size), strict=True))
        assert not found.keys() & its.keys()
        found |= its
    return found


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=8), st.integers(1, 30))
def test_pieces_do_not_reach_over_a_multiple(places: list[tuple[int, int]], every: int) -> None:
    begins, sizes = np.array(places, np.int64).reshape(-1, 2).T
    device = np.arange(len(places)) * 100
    whole = Fragments(device, 5000 + device, sizes, device)
    pieces, at = cut(whole, begins, every)
    assert bytes_of(pieces) == bytes_of(whole)
    assert (at // every == (at + pieces.sizes - 1) // every).all()
    assert (pieces.rows == pieces.device // 100 * 100).all()
    # A piece stands where its part of the fragment does.
    assert (at - begins[pieces.rows // 100] == pieces.device - pieces.rows).all()


@given(
    st.lists(st.tuples(st.integers(1, 2 * STEP + 5), st.booleans()), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_fills_of_a_ring_copy_what_the_transfer_does(
    sizes: list[tuple[int, bool]], dice: random.Random
) -> None:
    total = sum(size for size, _ in sizes)
    host = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    device, wanted = np.zeros(total, np.uint8), np.zeros(total, np.uint8)
    at = row = there = 0
    lies = {}
    for number, (size, new_row) in enumerate(sizes):
        row += new_row
        lies[number] = at, size, row
        at += size
    places = []
    for number in dice.sample(range(len(sizes)), len(sizes)):
        at, size, row = lies[number]
        wanted[there : there + size] = host[at : at + size]
        places.append((device.ctypes.data + there, host.ctypes.data + at, size, row))
        there += size
    ring = Ring(torch.device("cpu"), STEP)
    row_of = np.repeat([row for _, _, row in lies.values()], [size for size, _ in sizes])
    for fill in ring.fills(fragments_of(places)):
        assert fill.rows.bytes == fill.pages.bytes <= STEP
        for to, from_, size in columns(fill.rows):
            begin = from_ - host.ctypes.data
            assert len(set(row_of[begin : begin + size])) == 1
            assert 0 <= to - ring._memory.data_ptr() <= STEP - size
            ctypes.memmove(to, from_, size)
        for to, from_, size in columns(fill.pages):
            assert 0 <= from_ - ring._memory.data_ptr() <= STEP - size
            ctypes.memmove(to, from_, size)
    assert (device == wanted).all()


def test_rows_that_lie_whole_are_one_copy_and_never_two_rows() -> None:
    """Two rows may be registered apart, even where they are neighbours."""
    pages = [(9000 * n, 4096 * n, 4096, n // 4) for n in (5, 2, 7, 0, 3, 6, 1, 4)]
    (fill,) = Ring(torch.device("cpu"), STEP).fills(fragments_of(pages))
    assert fill.rows.sizes.tolist() == [4 * 4096] * 2
    assert fill.rows.rows.tolist() == [0, 1]
    assert len(fill.pages) == 8


def test_rings_that_cannot_be_are_refused() -> None:
    for size in (0, STEP + 1, -STEP):
        with pytest.raises(ConfigError, match="ring_bytes = .*: must be a multiple of 65536"):
            Ring(torch.device("cpu"), size)
    with pytest.raises(ConfigError, match="cannot allocate a ring of"):
        Ring(torch.device("cpu"), 2**60)


@pytest.mark.parametrize(
    ("page", "stride", "row_stride", "word"),
    [
        (64, 64, 4096, 16),
        (64, 72, 4096, 8),
        (20, 64, 4096, 4),
        (6, 64, 4096, 2),
        (64, 64, 4095, 1),
    ],
)
def test_the_word_of_a_layout_divides_every_address_and_size(
    page: int, stride: int, row_stride: int, word: int
) -> None:
    tensor = torch.zeros(20 * 72, dtype=torch.uint8)
    layout = Layout([[Pages(tensor, 20, 0, stride, page)]], 8, 4000, 2)
    assert tensor.data_ptr() % 16 == 0
    assert Addresses(layout, 4096, row_stride).word == word
    assert Addresses(layout, 4096 + 1, row_stride).word == 1
