"""Stores for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from tests.store.support import Open, payloads, small


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    """Opens a small store; `disk` is the capacity of its disk tier, in chunks.

    The chunks that it `holds` are put first.
    """

    @asynccontextmanager
    async def open_store(
        rows: int = 8, disk: int = 0, holds: Sequence[bytes] = (), **more: Any
    ) -> AsyncIterator[Store]:
        config = small(tmp_path / "cache", rows, disk, **more)
        async with kvstore.open(config) as store:
            if holds:
                assert await store.put(holds, payloads(holds)) == len(holds)
            yield store

    return open_store
