"""LMCache over kvstore as its second level: its own manager, controllers and command."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects, make_object_keys
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.platform import consume_fd

from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.tiers.disk import DiskTier
from tests.unpacked import folder_of

SIZE = 64 * 1024
WAIT_S = 30
ROOT = Path(__file__).parents[2]


def params(path: Path, **values: Any) -> dict[str, Any]:
    disk = {"type": "disk", "path": str(path), "capacity_bytes": "8MiB", "segment_bytes": "1MiB"}
    return {"host": "1MiB", "chunk_bytes": SIZE, "tiers": [disk], **values}


def spec(path: Path, **values: Any) -> str:
    """The adapter as an operator writes it."""
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvstore.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": params(path, **values),
        }
    )


def parsed(text: str) -> L2AdaptersConfig:
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[text]))


@contextmanager
def adapter(path: Path, **values: Any) -> Iterator[Any]:
    one = create_l2_adapter(parsed(spec(path, **values)).adapters[0])
    try:
        yield one
    finally:
        one.close()
        one.close()


def objects(count: int, fill: int = 0, size: int = SIZE) -> list[Any]:
    made: list[Any] = make_memory_objects(
        torch.empty(count * size, dtype=torch.uint8), count, size, 0, fill_offset=fill
    )
    return made


def wait(descriptor: int) -> None:
    assert select.select([descriptor], [], [], WAIT_S)[0], "the task did not end"
    consume_fd(descriptor)


def store(one: Any, keys: list[ObjectKey], what: list[Any]) -> Any:
    number = one.submit_store_task(keys, what)
    wait(one.get_store_event_fd())
    (result,) = one.pop_completed_store_tasks().items()
    assert result[0] == number
    return result[1]


def look_up(one: Any, keys: list[ObjectKey]) -> list[int]:
    number = one.submit_lookup_and_lock_task(keys, {})
    wait(one.get_lookup_and_lock_event_fd())
    return _taken(lambda: one.query_lookup_and_lock_result(number))


def load(one: Any, keys: list[ObjectKey], into: list[Any]) -> list[int]:
    number = one.submit_load_task(keys, into)
    wait(one.get_load_event_fd())
    return _taken(lambda: one.query_load_result(number))


def _taken(query: Any) -> list[int]:
    end = time.monotonic() + WAIT_S
    while (bitmap := query()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert query() is None, "a result is given once"
    return list(bitmap.get_indices_list())


@contextmanager
def manager(path: Path) -> Iterator[StorageManager]:
    """LMCache's two levels: memory for a few objects, and kvstore."""
    memory = L1MemoryManagerConfig(size_in_bytes=4 * 2**20, use_lazy=False, shm_name="")
    one = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory), EvictionConfig("LRU"), parsed(spec(path, host="2MiB"))
        )
    )
    try:
        yield one
    finally:
        one.close()


def test_what_its_manager_stores_is_prefetched_after_a_restart(tmp_path: Path) -> None:
    keys = make_object_keys(16)
    layout = MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])
    with manager(tmp_path) as one:
        written = one.reserve_write(keys, layout)
        assert len(written) == len(keys)
        for at, key in enumerate(keys):
            written[key].tensor.fill_(at + 1)
        one.finish_write(keys)
        end = time.monotonic() + WAIT_S
        while one.l2_adapters()[0][1].get_usage().total_bytes_used < len(keys) * SIZE:
            assert time.monotonic() < end, "nothing reaches the disk"
            time.sleep(0.01)
    with manager(tmp_path) as one:
        asked = [*keys, *make_object_keys(4, key_offset=100)]
        handle = one.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(asked, 0, layout)]))
        assert one.wait_prefetch_status(handle, WAIT_S)
        result = one.query_prefetch_status(handle)
        assert result is not None
        assert (result.l1_hit_count, result.l2_hit_count) == (0, len(keys))
        with one.read_prefetched_results(keys) as found:
            assert found is not None
            for at, each in enumerate(found):
                assert each.tensor is not None
                assert bool((each.tensor.view(torch.uint8) == at + 1).all())
        one.finish_read_prefetched(keys)


@pytest.mark.parametrize("size", [64, 1024])
def test_its_own_benchmark_verifies_every_byte(tmp_path: Path, size: int) -> None:
    text = spec(tmp_path, chunk_bytes=size * 1024, host="16MiB")
    text = text.replace('"8MiB"', '"64MiB"').replace('"1MiB"', '"8MiB"', 1)
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", text]
    command += ["--num-keys", "8", "--in-flight", "2", "--rounds", "2", "--no-skip-verify"]
    command += ["--data-size-kb", str(size), "--lookup-max-hit-rate", "1"]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": f"{ROOT}:{folder_of('lmcache')}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"All \d+ keys data verified OK", done.stdout)
    for word in ("stored", "loaded", "success_keys", "found"):
        for counts in re.findall(rf"{word}=(\d+)/(\d+)", done.stdout):
            assert counts[0] == counts[1], done.stdout


