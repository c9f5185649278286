"""Servers, operators, an enemy and a store under one seed: no promise is broken.

    KVSTORE_WORLD=159,160 pytest tests/world/test_world.py

runs these seeds and no others; `make world` runs a thousand. The second half proves that the
world can fail: it takes one rule away and expects that a seed notices.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.api.put import Puts
from kvstore.core.cascade import Cascades
from kvstore.core.residency.slots import Slots
from kvstore.tiers.coding import Coder
from kvstore.tiers.disk import epoch, extents, lane, recovery, segment
from kvstore.tiers.disk.format import LiveRecords
from kvstore.tiers.disk.index import IndexFile
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.volume import Volume
from kvstore.tiers.remote.sweeper import Sweeper
from tests.world.kernel import Thread
from tests.world.world import BrokenError, World

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

told = os.environ.get("KVSTORE_WORLD")
SEEDS = range(20) if told is None else [int(seed) for seed in told.split(",")]
ACTS = 600

PATIENCE = 60
"""Seeds within which a rule that was taken away is missed."""


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """What the last test still held is destroyed here, and not at the end of the process."""
    yield
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "unraisablehook", lambda told: None)
        warnings.simplefilter("ignore", RuntimeWarning)
        # The garbage of a test may be among what the next one has frozen.
        gc.unfreeze()
        while gc.collect():
            pass
        gc.freeze()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_is_broken(seed: int) -> None:
    World(seed).run(ACTS)


def story(seed: int) -> list[str]:
    world = World(seed)
    world.run(200)
    return list(world.story)


def test_the_same_seed_is_the_same_story() -> None:
    assert story(5) == story(5) != story(6)


# -- a rule is taken away -------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]

BREAKS: dict[str, Break] = {}

WORLDS: dict[str, dict[str, Any]] = {}
"""In what kind of world a rule is missed soon: see `World`."""

FIRST: dict[str, int] = {}
"""The seed that is tried first, where those from 0 on take long to miss a rule."""


def without(rule: str, first: int = 0, **world: Any) -> Callable[[Break], Break]:
    def register(make: Break) -> Break:
        BREAKS[rule], WORLDS[rule], FIRST[rule] = make, world, first
        return make

    return register


@without("payloads are compared with their digests")
def _(patch: pytest.MonkeyPatch) -> None:
    def verified(backend: Any, extent: Any, raw: Any, done: Any) -> extents.Outcome:
        if isinstance(raw, OSError) or isinstance(done, OSError):
            return extents.Outcome([False] * len(extent.keys), [], "no")
        return extents.Outcome([True] * len(extent.keys), [], None)

    patch.setattr(extents, "_verified", verified)


@without(
    "the oldest leave a store that is full",
    often=["heal"],
    shape={"server": True, "bound": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Sweeper, *what: object) -> None:
        return

    patch.setattr(Sweeper, "_remove_oldest", nothing)


@without("records are of one epoch", first=23)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveRecords, "of_epoch", lambda self, *epochs: self)
    chunks = IndexFile.chunks

    def any_epoch(self: IndexFile, first: int, raw: bytes, epoch: int) -> Any:
        found = [chunks(self, first, raw, each) for each in range(8)]
        return {slot: its for each in found for slot, its in each.items()}

    patch.setattr(IndexFile, "chunks", any_epoch)


@without("a reset is on the medium before it ends", first=11)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epoch, "_write", lambda folder, number: None)


@without("a lane has one owner", first=38, often=["start"], shape={"server": False})
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane, "_locked", lambda fd, kind: True)


@without("the capacity is a limit")
def _(patch: pytest.MonkeyPatch) -> None:
    forget = Volume.forget_recovered

    def more(self: Volume) -> None:
        forget(self)
        self.max_segments += 2

    patch.setattr(Volume, "forget_recovered", more)


@without("files are closed")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "close", lambda self: None)


@without(
    "a removed chunk's record is erased",
    often=["remove", "start"],
    shape={"alone": True, "server": False, "calm": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IndexFile, "erase_keys", lambda self, keys: 0)


@without("an old record is erased before its slot is written", first=39, often=["put"])
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IndexFile, "erase", lambda self, first, count: None)
    patch.setattr(extents, "_write_records", lambda *told: None)


@without("a header is written whole", only="short")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segment, "write_whole", lambda fd, data, at: os.pwrite(fd, data[0], at))


@without("a folder that cannot be listed is an error of the path", only="list")
def _(patch: pytest.MonkeyPatch) -> None:
    def listed(folder: Path) -> None:
        os.listdir(folder)

    patch.setattr("kvstore.tiers.disk.namespace._remove_leftovers", listed)


@without("a lock that cannot be had is an error of the path", only="lock")
def _(patch: pytest.MonkeyPatch) -> None:
    def plain(folder: Path, trust: Any) -> int | None:
        fd = os.open(folder / lane.LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        if not lane._take(fd):
            os.close(fd)
            return None
        return fd

    patch.setattr(lane, "_lock", plain)


@without(
    "what is durable is on a disk of one's own",
    first=44,
    often=["put"],
    shape={"roomy": True, "share": True, "server": False, "calm": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    save_to = Cascades.save_to

    def shared(self: Cascades, target: Any, chunks: Any, now: float) -> None:
        save_to(self, target, self._not_shared(list(chunks)), now)

    async def save(self: Puts, keys: Any) -> int:
        self._core.save_first(keys)
        self._driver.pump()
        return sum(self.has(key) for key in keys)

    patch.setattr(Cascades, "save_to", shared)
    patch.setattr(Puts, "save", save)


@without(
    "a durable put waits for the disk",
    first=44,
    often=["put"],
    shape={"roomy": True, "share": True, "server": False, "calm": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    async def save(self: Puts, keys: Any) -> int:
        return len(keys)

    patch.setattr(Puts, "save", save)


@without("a record that is moved keeps its epoch", first=31)
def _(patch: pytest.MonkeyPatch) -> None:
    place = IndexFile.place

    def newer(self: IndexFile, records: Any, slot: int) -> None:
        moved = records.copy()
        moved["epoch"] += 1
        place(self, moved, slot)

    patch.setattr(IndexFile, "place", newer)


@without(
    "a store's value is compared with its record", only="rot", often=["net"], shape={"server": True}
)
def _(patch: pytest.MonkeyPatch) -> None:
    for module in ("tier", "record"):
        patch.setattr(f"kvstore.tiers.remote.{module}.digest", lambda payload: bytes(16))


@without("what was encoded is decoded", shape={"coded": True})
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coder, "decode", lambda self, row: None)


# -- faults that there were, put back -------------------------------------------------------


@without(
    "compact knows the epoch of its namespace",
    often=["reset", "operate", "kill"],
    shape={"server": False, "calm": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    real = recovery.recover

    def recover(*args: Any, **named: Any) -> Any:
        if Thread.kernel.process.name == "operator":
            args = args[:6]
            named.pop("epoch", None)
        return real(*args, **named)

    patch.setattr("kvstore.tiers.disk.volume.recover", recover)


@without("a lane without threads is let go of", only="threads")
def _(patch: pytest.MonkeyPatch) -> None:
    close_files = Volume.close_files

    def close(self: Volume) -> None:
        if not isinstance(sys.exc_info()[1], RuntimeError):
            close_files(self)

    patch.setattr(Volume, "close_files", close)


@without(
    "a slot that cannot be written is set aside",
    first=8,
    only="bad",
    without=["pin", "control", "freeze", "kill", "end"],
    shape={"server": False},
)
def _(patch: pytest.MonkeyPatch) -> None:
    set_aside = Slots.set_aside

    def at_once(self: Slots, slots: Any, now: float) -> None:
        set_aside(self, slots, now)
        self.give_aside(self.aside)

    patch.setattr(Slots, "set_aside", at_once)


@without(
    "a value that was found damaged is written anew",
    only="rot",
    often=["net", "heal"],
    shape={"server": True},
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvstore.tiers.remote.suspects.MOST_KEYS", 0)


@without(
    "a segment that lacks a descriptor is no foreign file",
    first=67,
    only="descriptors",
    without=["relieve"],
    shape={"roomy": False, "alone": True, "server": False},
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "NO_DESCRIPTORS", ())


def test_the_story_does_not_depend_on_the_order_of_sets() -> None:
    """Of strings they are ordered by a hash that is another one in each process."""
    command = [sys.executable, "-m", "tests.world", "--seed", "5", "--acts", "1000"]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for seed in ("0", "1")
    ]
    one, other = (each.communicate()[0] for each in running)
    assert one == other


@pytest.mark.parametrize("rule", BREAKS)
def test_a_rule_that_is_taken_away_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[rule](monkeypatch)
    seeds = range(FIRST[rule], FIRST[rule] + PATIENCE)
    assert any(breaks(seed, **WORLDS[rule]) for seed in seeds), "no seed notices"


def breaks(seed: int, **world: Any) -> bool:
    try:
        World(seed, **world).run(ACTS)
    except BrokenError:
        return True
    return False
