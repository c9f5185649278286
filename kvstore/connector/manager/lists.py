"""Managers that know the form by lists only, for callers that name requests."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import overload

from kvstore.connector.manager.base import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
)
from kvstore.connector.mediums import LoadStoreSpec

__all__ = ["ListManager", "knows_requests"]


def knows_requests(manager: OffloadingManager) -> bool:
    """Whether calls of `manager`, and of the one behind it, can name their request."""
    backing = getattr(manager, "backing", None)
    if backing is not None:
        return knows_requests(backing)
    parameters = inspect.signature(manager.lookup).parameters.values()
    several = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return several or sum(one.kind is not one.KEYWORD_ONLY for one in parameters) > 1


class ListManager(OffloadingManager):
    """Asks `inner` by lists, whoever the request is.

    Args:
        suffix: the end of all keys, which `inner` is not told: with one KV cache group what is
            left is the hash of a block.
    """

    def __init__(self, inner: OffloadingManager, suffix: bytes = b"") -> None:
        self.inner = inner
        self._suffix = suffix

    @overload
    def lookup(self, keys: bytes, req_context: RequestContext) -> bool | None: ...

    @overload
    def lookup(self, keys: Iterable[bytes]) -> int | None: ...

    def lookup(
        self, keys: bytes | Iterable[bytes], req_context: RequestContext | None = None
    ) -> int | None:
        if not isinstance(keys, bytes):
            return self.inner.lookup(self._names(keys))
        found = self.inner.lookup(self._names([keys]))
        return None if found is None else bool(found)

    def lookup_prefix(self, keys: Iterable[bytes], req_context: RequestContext) -> int | None:
        return self.lookup(keys)

    def prepare_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> LoadStoreSpec:
        return self.inner.prepare_load(self._names(keys))

    def touch(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        self.inner.touch(self._names(keys))

    def complete_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        self.inner.complete_load(self._names(keys))

    def prepare_store(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        out = self.inner.prepare_store(self._names(keys))
        if out is None:
            return None
        return PrepareStoreOutput(
            self._keys(out.keys_to_store), out.store_spec, self._keys(out.evicted_keys)
        )

    def complete_store(
        self,
        keys: Iterable[bytes],
        req_context: RequestContext | bool | None = None,
        success: bool = True,
    ) -> None:
        self.inner.complete_store(self._names(keys), success)

    def on_schedule_end(self, context: object = None) -> None:
        self.inner.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return self.inner.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.inner.take_events():
            keys = self._keys(event.keys)
            yield OffloadingEvent(keys, event.block_size, event.medium, event.removed)

    def reset(self) -> None:
        self.inner.reset()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        end = len(self._suffix)
        return [key[: len(key) - end] for key in keys]

    def _keys(self, names: Iterable[bytes]) -> list[bytes]:
        return [name + self._suffix for name in names]
