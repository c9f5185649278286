"""LoRA adapters: which weights each request is computed with, and the keys that follow from them.

vLLM's block hashes know an adapter by name and path, and its weights may be others in the next
process. So kvstore adds a fingerprint of the adapter's files to the keys. vLLM has loaded what
the files hold when the first request of the adapter comes, as long as they do not change. When
they do or cannot be read, or vLLM is made to read them again (`load_inplace`), it is unknown
which weights a request is computed with: the adapter is in doubt, and its chunks are neither
looked up nor stored any more.

A request may wait in vLLM's queue before its adapter is read, also again, if vLLM has given it up.
So its files are looked at once more at its end, and what it has stored is removed if they changed.

A request tells that it makes vLLM read them again. A client who has the server do so, while other
requests of the adapter are computed, reaches no connector: so the executor's call is watched.

Fingerprints are taken by threads, one for each adapter, and noted in the order of the calls.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvstore.concurrency import Daemons
from kvstore.types import about
from kvstore.vllm.identity.fingerprint import (
    AbsentError,
    Fingerprint,
    adapter_files,
    fingerprint,
)
from kvstore.vllm.version import GROUP_BYTES, keep_position

if TYPE_CHECKING:
    from kvstore.vllm.engine import Engine

__all__ = ["AdapterKeys", "Adapters", "Take", "Use"]

logger = logging.getLogger("kvstore")

LAST_SECONDS = 2.0
"""How long the end of an engine waits for files of adapters."""

Take = Callable[[str, Fingerprint | None], "Future[Fingerprint]"]
"""Begins to take the fingerprint of the adapter in a path, given an earlier one."""


@dataclass(slots=True)
class _Adapter:
    """The adapter that vLLM has loaded under one id; `doubtful` once that is not known any more."""

    loaded: Fingerprint | None = None
    doubtful: bool = False


@dataclass(slots=True, eq=False)
class Use:
    """The adapter of one request.

    Attributes:
        request: its id.
        adapter: what is known of its adapter; None where vLLM does not say which it is.
        waiting: its weights are not known yet.
        salt: of its keys, once its weights are known; what is under way keeps it.
        stored: keys, as vLLM names them, of chunks that it has stored.
        forget: removes these.
    """

    request: str
    adapter: _Adapter | None = None
    path: str = ""
    arrived: float = 0.0
    waiting: bool = False
    salt: bytes = b""
    taken: Future[Fingerprint] | None = None
    stored: list[OffloadKey] = field(default_factory=list)
    forget: Callable[[], object] | None = None

    @property
    def doubtful(self) -> bool:
        """Not to be looked up or stored (any more)."""
        if self.adapter is None or self.adapter.doubtful:
            return True
        return not self.waiting and not self.salt

    def key(self, key: bytes) -> bytes:
        """Return the key under which the chunk that vLLM calls `key` is kept."""
        body = key[:-GROUP_BYTES]
        digest = blake2b(body, key=self.salt, digest_size=len(body)).digest()
        return digest + key[-GROUP_BYTES:]


class Adapters:
    """The adapters that this process has seen; answers from memory."""

    def __init__(self, take: Take, settings: str, patience: float) -> None:
        """
        Args:
            settings: what beside the files decides the KV of a request with an adapter.
            patience: seconds that a request waits for its fingerprint.
        """
        self._take = take
        self._settings = settings
        self._patience = patience
        self._adapters: dict[int, _Adapter] = {}
        self._arrivals: deque[Use] = deque()
        self._leaving: deque[Use] = deque()
        self._told: set[str] = set()

    def arrive(self, request: str, adapter: int, path: str, inplace: bool, now: float) -> Use:
        """A request with an adapter has come; `inplace`: vLLM reads the adapter's files again."""
        known = self._adapters.setdefault(adapter, _Adapter())
        use = Use(request, known, path, now)
        if inplace:
            self.replaced(adapter, path)
        if not known.doubtful:
            use.taken = self._take(path, known.loaded)
            use.waiting = True
            self._arrivals.append(use)
        return use

    def replaced(self, adapter: int, path: str) -> None:
        """vLLM reads the files of an adapter again; nothing is lost where no request has come."""
        if adapter in self._adapters:
            self._adapters[adapter].doubtful = True
            self._tell(f"adapter {path}: was loaded in place")

    def leave(self, use: Use, forget: Callable[[], object], now: float) -> None:
        """A request has ended; `forget`, which removes what it has stored, is called in doubt."""
        if not use.stored:
            return
        use.forget = forget
        if use.adapter is None or use.doubtful:
            forget()
        else:
            use.taken, use.arrived = self._take(use.path, use.adapter.loaded), now
            self._leaving.append(use)

    @property
    def leaving(self) -> list[Future[Fingerprint]]:
        """The looks on which it depends whether what ended requests have stored may stay."""
        return [use.taken for use in self._leaving if use.taken is not None]

    def unknown(self, request: str) -> Use:
        """Begin a request whose adapter is not known."""
        self._tell("vLLM does not say which adapter a request uses")
        return Use(request)

    def settle(self, now: float) -> None:
        """Take note of fingerprints that are there."""
        for uses in (self._arrivals, self._leaving):
            while uses:
                use = uses[0]
                assert use.taken is not None
                if not use.taken.done() and now - use.arrived < self._patience:
                    break
                uses.popleft()
                self._learn(use)
                if use.doubtful and use.forget is not None:
                    use.forget()

    def _learn(self, use: Use) -> None:
        taken, known = use.taken, use.adapter
        assert taken is not None
        assert known is not None
        use.waiting, use.taken = False, None
        if not taken.done():
            # A fingerprint that comes too late may be of other files than vLLM has read.
            known.doubtful = True
            self._tell(f"adapter {use.path}: its files cannot be read in time")
        elif taken.cancelled() or taken.exception() is not None:
            absent = not taken.cancelled() and isinstance(taken.exception(), AbsentError)
            if known.loaded is None and absent:
                # vLLM has loaded nothing from this machine's files yet.
                self._tell(f"adapter {use.path}: its files are not on this machine")
                return
            # vLLM may have read them before they changed, or since.
            known.doubtful = True
            self._tell(f"adapter {use.path}: its files cannot be read")
        elif known.loaded is not None and known.loaded.digest != taken.result().digest:
            known.doubtful = True
            self._tell(f"adapter {use.path}: other files than vLLM has loaded")
        else:
            known.loaded = known.loaded or taken.result()
            told = f"{self._settings} {known.loaded.digest}"
            use.salt = blake2b(told.encode(), digest_size=32).digest()

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "kvstore: %s: not offloaded",
                what,
                extra=about("adapter.not_offloaded", adapter=what),
            )


