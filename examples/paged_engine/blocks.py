"""Blocks of the device: who has which, and what those that nobody has still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Gives out blocks by number. Block 0 is never given out: it stands for no block.

    Blocks that were given back keep what they hold until they are given out again, the one that
    was given back first before the others. With prefix caching they can be found by it.
    """

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._caches = prefix_caching

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks to be written; there must be as many free ones."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._users[block] = 1
            held = self._hash_of.pop(block, None)
            if held is not None:
                del self._block_of[held]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Nobody reads or writes these for a request any more; 0 is skipped."""
        for block in blocks:
            if block:
                self._users[block] -= 1
                if not self._users[block]:
                    self._free[block] = None

    # -- prefix caching ----------------------------------------------------------------------

    def cached(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the leading ones of `hashes`."""
        found = []
        for its in hashes:
            if its not in self._block_of:
                break
            found.append(self._block_of[its])
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """One more request reads these."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of these nobody has."""
        return sum(not self._users[block] for block in blocks)

    def holds(self, block: int, its: bytes) -> None:
        """`block` has been computed, and holds what has this hash."""
        if self._caches and its not in self._block_of and block not in self._hash_of:
            self._block_of[its] = block
            self._hash_of[block] = its
