"""Commands on chunks and settings, over the socket of a store that serves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.control.commands import MOST_RUNNING
from kvstore.core.residency import compactor
from kvstore.errors import ConfigError
from kvstore.maintenance.survey import survey
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk import tier as disk_tier
from kvstore.tiers.disk.relocation import Relocated
from kvstore.tiers.keys import KeyRing, parse_keys, read_keys
from kvstore.tools.cli import main
from tests.control.test_server import at_path
from tests.patience import PATIENCE, until_async
from tests.store.support import CHUNK, keys_of, payload, payloads, small

A, B = keys_of("a", 4), keys_of("b", 4)


def named(keys: Sequence[bytes], **more: Any) -> dict[str, Any]:
    return {"keys": [key.hex() for key in keys], **more}


async def ask(session: aiohttp.ClientSession, command: str, **body: Any) -> dict[str, Any]:
    """The job of a command, once it has ended; or the answer to a dry run."""
    response = await session.post(f"/v1/{command}", json=body)
    told: dict[str, Any] = await response.json()
    assert response.status in (200, 202), told
    if response.status == 202:
        told = await (await session.get(f"/v1/jobs/{told['job']}?wait=60")).json()
    return told


async def in_host(store: Store, session: aiohttp.ClientSession, keys: Sequence[bytes]) -> int:
    told = await ask(session, "remove", **named(keys, dry_run=True))
    return int(told["places"].get("host", 0))


async def filled(store: Store, keys: Sequence[bytes]) -> None:
    await store.put(keys, payloads(keys))
    await store.flush()


async def test_chunks_leave_host_memory_come_back_and_are_removed(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=64) as (store, session):
        await filled(store, A)
        job = await ask(session, "demote", **named(A))
        assert (job["state"], job["keys"], job["done"], job["affected"]) == ("done", 4, 4, 4)
        assert await in_host(store, session, A) == 0
        job = await ask(session, "prefetch", **named([*A, *B]))
        assert (job["state"], job["done"], job["affected"]) == ("done", 8, 4)
        assert await in_host(store, session, A) == 4
        job = await ask(session, "remove", **named([*A, *B]))
        assert (job["state"], job["affected"]) == ("done", 4)
        assert store.lookup_prefix(A) == 0


async def test_a_removal_that_a_reset_takes_over_is_told_what_the_disk_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()

    async def waits(*_: Any) -> str:
        await goes_on.wait()
        return "too late"

    async def fails(*_: Any) -> None:
        return None

    async with at_path(tmp_path, disk=64) as (store, session):
        await filled(store, A)
        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "erase", waits)
            broken.setattr(DiskTier, "clear", fails)
            removing = asyncio.create_task(ask(session, "remove", **named(A)))
            await until_async(lambda: bool(store._core.hidden))
            resetting = asyncio.create_task(ask(session, "reset"))
            await asyncio.sleep(0.05)
            goes_on.set()
            for job in (await resetting, await removing):
                assert job["state"] == "failed"
                assert job["error"].endswith(" cannot be cleared now, which is tried again")


async def test_a_server_may_refuse_a_command_and_name_its_own_way(tmp_path: Path) -> None:
    async with at_path(tmp_path) as (store, session):
        await store.put(A, payloads(A))
        store.refuse_command("reset", "POST /clear forgets everything")
        told = (await (await session.get("/v1/status")).json())["refused"]
        assert told == {"reset": "POST /clear forgets everything"}
        for body in ({}, {"dry_run": True}):
            response = await session.post("/v1/reset", json=body)
            told = await response.json()
            assert response.status == 400
            assert told["error"] == "this server takes no reset: POST /clear forgets everything"
        assert store.contains_prefix(A) == 4
        assert (await ask(session, "remove", **named(A)))["affected"] == 4
        with pytest.raises(ConfigError, match="unknown command 'rest'; known are: .*reset"):
            store.refuse_command("rest", "")
    async with kvstore.open(small(tmp_path / "none")) as store:
        store.refuse_command("reset", "where there is no socket, nothing is to be refused")
        with pytest.raises(ConfigError, match="unknown command 'rest'"):
            store.refuse_command("rest", "")


async def test_chunks_are_retained_and_released(tmp_path: Path) -> None:
    async with at_path(tmp_path) as (store, session):
        await store.put(A, payloads(A))
        job = await ask(session, "retain", **named(A, seconds=600))
        assert (job["state"], job["affected"]) == ("done", 4)
        await store.put(B, payloads(B))
        await store.put(keys_of("c", 4), payloads(keys_of("c", 4)))
        assert await in_host(store, session, A) == 4
        # Half of host memory at most.
        job = await ask(session, "retain", **named(B, seconds=600))
        assert job["state"] == "failed"
        assert "4 chunks are beyond pinned_share" in job["error"]
        job = await ask(session, "release", **named(A))
        assert job["affected"] == 4
        await store.put(keys_of("d", 4), payloads(keys_of("d", 4)))
        assert await in_host(store, session, A) == 0


async def test_a_dry_run_tells_where_chunks_are_and_does_nothing(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=64) as (store, session):
        await filled(store, A)
        before = store.stats()
        disk = before.tiers[0].name
        for command in ("prefetch", "demote", "remove", "release"):
            told = await ask(session, command, **named([*A, *B], dry_run=True))
            assert told["places"] == {"host": 4, disk: 4, "nowhere": 4}
        told = await ask(session, "reset", dry_run=True)
        assert told["chunks"]["host"] == told["chunks"][disk] == 4
        host = {"bytes": CHUNK, "eviction_policy": "arc"}
        told = await ask(session, "settings", host=host, dry_run=True)
        assert told["would_change"] == ["host memory: 1 chunks, arc"]
        after = store.stats()
        assert (after.chunks, after.demoted, after.rows) == (4, 0, 8)
        assert after.tiers[0].chunks == 4


async def test_a_reset_forgets_and_the_next_process_finds_nothing(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=64) as (store, session):
        await filled(store, A)
        assert (await ask(session, "reset"))["state"] == "done"
        assert await store.resolve(A) == 0
        await filled(store, B)
    async with at_path(tmp_path, disk=64) as (store, _):
        assert await store.resolve(A) == 0
        assert await store.resolve(B) == 4


async def test_a_disk_becomes_smaller_and_larger_while_it_serves(tmp_path: Path) -> None:
    keys = keys_of("long", 128)
    async with at_path(tmp_path, rows=16, disk=128) as (store, session):
        for at in range(0, 128, 8):
            await filled(store, keys[at : at + 8])
        whole = store.stats().tiers[0]
        assert whole.chunks == 128

        used = asyncio.create_task(served(store, keys))
        tier = store._assembly.tiers[0]
        assert isinstance(tier, DiskTier)
        file_bytes = tier.geometry.file_bytes
        capacity = 5 * file_bytes
        job = await ask(session, "settings", tiers={"0": {"capacity_bytes": capacity}})
        assert job["state"] == "done"
        smaller = store.stats().tiers[0]
        assert smaller.segments == smaller.max_segments == 5
        assert 0 < smaller.chunks <= 5 * tier.geometry.slots
        held = [path.stat().st_size for path in (tmp_path / "cache").rglob("*")]
        assert held.count(file_bytes) == 5
        used.cancel()
        job = await ask(session, "settings", tiers={"0": {"capacity_bytes": "64MiB"}})
        assert job["state"] == "done"
        # What host memory still has would not be written again.
        await ask(session, "remove", **named(keys))
        for at in range(0, 128, 8):
            await filled(store, keys[at : at + 8])
        assert store.stats().tiers[0].chunks == 128
        for key in keys:
            async with store.get([key]) as chunks:
                assert bytes(chunks[0]) == payload(key)
        state = await (await session.get("/v1/status")).json()
        assert state["tiers"][0]["capacity_bytes"] == 64 * 2**20
    async with at_path(tmp_path, rows=16, disk=128) as (store, _):
        assert store.stats().tiers[0].chunks >= 112


async def served(store: Store, keys: Sequence[bytes]) -> None:
    """Somebody reads all the time; what is there is right."""
    while True:
        # Where none of them is there no call waits, and nobody else would have a turn.
        await asyncio.sleep(0)
        for key in keys:
            async with store.get([key]) as chunks:
                assert not chunks or bytes(chunks[0]) == payload(key)


async def test_policies_rates_and_sizes_of_host_memory_change(tmp_path: Path) -> None:
    async with at_path(tmp_path, rows=64, disk=64) as (store, session):
        await filled(store, A)
        settings = {"bytes": 32 * CHUNK, "eviction_policy": "sieve"}
        disk = {"eviction_policy": "hit-density(whole_stores=false)", "compaction_rate": "1MiB"}
        name = store.stats().tiers[0].name
        job = await ask(session, "settings", host=settings, tiers={name: disk})
        assert job["state"] == "done"
        state = await (await session.get("/v1/status")).json()
        assert state["host"] == {
            "bytes": 32 * CHUNK,
            "allocated_bytes": 64 * CHUNK,
            "eviction_policy": "sieve",
        }
        (tier, _) = state["tiers"]
        assert tier["eviction_policy"] == "hit-density(whole_stores=False)"
        assert tier["compaction_rate"] == 2**20
        assert await store.resolve(A) == 4
        await ask(
            session, "settings", host={"bytes": 64 * CHUNK}, tiers={"0": {"compaction_rate": 0}}
        )
        assert store.stats().rows == 64


async def test_a_job_tells_how_far_it_is_and_can_be_cancelled(tmp_path: Path) -> None:
    keys = keys_of("long", 64)
    async with at_path(tmp_path, rows=64) as (store, session):
        await store.put(keys, payloads(keys))
        async with store.get(keys):
            asked = {"host": {"bytes": 16 * CHUNK}}
            job = await (await session.post("/v1/settings", json=asked)).json()
            number = job["job"]

            async def left() -> int:
                told = await (await session.get(f"/v1/jobs/{number}")).json()
                assert told["state"] == "running"
                return int(told["left"])

            for _ in range(1000):
                if await left() == 48:
                    break
                await asyncio.sleep(0.01)
            assert await left() == 48
            await session.delete(f"/v1/jobs/{number}")
            told = await (await session.get(f"/v1/jobs/{number}?wait=60")).json()
            assert told["state"] == "cancelled"


async def test_jobs_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstore")
    keys = keys_of("long", 8)
    async with at_path(tmp_path, rows=8) as (store, session):
        await store.put(keys, payloads(keys))
        async with store.get(keys):
            asked = {"host": {"bytes": CHUNK}}
            for _ in range(MOST_RUNNING):
                assert (await session.post("/v1/settings", json=asked)).status == 202
            response = await session.post("/v1/settings", json=asked)
            assert response.status == 400
            assert "jobs run already" in (await response.json())["error"]
            assert caplog.text.count("kvstore: control: host") == MOST_RUNNING
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [0, 1, 300])
async def test_many_keys_are_done_in_batches(tmp_path: Path, count: int) -> None:
    keys = keys_of("long", count)
    async with at_path(tmp_path, rows=512) as (store, session):
        if keys:
            await store.put(keys, payloads(keys))
        job = await ask(session, "remove", **named(keys))
        assert (job["state"], job["done"], job["affected"]) == ("done", count, count)
        assert store.stats().chunks == 0


async def test_what_could_not_be_fetched_or_demoted_is_told(tmp_path: Path) -> None:
    async with at_path(tmp_path, rows=8, disk=64) as (store, session):
        await filled(store, A)
        assert (await ask(session, "demote", **named(A)))["affected"] == 4
        for segment in (tmp_path / "cache").rglob("segment-*.safetensors"):
            os.truncate(segment, 8192)
        job = await ask(session, "prefetch", **named(A))
        assert (job["state"], job["affected"]) == ("failed", 0)
        assert job["error"].startswith("4 chunks could not be read")
    async with at_path(tmp_path) as (store, session):
        await store.put(A, payloads(A))
        job = await ask(session, "demote", **named(A))
        assert (job["state"], job["affected"]) == ("failed", 0)
        assert job["error"].startswith("4 chunks stay in host memory")


async def test_more_than_fits_is_fetched_a_part_at_a_time(tmp_path: Path) -> None:
    keys = keys_of("long", 64)
    async with at_path(tmp_path, rows=16, disk=64) as (store, session):
        for at in range(0, 64, 8):
            await filled(store, keys[at : at + 8])
        jobs = [ask(session, "prefetch", **named(part)) for part in (keys[:32], keys[32:56])]
        first, second = await asyncio.gather(*jobs)
        assert (first["state"], first["done"]) == (second["state"], 32) == ("done", 32)
        assert first["affected"] == 32
        last = await ask(session, "prefetch", **named(keys))
        assert last["state"] == "done"
        assert await in_host(store, session, keys[48:]) >= 12


async def test_a_size_and_a_policy_that_are_set_at_once_both_hold(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=64) as (store, session):
        changes: list[dict[str, Any]] = [{"eviction_policy": "arc"}, {"capacity_bytes": "1MiB"}]
        jobs = [ask(session, "settings", tiers={"0": change}) for change in changes]
        assert [job["state"] for job in await asyncio.gather(*jobs)] == ["done", "done"]
        tier, *_ = (await (await session.get("/v1/status")).json())["tiers"]
        assert (tier["eviction_policy"], tier["capacity_bytes"]) == ("arc", 2**20)
        assert store._core.tiers[0].index.policy.name == "arc"
        both = {"0": {"capacity_bytes": "2MiB"}, tier["name"]: {"eviction_policy": "lru"}}
        response = await session.post("/v1/settings", json={"tiers": both})
        assert response.status == 400
        assert "are the same tier" in (await response.json())["error"]


async def test_of_settings_all_are_changed_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(choice: object, capacity: int) -> None:
        raise MemoryError

    async with at_path(tmp_path, disk=64) as (store, session):
        before = store.stats()
        monkeypatch.setattr("kvstore.control.commands.build_policy", no_memory)
        host = {"bytes": 2 * CHUNK}
        job = await ask(session, "settings", host=host, tiers={"0": {"capacity_bytes": "1GiB"}})
        assert job["state"] == "failed"
        after = store.stats()
        assert (after.rows, after.tiers[0].max_segments) == (
            before.rows,
            before.tiers[0].max_segments,
        )
        tier = store._assembly.tiers[0]
        assert isinstance(tier, DiskTier)
        assert tier.volumes[0].max_segments == before.tiers[0].max_segments


async def test_a_longer_put_goes_through_host_memory_that_was_made_smaller(tmp_path: Path) -> None:
    keys = keys_of("long", 32)
    async with at_path(tmp_path, rows=32, disk=64) as (store, session):
        assert (await ask(session, "settings", host={"bytes": 4 * CHUNK}))["state"] == "done"
        assert await store.put(keys, payloads(keys)) == 32
        await store.flush()
        assert store.lookup_prefix(keys) is not False
        assert await store.resolve(keys[:4]) == 4
        assert store.stats().tiers[0].chunks == 32


async def test_a_disk_becomes_smaller_while_it_is_read_without_end(tmp_path: Path) -> None:
    keys = keys_of("long", 96)
    async with at_path(tmp_path, rows=16, disk=128) as (store, session):
        for at in range(0, 96, 8):
            await filled(store, keys[at : at + 8])
        readers = [asyncio.create_task(served(store, keys[n::6])) for n in range(6)]
        tier = store._assembly.tiers[0]
        assert isinstance(tier, DiskTier)
        for segments in (3, 9, 2, 9, 4):
            size = segments * tier.geometry.file_bytes
            job = await ask(session, "settings", tiers={"0": {"capacity_bytes": size}})
            assert job["state"] == "done"
        assert not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        told = store.stats().tiers[0]
        assert (told.corrupt, told.failed_reads, told.errors) == (0, 0, 0)


async def test_what_cannot_be_read_is_left_under_its_older_key_and_the_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "--add", "*"]) == 0
    monkeypatch.setattr(compactor, "FAILURE_PAUSE", 0.05)
    async with at_path(tmp_path, rows=64, disk=64, encryption_keys=str(file)) as (store, session):
        keys = keys_of("prompt", 16)
        await store.put(keys, payloads(keys), durable=True)
        assert main(["keys", str(file), "--add", "*"]) == 0

        def unreadable(keys: Sequence[bytes], *_: object) -> Relocated:
            return Relocated([False] * len(keys), error="read: Input/output error")

        monkeypatch.setattr(disk_tier, "relocate", unreadable)
        job = await ask(session, "reencrypt")
        assert job["state"] == "failed"
        assert "segments could not be copied" in job["error"]
        assert (await ask(session, "reencrypt", dry_run=True))["segments"]["0"] > 0
        goes_on = threading.Event()

        def slow(keys: Sequence[bytes], *_: object) -> Relocated:
            goes_on.wait(PATIENCE)
            return unreadable(keys)

        monkeypatch.setattr(disk_tier, "relocate", slow)
        async with session.post("/v1/reencrypt", json={}) as response:
            assert response.status == 202
            number = (await response.json())["job"]
        async with session.post("/v1/reencrypt", json={}) as response:
            assert f"job {number} does that already" in (await response.json())["error"]
        async with session.delete(f"/v1/jobs/{number}") as response:
            assert response.status == 200
        goes_on.set()
        monkeypatch.undo()
        assert (await ask(session, "reencrypt"))["state"] == "done"


async def test_what_is_under_older_keys_is_encrypted_anew_while_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "--add", "*"]) == 0
    (old,) = parse_keys(read_keys(file), "")["*"]
    more = {"rows": 64, "disk": 256, "encryption_keys": str(file)}
    async with at_path(tmp_path, **more) as (store, session):
        keys = keys_of("prompt", 128)
        for start in range(0, len(keys), 16):
            part = keys[start : start + 16]
            await store.put(part, payloads(part), durable=True)
        assert main(["keys", str(file), "--add", "*"]) == 0
        told = await ask(session, "reencrypt", dry_run=True)
        assert told["segments"]["0"] >= 8
        job = await ask(session, "reencrypt")
        assert (job["state"], job["error"]) == ("done", None)
        assert (await ask(session, "reencrypt", dry_run=True))["segments"] == {"0": 0}
        # The older key is not needed any more.
        assert main(["keys", str(file), "--retire", "*"]) == 0
        for key in keys:
            async with store.get([key]) as chunks:
                assert [bytes(chunk) for chunk in chunks] == [payload(key)]
    (namespace,) = survey(tmp_path / "cache")
    ids = Counter[str]()
    for segment in namespace.lanes[0].segments:
        ids.update(segment.key_ids)
    (new,) = parse_keys(read_keys(file), "")["*"]
    assert new != old
    assert ids[new.id.hex()] == len(keys)


async def test_what_is_not_encrypted_cannot_be_encrypted_anew(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=64) as (_, session):
        response = await session.post("/v1/reencrypt", json={})
        assert response.status == 400
        assert "not encrypted" in (await response.json())["error"]


async def test_where_no_thread_can_be_started_nothing_is_encrypted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "--add", "*"]) == 0

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with at_path(tmp_path, disk=64, encryption_keys=str(file)) as (_, session):
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refuses)
            response = await session.post("/v1/reencrypt", json={})
        assert response.status == 400
        assert "can't start new thread" in (await response.json())["error"]


async def test_nothing_is_encrypted_anew_while_the_keys_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may believe that older keys are not needed any more."""
    file = tmp_path / "keys.toml"
    assert main(["keys", str(file), "--add", "*"]) == 0
    async with at_path(tmp_path, disk=64, encryption_keys=str(file)) as (_, session):
        assert main(["keys", str(file), "--add", "*"]) == 0
        file.chmod(0o644)
        response = await session.post("/v1/reencrypt", json={})
        assert response.status == 400
        assert "chmod" in (await response.json())["error"]
        monkeypatch.setattr("kvstore.tiers.disk.tier.KEYS_SECONDS", 0.05)
        goes_on = threading.Event()
        monkeypatch.setattr(KeyRing, "look", lambda _: goes_on.wait(PATIENCE))
        response = await session.post("/v1/reencrypt", json={})
        assert response.status == 400
        assert "does not answer" in (await response.json())["error"]
        goes_on.set()


