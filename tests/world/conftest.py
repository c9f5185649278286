"""Fixtures of the simulated world."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def small_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collections look at what belongs to a world alone: a process of tests has much more."""
    gc.freeze()
    yield
    # The coroutines of a world that is over are destroyed only now, and say so.
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    gc.collect()
