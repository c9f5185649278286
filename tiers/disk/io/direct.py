"""Direct I/O: O_DIRECT with vectored calls."""

from __future__ import annotations

import os

from kvstore.tiers.disk.io.buffered import BufferedIO

__all__ = ["DirectIO"]


class DirectIO(BufferedIO):
    """Moves bytes between the device and host memory without the page cache."""

    name = "direct"
    flags = os.O_DIRECT
