"""Stores for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from tests.store.support import Open, small


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    """Opens a small store; `disk` is the capacity of its disk tier, in chunks."""

    @asynccontextmanager
    async def open_store(rows: int = 8, disk: int = 0, **more: Any) -> AsyncIterator[Store]:
        config = small(tmp_path / "cache", rows, disk, **more)
        async with kvstore.open(config) as store:
            yield store

    return open_store
