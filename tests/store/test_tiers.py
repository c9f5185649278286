"""A kind of tier that another package adds."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import plugins as tiering
from kvstore.config import Config
from kvstore.connector.manager import KVStoreManager
from kvstore.errors import ConfigError
from kvstore.tiers import PinnedRegion, Tier
from kvstore.types import TierPlace
from tests.patience import PATIENCE, until
from tests.store.support import Open, contents, keys_of, on_disk, payloads, small

SHELF = '''
from kvstore.types import RecoveredTier
from kvstore.tiers import Tier
from kvstore.tiers.base import Transfer

PLACES = []


class Shelf(Tier):
    """Chunks in a dictionary: what a tier is at least."""

    name = "shelf"

    def __init__(self, place, *, boards: int = 2, board_chunks: int = 8, loud: bool = False):
        if boards < 1:
            raise ValueError("boards must be at least 1")
        self.boards, self.board_chunks = boards, board_chunks
        self.held = {}
        PLACES.append(place)

    def open(self, region):
        self.region = region
        return RecoveredTier("shelf", "shelf", [], self.board_chunks, [0], self.boards)

    async def read(self, keys, slots, rows):
        ok = []
        for key, slot, row in zip(keys, slots, rows):
            held = self.held.get(slot)
            ok.append(held is not None and held[0] == key)
            if ok[-1]:
                self.region.row(row)[:] = held[1]
        return Transfer(ok)

    async def write(self, keys, slots, rows):
        for key, slot, row in zip(keys, slots, rows):
            self.held[slot] = (key, bytes(self.region.row(row)))
        return Transfer([True] * len(keys))

    async def grow(self):
        self.grown = getattr(self, "grown", 0) + 1
        return self.grown, None

    async def clear(self):
        self.held.clear()
        return list(range(1 + getattr(self, "grown", 0)))

    async def close(self, coldest_first):
        self.closed = True

    def abandon(self):
        self.closed = True

    @property
    def description(self):
        return f"{self.boards} boards"
'''


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the tier and its entry point, installed as pip does."""
    info = tmp_path / "site" / "shelf-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "shelf.py").write_text(SHELF)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvstore.tiers]\nshelf = shelf:Shelf\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(tiering._kinds, "classes", dict(tiering._kinds.classes))
    monkeypatch.setattr(tiering._kinds, "_provided", {})
    yield
    sys.modules.pop("shelf", None)


async def test_chunks_go_to_an_added_tier_and_come_back_from_it(open_store: Open) -> None:
    keys = keys_of("a", 12)
    tiers = [{"type": "shelf", "boards": 3, "eviction_policy": "fifo"}]
    async with open_store(rows=6, tiers=tiers) as store:
        for start in range(0, 12, 4):
            assert await store.put(keys[start : start + 4], payloads(keys[start : start + 4])) == 4
            assert await store.flush()
        stats = store.stats().tiers[0]
        assert (stats.name, stats.chunks, stats.written) == ("shelf", 12, 12)
        assert await contents(store, keys[:4]) == payloads(keys[:4])
        assert store.stats().tiers[0].promoted > 0
        assert store.stats().tiers[0].segments == 2, "it grew"
        (place,) = sys.modules["shelf"].PLACES
        assert place.chunk_bytes == 4096
        assert place.identity["chunk_bytes"] == 4096
        await store.reset()
        assert await store.resolve(keys) == 0
    tier = store._assembly.tiers[0]
    assert tier.closed  # type: ignore[attr-defined]


