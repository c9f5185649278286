"""Copies that leave the interpreter to others."""

from __future__ import annotations

import numpy as np

__all__ = ["copy"]


def copy(part: bytes | memoryview, payload: memoryview, start: int = 0) -> None:
    """Copy `part` into `payload`, from `start` on, without the GIL.

    The assignment to a slice would hold it.
    """
    into = np.frombuffer(payload, np.uint8)[start : start + len(part)]
    np.copyto(into, np.frombuffer(part, np.uint8))
