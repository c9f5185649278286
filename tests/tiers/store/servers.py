"""Real engines on this machine, for tests."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ceph_gateway import CephGateway, is_installed
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer

__all__ = [
    "CephGateway",
    "MooncakeMaster",
    "RedisServer",
    "ceph_gateway",
    "mooncake_master",
    "redis_server",
]


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server for a while; skips the test where redis-server is not installed."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), *options)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def mooncake_master() -> Iterator[MooncakeMaster]:
    """A master for a while; skips the test where the package cannot be used."""
    # Without Debian's libibverbs1, libnl and librdmacm1 it is there and cannot be loaded.
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with tempfile.TemporaryDirectory() as folder:
        master = MooncakeMaster(Path(folder))
        try:
            yield master
        finally:
            master.stop()


@contextlib.contextmanager
def ceph_gateway() -> Iterator[CephGateway]:
    """An S3 server for a while; skips the test where Ceph is not installed."""
    pytest.importorskip("obstore")
    if not is_installed():
        pytest.skip("Ceph (ceph-mon, ceph-osd, radosgw) is not installed")
    with tempfile.TemporaryDirectory() as folder:
        server = CephGateway(Path(folder))
        try:
            yield server
        finally:
            server.end()
