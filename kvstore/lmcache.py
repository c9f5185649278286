"""LMCache: kvstore as an L2 adapter, loaded by name.

    --l2-adapter '{"type": "plugin", "module_path": "kvstore.lmcache",
      "class_name": "KVStoreL2Adapter", "adapter_params": {
        "host": "4GiB", "disk": "/nvme/kv", "disk_bytes": "2TiB", "chunk_bytes": "32MiB",
        "identity": {"weights": "v1"}}}'

An object of LMCache is a chunk. LMCache's own memory is the tier above; kvstore's host memory is
what its copies pass through, so an object is stored when the first tier has it. Tasks run in
threads here; a fault is a task that failed, or an object that is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, Generic, TypeVar

import attrs
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import kvstore
from kvstore.config import Config, DiskConfig
from kvstore.core.reports import Complaints
from kvstore.errors import ConfigError
from kvstore.observe.logs import warn_with
from kvstore.policies.shares import tag_of

__all__ = ["KVStoreL2Adapter"]

logger = logging.getLogger("kvstore")

_T = TypeVar("_T")

TASKS_AT_ONCE = 8
"""Stores, and loads; more wait for their turn."""

LOCK_SECONDS = 30.0
"""How long what a lookup found is kept for a load that does not come."""


MOST_LOCKED, MOST_RESULTS = 100_000, 10_000
"""Objects that are kept for loads before it is looked which of them no longer are, and results."""


class KVStoreL2Adapter(L2AdapterInterface):
    """An L2 adapter of LMCache over tiers of kvstore; for LMCache 0.5.6.

    An object that has not ``chunk_bytes`` bytes is not stored, and its size is logged; the others
    of its task are. kvstore keeps the disk within its limit by its own policy, so LMCache's
    eviction and quotas have nothing to do here, and it is not told what leaves. Model, rank, group
    and salt of an object are part of its key; with ``tenants`` its salt is its tenant.

    Raises:
        KVStoreError: for a configuration or a path that cannot be used.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        config = Config.from_mapping(params)
        if config.chunk_bytes is None:
            raise ConfigError(
                "missing key chunk_bytes: the size of LMCache's objects; bytes of a token in one "
                "rank and group, times the tokens of a chunk (256)"
            )
        if any(tier.is_store for tier in config.tiers):
            raise ConfigError(
                "tiers: a store that hosts share is not asked what it has here; give LMCache its "
                "own adapter for it, and kvstore disks"
            )
        identity = {"engine": "lmcache", **(config.identity or {})}
        self._capacity = sum(
            tier.capacity_bytes for tier in config.tiers if isinstance(tier, DiskConfig)
        )
        self._timeout = config.max_wait_s
        self._tenants = config.tenants is not None
        self._store = kvstore.open_sync(attrs.evolve(config, identity=identity))
        self._lock = threading.Lock()
        self._next = 0
        self._closing_until: float | None = None
        self._locked: dict[bytes, tuple[int, float]] = {}
        """How many lookups keep a chunk for their loads, and how long the last of them does."""
        self._stores: _Tasks[L2StoreResult] = _Tasks("stores", TASKS_AT_ONCE)
        # They wait for no disk.
        self._lookups: _Tasks[Bitmap] = _Tasks("lookups", 1)
        self._loads: _Tasks[Bitmap] = _Tasks("loads", TASKS_AT_ONCE)
        self._complaints = Complaints(warn_with(logger))

    def _key(self, key: ObjectKey) -> bytes:
        """All that names an object of LMCache; "@" is in none of the parts but the hash."""
        name = f"{key.model_name}@{key.kv_rank}@{key.object_group_id}@{key.cache_salt}@"
        digest = hashlib.sha256(name.encode() + key.chunk_hash).digest()
        return tag_of(key.cache_salt) + digest if self._tenants else digest

    # -- events --------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Descriptor that becomes readable when a store has ended."""
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        """Descriptor that becomes readable when a lookup has ended."""
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        """Descriptor that becomes readable when a load has ended."""
        return self._loads.descriptor

    # -- tasks ---------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Store objects, in order, as far as there is room; ends when they are on the first tier.

        In host memory alone an object may give way to a load before its copy.
        """
        return self._submit(
            self._stores, "stored", lambda: self._write(keys, objects), L2StoreResult(False, 0)
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Take the results of the stores that have ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look objects up, and keep those that are there for the load that follows."""
        return self._submit(self._lookups, "looked up", lambda: self._find(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a lookup; None while there is none."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Let objects leave again, once every lookup that found them is done with them.

        Without it they may leave after half a minute.
        """
        free, now = [], time.monotonic()
        with self._lock:
            for name in map(self._key, keys):
                if name not in self._locked:
                    continue
                count, until = self._locked.pop(name)
                if count > 1 and until > now:
                    self._locked[name] = (count - 1, until)
                else:
                    free.append(name)
            # In the lock: a lookup that comes meanwhile pins them after this.
            self._tried("unlocked", lambda: self._store.unpin(free), 0)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Copy what is there into `objects`; the others keep what they hold."""
        return self._submit(
            self._loads, "loaded", lambda: self._read(keys, objects), Bitmap(len(keys))
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a load; None while there is none."""
        return self._loads.take(task_id)

    # -- the whole -----------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects from host memory and every tier; waits for it."""
        names = [self._key(key) for key in keys]
        there = self._tried("deleted", lambda: self._store.contains(names), [False] * len(keys))
        self._tried("deleted", lambda: self._store.remove(names, timeout=self._timeout), None)
        # What a neighbour has is found again. What takes long to erase is gone all the same.
        left = self._tried("deleted", lambda: self._store.contains(names), [True] * len(keys))
        each = zip(keys, there, left, strict=True)
        gone = [key for key, held, found in each if held and not found]
        if gone:
            # Of no size: `get_usage` counts what there is, also from before this process.
            self._notify_keys_deleted(gone, [0] * len(gone))

    def get_usage(self) -> AdapterUsage:
        """Return the bytes on disk and their limit; kvstore does not count them by salt."""
        stats = self._tried("counted", self._store.stats, None)
        used = 0 if stats is None else sum(tier.used_bytes for tier in stats.tiers if tier.owned)
        return AdapterUsage(total_bytes_used=used, total_capacity_bytes=self._capacity)

    def report_status(self) -> dict[str, Any]:
        """Return whether tiers answer, and what they are."""
        stats = self._tried("counted", self._store.stats, None)
        return {
            "is_healthy": stats is not None
            and not any(tier.closed or tier.stalled or tier.away for tier in stats.tiers),
            "type": type(self).__name__,
            "store": self._store.description,
            "capacity_bytes": self._capacity,
        }

    def close(self) -> None:
        """End in order: tasks are waited for, and what is on its way to a tier.

        Not for more than `max_wait_s` in all, however many tasks there are. May be called again.
        """
        if self._closing_until is not None:
            return
        self._closing_until = time.monotonic() + self._timeout
        kinds = (self._stores, self._lookups, self._loads)
        for tasks in kinds:
            tasks.workers.shutdown()
        self._store.close()
        for tasks in kinds:
            tasks.close()

    def _submit(self, tasks: _Tasks[_T], what: str, work: Callable[[], _T], otherwise: _T) -> int:
        with self._lock:
            number = self._next = self._next + 1
        tasks.workers.submit(lambda: tasks.ended(number, self._tried(what, work, otherwise)))
        return number

    def _write(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> L2StoreResult:
        size = self._store.chunk_bytes
        buffers = [one.byte_array for one in objects]
        fit = [at for at, buffer in enumerate(buffers) if len(buffer) == size]
        names = [self._key(keys[at]) for at in fit]
        # What is there already was told when it came.
        before = self._store.contains(names)
        until = self._until()
        try:
            stored = self._store.put(
                names,
                [buffers[at] for at in fit],
                durable=self._capacity > 0,
                timeout=max(0.0, until - time.monotonic()),
            )
        finally:
            # Also of those that come behind one that is not there, or too late.
            there = self._tried("counted", lambda: self._store.contains(names), before)
            each = zip(fit, before, there, strict=True)
            new = [keys[at] for at, had, has in each if has and not had]
            if new:
                self._notify_keys_stored(new, [size] * len(new))
        if len(fit) < len(keys):
            other = next(len(buffer) for buffer in buffers if len(buffer) != size)
            self._failed("stored", f"{len(keys) - len(fit)} have another size than chunk_bytes = "
                         f"{size}: {other}")  # fmt: skip
        return L2StoreResult(stored == len(keys), size * len(new))

    def _find(self, keys: Sequence[ObjectKey]) -> Bitmap:
        names = [self._key(key) for key in keys]
        there = [at for at, held in enumerate(self._store.contains(names)) if held]
        if there:
            found = [names[at] for at in there]
            with self._lock:
                self._lock_for_loads(found, time.monotonic())
                self._store.pin(found, LOCK_SECONDS, host=False)
        return _bitmap(len(keys), there)

    def _lock_for_loads(self, names: Sequence[bytes], now: float) -> None:
        locked = self._locked
        if len(locked) > MOST_LOCKED:
            # LMCache gives none back of a lookup that it has abandoned.
            for name in [name for name, (_, until) in locked.items() if until <= now]:
                del locked[name]
        for name in names:
            count, until = locked.get(name, (0, now))
            locked[name] = (count + 1 if until > now else 1, now + LOCK_SECONDS)

    def _read(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Bitmap:
        names = [self._key(key) for key in keys]
        buffers = [one.byte_array for one in objects]
        filled: list[int] = []
        at, until = 0, self._until()
        with contextlib.suppress(TimeoutError):
            for held, run in groupby(self._store.contains(names)):
                end = at + len(list(run))
                while held and at < end:
                    left = max(0.0, until - time.monotonic())
                    count = self._store.get_into(names[at:end], buffers[at:end], timeout=left)
                    filled += range(at, at + count)
                    at += count + 1  # The one after them is not there any more.
                at = end
        if not filled and time.monotonic() >= until:
            raise TimeoutError(f"no object came within {self._timeout:g} s")
        if filled:
            self._notify_keys_accessed([keys[at] for at in filled])
        return _bitmap(len(keys), filled)

    def _until(self) -> float:
        """When a task that begins now has to end."""
        until = time.monotonic() + self._timeout
        return until if self._closing_until is None else min(until, self._closing_until)

    def _tried(self, what: str, call: Callable[[], _T], otherwise: _T) -> _T:
        """The result of a call; what it raises is a fault of the task."""
        try:
            result = call()
        except Exception as error:  # Of a listener, or of an object: the task has to end.
            self._failed(what, str(error) or repr(error))
            return otherwise
        self._complaints.went_well(
            f"kvstore: objects are not {what}",
            f"kvstore: objects are {what} again",
            time.monotonic(),
        )
        return result

    def _failed(self, what: str, why: str) -> None:
        self._complaints.failed(f"kvstore: objects are not {what}", why, time.monotonic())


class _Tasks(Generic[_T]):
    """Results of one kind of task, until they are taken, and a descriptor that tells of them."""

    def __init__(self, name: str, threads: int) -> None:
        self.workers = ThreadPoolExecutor(threads, f"kvstore-lmcache-{name}")
        self._notifier = create_event_notifier()
        self._results: dict[int, _T] = {}
        self._lock = threading.Lock()

    @property
    def descriptor(self) -> int:
        return int(self._notifier.fileno())

    def ended(self, number: int, result: _T) -> None:
        with self._lock:
            self._results[number] = result
            if len(self._results) > MOST_RESULTS:
                # LMCache does not ask for those of lookups that it has abandoned.
                del self._results[next(iter(self._results))]
        self._notifier.notify()

    def take(self, number: int) -> _T | None:
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, _T]:
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        self._notifier.close()


def _bitmap(count: int, those: Iterable[int]) -> Bitmap:
    bitmap = Bitmap(count)
    for at in those:
        bitmap.set(at)
    return bitmap