def test_what_is_told_stored_is_on_the_disk(tmp_path: Path) -> None:
    """In host memory it could give way to the loads that follow before its copy."""
    with adapter(tmp_path) as one:
        for count in range(1, 5):
            keys = make_object_keys(16, key_offset=16 * count)
            assert store(one, keys, objects(16, fill=count)).is_successful()
            assert one.get_usage().total_bytes_used >= 16 * count * SIZE
        for count in (1, 2, 3, 4):
            assert load(one, make_object_keys(16, key_offset=16 * count), objects(16)) == list(
                range(16)
            )


def test_objects_are_stored_in_host_memory_where_there_is_no_disk(tmp_path: Path) -> None:
    keys = make_object_keys(4)
    with adapter(tmp_path, tiers=[]) as one:
        assert store(one, keys, objects(4, fill=1)).is_successful()
        assert load(one, keys, objects(4)) == [0, 1, 2, 3]


def test_a_load_fills_what_is_there_and_leaves_the_rest(tmp_path: Path) -> None:
    keys = make_object_keys(10)
    there = [at for at in range(10) if at not in (0, 4, 5)]
    with adapter(tmp_path) as one:
        stored = store(one, [keys[at] for at in there], objects(7, fill=1))
        assert stored.is_successful()
        assert stored.bytes_transferred() == 7 * SIZE
        assert look_up(one, keys) == there
        into = objects(10, fill=100)
        before = [bytes(one.byte_array) for one in into]
        assert load(one, keys, into) == there
        for at, each in enumerate(into):
            expected = bytes([there.index(at) + 1]) * SIZE if at in there else before[at]
            assert bytes(each.byte_array) == expected
        one.submit_unlock(keys)


def test_a_load_that_takes_too_long_keeps_what_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_object_keys(48)
    with adapter(tmp_path) as one:
        assert store(one, keys, objects(48)).is_successful()
    read = DiskTier.read

    async def slowly(self: DiskTier, *args: Any) -> Any:
        await asyncio.sleep(0.5)
        return await read(self, *args)

    monkeypatch.setattr(DiskTier, "read", slowly)
    with adapter(tmp_path, max_wait_s=2) as one:
        into = objects(48, fill=100)
        found = load(one, keys, into)
        assert 0 < len(found) < 48
        assert [bytes(into[at].byte_array[:1])[0] for at in found] == found


def test_what_differs_in_rank_group_salt_or_model_is_another_object(tmp_path: Path) -> None:
    digest = bytes(16)
    keys = [
        ObjectKey(digest, "m", 0),
        ObjectKey(digest, "m", 1),
        ObjectKey(digest, "m", 0, 1),
        ObjectKey(digest, "m", 0, 0, "salt"),
        ObjectKey(digest, "n", 0),
    ]
    with adapter(tmp_path) as one:
        for at, key in enumerate(keys):
            assert look_up(one, keys) == list(range(at))
            store(one, [key], objects(1, fill=at))
        into = objects(5, fill=50)
        assert load(one, keys, into) == [0, 1, 2, 3, 4]
        assert [bytes(each.byte_array[:1])[0] for each in into] == [0, 1, 2, 3, 4]


def test_what_a_lookup_found_is_kept_for_its_load(tmp_path: Path) -> None:
    """Others come in until the disk has turned over three times."""
    keys = make_object_keys(8)
    with adapter(tmp_path) as one:
        assert store(one, keys, objects(8, fill=1)).is_successful()
        assert one._store.flush(WAIT_S)
        assert look_up(one, keys) == list(range(8))
        for number in range(24):
            more = make_object_keys(16, key_offset=1000 + 16 * number)
            store(one, more, objects(16))
        into = objects(8, fill=90)
        assert load(one, keys, into) == list(range(8))
        assert bytes(into[7].byte_array) == bytes([8]) * SIZE


def test_deleted_objects_are_gone_and_told_of(tmp_path: Path) -> None:
    keys = make_object_keys(4)
    with adapter(tmp_path) as one:
        told: list[Any] = []
        one.register_listener(_Listener(told))
        store(one, keys, objects(4))
        store(one, keys, objects(4))
        one.delete(keys[:2])
        assert look_up(one, keys) == [2, 3]
        assert told == [("stored", keys), ("deleted", keys[:2])]


