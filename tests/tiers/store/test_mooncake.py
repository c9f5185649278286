"""The Mooncake store against a real master."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvstore.testing.store import StoreContract
from kvstore.testing.tier import TierBench, key_of
from kvstore.types import TierPlace
from tests.patience import PATIENCE
from tests.tiers.store.servers import MooncakeMaster, mooncake_master
from tiers.base import Tier
from tiers.store.mooncake import MooncakeTier

store = pytest.importorskip("mooncake.store", exc_type=ImportError)

# Its own calls give up after half a minute otherwise.
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

POOL_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with mooncake_master() as running:
        yield running


@pytest.fixture(scope="module")
def host(master: MooncakeMaster) -> Iterator[Any]:
    """A host that gives its memory to the pool."""
    engine = store.MooncakeDistributedStore()
    metadata = "P2PHANDSHAKE"
    assert not engine.setup("127.0.0.1", metadata, POOL_BYTES, 2**24, "tcp", "", master.address)
    yield engine
    engine.close()


class TestMooncake(StoreContract):
    seconds = PATIENCE

    @pytest.fixture(autouse=True)
    def _use(self, master: MooncakeMaster, host: Any) -> None:
        self.master, self.host = master, host
        host.remove_all(True)

    def new_tier(self, place: TierPlace) -> Tier:
        # The engine's own limit comes first; to reach its master may take longer.
        return MooncakeTier(place, master=self.master.address, timeout_s=6.0)

    def values(self) -> Mapping[str, bytes]:
        return {name: self.host.get(name) for name in self.master.names()}

    def put(self, name: str, value: bytes) -> None:
        self.host.remove(name, True)
        if value:
            # It has no empty values.
            assert not self.host.put(name, value)

    def stop(self) -> None:
        self.master.stop()

    def start(self) -> None:
        self.master.start()
        # The host comes back to its master by itself, and gives it its memory anew.
        end = time.monotonic() + PATIENCE
        while self.host.put("probe", b"probe"):
            assert time.monotonic() < end
            time.sleep(0.1)
        self.host.remove("probe", True)

    def freeze(self) -> None:
        self.master.freeze()


PLACE = TierPlace("place", {"model": "tiny"}, 8000)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"master": "host"}, "must be a host and a port"),
        ({"protocol": "udp"}, "must be tcp or rdma"),
        ({"contribute_bytes": -1}, "contribute_bytes"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MooncakeTier(PLACE, **parameters)


@pytest.mark.asyncio
async def test_a_pool_that_is_full_refuses_and_still_serves() -> None:
    place = TierPlace("full", {}, 2**20)
    with mooncake_master() as small:
        tier = MooncakeTier(place, master=small.address, contribute_bytes=16 * 2**20, timeout_s=20)
        bench = TierBench(tier, 8, 2**20, 2**20)
        refused = []
        async with asyncio.timeout(PATIENCE):
            for first in range(0, 4096, 8):
                keys = [key_of(n) for n in range(first, first + 8)]
                done = await bench.store(keys, [0] * 8)
                refused = [key for key, ok in zip(keys, done.ok, strict=True) if not ok]
                if refused:
                    assert "no room" in str(done.error)
                    break
        assert refused
        assert (await bench.fetch([key_of(0), refused[-1]], [0, 0]))[1] is False
        await bench.close()


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.store.mooncake.Engine", None)
    with pytest.raises(ValueError, match="pip install mooncake-transfer-engine"):
        MooncakeTier(PLACE)
