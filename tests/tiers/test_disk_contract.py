"""The disk tier keeps the contract of every tier, whatever moves its bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.testing.tier import TierContract
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.io import IO_BACKENDS, choose_backend
from tests.tiers.support import disk_tier, some_keys


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


class TestAio(DiskTierContract):
    io = "aio"


class TestDirect(DiskTierContract):
    io = "direct"


class TestMapped(DiskTierContract):
    io = "mmap"


class TestMappedInMemory(DiskTierContract):
    """Where files are memory they are mapped."""

    io = "mmap"

    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            yield Path(place) / "tier"


class TestBuffered(DiskTierContract):
    io = "buffered"


class TestPortable(DiskTierContract):
    io = "portable"


def test_every_backend_passes_the_contract() -> None:
    tested = {contract.io for contract in DiskTierContract.__subclasses__()}
    assert tested - {"auto"} == set(IO_BACKENDS)


class TestSealed(DiskTierContract):
    """Chunks that are encrypted."""

    io = "direct"

    def new_tier(self, folder: Path) -> DiskTier:
        return disk_tier(folder, io=self.io, keys=some_keys(folder.parent))


class TestSealedAio(TestSealed):
    io = "aio"


class TestOneThread(DiskTierContract):
    """Nothing depends on several operations running at once."""

    io = "buffered"

    def new_tier(self, folder: Path) -> DiskTier:
        return disk_tier(folder, io=self.io, io_threads=1)


class TestSeveralPaths(DiskTierContract):
    """Segments lie on three folders in turn."""

    io = "auto"

    def new_tier(self, folder: Path) -> DiskTier:
        paths = [folder / name for name in ("one", "two", "three")]
        return disk_tier(paths, segments=9, io=self.io)
