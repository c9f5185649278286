"""Encryption over the whole store: disks, shared stores, tools and a forgotten tenant."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import tenant_keys
from kvstore.errors import ConfigError, KVStoreError
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.maintenance.offline import compact
from kvstore.maintenance.survey import Progress, survey, verify
from kvstore.tiers.coding import Coder
from kvstore.tiers.keys import ID_BYTES, KeyRing, Secret, id_of, parse_keys, read_keys, write_keys
from kvstore.tiers.sealing import TAG_BYTES
from kvstore.types import Changes
from tests.patience import PATIENCE, until_async
from tests.store.support import contents, keys_of, payload, payloads, small
from tests.tools.support import command

KEYS = keys_of("prompt", 20)
ALICE, BOB = tenant_keys("alice", KEYS[:10]), tenant_keys("bob", KEYS[:10])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are looked at again, and what they do not open is noticed, without a pause."""
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("kvstore.engine.engine.FOLLOW_SECONDS", 0.01)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    for tenant in ("*", "alice", "bob"):
        assert command("keys", str(path), "--add", tenant).returncode == 0
    return path


def test_commands_at_once_lose_no_key_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    start = [sys.executable, "-m", "kvstore.tools", "keys", str(path), "--add"]
    names = [f"tenant-{number}" for number in range(5)]
    running = [subprocess.Popen([*start, name], stdout=subprocess.DEVNULL) for name in names]
    assert [one.wait() for one in running] == [0] * len(running)
    told = json.loads(command("keys", str(path), "--json").stdout)
    assert set(told["tenants"]) == {"*", *names}


def config(path: Path, keys: Path, **more: Any) -> dict[str, Any]:
    return small(path, rows=32, disk=64, encryption_keys=str(keys), tenants={}, **more)


async def fill(path: Path, keys: Path, names: list[bytes]) -> None:
    async with kvstore.open(config(path, keys)) as store:
        assert await store.put(names, payloads(names), durable=True) == len(names)


async def held(path: Path, keys: Path, names: list[bytes]) -> list[bytes]:
    """The chunks that are found, which are right."""
    found = []
    async with kvstore.open(config(path, keys)) as store:
        for name in names:
            got = await contents(store, [name])
            assert got in ([], [payload(name)])
            found += [name] * len(got)
    return found


def last(found: Any) -> Progress:
    (*_, end) = (each for each in found if isinstance(each, Progress))
    assert isinstance(end, Progress)
    return end


async def test_chunks_come_back_after_a_restart_and_only_with_the_keys(
    tmp_path: Path, keys_file: Path
) -> None:
    path = tmp_path / "kv"
    await fill(path, keys_file, ALICE + BOB)
    assert await held(path, keys_file, ALICE + BOB) == ALICE + BOB
    other = tmp_path / "other.toml"
    assert command("keys", str(other), "--add", "*").returncode == 0
    assert await held(path, other, ALICE + BOB) == []
    # Without encryption it is another namespace.
    async with kvstore.open(small(path, rows=32, disk=64, tenants={})) as store:
        assert store.contains(ALICE) == [False] * len(ALICE)
    assert len(survey(path)) == 2


async def test_a_tenant_that_is_forgotten_is_gone_at_once_for_everybody(
    tmp_path: Path, keys_file: Path
) -> None:
    path = tmp_path / "kv"
    await fill(path, keys_file, ALICE + BOB)
    began = time.monotonic()
    done = command("keys", str(keys_file), "--forget", "alice", "--json")
    assert time.monotonic() - began < PATIENCE
    assert set(json.loads(done.stdout)["tenants"]) == {"*", "bob"}
    assert await held(path, keys_file, ALICE + BOB) == BOB
    raw = b"".join(file.read_bytes() for file in path.rglob("*.safetensors"))
    for name in ALICE:
        assert payload(name)[:16] not in raw
    # What she stores from now on is kept with the key of all others.
    await fill(path, keys_file, ALICE)
    assert await held(path, keys_file, ALICE + BOB) == ALICE + BOB


