"""Stores for tests, as in tests/store."""

from tests.store.conftest import open_store

__all__ = ["open_store"]
