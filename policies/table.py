"""Ordered table: an ordered dictionary without pauses for rebuilding.

Python's `dict` and `OrderedDict` are rebuilt when insertions have used up their space, which
deletions do not free. With 100,000 entries that takes 8 ms, with a million 60 to 130 ms, in the
middle of a step. `OrderedTable`, written in C, is as fast and takes less memory, and no call takes
longer because the table is large: its index grows a little with each insertion.

If the package was installed without a C compiler, an `OrderedDict` replaces it: everything works,
but steps over large tiers have these pauses.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

__all__ = ["COMPILED", "OrderedTable"]

if TYPE_CHECKING:
    from kvstore.policies._table import OrderedTable
else:
    try:
        from kvstore.policies._table import OrderedTable
    except ImportError:

        class OrderedTable(OrderedDict):
            """Fallback without a C compiler."""


COMPILED: bool = not issubclass(OrderedTable, dict)
"""Whether the table in C is available."""
