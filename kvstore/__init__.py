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

from kvstore._installation import check_siblings
from kvstore._version import __version__

check_siblings()

if TYPE_CHECKING:
    from kvstore.config import Config, DiskConfig
    from kvstore.errors import KVStoreError
    from kvstore.store import Store, open
    from kvstore.sync import SyncStore, open_sync

__all__ = [
    "Config",
    "DiskConfig",
    "KVStoreError",
    "Store",
    "SyncStore",
    "__version__",
    "open",
    "open_sync",
]


_HOMES = {
    "Config": "kvstore.config",
    "DiskConfig": "kvstore.config",
    "KVStoreError": "kvstore.errors",
    "Store": "kvstore.store",
    "SyncStore": "kvstore.sync",
    "open": "kvstore.store",
    "open_sync": "kvstore.sync",
}


def __getattr__(name: str) -> Any:
    # Parts of kvstore import others by way of this package, so it stays empty
    # until a name is asked for.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