async def test_an_added_tier_stands_below_a_disk(open_store: Open, tmp_path: Path) -> None:
    keys = keys_of("b", 4)
    disk = {"type": "disk", "path": tmp_path / "cache", "capacity_bytes": 2**20}
    tiers = [{**disk, "segment_bytes": 2**17}, {"type": "shelf"}]
    async with open_store(rows=8, tiers=tiers) as store:
        assert await store.put(keys, payloads(keys)) == 4
        assert await store.flush()
        assert [tier.chunks for tier in store.stats().tiers if tier.name == "shelf"] == [4]


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"type": "shelf", "boards": "two"}, "boards = 'two' must be a whole number"),
        ({"type": "shelf", "shelves": 2}, "tier 'shelf' has no parameter 'shelves'"),
        (
            {"type": "tape"},
            "tiers[0].type = 'tape': must be one of: disk, mooncake, object, redis, shelf",
        ),
        ({"type": ["shelf"]}, "must be one of: disk, mooncake, object, redis, shelf"),
        ({"type": "shelf", "flow": "up"}, "tiers[0].flow = 'up': must be one of"),
        ({"type": "shelf", "eviction_policy": "none"}, "eviction_policy = 'none': unknown policy"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tier: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.from_mapping({"cpu_bytes_to_use": 4096, "tiers": [tier]})
    assert said in str(refused.value)


async def test_a_value_that_the_tier_refuses_is_an_error_of_the_configuration(
    open_store: Open,
) -> None:
    with pytest.raises(ConfigError, match="tier 'shelf': boards must be at least 1"):
        async with open_store(tiers=[{"type": "shelf", "boards": 0}]):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("kind", ["disk", "shelf", "redis"])
async def test_a_tier_wants_an_identity(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    tier = {"disk": {"path": cache, "capacity_bytes": 2**21, "segment_bytes": 2**17}}
    config = small(cache, tiers=[{"type": kind, **tier.get(kind, {})}])
    del config["identity"]
    with pytest.raises(ConfigError, match=r"missing key identity: .*; \{\} shares"):
        async with kvstore.open(config):
            pass
    with pytest.raises(ConfigError, match="missing key identity"):
        kvstore.open_sync(config)
    with pytest.raises(ConfigError, match="missing key identity"):
        KVStoreManager(config)
    assert not cache.exists()


async def test_two_models_on_one_path_find_nothing_of_each_other(
    open_store: Open, tmp_path: Path
) -> None:
    keys = keys_of("a", 4)
    await on_disk(open_store, keys, disk=16, identity={"model": "one"})
    for identity, found in (({"model": "other"}, 0), ({}, 0), ({"model": "one"}, 4)):
        async with open_store(disk=16, identity=identity) as store:
            assert await store.resolve(keys) == found


async def test_host_memory_alone_wants_no_identity(open_store: Open) -> None:
    async with open_store(tiers=[], identity=None) as store:
        assert await store.put(keys_of("a", 1), payloads(keys_of("a", 1))) == 1


def test_a_tier_can_be_registered_without_a_package() -> None:
    import shelf  # type: ignore[import-not-found]

    class Own(shelf.Shelf):  # type: ignore[misc]
        name = "own"

    assert tiering.register_tier(Own) is Own
    assert tiering.tier_names() == ["disk", "mooncake", "object", "own", "redis", "shelf"]


def ending(ended: list[str], name: str, *, raises: bool = False) -> Any:
    """A kind of tier that tells when it is abandoned, and perhaps raises then."""
    import shelf

    class Ending(shelf.Shelf):  # type: ignore[misc]
        def abandon(self) -> None:
            ended.append(name)
            if raises:
                raise AttributeError("no connection")

    Ending.name = name
    return Ending


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("opens not", r"open raised TimeoutError\('no route'\)"),
        ("opens later", "open returned .*, not a RecoveredTier"),
        ("is not made", r"its constructor raised KeyError\('URL'\)"),
    ],
)
async def test_a_tier_that_fails_at_the_start_is_named_and_what_it_began_is_ended(
    open_store: Open, how: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    class Failing(ending(ended, "failing", raises=True)):  # type: ignore[misc]
        def __init__(self, place: TierPlace) -> None:
            super().__init__(place)
            if how == "is not made":
                raise KeyError("URL")

        def open(self, region: PinnedRegion) -> Any:
            if how == "opens later":
                return self.later()
            raise TimeoutError("no route")

        async def later(self) -> None: ...

    tiering.register_tier(Failing)
    tiering.register_tier(ending(ended, "sound"))
    with pytest.raises(ConfigError, match=told):
        await open_store(tiers=[{"type": "sound"}, {"type": "failing"}]).__aenter__()
    assert ended == (["sound", "failing"] if how != "is not made" else ["sound"])
    assert ("no connection" in caplog.text) == (how != "is not made")


@pytest.mark.parametrize("how", ["cancelled", "its loop is closed"])
def test_an_opening_that_is_given_up_ends_every_tier(open_store: Open, how: str) -> None:
    ended: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(ending(ended, "slow", raises=True)):  # type: ignore[misc]
        def open(self, region: PinnedRegion) -> Any:
            begun.set()
            goes_on.wait(PATIENCE)
            return super().open(region)

    tiering.register_tier(Slow)
    tiering.register_tier(ending(ended, "last"))
    loop = asyncio.new_event_loop()
    opening = loop.create_task(open_store(tiers=[{"type": "slow"}, {"type": "last"}]).__aenter__())
    loop.run_until_complete(asyncio.wait_for(loop.run_in_executor(None, begun.wait), PATIENCE))
    if how == "cancelled":
        opening.cancel()
        loop.run_until_complete(asyncio.wait([opening]))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    del opening
    goes_on.set()
    until(lambda: gc.collect() >= 0 and ended == ["slow", "last"])


def test_no_tier_takes_the_name_of_the_disk() -> None:
    class Disk(Tier):
        name = "disk"

    with pytest.raises(ValueError, match="'disk' is taken"):
        tiering.register_tier(Disk)


def test_what_an_entry_point_offers_must_be_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "shelf.py").write_text("Shelf = dict\n")
    with pytest.raises(ConfigError, match="is not a subclass of Tier"):
        Config.from_mapping({"cpu_bytes_to_use": 4096, "tiers": [{"type": "shelf"}]})


@pytest.mark.parametrize("name", ["chunk_bytes", "slot_bytes", "encryption"])
async def test_what_kvstore_adds_to_an_identity_may_not_stand_in_it(
    tmp_path: Path, name: str
) -> None:
    config = {**small(tmp_path, disk=16), "identity": {"model": "m", name: 1}}
    with pytest.raises(ConfigError, match=f"identity has '{name}', which kvstore adds itself"):
        async with kvstore.open(config):
            pass


@pytest.mark.parametrize("name", ["..", "a//b", ".x", "a b", "\ud800"])
async def test_a_namespace_is_the_name_of_a_folder_in_any_tier(tmp_path: Path, name: str) -> None:
    tiers = [{"type": "object", "url": tmp_path.as_uri()}]
    with pytest.raises(ConfigError, match="namespace name"):
        async with kvstore.open({**small(tmp_path), "namespace": name, "tiers": tiers}):
            pass
    async with kvstore.open({**small(tmp_path), "namespace": name, "tiers": []}):
        pass
