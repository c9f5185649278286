"""Whatever is handed in that is not what it should be is refused by name, and changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.errors import BlockKeyError, ConfigError, KVStoreError
from tests.store.support import CHUNK, Open, busy, contents, keys_of, payload, payloads

KEYS = keys_of("a", 2)


async def _get(store: Store, keys: Any) -> None:
    async with store.get(keys):
        pass


async def _lookup(store: Store, keys: Any) -> None:
    store.lookup_prefix(keys)


Call = Callable[[Store, Any], Awaitable[object]]


async def _contains(store: Store, keys: Any) -> None:
    store.contains_prefix(keys)


BY_KEYS: dict[str, Call] = {
    "contains_prefix": _contains,
    "lookup_prefix": _lookup,
    "remove": lambda store, keys: store.remove(keys),
    "resolve": lambda store, keys: store.resolve(keys),
    "get": _get,
    "put": lambda store, keys: store.put(keys, [bytes(CHUNK)] * 2),
}

NO_KEYS: dict[str, Any] = {
    "a number": 5,
    "None": None,
    "one key": KEYS[0],
    "a text": "keys",
    "bytes that can change": bytearray(KEYS[0]),
    "a generator": (key for key in KEYS),
    "an iterator": iter(KEYS),
    "a set": set(KEYS),
    "texts": ["k1", "k2"],
    "numbers": [1, 2],
    "lists": [[], []],
    "an empty key": [b"", KEYS[1]],
    "a bad key at the end": [KEYS[0], None],
    "a bad key at the beginning": [None, KEYS[1]],
    "a bad key in the middle": [KEYS[0], "k", KEYS[1]],
    "a long key": [KEYS[0], b"k" * 57],
}


async def unchanged(store: Store) -> None:
    assert busy(store) == 0
    assert store.stats().chunks == 2
    assert await contents(store, KEYS) == payloads(KEYS)


@pytest.mark.parametrize("method", BY_KEYS)
async def test_what_are_no_keys_is_refused(open_store: Open, method: str) -> None:
    async with open_store(holds=KEYS) as store:
        for wrong in NO_KEYS.values():
            with pytest.raises(BlockKeyError, match=r"keys? must"):
                await BY_KEYS[method](store, wrong)
            await unchanged(store)


async def test_other_sequences_of_keys_are_keys(open_store: Open) -> None:
    class Keys(bytes):
        pass

    class Several(tuple[bytes, ...]):
        pass

    async with open_store() as store:
        keys = Several(Keys(key) for key in KEYS)
        assert await store.put(keys, payloads(KEYS)) == 2
        assert store.lookup_prefix(tuple(KEYS)) == 2
        await unchanged(store)


@pytest.mark.parametrize("wrong", [5, b"mine", ("mine",), True])
async def test_what_is_no_name_of_a_request_is_refused(open_store: Open, wrong: Any) -> None:
    async with open_store(holds=KEYS) as store:
        with pytest.raises(KVStoreError, match="request must be"):
            store.lookup_prefix(KEYS, wrong)
        with pytest.raises(KVStoreError, match="request must be"):
            await store.resolve(KEYS, wrong)
        with pytest.raises(KVStoreError, match="request must be"):
            store.get(KEYS, wrong)
        with pytest.raises(KVStoreError, match="request must be"):
            await store.put(KEYS, payloads(KEYS), wrong)
        with pytest.raises(KVStoreError, match="request must be"):
            store.release(wrong)
        with pytest.raises(KVStoreError, match="request must be"):
            store.release(None)  # type: ignore[arg-type]
        await unchanged(store)


@pytest.mark.parametrize("wrong", [5, None, CHUNK])
async def test_what_are_no_buffers_is_refused(open_store: Open, wrong: Any) -> None:
    async with open_store(holds=KEYS) as store:
        with pytest.raises(KVStoreError, match="buffers must be"):
            await store.put(keys_of("b", 2), wrong)
        await unchanged(store)


async def test_one_buffer_instead_of_many_is_refused(open_store: Open) -> None:
    async with open_store(holds=KEYS) as store:
        with pytest.raises(KVStoreError, match="a chunk must"):
            await store.put(keys_of("b", 1), payload(KEYS[0]))
        await unchanged(store)


@pytest.mark.parametrize("rate", ["50MiB", "0.5 MiB", 2**20])
async def test_a_rate_may_be_a_text(open_store: Open, rate: Any) -> None:
    async with open_store(disk=16) as store:
        store.compact(rate)
        assert store._core.owned[0].compactor.rate > 0
        store.compact("0")
        assert store._core.owned[0].compactor.rate == 0


@pytest.mark.parametrize("wrong", ["fast", "50 parsecs", None, -1, 0.5, [1], True])
async def test_what_is_no_rate_is_refused(open_store: Open, wrong: Any) -> None:
    async with open_store(disk=16, rows=8) as store:
        store.compact("1MiB")
        before = store._core.owned[0].compactor.rate
        with pytest.raises(ConfigError, match="bytes_per_second = "):
            store.compact(wrong)
        assert store._core.owned[0].compactor.rate == before
        assert store._upkeep is not None


@pytest.mark.parametrize("wrong", [5, "config", [("chunk_bytes", 4096)]])
async def test_what_is_no_configuration_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="must be a table of keys"):
        async with kvstore.open(wrong):
            pass
