"""Reuse filter: store only what was looked up several times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.connector.contract import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
    asking,
    by_lists,
)
from kvstore.connector.mediums import LoadStoreSpec
from kvstore.connector.queued import GroupSizes, QueuedKeys

__all__ = ["FilterReusedOffloadingManager"]

MOST_REQUESTS = 2**14
"""Most requests that are remembered, if a server does not report their ends."""


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

    # -- passed on to the backing manager --------------------------------------------------

    def is_deferred(self, req_context: RequestContext) -> bool:
        return self.backing.is_deferred(req_context)

    def prepare_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> LoadStoreSpec:
        return self.backing.prepare_load(keys, *_where(req_context))

    def touch(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        self.backing.touch(keys, *_where(req_context))

    def complete_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        self.backing.complete_load(keys, *_where(req_context))

    def complete_store(
        self,
        keys: Iterable[bytes],
        req_context: RequestContext | bool | None = None,
        success: bool = True,
    ) -> None:
        req_context, success = by_lists(req_context, success)
        if req_context is None:
            self.backing.complete_store(keys, success=success)
        else:
            self.backing.complete_store(keys, req_context, success)

    def on_new_request(self, req_context: RequestContext) -> None:
        self.backing.on_new_request(req_context)

    def on_request_queued(self, req_context: RequestContext, groups: Sequence[QueuedKeys]) -> None:
        self.backing.on_request_queued(req_context, groups)

    def on_request_turn(self, req_context: RequestContext) -> None:
        self.backing.on_request_turn(req_context)

    def on_request_decided(self, req_context: RequestContext, *, loads: bool, start: int) -> None:
        self.backing.on_request_decided(req_context, loads=loads, start=start)

    def is_coming(self, key: bytes) -> bool:
        return self.backing.is_coming(key)

    def most_tokens(self, groups: GroupSizes, keys: Sequence[bytes] = ()) -> int:
        return self.backing.most_tokens(groups, keys)

    def on_request_finished(self, req_context: RequestContext) -> None:
        self._named.pop(req_context.req_id, None)
        self.backing.on_request_finished(req_context)

    def on_schedule_end(self, context: object = None, *, computes: bool | None = None) -> None:
        self.backing.on_schedule_end(computes=computes)

    def on_step_reported(self) -> None:
        self.backing.on_step_reported()

    def has_pending_work(self) -> bool:
        return self.backing.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.backing.take_events()

    def reset(self) -> None:
        self.counts.clear()
        self._named.clear()
        self.backing.reset()

    def shutdown(self) -> None:
        self.backing.shutdown()


def _where(req_context: RequestContext | None) -> tuple[RequestContext, ...]:
    """Return the argument only if it was given: `backing` may take calls by lists only."""
    return () if req_context is None else (req_context,)
