"""The recording of one's own server has each request once, and simulates as was served."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.core.residency.owned import OwnedTier
from kvstore.errors import KVStoreError
from kvstore.observe.recording import RecordingStream
from kvstore.simulation import Setup, Trace, read_trace, replay
from kvstore.tiers.disk.format import Geometry
from tests.patience import answered_async
from tests.simulation.traces import conversations
from tests.store.support import CHUNK, keys_of, small

DATA = bytes(CHUNK)
HOST, DISK = 48, 96
COMPUTING = ContextVar("COMPUTING", default=0.0)
SLOTS = 16
SEGMENT = Geometry(SLOTS, CHUNK, CHUNK).file_bytes


@asynccontextmanager
async def recorded(path: Path, host: int = HOST, disk: int = DISK) -> AsyncIterator[Store]:
    """A store that records; `disk` chunks fit its disk tier exactly, when it has one."""
    tiers = [
        {
            "type": "disk",
            "path": str(path / "cache"),
            "capacity_bytes": (disk // SLOTS) * SEGMENT,
            "segment_bytes": SEGMENT,
            "eviction_policy": "lru",
        }
    ]
    config = small(path, host, eviction_policy="lru", record_trace=str(path / "trace.kvt"))
    async with kvstore.open({**config, "tiers": tiers if disk else []}) as store:
        if disk:
            tier = store._core.tiers[0]
            assert isinstance(tier, OwnedTier)
            assert tier.slots.max_segments * tier.slots.segment_slots == disk
        yield store


async def get(store: Store, keys: list[bytes], name: str | None) -> int:
    async with store.get(keys, name) as chunks:
        found = len(chunks)
    # The server computes the rest.
    await asyncio.sleep(COMPUTING.get())
    return found


async def get_and_put(store: Store, keys: list[bytes], name: str | None) -> int:
    found = await get(store, keys, name)
    await store.put(keys, [DATA] * len(keys), name)
    return found


async def get_and_put_the_rest(store: Store, keys: list[bytes], name: str | None) -> int:
    found = await get(store, keys, name)
    await store.put(keys[found:], [DATA] * (len(keys) - found), name)
    return found


async def resolve_get_and_put(store: Store, keys: list[bytes], name: str | None) -> int:
    found = await store.resolve(keys, name)
    assert await get(store, keys[:found], name) == found
    await store.put(keys[found:], [DATA] * (len(keys) - found), name)
    return found


async def poll_get_and_put(store: Store, keys: list[bytes], name: str | None) -> int:
    found = await answered_async(lambda: store.lookup_prefix(keys, name))
    assert await get(store, keys[:found], name) == found
    await store.put(keys, [DATA] * len(keys), name)
    return found


async def poll_get_and_put_in_portions(store: Store, keys: list[bytes], name: str | None) -> int:
    found = await answered_async(lambda: store.lookup_prefix(keys, name))
    assert await get(store, keys, name) == found
    for start in range(found, len(keys), 3):
        part = keys[start : start + 3]
        await store.put(part, [DATA] * len(part), name)
    return found


def turns(seed: int) -> Trace:
    """Conversations of which none has two requests at the same time; some are held more often."""
    rng = random.Random(seed)
    fresh = iter(range(2, 10**6))
    open_ones = [[0, 1, *(next(fresh) for _ in range(rng.randrange(2, 12)))] for _ in range(120)]
    weights = [1 / (rank + 5) for rank in range(len(open_ones))]
    latest: deque[list[int]] = deque(maxlen=8)
    requests: list[tuple[float, list[int]]] = []
    while len(requests) < 400:
        (session,) = rng.choices(open_ones, weights)
        if session not in latest:
            latest.append(session)
            if len(session) < 30:
                session += [next(fresh) for _ in range(rng.randrange(2))]
            requests.append((len(requests) / 10, list(session)))
    return Trace.of(f"seed {seed}", requests)


Serve = Callable[[Store, list[bytes], str | None], Awaitable[int]]

SERVERS: dict[str, Serve] = {
    each.__name__: each
    for each in (
        get_and_put,
        get_and_put_the_rest,
        resolve_get_and_put,
        poll_get_and_put,
        poll_get_and_put_in_portions,
    )
}


@dataclass
class Served:
    """What a server has done."""

    requests: int = 0
    accesses: int = 0
    hits: int = 0

    @property
    def ratio(self) -> float:
        return self.hits / self.accesses


async def serve(
    store: Store, trace: Trace, server: Serve, *, named: bool, at_once: int = 1, suffix: bytes
) -> Served:
    """Handle all requests of a trace in order, `at_once` at a time."""
    keys = [key[:8] + suffix for key in trace.keys()]  # noqa: SIM118
    served = Served()
    places = asyncio.Semaphore(at_once)

    async def handle(number: int, prompt: list[bytes]) -> None:
        name = f"request {number}" if named else None
        try:
            found = await server(store, prompt, name)
            if name is not None:
                store.release(name)
            if at_once == 1:
                # In the simulation the disk is never behind.
                await store.flush()
        finally:
            places.release()
        served.requests += 1
        served.accesses += len(prompt)
        served.hits += found

    async with asyncio.TaskGroup() as group:
        for number, chunks in enumerate(trace.requests):
            await places.acquire()
            group.create_task(handle(number, [keys[chunk] for chunk in chunks]))
    return served


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("server", SERVERS)
async def test_a_recording_simulates_as_it_was_served(
    tmp_path: Path, server: str, named: bool
) -> None:
    # Keys with the index of a group, and without one.
    suffix = b"\0\0\0\3" if named else b""
    trace = conversations(7, sessions=40, turns=200)
    async with recorded(tmp_path) as store:
        served = await serve(store, trace, SERVERS[server], named=named, suffix=suffix)
    recording = read_trace(tmp_path / "trace.kvt")
    assert len(recording.requests) == served.requests
    assert recording.accesses == served.accesses
    outcome = replay(recording, Setup(HOST, DISK))
    assert abs(outcome.hit_ratio - served.ratio) < 0.01
    assert 0.3 < served.ratio < 0.95


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
async def test_it_does_so_without_a_disk(tmp_path: Path, named: bool) -> None:
    trace = conversations(8, sessions=40, turns=250)
    async with recorded(tmp_path, disk=0) as store:
        served = await serve(store, trace, get_and_put, named=named, suffix=b"")
    outcome = replay(read_trace(tmp_path / "trace.kvt"), Setup(HOST))
    assert outcome.accesses == served.accesses
    assert abs(outcome.hit_ratio - served.ratio) < 0.01


@pytest.mark.parametrize(
    ("server", "named"),
    [("get_and_put", False), ("resolve_get_and_put", True)],
    ids=["unnamed", "named"],
)
async def test_it_does_so_for_many_requests_at_once(
    tmp_path: Path, server: str, named: bool
) -> None:
    trace = turns(9)
    COMPUTING.set(0.008)
    async with recorded(tmp_path, 384, 768) as store:
        served = await serve(
            store, trace, SERVERS[server], named=named, at_once=4, suffix=b"\0\0\0\0"
        )
    recording = read_trace(tmp_path / "trace.kvt")
    outcome = replay(recording, Setup(384, 768))
    assert len(recording.requests) == pytest.approx(served.requests, rel=0.03)
    assert outcome.accesses == pytest.approx(served.accesses, rel=0.02)
    assert abs(outcome.hit_ratio - served.ratio) < 0.01


async def test_a_polled_lookup_and_its_get_are_one_request(tmp_path: Path) -> None:
    async with recorded(tmp_path) as store:
        prompts = [keys_of(f"prompt {number}", 4) for number in range(30)]
        for keys in prompts:
            await store.put(keys, [DATA] * 4)
    (tmp_path / "trace.kvt").unlink()
    async with recorded(tmp_path, host=16) as store:
        for keys in prompts:
            await poll_get_and_put(store, keys, None)
    requests = list(RecordingStream(tmp_path / "trace.kvt"))
    assert len(requests) == 30
    assert [len(chain) for request in requests for chain in request.chains] == [4] * 30


async def test_get_and_put_of_one_prompt_are_one_request(tmp_path: Path) -> None:
    keys = keys_of("a", 6)
    async with recorded(tmp_path) as store:
        await store.put(keys[:3], [DATA] * 3)
        assert await get(store, keys, None) == 3
        await store.put(keys[3:], [DATA] * 3)
        assert await get(store, keys, None) == 6
    requests = list(RecordingStream(tmp_path / "trace.kvt"))
    assert sorted(len(request.chains[0]) for request in requests) == [3, 6, 6]


async def test_the_groups_of_a_request_are_told_apart(tmp_path: Path) -> None:
    keys = [b"%d\0\0\0\0" % n for n in range(4)]
    sliding = [b"%d\0\0\0\1" % n for n in range(2)]
    async with recorded(tmp_path) as store:
        await store.put([*keys, *sliding], [DATA] * 6, "mine")
        store.release("mine")
    (request,) = list(RecordingStream(tmp_path / "trace.kvt"))
    assert [len(chain) for chain in request.chains] == [4, 2]


async def test_keys_without_a_group_are_one_request(tmp_path: Path) -> None:
    keys = [bytes([n]) * 20 for n in range(1, 6)]
    async with recorded(tmp_path) as store:
        await store.put(keys, [DATA] * 5)
    (request,) = list(RecordingStream(tmp_path / "trace.kvt"))
    assert [len(chain) for chain in request.chains] == [5]


async def test_what_finds_no_room_belongs_to_the_request(tmp_path: Path) -> None:
    async with recorded(tmp_path, host=4, disk=0) as store:
        assert await store.put(keys_of("a", 10), [DATA] * 10) == 4
    (request,) = list(RecordingStream(tmp_path / "trace.kvt"))
    assert [len(chain) for chain in request.chains] == [10]


async def test_a_prompt_that_is_put_again_is_another_request(tmp_path: Path) -> None:
    keys = keys_of("a", 4)
    async with recorded(tmp_path) as store:
        for _ in range(3):
            await store.put(keys, [DATA] * 4)
    assert len(list(RecordingStream(tmp_path / "trace.kvt"))) == 3


async def test_requests_are_recorded_in_their_order(tmp_path: Path) -> None:
    prompts = [keys_of(str(number), number + 1) for number in range(8)]
    async with recorded(tmp_path) as store:
        for keys in prompts:
            await get_and_put(store, keys, None)
        for keys in prompts:
            await get(store, keys, None)
    lengths = [len(each.chains[0]) for each in list(RecordingStream(tmp_path / "trace.kvt"))]
    assert lengths == [*range(1, 9), *range(1, 9)]


async def test_a_start_that_fails_gives_its_recording_up(tmp_path: Path) -> None:
    """The next one has the name that was configured."""
    config = {
        "chunk_bytes": CHUNK,
        "cpu_bytes_to_use": 8 * CHUNK,
        "identity": {},
        "record_trace": str(tmp_path / "trace.jsonl"),
    }
    for _ in range(2):
        with pytest.raises(KVStoreError, match="control"):
            await kvstore.open({**config, "control": f"unix:{tmp_path}/none/socket"})
    async with kvstore.open(config) as store:
        assert "requests recorded in" in store.description
        assert "trace-1" not in store.description
