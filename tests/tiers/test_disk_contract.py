"""The disk tier keeps the contract of every tier, whatever moves its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.testing.tier import TierContract
from tests.tiers.support import disk_tier
from tiers.disk import DiskTier
from tiers.disk.io import choose_backend


class DiskTierContract(TierContract):
    io: str

    @pytest.fixture(autouse=True)
    def _possible(self, tmp_path: Path) -> None:
        try:
            choose_backend(tmp_path, self.io)
        except ConfigError as error:
            pytest.skip(str(error))

    def new_tier(self, folder: Path) -> DiskTier:
        return disk_tier(folder, io=self.io)


class TestDirect(DiskTierContract):
    io = "direct"


class TestBuffered(DiskTierContract):
    io = "buffered"


class TestOneThread(DiskTierContract):
    """Nothing depends on several operations running at once."""

    io = "buffered"

    def new_tier(self, folder: Path) -> DiskTier:
        return disk_tier(folder, io=self.io, io_threads=1)
