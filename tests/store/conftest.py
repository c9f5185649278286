"""Stores for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.store import Store
from tests.store.support import CHUNK, Open


@pytest.fixture
def open_store(tmp_path: Path) -> Open:
    """Opens a small store; `disk` is the capacity of its disk tier, in chunks."""

    @asynccontextmanager
    async def open_store(rows: int = 8, disk: int = 0, **more: Any) -> AsyncIterator[Store]:
        size = more.get("chunk_bytes", CHUNK)
        tiers = []
        if disk:
            # One segment more than its payload: headers need room too.
            tiers = [
                {
                    "type": "disk",
                    "path": tmp_path / "cache",
                    "capacity_bytes": (disk + 16) * size + 2**20,
                    "segment_bytes": 16 * size + 2**14,
                }
            ]
        config = {
            "chunk_bytes": size,
            "cpu_bytes_to_use": rows * size,
            "tiers": tiers,
            "deadline_s": 1.0,
            "shutdown_timeout_s": 10.0,
            **more,
        }
        async with kvstore.open(config) as store:
            yield store

    return open_store