async def test_a_policy_that_waits_for_another_is_made_for_the_size_of_then(tmp_path: Path) -> None:
    async with at_path(tmp_path, disk=256) as (store, session):
        await filled(store, keys_of("many", 100))
        for settings in (
            {"tiers": {"0": {"eviction_policy": "arc"}}},
            {"tiers": {"0": {"capacity_bytes": 4 * (16 * CHUNK + 2**14)}}},
            {"tiers": {"0": {"eviction_policy": "s3-fifo"}}},
        ):
            await session.post("/v1/settings", json=settings)
        await until_async(lambda: not store._core.changing)
        index = store._core.tiers[0].index
        slots = store._core.tiers[0].stats().max_segments * store._core.segment_slots(0)
        assert index.policy.capacity == slots < 100
        assert index.most_pinned == slots // 2


async def test_shares_and_what_is_kept_free_follow_the_size_of_host_memory(tmp_path: Path) -> None:
    shares = {"alice": {"maximal": 0.25}}
    async with at_path(tmp_path, rows=64, disk=128, tenants=shares) as (store, session):
        ahead = store._core._pool.ahead
        for rows in (16, 64):
            await ask(session, "settings", host={"bytes": rows * CHUNK})
            for key in kvstore.tenant_keys("alice", keys_of(str(rows), 64)):
                await store.put([key], [payload(key)])
            await store.flush()
            assert store.stats().rows == rows

            def within(most: int = rows // 4) -> bool:
                return store.stats().tenants["alice"].host_chunks <= most

            await until_async(within)
            assert store._core._pool.ahead == ahead * rows // 64
