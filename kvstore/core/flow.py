"""When a chunk goes from host memory to a slower tier, and whether it stays there."""

from __future__ import annotations

import enum

__all__ = ["Flow"]


class Flow(enum.Enum):
    """How chunks flow between host memory and one slower tier."""

    WRITE_THROUGH = "write-through"
    """Copied as soon as it is stored. What is reported stored survives the process."""

    DEMOTE = "demote"
    """Copied when host memory gives it up, unless the tier has it; the copy stays when it is
    promoted, so that giving it up once more writes nothing."""

    EXCLUSIVE = "exclusive"
    """Copied when host memory gives it up; the copy is given up when it is promoted."""
