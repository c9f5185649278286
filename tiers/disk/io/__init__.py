"""I/O backends of the disk tier."""

from kvstore.tiers.disk.io.base import IOV_MAX, IOBackend, IORequest, Moved, UnderWay
from kvstore.tiers.disk.io.probe import IO_BACKENDS, choose_backend

__all__ = [
    "IOV_MAX",
    "IO_BACKENDS",
    "IOBackend",
    "IORequest",
    "Moved",
    "UnderWay",
    "choose_backend",
]
