"""A Triton kernel that copies between addresses. Importing this module imports Triton.

It knows no direction: source and target may each be memory of the device, or host memory that
kernels of this device may use by its address.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["constants", "launch"]

TILE = 2048
"""Words that a program reads before it writes."""

WARPS = 8
"""Of a program: a thread has eight words, so that several reads are under way at a time."""

TYPES = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""What is moved. There is no integer of 16 bytes: two of 8 are moved at once where both addresses
are known to be multiples of 16."""


# Triton compiles annotations, too, and knows no names but its own.
def _copy(
    lists: tl.tensor,
    count: tl.tensor,
    TYPE: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    TYPE_BYTES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Copies piece i of `lists[2 * count + i]` bytes from `lists[count + i]` to `lists[i]`."""
    words = tl.arange(0, TILE)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        target = tl.load(lists + piece).to(tl.pointer_type(TYPE))
        source = tl.load(lists + count + piece).to(tl.pointer_type(TYPE))
        length = tl.load(lists + 2 * count + piece) // TYPE_BYTES
        # The promises let a thread move a whole word with one instruction.
        target = tl.multiple_of(target, WORD)
        source = tl.multiple_of(source, WORD)
        length = tl.multiple_of(length, WORD // TYPE_BYTES)
        for begin in range(0, length, TILE):
            at = begin + words
            inside = at < length
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def constants(word: int) -> dict[str, Any]:
    """What the kernel is compiled with."""
    return {"TYPE": TYPES[word], "WORD": word, "TYPE_BYTES": min(word, 8), "TILE": TILE}


# A count that is 1, or a multiple of 16, would be compiled anew.
copy = triton.jit(_copy, do_not_specialize=["count"])


def launch(lists: torch.Tensor, count: int, word: int, programs: int) -> None:
    """Queue copies on the current stream of the current device.

    The caller guarantees that all addresses and sizes are multiples of `word`, and that what is
    named stays until the copies have ended. No two pieces have bytes of a target in common.

    Args:
        lists: int64, on the device: targets of the first `count` pieces, then their sources,
            then their sizes in bytes.
        word: 16, 8, 4, 2 or 1. Each is compiled when it is first used.
        programs: that share the pieces. Each takes room on a multiprocessor.

    Raises:
        Exception: whatever Triton raises where it cannot compile or launch.
    """
    copy[(programs,)](lists, count, **constants(word), num_warps=WARPS)