def test_what_is_there_or_gone_after_a_task_that_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_object_keys(4)
    with adapter(tmp_path) as one:
        told: list[Any] = []
        one.register_listener(_Listener(told))

        def too_late(name: str) -> None:
            real = getattr(one._store, name)

            def late(*those: Any, **named: Any) -> None:
                real(*those, **named)
                raise TimeoutError("it continues")

            monkeypatch.setattr(one._store, name, late)

        too_late("put")
        assert not store(one, keys, objects(4)).is_successful()
        assert look_up(one, keys) == [0, 1, 2, 3]
        one.submit_unlock(keys)
        too_late("remove")
        one.delete(keys)
        assert look_up(one, keys) == []
        assert told == [("stored", keys), ("deleted", keys)]


def test_tasks_that_wait_for_a_disk_that_hangs_do_not_keep_it_open_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    with adapter(tmp_path, max_wait_s=0.5) as one:

        def hangs(*those: Any, timeout: float, **named: Any) -> int:
            waited.append(timeout)
            time.sleep(timeout)
            raise TimeoutError("no answer")

        monkeypatch.setattr(one._store, "put", hangs)
        for _ in range(200):
            one.submit_store_task(make_object_keys(1), objects(1))
    assert len(waited) == 200
    assert sum(waited) < 200 * 0.5 / 2


def test_what_is_not_deleted_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_object_keys(4)
    with adapter(tmp_path) as one, adapter(tmp_path) as neighbour:
        told: list[Any] = []
        one.register_listener(_Listener(told))
        store(neighbour, keys[2:], objects(2))
        end = time.monotonic() + WAIT_S
        while look_up(one, keys) != [2, 3]:
            assert time.monotonic() < end
        one.submit_unlock(keys[2:])
        one.delete(keys[2:])
        assert told == []
        store(one, keys[:2], objects(2))

        def fails(*names: Any, **named: Any) -> int:
            raise KVStoreError("records could not be erased")

        monkeypatch.setattr(one._store, "remove", fails)
        one.delete(keys[:2])
        assert told == [("stored", keys[:2])]


def test_the_disk_stays_within_its_limit_and_usage_tells_it(tmp_path: Path) -> None:
    with adapter(tmp_path) as one:
        for number in range(20):
            store(one, make_object_keys(16, key_offset=16 * number), objects(16))
        assert one._store.flush(WAIT_S)
        usage = one.get_usage()
        assert 0 < usage.total_bytes_used <= usage.total_capacity_bytes == 8 * 2**20
        assert not one.supports_global_eviction
        assert one.report_status()["is_healthy"]
    assert sum(file.stat().st_size for file in tmp_path.rglob("segment-*")) <= 8 * 2**20


