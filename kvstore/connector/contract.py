"""The contract of a manager.

A manager lives in the scheduler's process. It knows which blocks are offloaded and where. It copies
nothing itself: it tells the server what a worker must copy, from where to where. Keys are
``bytes``, one for each offloaded block, in the order of the prompt.

It is called in one of two forms:

* by lists: ``lookup(keys)`` counts the leading keys that can be loaded, and no call names a
  request;
* by keys: ``lookup(key, req_context)``, and every call names its request.

The caller guarantees:

* all calls come from one thread at a time;
* `prepare_load` names keys that can be loaded: the leading ones that `lookup` has counted, or
  those for which it has answered True, in the same step. A step ends with `on_schedule_end`.
  If a server never calls it, a step ends when a prompt is looked up once more, when all that
  was found has been loaded, or after a quarter of a second;
* each `prepare_load` and `prepare_store` is followed by its completion.

The manager guarantees:

* no call waits for I/O, and none raises because a medium is slow, full or broken;
* between `prepare_load` and `complete_load` the blocks are not overwritten; between
  `prepare_store` and `complete_store` their places are not given out again, and no load
  reads them;
* a lookup that answers None ("ask again") is in the end answered otherwise;
* completions of what was never prepared are counted and change nothing.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.connector.mediums import LoadStoreSpec
from kvstore.connector.queued import GroupSizes, QueuedKeys
from kvstore.errors import KVStoreError

__all__ = [
    "ListManager",
    "OffloadingEvent",
    "OffloadingManager",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestContext",
    "knows_requests",
]


class RequestContext(Protocol):
    """What a manager must know about a request."""

    @property
    def req_id(self) -> str:
        """Name of the request, unique while it lives."""


@dataclass(slots=True)
class ReqContext:
    """A request of the server.

    Attributes:
        req_id: its name.
        position: returns the position in the prompt, in tokens, at which a key ends; for servers
            that name keys of several KV cache groups, or in another order than the prompt's.
        kv_transfer_params, kv_hints: hints about the request: see `kvstore.core.hints`.
        trace_headers: HTTP headers of which ``traceparent`` (W3C Trace Context) names the parent
            of the request's spans.
    """

    req_id: str
    position: Callable[[bytes], int] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    kv_hints: object | None = None
    trace_headers: Mapping[str, str] | None = None


@dataclass(slots=True, init=False)
class PrepareStoreOutput:
    """Which keys are to be stored, and where.

    Attributes:
        keys_to_store: the keys that are accepted and not offloaded yet, in their order.
        store_spec: their places, in the same order.
        evicted_keys: keys that were evicted to make room.
        block_hashes_to_store, block_hashes_evicted: published aliases of the two, also as
            keyword arguments.
    """

    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]

    def __init__(
        self,
        keys_to_store: list[bytes] | None = None,
        store_spec: LoadStoreSpec | None = None,
        evicted_keys: list[bytes] | None = None,
        *,
        block_hashes_to_store: list[bytes] | None = None,
        block_hashes_evicted: list[bytes] | None = None,
    ) -> None:
        if store_spec is None:
            raise TypeError("store_spec is missing: it says where the keys are to be stored")
        self.keys_to_store = _either("keys_to_store", keys_to_store, block_hashes_to_store)
        self.store_spec = store_spec
        self.evicted_keys = _either("evicted_keys", evicted_keys, block_hashes_evicted or [])

    @property
    def block_hashes_to_store(self) -> list[bytes]:
        return self.keys_to_store

    @property
    def block_hashes_evicted(self) -> list[bytes]:
        return self.evicted_keys


@dataclass(slots=True, init=False)
class OffloadingEvent:
    """Keys that appeared on (`removed` is False) or left a medium.

    Attributes:
        block_hashes: published alias of `keys`, also as a keyword argument.
        block_size: tokens of an offloaded block.
        tier: name of the tier; "" for host memory.
    """

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool
    tier: str

    def __init__(
        self,
        keys: list[bytes] | None = None,
        block_size: int = 1,
        medium: str = "",
        removed: bool = False,
        tier: str = "",
        *,
        block_hashes: list[bytes] | None = None,
    ) -> None:
        self.tier = tier
        self.keys = _either("keys", keys, block_hashes)
        self.block_size = block_size
        self.medium = medium
        self.removed = removed

    @property
    def block_hashes(self) -> list[bytes]:
        return self.keys


def _either(name: str, keys: list[bytes] | None, other: list[bytes] | None) -> list[bytes]:
    """Return the argument `name`, or its published alias."""
    found = other if keys is None else keys
    if found is None:
        raise TypeError(f"{name} is missing")
    return found


def asking(req_context: RequestContext | None) -> RequestContext:
    """Return the request that looks up one key.

    Raises:
        KVStoreError: if no request is named.
    """
    if req_context is None:
        raise KVStoreError("lookup of one key needs req_context, the request that asks")
    return req_context


def by_lists(
    req_context: RequestContext | bool | None, success: bool
) -> tuple[RequestContext | None, bool]:
    """Return the request and `success`; in calls by lists, `success` comes second."""
    if req_context is None or hasattr(req_context, "req_id"):
        return req_context, success
    return None, bool(req_context)


class OffloadingManager(ABC):
    """Base of managers: knows what is offloaded, and where. See the module's text.

    Attributes:
        loads_are_uses: whether `prepare_load` counts as a use. If so, `touch` is called only for
            keys that were used without being loaded, otherwise for all keys of a request.
    """

    loads_are_uses: bool = False

    @abstractmethod
    def lookup(
        self, keys: bytes | Iterable[bytes], req_context: RequestContext | None = None
    ) -> int | None:
        """Return how many leading `keys` can be loaded, or whether the one key of a request can.

        None means that it is being fetched: ask again.
        """

    def lookup_prefix(self, keys: Iterable[bytes], req_context: RequestContext) -> int | None:
        """Return how many leading `keys` of a request can be loaded, in one call.

        None if any key before the first miss is being fetched. All keys up to the first miss are
        looked up in any case.
        """
        deferred = False
        count = 0
        for key in keys:
            answer = self.lookup(key, req_context)
            if answer is None:
                deferred = True
            elif not answer:
                break
            else:
                count += 1
        return None if deferred else count

    def is_deferred(self, req_context: RequestContext) -> bool:
        """Whether every lookup of the request would be answered None now. Counts as asking."""
        return False

    @abstractmethod
    def prepare_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> LoadStoreSpec:
        """Protect `keys` until `complete_load`; return where they lie, in their order.

        Raises:
            KeyError: if one of them cannot be loaded; then none is protected.
        """

    def touch(  # noqa: B027
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        """Count a use of `keys` that were not loaded from here. Unknown keys are ignored."""

    def complete_load(  # noqa: B027
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        """End the protection of loaded `keys`, each as often as it was prepared."""

    @abstractmethod
    def prepare_store(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        """Reserve places for those of `keys` that are not here, evicting others if necessary.

        If not all fit, the longest prefix that fits is accepted. None means that nothing can be
        stored now: offer it again.
        """

    def complete_store(  # noqa: B027
        self,
        keys: Iterable[bytes],
        req_context: RequestContext | bool | None = None,
        success: bool = True,
    ) -> None:
        """Make stored `keys` loadable; without `success`, drop them.

        In calls by lists `success` comes second, as in ``complete_store(keys, False)``.
        """

    def on_new_request(self, req_context: RequestContext) -> None:  # noqa: B027
        """Begin a request, when it is seen for the first time."""

    def on_request_queued(  # noqa: B027
        self, req_context: RequestContext, groups: Sequence[QueuedKeys]
    ) -> None:
        """Note what a request will look up when its turn comes, so that it may be fetched by then.

        Optional; called after `on_new_request`, before the first lookup.

        Args:
            groups: the keys of the prompt, for each KV cache group.
        """

    def on_request_turn(self, req_context: RequestContext) -> None:  # noqa: B027
        """Note that a request's turn has come, whether or not anything of it is looked up."""

    def on_request_decided(  # noqa: B027
        self, req_context: RequestContext, *, loads: bool, start: int
    ) -> None:
        """Note that no more is looked up for a request: it loads what was found, or nothing.

        Args:
            start: the first token of the prompt that it computes.
        """

    def is_coming(self, key: bytes) -> bool:
        """Whether a chunk whose lookup was deferred is known to exist, and so will be a hit."""
        return False

    def most_tokens(self, groups: GroupSizes, keys: Sequence[bytes] = ()) -> int:
        """Return how many tokens one request can load at once.

        Args:
            keys: of its prompt; where there are tenants, the first and the last say whose it is.
        """
        return sys.maxsize

    def on_request_finished(self, req_context: RequestContext) -> None:  # noqa: B027
        """End a request: it looks up and prepares no more. Completions may still come."""

    def on_schedule_end(  # noqa: B027
        self, context: object = None, *, computes: bool | None = None
    ) -> None:
        """End a step of the scheduler. `context`, which some servers pass, is not used.

        Args:
            computes: whether the step computes tokens of prompts; None: not known.
        """

    def on_step_reported(self) -> None:  # noqa: B027
        """Note that the workers have computed the oldest step that was not reported yet.

        A server that reports every step, in order, lets a manager measure how long computing
        takes: what would take longer to fetch is then a miss.
        """

    def has_pending_work(self) -> bool:
        """Whether the server must go on taking steps although it has no request."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what appeared on or left a medium since the last call."""
        return ()

    def reset(self) -> None:  # noqa: B027
        """Forget everything, including what is being loaded or stored.

        The places of these transfers stay reserved until they are completed. If a key is prepared
        again before that, its older transfer must be completed first.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Release everything. No call follows."""


def knows_requests(manager: OffloadingManager) -> bool:
    """Whether calls of `manager`, and of the manager behind it, can name their request."""
    backing = getattr(manager, "backing", None)
    if backing is not None:
        return knows_requests(backing)
    parameters = inspect.signature(manager.lookup).parameters.values()
    several = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return several or sum(one.kind is not one.KEYWORD_ONLY for one in parameters) > 1


class ListManager(OffloadingManager):
    """Adapter that calls `inner` by lists, without naming requests.

    Args:
        suffix: end of all keys, removed in calls of `inner`; with one KV cache group, what
            remains is the hash of a block.
    """

    def __init__(self, inner: OffloadingManager, suffix: bytes = b"") -> None:
        self.inner = inner
        self._suffix = suffix

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

    def on_schedule_end(self, context: object = None, *, computes: bool | None = None) -> None:
        self.inner.on_schedule_end(computes=computes)

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