@pytest.mark.parametrize("lane", ["own", "another's"])
async def test_a_tenant_that_is_forgotten_is_stored_anew_by_who_runs(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """What was stored durably is there after a restart, and nothing is taken for there before."""
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.01)
    path, more = tmp_path / "kv", tenant_keys("alice", keys_of("more", 40))
    async with (
        kvstore.open(config(path, keys_file)) as one,
        kvstore.open(config(path, keys_file)) as store,
    ):
        await (store if lane == "own" else one).put(ALICE, payloads(ALICE), durable=True)
        async with asyncio.timeout(PATIENCE):
            while not all(store.contains(ALICE)):
                await asyncio.sleep(0.05)
        # They leave host memory for others of hers.
        await store.put(more, payloads(more), durable=True)
        assert command("keys", str(keys_file), "--forget", "alice").returncode == 0
        async with asyncio.timeout(PATIENCE):
            # Not hers alone that others keep: they may have let them go before this one knows why.
            while any(store.contains(ALICE + more[1:])):
                # The keys are looked up again while they are used.
                await store.remove(more[:1])
                await store.put(more[:1], payloads(more[:1]), durable=True)
        assert await store.put(ALICE, payloads(ALICE), durable=True) == len(ALICE)
        await store.put(more, payloads(more), durable=True)
        assert await contents(store, ALICE) == payloads(ALICE)
    assert await held(path, keys_file, ALICE) == ALICE


def forget(keys_file: Path, gets: str) -> list[bytes]:
    """Take alice's key out, or put another in its place.

    Returns:
        The ids of what she stores with from then on, and of the keys of all others.
    """
    keys = parse_keys(read_keys(keys_file), "")
    (old,) = keys.pop("alice")
    new = bytes(reversed(old.material))
    if gets == "another key":
        keys["alice"] = [Secret(id_of(new), new)]
    write_keys(keys_file, keys)
    return [secret.id for secret in (*keys.get("alice", ()), *keys["*"])]


def config_of(kind: str, folder: Path, keys_file: Path) -> dict[str, Any]:
    """A configuration with a disk, or with a store alone."""
    its = config(folder / "kv", keys_file)
    if kind == "store":
        its["tiers"] = [{"type": "object", "url": (folder / "kv").as_uri(), "timeout_s": 60}]
    return its


async def check_found_anew(its: dict[str, Any]) -> None:
    """A later process finds three chunks that Alice has stored since, and none from before."""
    async with kvstore.open(its) as store:
        assert [await contents(store, [key]) for key in ALICE[:3]] == [
            [payload(key)] for key in ALICE[:3]
        ]
        assert [await contents(store, [key]) for key in ALICE[3:]] == [[]] * (len(ALICE) - 3)
        assert await contents(store, BOB) == payloads(BOB)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("flow", ["write-through", "demote", "exclusive"])
@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("gets", ["no key", "another key"])
async def test_what_is_in_host_memory_of_a_tenant_that_is_forgotten_goes_nowhere(
    tmp_path: Path,
    keys_file: Path,
    caplog: pytest.LogCaptureFixture,
    flow: str,
    kind: str,
    gets: str,
) -> None:
    """She may be forgotten and get a key between two looks at the keys."""
    if (kind, flow) == ("store", "exclusive"):
        pytest.skip("a store is shared")
    its = config_of(kind, tmp_path, keys_file)
    its["tiers"][0]["flow"] = flow
    async with kvstore.open(its) as store:
        await store.put(ALICE + BOB, payloads(ALICE + BOB))
        forget(keys_file, gets)
        # Nobody uses anything, and she is gone from host memory all the same.
        async with asyncio.timeout(PATIENCE):
            while any(store.contains(ALICE)):
                await asyncio.sleep(0.05)
        assert "chunks leave host memory" in caplog.text
        assert await contents(store, BOB) == payloads(BOB)
        await until_async(lambda: not store._core.hidden)
        # What she stores from now on is kept with that key, or the one of all others.
        assert await store.put(ALICE[:3], payloads(ALICE[:3]), durable=True) == 3
    await check_found_anew(its)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("gets", ["no key", "another key"])
