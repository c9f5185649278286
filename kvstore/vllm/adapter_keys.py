"""The keys of requests with a LoRA adapter: those of the adapter's own weights."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvstore.vllm.adapters import Adapters, Use
from kvstore.vllm.checkpoint import adapter_files
from kvstore.vllm.identity.fingerprint import Fingerprint, fingerprint
from kvstore.vllm.version import keep_position
from kvstore.vllm.vllm_internals import request_of

__all__ = ["AdapterKeys"]


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
