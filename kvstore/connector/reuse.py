"""Reuse filter: store only what was looked up several times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from kvstore.connector.contract import (
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
    asking,
)

__all__ = ["FilterReusedOffloadingManager"]

MOST_REQUESTS = 2**14
"""Most requests that are remembered, if a server does not report their ends."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _passed_on(method: _Method) -> _Method:
    """Return a method that calls the same one of the backing manager, in the form it was called."""

    @wraps(method, updated=())
    def passing_on(self: FilterReusedOffloadingManager, *given: Any, **named: Any) -> Any:
        return getattr(self.backing, method.__name__)(*given, **named)

    return cast(_Method, passing_on)


class FilterReusedOffloadingManager(OffloadingManager):
    """Manager that offers `backing` only keys that `store_threshold` requests have looked up.

    A request counts once for each key that it names, found or not, however often it asks. Lookups
    by lists name no request: each counts when it is answered, because one that is told to ask again
    will repeat the same lookup.

    Counts are kept for the `max_tracker_size` keys that were looked up last. All other calls are
    passed on to `backing`.

    Attributes:
        counts: how many requests have named a key, the coldest key first.
    """

    def __init__(
        self,
        backing: OffloadingManager,
        store_threshold: int = 2,
        max_tracker_size: int = 64_000,
    ) -> None:
        """
        Raises:
            ValueError: if `store_threshold` is below 2 or `max_tracker_size` below 1.
        """
        if store_threshold < 2:
            raise ValueError(
                f"store_threshold = {store_threshold}: must be at least 2; "
                "to store everything, use the manager without this filter"
            )
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size = {max_tracker_size}: must be at least 1")
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: OrderedDict[bytes, int] = OrderedDict()
        self._named: OrderedDict[str, set[bytes]] = OrderedDict()
        """Request -> the keys for which it was counted."""

    @property
    def loads_are_uses(self) -> bool:  # type: ignore[override]
        """As in `backing`."""
        return self.backing.loads_are_uses

    def lookup(
        self, keys: bytes | Iterable[bytes], req_context: RequestContext | None = None
    ) -> int | None:
        if isinstance(keys, bytes):
            context = asking(req_context)
            self._count_for(context.req_id, (keys,))
            return self.backing.lookup(keys, context)
        named = list(keys)
        answer = self.backing.lookup(named)
        if answer is not None:
            # After None the server repeats the lookup, which must not count twice.
            self._count(named)
        return answer

    def lookup_prefix(self, keys: Iterable[bytes], req_context: RequestContext) -> int | None:
        named = list(keys)
        self._count_for(req_context.req_id, named)
        return self.backing.lookup_prefix(named, req_context)

    def prepare_store(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        counts, enough = self.counts, self.store_threshold
        wanted = [key for key in keys if counts.get(key, 0) >= enough]
        return self.backing.prepare_store(wanted, *_where(req_context))

    def on_request_finished(self, req_context: RequestContext) -> None:
        self._named.pop(req_context.req_id, None)
        self.backing.on_request_finished(req_context)

    def reset(self) -> None:
        self.counts.clear()
        self._named.clear()
        self.backing.reset()

    def _count_for(self, request: str, keys: Iterable[bytes]) -> None:
        """Count the request once for each of these keys."""
        known = self._named.setdefault(request, set())
        fresh = [key for key in keys if key not in known]
        known.update(fresh)
        self._count(fresh)
        if len(self._named) > MOST_REQUESTS:
            self._named.popitem(last=False)

    def _count(self, keys: Iterable[bytes]) -> None:
        counts = self.counts
        for key in keys:
            count = counts.pop(key, 0)
            if not count and len(counts) >= self.max_tracker_size:
                counts.popitem(last=False)
            counts[key] = count + 1

    is_deferred = _passed_on(OffloadingManager.is_deferred)
    prepare_load = _passed_on(OffloadingManager.prepare_load)
    touch = _passed_on(OffloadingManager.touch)
    complete_load = _passed_on(OffloadingManager.complete_load)
    complete_store = _passed_on(OffloadingManager.complete_store)
    on_new_request = _passed_on(OffloadingManager.on_new_request)
    on_request_queued = _passed_on(OffloadingManager.on_request_queued)
    on_request_turn = _passed_on(OffloadingManager.on_request_turn)
    on_request_decided = _passed_on(OffloadingManager.on_request_decided)
    is_coming = _passed_on(OffloadingManager.is_coming)
    most_tokens = _passed_on(OffloadingManager.most_tokens)
    on_schedule_end = _passed_on(OffloadingManager.on_schedule_end)
    on_step_reported = _passed_on(OffloadingManager.on_step_reported)
    has_pending_work = _passed_on(OffloadingManager.has_pending_work)
    take_events = _passed_on(OffloadingManager.take_events)
    shutdown = _passed_on(OffloadingManager.shutdown)


def _where(req_context: RequestContext | None) -> tuple[RequestContext, ...]:
    """Return the argument only if it was given: `backing` may take calls by lists only."""
    return () if req_context is None else (req_context,)
