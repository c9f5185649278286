"""Encryption at rest: what opens, what does not, and what is left of chunks whose key is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.maintenance.compaction import compact_lane
from kvstore.policies.shares import tag_of, tenant_keys
from kvstore.testing.bench import TierBench, key_of, payload_of
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import PeerLanes
from kvstore.tiers.disk.extents import Extent, Writing
from kvstore.tiers.disk.format import RECORD, RECORD_BYTES, checksummed
from kvstore.tiers.disk.index import IndexFile, read_index
from kvstore.tiers.disk.volume import Volume
from kvstore.tiers.keys import KeyRing, Secret, id_of, parse_keys, read_keys, write_keys
from kvstore.tiers.pages import Scratch
from kvstore.tiers.sealing import TAG_BYTES, Sealer
from kvstore.types import Changes
from tests.patience import PATIENCE
from tests.tiers.conftest import OpenBench
from tests.tiers.support import CHUNK, GEOMETRY, SLOT, SLOTS, disk_of, flip, lane_of, segment_of

FORGERIES = 10_000

ALICE = tenant_keys("alice", [key_of(number) for number in range(SLOTS // 2)])
BOB = tenant_keys("bob", [key_of(number) for number in range(SLOTS // 2)])
KEYS = [*ALICE, *BOB]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """The keys of alice, of bob and of all others."""
    path = tmp_path / "keys.toml"
    write_keys(path, {name: [secret()] for name in ("*", "alice", "bob")})
    return path


def secret() -> Secret:
    material = os.urandom(32)
    return Secret(id_of(material), material)


def change(path: Path, **keys: list[Secret] | None) -> None:
    """Change the keys of some tenants, or take them out."""
    table: dict[str, Any] = parse_keys(read_keys(path), "")
    table |= keys
    write_keys(path, {name: its for name, its in table.items() if its is not None})


def ring(path: Path) -> KeyRing:
    return KeyRing(str(path), tag_of)


@pytest.fixture
async def stored(folder: Path, open_bench: OpenBench, keys_file: Path) -> Path:
    """A cache with the chunks of alice and bob in segment 0."""
    bench = open_bench(keys=ring(keys_file))
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    await bench.close([(key, slot) for slot, key in enumerate(KEYS)])
    return folder


async def served(bench: TierBench, keys: list[bytes] = KEYS) -> list[bytes]:
    """The chunks that are reported and served."""
    entries = dict(bench.opening.entries)
    found = [key for key in keys if key in entries]
    ok = await bench.fetch(found, [entries[key] for key in found])
    return [key for key, one in zip(found, ok, strict=True) if one]


# -- what is on disk ---------------------------------------------------------------------------


async def test_no_payload_is_readable_on_disk_and_all_come_back(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    raw = segment_of(stored).read_bytes()
    for key in KEYS:
        payload = payload_of(key, CHUNK)
        assert not any(payload[at : at + 16] in raw for at in range(0, CHUNK - 16, 256))
    assert await served(open_bench(keys=ring(keys_file))) == KEYS


async def test_the_same_payload_is_never_sealed_alike(
    folder: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    bench = open_bench(keys=ring(keys_file))
    seen = set()
    for _ in range(20):
        assert all((await bench.store(KEYS[:1], [0])).ok)
        raw = segment_of(folder).read_bytes()
        seen.add(raw[GEOMETRY.blocks_offset : GEOMETRY.blocks_offset + CHUNK])
        _, live, _ = read_index(segment_of(folder))
        seen.add(live.digests()[0])
    assert len(seen) == 40


async def test_a_plain_cache_is_not_taken_for_an_encrypted_one(
    folder: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """Not even where the namespace says the same: nobody vouches for its bytes."""
    bench = open_bench()
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    await bench.close()
    assert open_bench(keys=ring(keys_file)).opening.entries == []


# -- forgeries ---------------------------------------------------------------------------------


class Forger:
    """Somebody who owns the folder: writes any bytes into a segment, with checksums that fit."""

    def __init__(self, path: Path, seed: int, dice: random.Random) -> None:
        self._path, self._seed, self._dice = path, seed, dice
        self.before: dict[int, tuple[Any, bytes]] = {}

    def read(self, slot: int) -> tuple[Any, bytes]:
        with self._path.open("rb") as file:
            file.seek(GEOMETRY.index_offset + slot * RECORD_BYTES)
            record = np.frombuffer(file.read(RECORD_BYTES), RECORD).copy()
            file.seek(GEOMETRY.blocks_offset + slot * SLOT)
            return record, file.read(SLOT)

    def write(self, slot: int, record: Any, payload: bytes) -> None:
        record = record.copy()
        record["slot"] = slot
        with self._path.open("r+b") as file:
            file.seek(GEOMETRY.index_offset + slot * RECORD_BYTES)
            file.write(checksummed(record, self._seed))
            file.seek(GEOMETRY.blocks_offset + slot * SLOT)
            file.write(payload)

    def _other(self, slot: int) -> int:
        return self._dice.choice([other for other in range(SLOTS) if other != slot])

    def alter_payload(self, slot: int) -> None:
        record, payload = self.read(slot)
        changed = bytearray(payload)
        changed[self._dice.randrange(CHUNK)] ^= 1 << self._dice.randrange(8)
        self.write(slot, record, bytes(changed))

    def alter_seal(self, slot: int) -> None:
        record, payload = self.read(slot)
        raw = bytearray(record.tobytes())
        where = [*range(16, 40), *range(120, 124)]
        raw[self._dice.choice(where)] ^= 1 << self._dice.randrange(8)
        self.write(slot, np.frombuffer(bytes(raw), RECORD), payload)

    def swap_payload(self, slot: int) -> None:
        self.write(slot, self.read(slot)[0], self.read(self._other(slot))[1])

    def plant(self, slot: int) -> None:
        """Another chunk, perhaps of another tenant, under the key of this one."""
        record, payload = self.read(self._other(slot))
        record["key"] = self.read(slot)[0]["key"]
        self.write(slot, record, payload)

    def replay(self, slot: int) -> None:
        """What was there before, under the same key."""
        self.write(slot, *self.before[slot])


async def test_forged_records_and_payloads_are_refused(
    folder: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    bench = open_bench(keys=ring(keys_file))
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    segment = disk_of(bench).volumes[0].segments[0]
    dice = random.Random(1)
    forger = Forger(segment_of(folder), segment.seed, dice)
    forger.before = {slot: forger.read(slot) for slot in range(SLOTS)}
    assert all((await bench.store(KEYS, range(SLOTS))).ok)
    ways: list[Callable[[int], None]] = [
        forger.alter_payload,
        forger.alter_seal,
        forger.swap_payload,
        forger.plant,
        forger.replay,
    ]
    whole = {slot: forger.read(slot) for slot in range(SLOTS)}
    for number in range(FORGERIES):
        slot, way = dice.randrange(SLOTS), ways[number % len(ways)]
        way(slot)
        assert await bench.fetch([KEYS[slot]], [slot]) == [False], way.__name__
        forger.write(slot, *whole[slot])
        if not number % 50:
            assert await bench.fetch(KEYS, range(SLOTS)) == [True] * SLOTS


async def test_what_was_replayed_while_nobody_looked_is_the_chunk_that_it_says(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """Rolled back as a whole, a folder is an older state of itself: right bytes, as ever."""
    old = segment_of(stored).read_bytes()
    bench = open_bench(keys=ring(keys_file))
    others = [key_of(number) for number in range(100, 100 + SLOTS)]
    assert all((await bench.store(others, range(SLOTS))).ok)
    bench.abandon()
    segment_of(stored).write_bytes(old)
    assert await served(open_bench(keys=ring(keys_file))) == KEYS


async def test_another_epoch_does_not_open(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """A chunk from before a reset stays gone, whatever its record says."""
    bench = open_bench(keys=ring(keys_file))
    await bench.tier.clear()
    epoch = disk_of(bench).epoch
    assert epoch > 0
    forger = Forger(segment_of(stored), disk_of(bench).volumes[0].segments[0].seed, random.Random())
    record, payload = forger.read(0)
    record["epoch"] = epoch
    forger.write(0, record, payload)
    assert await bench.fetch(KEYS[:1], [0]) == [False]


# -- keys that come and go -----------------------------------------------------------------------


async def test_without_its_key_a_chunk_is_not_found_and_its_slot_is_free(
    stored: Path, open_bench: OpenBench, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(keys_file, alice=None)
    bench = open_bench(keys=ring(keys_file))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [key for key, _ in bench.opening.entries] == BOB
    assert await served(bench) == BOB


@pytest.mark.parametrize("epochs", [1, 3])
async def test_what_is_stored_anew_counts_for_more_than_what_is_under_a_lost_key(
    folder: Path, open_bench: OpenBench, keys_file: Path, epochs: int
) -> None:
    """`compact` knows no keys: of two copies it keeps the one of the higher sequence."""
    bench = open_bench(keys=ring(keys_file))
    for _ in range(epochs):
        assert all((await bench.store(KEYS, range(SLOTS))).ok)
    await bench.close([(key, slot) for slot, key in enumerate(KEYS)])
    change(keys_file, **{name: [secret()] for name in ("*", "alice", "bob")})
    bench = open_bench(keys=ring(keys_file))
    assert bench.opening.entries == []
    assert (await bench.tier.grow())[0] == 1
    assert all((await bench.store(KEYS, range(SLOTS, 2 * SLOTS))).ok)
    bench.abandon()
    compact_lane(lane_of(folder))
    bench = open_bench(keys=ring(keys_file))
    assert await served(bench) == KEYS


async def test_a_key_of_its_own_takes_nothing_from_a_tenant(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """What she stored before stays readable, and goes under her key when it is moved."""
    mine = parse_keys(read_keys(keys_file), "")["alice"]
    change(keys_file, alice=None)
    bench = open_bench(keys=ring(keys_file))
    assert all((await bench.store(ALICE, range(len(ALICE)))).ok)
    assert await disk_of(bench).outdated_segments() == []
    change(keys_file, alice=mine)
    assert await disk_of(bench).outdated_segments() == [0]
    assert await bench.fetch(ALICE, range(len(ALICE))) == [True] * len(ALICE)
    assert (await bench.tier.grow())[0] == 1
    done = await bench.tier.relocate(KEYS, range(SLOTS), range(SLOTS, 2 * SLOTS))
    assert done.ok == [True] * SLOTS
    ids = read_index(segment_of(stored, 1))[1].key_ids()
    assert ids[: len(ALICE)] == [mine[0].id.hex()] * len(ALICE)


async def test_a_write_under_way_counts_as_under_its_key(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """Who looks for what is under older keys must not miss what is about to be there."""
    bench = open_bench(keys=ring(keys_file))
    await bench.tier.clear()
    volume = disk_of(bench).volumes[0]
    segment = volume.segments[0]
    assert segment.nonces is not None
    segment.nonces[:] = 0
    rows = [bench.region.row(row) for row in bench.fill(ALICE)]
    writing = Writing(segment.backend, [Extent(segment, 0, ALICE, rows)], 1, volume.coder)
    assert not segment.sealed_with(set())
    assert all(writing.end()[0].ok)
    assert not segment.sealed_with(set())


async def test_a_key_that_is_forgotten_while_serving_opens_nothing_more(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    keys = ring(keys_file)
    bench = open_bench(keys=keys)
    assert await served(bench) == KEYS
    change(keys_file, alice=None)
    keys.look()
    done = await bench.tier.read(KEYS, range(SLOTS), range(SLOTS))
    assert done.ok == [False] * len(ALICE) + [True] * len(BOB)
    # Not damaged, for all that is known: the records stay.
    assert done.unread == list(range(len(ALICE)))
    assert done.error is not None
    assert "keys that are not known" in done.error
    assert len(read_index(segment_of(stored))[1].slots) == SLOTS


async def news_of(tier: Tier) -> Changes:
    """All that has changed."""
    found = Changes()
    while more := await tier.refresh():
        found.appeared += more.appeared
        found.gone += more.gone
        found.lost += more.lost
        found.forgotten += more.forgotten
        more.end()
    return found


async def test_chunks_whose_key_is_forgotten_while_serving_are_told(
    stored: Path, open_bench: OpenBench, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ring(keys_file)
    bench = open_bench(keys=keys)
    assert disk_of(bench).refreshes
    assert not await bench.tier.refresh()
    change(keys_file, alice=[secret(), *parse_keys(read_keys(keys_file), "")["alice"]])
    keys.look()
    assert not await bench.tier.refresh()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    change(keys_file, alice=None)
    keys.look()
    lost_to_alice = list(zip(ALICE, range(SLOTS), strict=False))
    assert await news_of(bench.tier) == Changes(lost=lost_to_alice, forgotten=[tag_of("alice")])
    assert f"{len(ALICE)} chunks in" in caplog.text
    # What is stored anew is under a key that is known.
    assert all((await bench.store(ALICE[:1], [0])).ok)
    change(keys_file, bob=None)
    keys.look()
    lost = dict((await news_of(bench.tier)).lost)
    assert set(lost) == {*ALICE[1:], *BOB}
    told = caplog.text.count("are encrypted with keys that are not known")
    change(keys_file, carol=[secret()])
    keys.look()
    assert set(dict((await news_of(bench.tier)).lost)) == set(lost)
    assert told == caplog.text.count("are encrypted with keys that are not known") == 2
    # A lane that is opened has no use for them.
    await bench.close([])
    assert not await open_bench(keys=ring(keys_file)).tier.refresh()


async def test_until_the_core_has_removed_what_is_forgotten_nobody_can_open_what_is_written(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    """Chunks of hers may be in host memory, and on their way to the disk."""
    keys = ring(keys_file)
    bench = open_bench(keys=keys)
    sealer = disk_of(bench).sealer
    assert sealer is not None
    before = keys.ids()
    change(keys_file, alice=None)
    keys.look()
    changes = await bench.tier.refresh()
    assert changes.forgotten == [tag_of("alice")]
    for key, known in [(ALICE[0], False), (BOB[0], True)]:
        seal = sealer.seal(key, 0, memoryview(bytes(CHUNK)), memoryview(bytearray(CHUNK)))
        assert (seal[TAG_BYTES:][:4] in before) == known
    changes.end()
    for name in ("alice", "carol"):
        key = tenant_keys(name, [b"key"])[0]
        seal = sealer.seal(key, 0, memoryview(bytes(CHUNK)), memoryview(bytearray(CHUNK)))
        assert seal[TAG_BYTES:][:4] in keys.ids()
        assert sealer.has_key(key, seal)
    # Told once, whoever asks.
    assert not (await bench.tier.refresh()).forgotten
    assert not ring(keys_file).forgotten()


async def test_a_key_that_becomes_a_tenants_own_opens_nothing_of_others(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    mine = parse_keys(read_keys(keys_file), "")["bob"]
    change(keys_file, alice=None, bob=None, **{"*": mine})
    keys = ring(keys_file)
    bench = open_bench(keys=keys)
    assert await served(bench) == BOB
    change(keys_file, carol=mine, **{"*": [secret()]})
    keys.look()
    assert [key for key, _ in (await news_of(bench.tier)).lost] == KEYS
    await bench.close([])
    assert open_bench(keys=ring(keys_file)).opening.entries == []


async def without_alice(open_bench: OpenBench, keys_file: Path) -> TierBench:
    """A tier that was told that a key is forgotten, and has not looked for its chunks yet."""
    keys = ring(keys_file)
    bench = open_bench(keys=keys)
    change(keys_file, alice=None)
    keys.look()
    assert (await bench.tier.refresh()).forgotten
    return bench


async def test_what_is_stored_in_place_of_a_lost_chunk_amid_a_look_is_not_lost(
    stored: Path, open_bench: OpenBench, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await without_alice(open_bench, keys_file)
    real, looked, goes_on = Volume.list_unreadable, threading.Event(), threading.Event()

    def held(*arguments: Any) -> list[tuple[bytes, int]]:
        found = real(*arguments)
        looked.set()
        goes_on.wait(PATIENCE)
        return found

    monkeypatch.setattr(Volume, "list_unreadable", held)
    looking = asyncio.create_task(news_of(bench.tier))
    await asyncio.to_thread(looked.wait, PATIENCE)
    # It was removed meanwhile, and is stored again with a key that is known.
    assert all((await bench.store(ALICE[:1], [0])).ok)
    goes_on.set()
    assert [key for key, _ in (await looking).lost] == ALICE[1:]


async def test_an_index_that_cannot_be_read_is_asked_again_for_lost_chunks(
    stored: Path, open_bench: OpenBench, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await without_alice(open_bench, keys_file)

    def fails(*_: object) -> None:
        raise OSError("no index")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.tiers.disk.index.IndexFile.live", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="no index"):
                await bench.tier.refresh()
    assert [key for key, _ in (await news_of(bench.tier)).lost] == ALICE


async def test_peers_read_each_other_but_for_chunks_whose_key_is_not_known(
    folder: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    keys = ring(keys_file)
    bench, other = open_bench(keys=keys), open_bench(keys=ring(keys_file))
    assert all((await other.store(KEYS, range(SLOTS))).ok)
    hers = parse_keys(read_keys(keys_file), "")["alice"]
    change(keys_file, alice=None)
    keys.look()
    peers = PeerLanes(disk_of(bench))
    places = dict(peers.open(bench.region).entries)
    assert set(places) == set(BOB)
    change(keys_file, alice=hers)
    keys.look()
    found = await news_of(peers)
    assert {key for key, _ in found.appeared} == set(ALICE)
    assert not found.gone
    places.update(found.appeared)
    bench.smear(range(SLOTS))
    done = await peers.read(KEYS, [places[key] for key in KEYS], range(SLOTS))
    assert done.ok == [True] * SLOTS
    assert all(bench.holds(row, key) for row, key in enumerate(KEYS))
    # A record that is erased before the next look is gone as well.
    assert await other.tier.erase(BOB[:1]) is None
    change(keys_file, alice=None)
    keys.look()
    assert set((await news_of(peers)).gone) == {*ALICE, BOB[0]}
    await peers.close([])


async def test_an_older_key_still_opens_and_the_newest_seals(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    old = parse_keys(read_keys(keys_file), "")["alice"][0]
    new = secret()
    change(keys_file, alice=[new, old])
    bench = open_bench(keys=ring(keys_file))
    assert await served(bench) == KEYS
    assert all((await bench.store(ALICE[:1], [0])).ok)
    ids = read_index(segment_of(stored))[1].key_ids()
    assert ids[: len(ALICE)] == [new.id.hex()] + [old.id.hex()] * (len(ALICE) - 1)


async def test_what_is_copied_to_another_slot_is_sealed_with_the_newest_key(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    old = parse_keys(read_keys(keys_file), "")["alice"][0]
    new = secret()
    change(keys_file, alice=[new, old])
    bench = open_bench(keys=ring(keys_file))
    assert (await bench.tier.grow())[0] == 1
    flip(segment_of(stored), GEOMETRY.blocks_offset + SLOT + 7)
    done = await bench.tier.relocate(KEYS, range(SLOTS), range(SLOTS, 2 * SLOTS))
    assert done.ok == [True, False] + [True] * (SLOTS - 2)
    assert done.unread == []
    left = [key for key in KEYS if key != KEYS[1]]
    slots = [SLOTS + KEYS.index(key) for key in left]
    assert await bench.fetch(left, slots) == [True] * len(left)
    await bench.close([])
    ids = read_index(segment_of(stored, 1))[1].key_ids()
    assert ids[: len(ALICE) - 1] == [new.id.hex()] * (len(ALICE) - 1)
    change(keys_file, alice=[new])
    bench = open_bench(keys=ring(keys_file))
    assert set(await served(bench)) == set(left)


async def test_without_keys_chunks_are_copied_as_they_are(
    stored: Path, open_bench: OpenBench, keys_file: Path
) -> None:
    bench = open_bench(sealed=True)
    assert (await bench.tier.grow())[0] == 1
    done = await bench.tier.relocate(KEYS, range(SLOTS), range(SLOTS, 2 * SLOTS))
    assert done.ok == [True] * SLOTS
    await bench.close([])
    segment_of(stored).unlink()
    assert set(await served(open_bench(keys=ring(keys_file)))) == set(KEYS)


def test_a_seal_is_of_one_place(keys_file: Path) -> None:
    """Neither another namespace nor another epoch, key or payload opens it."""
    keys = ring(keys_file)
    here, there = Sealer(keys, "here"), Sealer(keys, "there")
    payload = payload_of(KEYS[0], CHUNK)
    sealed = bytearray(CHUNK)
    seal = here.seal(KEYS[0], 3, memoryview(payload), memoryview(sealed))

    def opens(sealer: Sealer, key: bytes, epoch: int, told: bytes, size: int = CHUNK) -> bool:
        copy = bytearray(sealed[:size])
        good = sealer.open(key, epoch, told, memoryview(copy))
        assert not good or bytes(copy) == payload
        return good

    assert opens(here, KEYS[0], 3, seal)
    assert not opens(there, KEYS[0], 3, seal)
    assert not opens(here, KEYS[0], 4, seal)
    assert not opens(here, KEYS[1], 3, seal)
    assert not opens(here, BOB[0], 3, seal)
    assert not opens(here, KEYS[0], 3, seal, CHUNK - 1)
    assert not opens(here, KEYS[0], 3, seal[:-1])
    for at in range(len(seal)):
        other = bytearray(seal)
        other[at] ^= 1
        assert not opens(here, KEYS[0], 3, bytes(other))


def test_the_memory_of_sealed_payloads_is_used_again() -> None:
    scratch = Scratch()
    first = scratch.lend(10_000)
    assert len(first) >= 10_000
    second = scratch.lend(10_000)
    scratch.take_back(first)
    assert scratch.lend(5_000) is first
    scratch.take_back(second)
    # One that is too small gives way: there are never more than were lent at once.
    assert len(scratch.lend(len(first) + 1)) > len(first)
    assert scratch._memory == []


def test_the_index_of_a_sealed_segment_reads_only_sealed_records(
    stored: Path, tmp_path: Path
) -> None:
    header, live, _ = read_index(segment_of(stored))
    assert header.geometry.sealed
    assert live.damaged == []
    record = live.records[:1].copy()
    record["version"] = 1
    fd = os.open(segment_of(stored), os.O_RDWR)
    index = IndexFile(fd, header)
    try:
        index.place(record, 0)
        assert index.live(0, 1).damaged == [0]
        assert index.chunks(0, index.read(0, 1), 0) == {}
    finally:
        index.close()