async def test_what_is_being_written_when_a_tenant_is_forgotten_is_under_no_key_in_use(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str, gets: str
) -> None:
    """A write may wait for its thread until the tenant's chunks have left host memory."""
    gate, waits = threading.Event(), threading.Event()
    seals: list[bytes] = []
    rings: list[Any] = []
    real = Coder.encode

    def held(self: Coder, *args: Any) -> bytes:
        rings.append(self.sealer and self.sealer.keys)
        waits.set()
        assert gate.wait(PATIENCE)
        seals.append(real(self, *args))
        return seals[-1]

    monkeypatch.setattr(Coder, "encode", held)
    its = config_of(kind, tmp_path, keys_file)
    async with kvstore.open(its) as store:
        assert await store.put(ALICE[:2], payloads(ALICE[:2])) == 2
        await until_async(waits.is_set)
        in_use = forget(keys_file, gets)
        await until_async(lambda: not any(store.contains(ALICE[:2])))
        await until_async(lambda: not rings[0].owned[0])
        gate.set()
        await until_async(lambda: not store._core.in_flight and not store._core.hidden)
        assert seals
        assert {seal[TAG_BYTES:][:ID_BYTES] for seal in seals}.isdisjoint(in_use)
        # What she stores from now on is under that key, or the one of all others.
        assert await store.put(ALICE[:2], payloads(ALICE[:2]), durable=True) == 2
        assert seals[-1][TAG_BYTES:][:ID_BYTES] == in_use[0]