def test_an_object_of_another_size_is_refused_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_object_keys(6)
    mixed = [*objects(2, size=SIZE // 2), *objects(4, fill=3)]
    with adapter(tmp_path) as one, caplog.at_level(logging.WARNING, "kvstore"):
        for _ in range(2):
            assert not store(one, keys, mixed).is_successful()
        message = f"2 have another size than chunk_bytes = {SIZE}: {SIZE // 2}"
        assert caplog.text.count(message) == 1
        assert look_up(one, keys) == [2, 3, 4, 5], "those of the right size are stored"


def test_a_task_ends_whatever_is_raised_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(_Listener):
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            raise RuntimeError("a listener's")

    keys = make_object_keys(2)
    with adapter(tmp_path) as one:
        one.register_listener(Raising([]))
        assert not store(one, keys, objects(2)).is_successful()
        assert "objects are not stored: a listener's" in caplog.text
        assert look_up(one, keys) == [0, 1]
        assert load(one, keys, [object(), object()]) == []


def test_objects_stay_locked_until_the_last_lookup_is_done_with_them(tmp_path: Path) -> None:
    keys = make_object_keys(4)
    with adapter(tmp_path) as one:
        assert store(one, keys, objects(4)).is_successful()
        assert one._store.flush(WAIT_S)
        for _ in range(2):
            assert look_up(one, keys) == [0, 1, 2, 3]
        one.submit_unlock(keys)
        assert len(one._locked) == 4
        tier, *_ = one._store.stats().tiers
        assert tier.pinned == 4
        one.submit_unlock(keys)
        assert not one._locked
        tier, *_ = one._store.stats().tiers
        assert tier.pinned == 0
        # What no lookup has locked is pinned by somebody else.
        assert one._store.pin(list(map(one._key, keys)), 60) == 4
        one.submit_unlock(keys)
        tier, *_ = one._store.stats().tiers
        assert tier.pinned == 4


def test_locks_of_lookups_that_were_abandoned_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache gives back neither their locks nor their results."""
    monkeypatch.setattr("kvstore.lmcache.LOCK_SECONDS", 0.2)
    monkeypatch.setattr("kvstore.lmcache.MOST_LOCKED", 2)
    monkeypatch.setattr("kvstore.lmcache.MOST_RESULTS", 2)
    keys = make_object_keys(4)
    with adapter(tmp_path) as one:
        assert store(one, keys, objects(4)).is_successful()
        for _ in range(5):
            one.submit_lookup_and_lock_task(keys, {})
            wait(one.get_lookup_and_lock_event_fd())
        assert len(one._lookups._results) == 2
        time.sleep(0.3)
        assert look_up(one, keys[:1]) == [0]
        assert len(one._locked) == 1
        one.submit_unlock(keys[:1])
        assert not one._locked
        tier, *_ = one._store.stats().tiers
        assert tier.pinned == 0


def test_a_lookup_waits_for_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_object_keys(2)
    with adapter(tmp_path) as one:
        assert store(one, keys, objects(2)).is_successful()
        hangs = threading.Event()
        monkeypatch.setattr(one, "_write", lambda *_: hangs.wait(WAIT_S))
        for _ in range(20):
            one.submit_store_task(keys, objects(2))
        assert look_up(one, keys) == [0, 1]
        assert load(one, keys, objects(2)) == [0, 1]
        hangs.set()


def test_usage_is_of_its_own_lane(tmp_path: Path) -> None:
    keys = make_object_keys(8)
    with adapter(tmp_path) as one, adapter(tmp_path) as other:
        assert store(one, keys, objects(8)).is_successful()
        end = time.monotonic() + WAIT_S
        while look_up(other, keys) != list(range(8)):
            assert time.monotonic() < end
        assert other.get_usage().total_bytes_used == 0
        assert one.get_usage().total_bytes_used == 8 * SIZE


def test_tasks_after_a_fault_end_as_misses(tmp_path: Path) -> None:
    keys = make_object_keys(2)
    with adapter(tmp_path) as one:
        store(one, keys, objects(2))
        one._store.close()
        assert not store(one, keys, objects(2)).is_successful()
        assert look_up(one, keys) == []
        assert load(one, keys, objects(2)) == []
        assert not one.report_status()["is_healthy"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_bytes": None}, "missing key chunk_bytes"),
        ({"deadlin_s": 1}, "did you mean deadline_s"),
        ({"tiers": [{"type": "redis", "url": "redis://127.0.0.1:1"}]}, "give LMCache its own"),
        ({"tiers": [{"type": "disk", "path": "/proc/x", "capacity_bytes": "1GiB"}]}, "/proc/x"),
    ],
    ids=["size", "misspelt", "store", "path"],
)
def test_what_cannot_be_used_is_named_at_the_start(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    given = {key: value for key, value in params(tmp_path, **values).items() if value is not None}
    text = json.dumps({**json.loads(spec(tmp_path)), "adapter_params": given})
    with pytest.raises(KVStoreError, match=message):
        create_l2_adapter(parsed(text).adapters[0])


def test_the_line_in_the_docs_is_one_that_lmcache_takes() -> None:
    text = (ROOT / "docs" / "lmcache.md").read_text()
    line = text[text.index("$ lmcache server ") :].partition("```")[0]
    arguments = shlex.split(line.removeprefix("$ ").replace("\\\n", " "))
    given = arguments[arguments.index("--l2-adapter") + 1]
    config = parsed(given).adapters[0]
    assert json.loads(given).keys() == json.loads(spec(Path("x"))).keys()
    Config.from_mapping(config.adapter_params)


class _Listener:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._told.append(("stored", keys))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Of no interest here."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self._told.append(("deleted", keys))


def test_a_salt_is_a_tenant_with_a_share(tmp_path: Path) -> None:
    def keys(salt: str, count: int) -> list[ObjectKey]:
        hashes = (f"{salt}{n}".encode().rjust(32) for n in range(count))
        return [ObjectKey(each, "model", 0, 0, salt) for each in hashes]

    with adapter(tmp_path, tenants={"alice": {"guaranteed": 0.5}}) as one:
        store(one, keys("alice", 12), objects(12))
        for first in range(0, 240, 12):
            store(one, keys("mallory", 240)[first : first + 12], objects(12))
        assert look_up(one, keys("alice", 12)) == list(range(12))
        assert not look_up(one, keys("mallory", 12))
        tenants = one._store.stats().tenants
        assert tenants["alice"].stored == 12
        assert tenants["others"].stored > 200
