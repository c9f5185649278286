"""A device and its workers that move no bytes: who has written what into which block.

What a token leaves in a block of a KV cache group is told by a *mark*, which depends on the group
and on all tokens up to this one. So it can be said of each transfer and of each step whether what
it reads is what it should be. Copies may take place at any moment while they are under way: here
they do at the first and at the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Marks = list[int | None]
"""What is in a chunk, token by token; None: nothing that anybody knows."""


class WrongBytesError(AssertionError):
    """Some transfer or step has read what it should not."""


@dataclass(frozen=True)
class Layer:
    """A KV cache group."""

    index: int
    block: int
    window: int | None


@dataclass
class Copy:
    """Blocks of one chunk.

    Attributes:
        first: the first of the chunk's blocks that is copied.
    """

    key: bytes
    first: int
    blocks: list[int]


@dataclass
class Transfer:
    """A job as a worker reads it."""

    request: str
    is_store: bool
    copies: list[Copy]
    expected: dict[bytes, Marks]
    """For each chunk that is stored what should be in it."""
    dropped: frozenset[bytes] = frozenset()
    """Chunks whose store shall leave nothing, as only one side has made it."""

    @property
    def blocks(self) -> set[int]:
        return {block for copy in self.copies for block in copy.blocks}


def copies_of(
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    sizes: Sequence[int],
    begins: Sequence[int],
    blocks_per_chunk: int,
) -> list[Copy]:
    """Which blocks belong to which key: those of each group lie one behind the other."""
    copies: list[Copy] = []
    left = list(block_ids)
    for group, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
        its, left = left[:size], left[size:]
        of_group = [key for key in keys if int.from_bytes(key[-4:], "big") == group]
        first = begin % blocks_per_chunk
        for key in of_group:
            take = blocks_per_chunk - first
            copies.append(Copy(key, first, its[:take]))
            its, first = its[take:], 0
        if its:
            raise WrongBytesError(f"group {group} has more blocks than keys")
    if left or not all(copy.blocks for copy in copies):
        raise WrongBytesError(f"{len(keys)} keys do not fit their {len(block_ids)} blocks")
    return copies


class Device:
    """Blocks of one side, and what it has offloaded."""

    def __init__(self, layers: Sequence[Layer], blocks_per_chunk: int) -> None:
        self.layers = layers
        self.blocks_per_chunk = blocks_per_chunk
        self.written: dict[int, Marks] = {}
        self.offloaded: dict[bytes, Marks] = {}
        self._loads: dict[int, list[Marks]] = {}

    def begin(self, number: int, transfer: Transfer) -> None:
        """A worker may copy from now on."""
        if transfer.is_store:
            self._store(transfer)
        else:
            self._loads[number] = [list(self.offloaded[copy.key]) for copy in transfer.copies]
            self._load(number, transfer)

    def end(self, number: int, transfer: Transfer) -> None:
        """It has copied."""
        if transfer.is_store:
            self._store(transfer)
        else:
            self._load(number, transfer)
            del self._loads[number]

    def _store(self, transfer: Transfer) -> None:
        for copy in transfer.copies:
            expected = transfer.expected[copy.key]
            size = len(expected) // self.blocks_per_chunk
            marks: Marks = [None] * (copy.first * size)
            for block in copy.blocks:
                marks += self._marks_in(block, size)
            marks += [None] * (len(expected) - len(marks))
            for place, mark in enumerate(marks[copy.first * size :], copy.first * size):
                if mark != expected[place]:
                    raise WrongBytesError(
                        f"{transfer.request} stores from {copy.blocks}, place {place}: {mark}"
                    )
            if copy.key not in transfer.dropped:
                self.offloaded[copy.key] = marks

    def _load(self, number: int, transfer: Transfer) -> None:
        for copy, marks in zip(transfer.copies, self._loads[number], strict=True):
            size = len(marks) // self.blocks_per_chunk
            for place, block in enumerate(copy.blocks, copy.first):
                self.written[block] = marks[place * size : (place + 1) * size]

    def compute(
        self,
        request: str,
        begin: int,
        end: int,
        marks: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """A request computes its tokens from `begin` to `end`.

        Args:
            marks: of its tokens, for each group.
            blocks: all of its blocks, for each group.
        """
        for layer, its_marks, its_blocks in zip(self.layers, marks, blocks, strict=True):
            size = layer.block
            first = 0 if layer.window is None else max(0, begin - layer.window + 1)
            for place in range(first, begin):
                block = its_blocks[place // size]
                found = self._marks_in(block, size)[place % size]
                if not block or found != its_marks[place]:
                    raise WrongBytesError(
                        f"{request} computes {begin} to {end} and reads {found} at {place}, "
                        f"block {block} of group {layer.index}"
                    )
            for place in range(begin, end):
                block = its_blocks[place // size]
                assert block
                self._marks_in(block, size)[place % size] = its_marks[place]

    def _marks_in(self, block: int, size: int) -> Marks:
        """What is in a block. Of one that a group with other blocks has written: nothing known."""
        marks = self.written.get(block)
        if marks is None or len(marks) != size:
            marks = self.written[block] = [None] * size
        return marks
