"""LoRA adapters: which weights each request is computed with, and the keys that follow from them.

vLLM's block hashes know an adapter by name and path. Its weights may be others in the next
process, or after a request with `load_inplace`; kvstore keeps their chunks apart by a fingerprint
of the files. What is in doubt is neither looked up nor stored:

- vLLM has loaded what an adapter's files hold when its first request comes, as long as they do
  not change. When they do, the adapter is in doubt.
- A request with `load_inplace` makes vLLM read the files again, at a moment that it does not
  tell. The request is in doubt, and so is every request of its adapter that lives beside it. When
  the last has run and is over, and the files have not changed since before it came, the adapter
  is known again.

Fingerprints are taken elsewhere, one after the other in the order of the calls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvstore.types import about
from kvstore.vllm.identity.fingerprint import Fingerprint, adapter_files, fingerprint
from kvstore.vllm.version import keep_position
from kvstore.vllm.vllm_internals import request_of

__all__ = ["AdapterKeys", "Adapters", "Take", "Use"]

logger = logging.getLogger("kvstore")


GROUP_BYTES = 4
"""The end of a key, which names its group."""

Take = Callable[[str, Fingerprint | None], "Future[Fingerprint]"]
"""Begins to take the fingerprint of the adapter in a path, given an earlier one."""


@dataclass(slots=True, eq=False)
class Use:
    """The adapter of one request.

    Attributes:
        waiting: its weights are not known yet.
        doubtful: not to be looked up or stored (any more).
        salt: of its keys, once its weights are known; what is under way keeps it.
    """

    request: str
    adapter: int = 0
    path: str = ""
    arrived: float = 0.0
    waiting: bool = False
    doubtful: bool = False
    salt: bytes = b""
    ran: bool = False
    taken: Future[Fingerprint] | None = None
    before: Fingerprint | None = None

    def key(self, key: bytes) -> bytes:
        """What the chunk that vLLM calls `key` is kept under."""
        body = key[:-GROUP_BYTES]
        digest = blake2b(body, key=self.salt, digest_size=len(body)).digest()
        return digest + key[-GROUP_BYTES:]


@dataclass(slots=True, eq=False)
class _Adapter:
    loaded: Fingerprint | None = None
    doubtful: bool = False
    live: set[Use] = field(default_factory=set)
    reloads: dict[str, Use] = field(default_factory=dict)


class Adapters:
    """The adapters that this process has seen; answers from memory."""

    def __init__(self, take: Take, settings: str, patience: float) -> None:
        """
        Args:
            settings: what beside the files decides the KV of a request with an adapter.
            patience: a request waits so many seconds for its fingerprint.
        """
        self._take = take
        self._settings = settings
        self._patience = patience
        self._adapters: dict[int, _Adapter] = {}
        self._arrivals: deque[Use] = deque()
        self._reloading: dict[str, Use] = {}
        self._checks: list[tuple[_Adapter, Use, Future[Fingerprint]]] = []
        self._told: set[str] = set()

    def arrive(self, request: str, adapter: int, path: str, inplace: bool, now: float) -> Use:
        """A request with an adapter has come."""
        known = self._adapters.setdefault(adapter, _Adapter())
        use = Use(request, adapter, path, now)
        if inplace:
            self._doubt(known)
            known.reloads[request] = self._reloading[request] = use
        if known.reloads:
            use.doubtful = True
        if inplace or not use.doubtful:
            # A reload waits, too: its files are to be seen before vLLM reads them.
            use.taken = self._take(path, known.loaded)
            use.waiting = True
            self._arrivals.append(use)
        known.live.add(use)
        return use

    def unknown(self, request: str) -> Use:
        """A request has come, and nobody can tell its adapter."""
        self._tell("vLLM does not say which adapter a request uses")
        return Use(request, doubtful=True)

    def settle(self, now: float) -> None:
        """Take note of fingerprints that are there."""
        if self._checks:
            self._checks = [check for check in self._checks if not self._checked(*check)]
        while self._arrivals:
            use = self._arrivals[0]
            assert use.taken is not None
            late = now - use.arrived >= self._patience
            if not use.taken.done() and not late:
                break
            self._arrivals.popleft()
            self._learn(use)

    def ran(self, requests: Iterable[str]) -> None:
        """These requests have been scheduled for the first time."""
        if self._reloading:
            for request in requests:
                use = self._reloading.get(request)
                if use is not None and use.before is not None:
                    use.ran = True

    def finish(self, use: Use) -> None:
        """The request is over; copies of its chunks may still be under way."""
        known = self._adapters.get(use.adapter)
        if known is None:
            return
        known.live.discard(use)
        if known.reloads.pop(use.request, None) is None:
            return
        self._reloading.pop(use.request, None)
        if use.ran and not known.reloads:
            self._checks.append((known, use, self._take(use.path, use.before)))

    def _learn(self, use: Use) -> None:
        found, done = _result(use.taken), use.taken is not None and use.taken.done()
        use.waiting, use.taken, use.before = False, None, found
        known = self._adapters[use.adapter]
        if found is None:
            use.doubtful = True
            # A fingerprint that comes too late may be of other files than vLLM has read.
            known.doubtful |= not done
            self._tell(
                f"adapter {use.path}: its files cannot be read" + ("" if done else " in time")
            )
        elif not known.doubtful:
            if known.loaded is None:
                known.loaded = found
            elif known.loaded.digest != found.digest:
                self._doubt(known)
                self._tell(f"adapter {use.path}: other files than vLLM has loaded")
        use.doubtful |= known.doubtful
        if not use.doubtful and found is not None:
            told = f"{self._settings} {found.digest}"
            use.salt = blake2b(told.encode(), digest_size=32).digest()

    def _checked(self, known: _Adapter, use: Use, after: Future[Fingerprint]) -> bool:
        if not after.done():
            return False
        found, before = _result(after), use.before
        unchanged = found is not None and before is not None and found.signature == before.signature
        if unchanged and not known.reloads:
            known.loaded, known.doubtful = found, False
        return True

    def _doubt(self, known: _Adapter) -> None:
        known.doubtful = True
        for use in known.live:
            use.doubtful = True

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "kvstore: %s: not offloaded",
                what,
                extra=about("adapter.not_offloaded", adapter=what),
            )


def _result(taken: Future[Fingerprint] | None) -> Fingerprint | None:
    if taken is None or not taken.done() or taken.cancelled() or taken.exception() is not None:
        return None
    return taken.result()


class AdapterKeys:
    """Which adapter each request uses, and what its chunks are kept under: see `Adapters`.

    Args:
        settings: what beside the files decides the KV of a request with an adapter.
        patience: a request waits so many seconds for its fingerprint.
    """

    def __init__(self, settings: str, patience: float) -> None:
        self._reader = ThreadPoolExecutor(1, "kvstore-adapters")
        self._adapters = Adapters(self._take, settings, patience)

    def arrived(self, req_context: ReqContext) -> None:
        """A request has come; called by vLLM's scheduler, a frame or two further up."""
        request = request_of(req_context.req_id)
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

    def settle(self) -> None:
        """Take note of fingerprints that are there."""
        self._adapters.settle(time.monotonic())

    def ran(self, requests: Iterable[str]) -> None:
        """These requests have been scheduled for the first time."""
        self._adapters.ran(requests)

    def finished(self, req_context: ReqContext) -> None:
        """The request is over."""
        use = req_context.get_state(Use)
        if use is not None:
            self._adapters.finish(use)

    def named(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """The keys under which chunks of a request are kept, at the same places in its prompt."""
        use = req_context.get_state(Use)
        if use is None or not use.salt:
            return list(keys)
        return [_named(key, use, req_context) for key in keys]

    def close(self) -> None:
        """No fingerprint is wanted any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _take(self, path: str, known: Fingerprint | None) -> Future[Fingerprint]:
        try:
            return self._reader.submit(lambda: fingerprint(adapter_files(path), known))
        except RuntimeError as error:
            # No thread can be started, or the server is going down.
            failed: Future[Fingerprint] = Future()
            failed.set_exception(error)
            return failed


def _named(key: OffloadKey, use: Use, req_context: ReqContext) -> OffloadKey:
    named = OffloadKey(use.key(key))
    keep_position(req_context, key, named)
    return named
