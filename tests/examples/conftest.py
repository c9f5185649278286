"""Stores and disks for tests, as in their own rooms."""

from tests.faults.conftest import faulty
from tests.store.conftest import open_store

__all__ = ["faulty", "open_store"]
