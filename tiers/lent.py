"""Lent memory: rows that a server owns and lends for copies."""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.tiers.pages import PAGE
from kvstore.tiers.pinned import PinnedRegion, RegionShape

__all__ = ["LentRegion"]


class LentRegion(PinnedRegion):
    """The rows of `memory`, a two-dimensional view with a row of bytes for each.

    Nothing is allocated, touched or registered: the lender does that. The memory stays valid
    until `close`, and longer if a hanging copy still uses it.

    Attributes:
        aligned: whether rows are aligned for direct I/O.

    Raises:
        ConfigError: if no tier can store rows of this size.
    """

    def __init__(self, memory: memoryview) -> None:
        if memory.ndim != 2 or not memory.c_contiguous or memory.readonly:
            raise ConfigError(
                "the server's host memory must be one writable block of rows of equal size"
            )
        rows = len(memory)
        shape = RegionShape(rows, memory.nbytes // max(1, rows))
        if rows < 1 or not shape.row_bytes or shape.row_bytes % PAGE:
            raise ConfigError(
                f"the server's host memory has {rows} rows of {shape.row_bytes} bytes: must be "
                f"at least one, of a multiple of {PAGE} bytes"
            )
        self._take(shape, memory.cast("B"))
        self.aligned = self.address % PAGE == 0

    @property
    def description(self) -> str:
        return f"{self.rows} rows of {self.row_bytes} B, lent"

    def register_with_cuda(self) -> bool:
        """Do nothing: the lender registers its memory."""
        return False

    def close(self) -> None:
        """Release the memory. Views that still exist keep it alive."""
        # The view itself is not released: a tensor made from it refers to this object only.
        self._view = None