class AdapterKeys:
    """Which adapter each request uses, and what its chunks are kept under: see `Adapters`.

    Args:
        settings: what beside the files decides the KV of a request with an adapter.
        patience: seconds that a request waits for its fingerprint.
    """

    def __init__(self, settings: str, patience: float) -> None:
        # Files that do not answer hold up neither other adapters nor the end of the process.
        self._reader = Daemons("kvstore-adapters")
        # Requests that come while one is taken share it: its files are looked at again at its end.
        self._pending: dict[str, Future[Fingerprint]] = {}
        self._adapters = Adapters(self._take, settings, patience)
        _watching.add(self._adapters)
        _watch_executor()

    def arrived(self, req_context: ReqContext, engine: Engine | None) -> None:
        """Note that a request has come; `engine` knows it if `KVStoreConnector` opens it."""
        request = None if engine is None else engine.opened(req_context.req_id)
        if request is None:
            req_context.set_state(self._adapters.unknown(req_context.req_id))
        elif request.lora_request is not None:
            lora = request.lora_request
            req_context.set_state(
                self._adapters.arrive(
                    req_context.req_id,
                    int(lora.lora_int_id),
                    str(lora.lora_path),
                    bool(getattr(lora, "load_inplace", False)),
                    time.monotonic(),
                )
            )

    def use(self, req_context: ReqContext) -> Use | None:
        """The adapter of a request, up to date if it waits to be known; None without one."""
        use: Use | None = req_context.get_state(Use)
        if use is not None and use.waiting:
            self.settle()
        return use

    def ended(self, req_context: ReqContext, forget: Callable[[list[OffloadKey]], object]) -> None:
        """Note that a request has ended; `forget` is given the keys of what is to be removed."""
        use: Use | None = req_context.get_state(Use)
        if use is not None:
            self._adapters.leave(use, lambda: forget(use.stored), time.monotonic())

    @property
    def settled(self) -> bool:
        """Whether nothing is to be removed because of fingerprints that are still taken."""
        return not self._adapters.leaving

    def settle(self) -> None:
        """Take note of fingerprints that are there."""
        self._adapters.settle(time.monotonic())

    def named(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """The keys under which chunks of a request are kept, at the same places in its prompt."""
        use = req_context.get_state(Use)
        if use is None or not use.salt:
            return list(keys)
        return [keep_position(req_context, key, OffloadKey(use.key(key))) for key in keys]

    def close(self) -> None:
        """Wait a moment for the last looks: no fingerprint is wanted any more."""
        wait(self._adapters.leaving, LAST_SECONDS)
        self._adapters.settle(math.inf)
        _watching.discard(self._adapters)

    def _take(self, path: str, known: Fingerprint | None) -> Future[Fingerprint]:
        taken = self._pending.get(path)
        if taken is None or taken.done():
            try:
                taken = self._reader.submit(lambda: fingerprint(adapter_files(path), known))
            except RuntimeError as error:
                # No thread can be started, or the server is going down.
                taken = Future()
                taken.set_exception(error)
            self._pending[path] = taken
        return taken


_watching: weakref.WeakSet[Adapters] = weakref.WeakSet()
"""Those that are told of each adapter that an engine of this process loads in place."""


@functools.cache
def _watch_executor() -> None:
    """Tell of each adapter that vLLM's executor loads in place, from now on.

    The engine does so between two steps: what was scheduled before is computed with the weights
    from before.
    """
    load = Executor.add_lora

    @functools.wraps(load)
    def add_lora(executor: Any, lora_request: Any) -> bool:
        if lora_request.load_inplace:
            for each in list(_watching):
                each.replaced(int(lora_request.lora_int_id), str(lora_request.lora_path))
        loaded: bool = load(executor, lora_request)
        return loaded

    Executor.add_lora = add_lora
