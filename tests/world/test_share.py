"""The simulated store is a store: it passes the contract that real ones pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest

from kvstore.testing.store import StoreContract
from kvstore.tiers import Tier
from kvstore.types import TierPlace
from tests.world.share import SERVERS, ShareServer, ShareTier


class TestSimulatedStore(StoreContract):
    seconds = 5.0

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        SERVERS["contract"] = ShareServer(random.Random(1))
        yield
        del SERVERS["contract"]

    def new_tier(self, place: TierPlace) -> Tier:
        return ShareTier(place, url="contract", timeout_s=1.0)

    def values(self) -> Mapping[str, bytes]:
        return {name: value for name, (value, _) in SERVERS["contract"].values.items()}

    def put(self, name: str, value: bytes) -> None:
        SERVERS["contract"].values[name] = (value, 0.0)

    def stop(self) -> None:
        SERVERS["contract"].away = True

    def start(self) -> None:
        SERVERS["contract"].heal()

    def freeze(self) -> None:
        SERVERS["contract"].frozen = True
