"""Memory that a server lends: its rows, and nothing of it left when it is given back."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.lent import LentRegion

ROW = 8192


def lent(rows: int, row_bytes: int = ROW, offset: int = 0) -> tuple[mmap.mmap, memoryview]:
    memory = mmap.mmap(-1, rows * row_bytes + mmap.PAGESIZE)
    array = np.frombuffer(memory, np.int8)[offset : offset + rows * row_bytes]
    return memory, array.reshape(rows, row_bytes).data


def test_rows_are_the_lenders_own_bytes() -> None:
    _, view = lent(4)
    region = LentRegion(view)
    assert (region.rows, region.row_bytes, region.aligned) == (4, ROW, True)
    region.row(2)[:3] = b"abc"
    assert view.tobytes()[2 * ROW : 2 * ROW + 3] == b"abc"
    assert bytes(region.array[2, :3]) == b"abc"


def test_after_close_the_lender_can_free_the_memory() -> None:
    memory, view = lent(4)
    region = LentRegion(view)
    row = region.row(1)
    region.close()
    # A copy that does not return keeps its row.
    row[0] = 1
    row.release()
    view.release()
    del view
    memory.close()
    region.close()


def test_memory_that_direct_io_cannot_use_is_noticed() -> None:
    _, view = lent(4, offset=8)
    assert not LentRegion(view).aligned


@pytest.mark.parametrize("row_bytes", [1000, 4097])
def test_rows_that_no_slot_can_hold_are_refused(row_bytes: int) -> None:
    _, view = lent(4, row_bytes)
    with pytest.raises(ConfigError, match=f"rows of {row_bytes} bytes"):
        LentRegion(view)


def test_what_is_no_block_of_rows_is_refused() -> None:
    for memory in (memoryview(bytearray(ROW)), np.zeros((4, 2 * ROW), np.int8)[:, ::2].data):
        with pytest.raises(ConfigError, match="one writable block of rows"):
            LentRegion(memory)
