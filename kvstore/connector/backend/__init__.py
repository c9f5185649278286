"""Backends: one medium of blocks each."""

from kvstore.connector.backend.base import Backend, BlockStatus
from kvstore.connector.backend.mapped import MappedFileBackend
from kvstore.connector.backend.pinned import PinnedBackend

__all__ = ["Backend", "BlockStatus", "MappedFileBackend", "PinnedBackend"]
