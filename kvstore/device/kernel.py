"""A Triton kernel that copies between addresses. Importing this module imports Triton.

Source and target may each be device memory, or host memory whose addresses kernels of this device
may use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["constants", "launch"]

TILE = 2048
"""Words that a program reads before it writes them."""

WARPS = 8
"""Warps of a program: each thread has eight words, so that several reads are under way at once."""

TYPES = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Type of a word by its size. There is no integer type of 16 bytes: Triton merges two of 8 bytes if
both addresses are known to be multiples of 16."""


# Triton also compiles annotations, so they may use only its own names.
def _copy(
    lists: tl.tensor,
    count: tl.tensor,
    TYPE: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    TYPE_BYTES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Copy `lists[2 * count + i]` bytes from `lists[count + i]` to `lists[i]`, for each piece i."""
    words = tl.arange(0, TILE)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        target = tl.load(lists + piece).to(tl.pointer_type(TYPE))
        source = tl.load(lists + count + piece).to(tl.pointer_type(TYPE))
        length = tl.load(lists + 2 * count + piece) // TYPE_BYTES
        # These hints let a thread move a whole word with one instruction.
        target = tl.multiple_of(target, WORD)
        source = tl.multiple_of(source, WORD)
        length = tl.multiple_of(length, WORD // TYPE_BYTES)
        for begin in range(0, length, TILE):
            at = begin + words
            inside = at < length
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def constants(word: int) -> dict[str, Any]:
    """Return the compile-time constants of the kernel."""
    return {"TYPE": TYPES[word], "WORD": word, "TYPE_BYTES": min(word, 8), "TILE": TILE}


# Without this, Triton would recompile for counts that are 1 or a multiple of 16.
copy = triton.jit(_copy, do_not_specialize=["count"])


def launch(lists: torch.Tensor, count: int, word: int, programs: int) -> None:
    """Queue copies on the current stream of the current device.

    The caller guarantees that all addresses and sizes are multiples of `word`, that the memory
    stays allocated until the copies have ended, and that targets do not overlap.

    Args:
        lists: int64, on the device: targets of the first `count` pieces, then their sources,
            then their sizes in bytes.
        word: 16, 8, 4, 2 or 1. Each is compiled when it is first used.
        programs: number of programs that share the pieces. Each occupies a multiprocessor.

    Raises:
        Exception: whatever Triton raises if it cannot compile or launch.
    """
    copy[(programs,)](lists, count, **constants(word), num_warps=WARPS)
