"""kvstore keeps the KV cache of an LLM server alive beyond device memory.

The asyncio face:

    async with kvstore.open(config) as store:
        await store.put(keys, buffers)
        async with store.get(keys) as chunks:
            ...

The same without asyncio, from any thread:

    with kvstore.open_sync(config) as store:
        store.put(keys, buffers)
        with store.get(keys) as chunks:
            ...

Importing kvstore imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore._version import __version__

if TYPE_CHECKING:
    from kvstore.api.lease import Chunks, Lease
    from kvstore.api.store import Store, open
    from kvstore.api.sync import SyncLease, SyncStore, open_sync
    from kvstore.api.windows import SyncWindows, Windows
    from kvstore.config import Config, DiskConfig, TierConfig
    from kvstore.core import CoreStats, Durations, TierStats
    from kvstore.errors import (
        BlockKeyError,
        ConfigError,
        KVStoreError,
        LaneBusyError,
        LeaseEndedError,
        NamespaceMismatchError,
        PathUnusableError,
    )
    from kvstore.policies.shares import tenant_keys
    from kvstore.types import Event

__all__ = [
    "BlockKeyError",
    "Chunks",
    "Config",
    "ConfigError",
    "CoreStats",
    "DiskConfig",
    "Durations",
    "Event",
    "KVStoreError",
    "LaneBusyError",
    "Lease",
    "LeaseEndedError",
    "NamespaceMismatchError",
    "PathUnusableError",
    "Store",
    "SyncLease",
    "SyncStore",
    "SyncWindows",
    "TierConfig",
    "TierStats",
    "Windows",
    "__version__",
    "open",
    "open_sync",
    "tenant_keys",
]


_HOMES = {
    "BlockKeyError": "kvstore.errors",
    "Chunks": "kvstore.api.lease",
    "Config": "kvstore.config",
    "ConfigError": "kvstore.errors",
    "CoreStats": "kvstore.core",
    "DiskConfig": "kvstore.config",
    "Durations": "kvstore.core",
    "Event": "kvstore.types",
    "KVStoreError": "kvstore.errors",
    "LaneBusyError": "kvstore.errors",
    "Lease": "kvstore.api.lease",
    "LeaseEndedError": "kvstore.errors",
    "NamespaceMismatchError": "kvstore.errors",
    "PathUnusableError": "kvstore.errors",
    "Store": "kvstore.api.store",
    "SyncLease": "kvstore.api.sync",
    "SyncStore": "kvstore.api.sync",
    "SyncWindows": "kvstore.api.windows",
    "TierConfig": "kvstore.config",
    "TierStats": "kvstore.core",
    "Windows": "kvstore.api.windows",
    "open": "kvstore.api.store",
    "open_sync": "kvstore.api.sync",
    "tenant_keys": "kvstore.policies.shares",
}


if not TYPE_CHECKING:  # A type checker refuses names that are not above.

    def __getattr__(name: str) -> Any:
        # Parts of kvstore import others by way of this package, so it stays empty
        # until a name is asked for.
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