@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("gets", ["no key", "another key"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_what_is_put_before_the_core_lets_a_tenant_go_does_not_count_as_durable(
    tmp_path: Path,
    keys_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    gets: str,
    when: str,
) -> None:
    """From the moment on in which the keys have changed it is written with nobody's key."""
    told, gate, waits = threading.Event(), threading.Event(), threading.Event()
    tell, encode = KeyRing.forgotten, Coder.encode

    def held(self: Coder, *args: Any) -> bytes:
        waits.set()
        assert gate.wait(PATIENCE)
        return encode(self, *args)

    monkeypatch.setattr(KeyRing, "forgotten", lambda r: tell(r) if told.is_set() else Changes())
    monkeypatch.setattr(Coder, "encode", held)
    its = config_of(kind, tmp_path, keys_file)
    async with kvstore.open(its) as store:
        ring = store._assembly.tiers[0].key_ring
        assert ring is not None
        if when == "before":
            forget(keys_file, gets)
            ring.look()
        putting = asyncio.create_task(store.put(BOB + ALICE, payloads(BOB + ALICE), durable=True))
        await until_async(waits.is_set)
        if when == "meanwhile":
            forget(keys_file, gets)
            ring.look()
        gate.set()
        assert await putting == len(BOB)
        told.set()
        await until_async(lambda: not any(store.contains(ALICE)) and not store._core.hidden)
        # From now on what she stores is kept.
        assert await store.put(ALICE[:3], payloads(ALICE[:3]), durable=True) == 3
    await check_found_anew(its)


@pytest.mark.usefixtures("soon")
async def test_a_running_store_takes_new_keys_and_drops_old_ones(
    tmp_path: Path, keys_file: Path
) -> None:
    path = tmp_path / "kv"
    async with kvstore.open(config(path, keys_file, chunk_bytes=8192)) as store:
        sizes = 8192
        first = keys_of("first", 40)
        mine = tenant_keys("alice", first)
        assert await store.put(mine[:10], payloads(mine[:10], sizes), durable=True) == 10
        assert command("keys", str(keys_file), "--add", "alice").returncode == 0
        await asyncio.sleep(0.1)
        for start in (10, 20, 30):
            some = mine[start : start + 10]
            assert await store.put(some, payloads(some, sizes), durable=True) == 10
        # The first ones have left host memory: they are read with the older key.
        assert await contents(store, mine[:5]) == payloads(mine[:5], sizes)
    (namespace,) = survey(path)
    ids = {id: 0 for segment in namespace.lanes[0].segments for id in segment.key_ids}
    assert len(ids) == 2


async def test_tools_do_what_they_can_without_keys_and_all_with_them(
    tmp_path: Path, keys_file: Path
) -> None:
    path = tmp_path / "kv"
    await fill(path, keys_file, ALICE + BOB)
    end = last(verify(path))
    assert (end.chunks, end.unchecked) == (20, 20)
    assert last(verify(path, str(keys_file))).unchecked == 0
    told = command("verify", str(path)).stdout
    assert "20 chunks encrypted: read, but not checked; see --keys" in told
    assert "20 chunks, " in command("verify", str(path), "--keys", str(keys_file)).stdout
    shown = command("inspect", str(path)).stdout
    newest = parse_keys(read_keys(keys_file), "")["alice"][0].id.hex()
    assert newest in shown
    assert "aes-256-gcm" in shown
    one = command("show", str(path), ALICE[0].hex(), "--json")
    assert json.loads(one.stdout)["whole"] is None
    assert one.returncode == 0
    one = command("show", str(path), ALICE[0].hex(), "--json", "--keys", str(keys_file))
    assert json.loads(one.stdout)["whole"] is True
    assert command("show", str(path), ALICE[0].hex(), "--dtype", "uint8").returncode == 2
    (done,) = compact(path)
    assert done.result is not None
    assert done.result.dropped == 0
    assert await held(path, keys_file, ALICE + BOB) == ALICE + BOB


async def test_a_changed_chunk_is_a_fault_with_keys_and_not_checked_without(
    tmp_path: Path, keys_file: Path
) -> None:
    path = tmp_path / "kv"
    await fill(path, keys_file, ALICE)
    (segment, *_) = survey(path)[0].lanes[0].segments
    with open(segment.path, "r+b") as file:
        file.seek(-10, 2)
        file.seek(4096 + -(-segment.slots * 128 // 4096) * 4096 + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert not [each for each in verify(path) if not isinstance(each, Progress)]
    faults = [each for each in verify(path, str(keys_file)) if not isinstance(each, Progress)]
    assert [str(fault).partition(" slot ")[2] for fault in faults] == [
        f"0: payload does not match its seal (key {ALICE[-1].hex()})"
    ] or len(faults) == 1


async def test_a_bundle_stays_encrypted_and_is_imported_with_the_keys(
    tmp_path: Path, keys_file: Path
) -> None:
    path, file, there = tmp_path / "kv", tmp_path / "bundle", tmp_path / "there"
    await fill(path, keys_file, ALICE + BOB)
    async with kvstore.open(config(path, keys_file)) as store:
        # Its chunks are of a later epoch than those of the cache that takes them.
        await store.reset()
        assert await store.put(ALICE, payloads(ALICE), durable=True) == len(ALICE)
    assert export_bundle(path, file).chunks == len(ALICE)
    raw = file.read_bytes()
    assert not any(payload(name)[:16] in raw for name in ALICE)
    with pytest.raises(KVStoreError, match="--keys"):
        import_bundle(file, there)
    done = command("import", str(file), str(there), "--keys", str(keys_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert await held(there, keys_file, ALICE + BOB) == ALICE
    stranger = tmp_path / "stranger.toml"
    assert command("keys", str(stranger), "--add", "*").returncode == 0
    with pytest.raises(KVStoreError, match="encrypted with keys that .*stranger.toml has not"):
        import_bundle(file, tmp_path / "elsewhere", keys=str(stranger))
    assert not (tmp_path / "elsewhere").exists()
    plain = tmp_path / "plain"
    async with kvstore.open(small(plain, disk=64)) as store:
        await store.put(KEYS[:4], payloads(KEYS[:4]), durable=True)
    export_bundle(plain, tmp_path / "plain-bundle")
    with pytest.raises(KVStoreError, match="not encrypted"):
        import_bundle(tmp_path / "plain-bundle", there, keys=str(keys_file))


async def test_what_is_not_encrypted_is_not_taken_for_it(tmp_path: Path, keys_file: Path) -> None:
    """Neither from a bundle nor from a segment that somebody has planted."""
    path, file = tmp_path / "kv", tmp_path / "bundle"
    await fill(path, keys_file, ALICE)
    (namespace,) = survey(path)
    # Somebody makes a plain cache, and says that it is that one.
    evil = tmp_path / "evil"
    async with kvstore.open(small(evil, rows=32, disk=64, tenants={})) as store:
        await store.put(ALICE, [b"EVIL" * 1024] * len(ALICE), durable=True)
    (plain,) = survey(evil)
    export_bundle(evil, file)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"]["identity"] = json.dumps(namespace.identity)
    header["__metadata__"]["namespace"] = namespace.name
    header["__metadata__"]["digest"] = namespace.digest
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(KVStoreError, match="encrypted, or not, other than it says"):
        import_bundle(file, tmp_path / "there", keys=str(keys_file))
    segment = Path(plain.lanes[0].segments[0].path)
    planted = Path(namespace.lanes[0].path) / "segment-77.safetensors"
    assert namespace.digest is not None
    assert plain.digest is not None
    page = segment.read_bytes().replace(plain.digest.encode(), namespace.digest.encode(), 1)
    planted.write_bytes(page)
    faults = [each for each in verify(path, str(keys_file)) if not isinstance(each, Progress)]
    assert "other than its namespace" in str(faults[0])
    export_bundle(path, file, replace=True)
    assert b"EVIL" not in file.read_bytes()
    assert await held(path, keys_file, ALICE) == ALICE


async def test_hosts_with_the_keys_share_a_store_that_cannot_read_it(
    tmp_path: Path, keys_file: Path
) -> None:
    pytest.importorskip("obstore")
    shared = tmp_path / "shared"
    store_tier = {"type": "object", "url": shared.as_uri()}

    def host(keys: Path) -> dict[str, Any]:
        return {**small(tmp_path / "none"), "tiers": [store_tier], "encryption_keys": str(keys)}

    single = tmp_path / "single.toml"
    write_keys(single, {"*": parse_keys(read_keys(keys_file), "")["*"]})
    async with kvstore.open(host(single)) as store:
        assert await store.put(KEYS[:8], payloads(KEYS[:8]), durable=True) == 8
    values = [file.read_bytes() for file in shared.rglob("*") if file.is_file()]
    assert not any(payload(key)[:16] in value for key in KEYS[:8] for value in values)
    async with kvstore.open(host(single)) as store:
        assert await store.resolve(KEYS) == 8
        assert await contents(store, KEYS[:8]) == payloads(KEYS[:8])
    write_keys(single, {"*": [Secret(id_of(bytes(32)), bytes(32))]})
    async with kvstore.open(host(single)) as store:
        assert await contents(store, KEYS[:8]) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encryption_keys": "no/such/file"}, "no/such/file"),
        ({"encryption_keys": ""}, "encryption_keys"),
        ({"encryption_keys": 3}, "encryption_keys"),
        ({"encryption_keys": "env:NO_SUCH_KEYS"}, "NO_SUCH_KEYS"),
    ],
)
async def test_keys_that_cannot_be_used_are_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        async with kvstore.open(small(tmp_path / "kv", disk=64, **change)):
            pass


async def test_keys_for_no_tier_are_refused(tmp_path: Path, keys_file: Path) -> None:
    """Nobody would look whether a tenant is forgotten."""
    with pytest.raises(ConfigError, match="encryption_keys: there is no tier"):
        async with kvstore.open(
            {**small(tmp_path), "tenants": {}, "encryption_keys": str(keys_file)}
        ):
            pass


async def test_a_tier_that_does_not_encrypt_is_refused(tmp_path: Path, keys_file: Path) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    single = tmp_path / "single.toml"
    write_keys(single, {"*": parse_keys(read_keys(keys_file), "")["*"]})
    settings = {**small(tmp_path / "none"), "encryption_keys": str(single)}
    with pytest.raises(ConfigError, match="does not encrypt"):
        async with kvstore.open({**settings, "tiers": [{"type": "mooncake"}]}):
            pass
