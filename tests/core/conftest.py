"""In tests of the core, what the tables of a chunk's life lack is an error."""

from __future__ import annotations

import pytest

from kvstore.core.chunk import Life


@pytest.fixture(autouse=True)
def illegal_transitions_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Life, "raises", True)
