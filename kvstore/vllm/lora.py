"""The manager of an engine with LoRA: each adapter's chunks under keys of its own weights."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.vllm.adapters import Adapters, Use
from kvstore.vllm.caller import request_of
from kvstore.vllm.checkpoint import adapter_files
from kvstore.vllm.fingerprint import Fingerprint, fingerprint
from kvstore.vllm.manager import KVStoreOffloadingManager

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec

__all__ = ["LoRAOffloadingManager"]


class LoRAOffloadingManager(KVStoreOffloadingManager):
    """Gives the requests of an adapter keys of their own; all others pass unchanged."""

    def __init__(self, spec: KVStoreOffloadingSpec, settings: str) -> None:
        super().__init__(spec)
        self._reader = ThreadPoolExecutor(1, "kvstore-adapters")
        self._adapters = Adapters(self._take, settings, spec.store_config.deadline_s)
        self._asked_again: set[str] = set()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
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
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        use = req_context.get_state(Use)
        if use is not None:
            self._adapters.finish(use)
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._adapters.ran(context.new_req_ids)
        self._asked_again.clear()
        super().on_schedule_end(context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        use = req_context.get_state(Use)
        if use is None:
            return super().lookup(key, req_context)
        if use.waiting:
            self._adapters.settle(time.monotonic())
            if use.waiting:
                return self._later(use)
        if use.doubtful:
            return LookupResult.MISS
        return super().lookup(_named(key, use, req_context), req_context)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        (named,) = _keys([key], req_context)
        return super().get_load_source(named, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().touch(_keys(keys, req_context), req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return super().prepare_load(_keys(keys, req_context), req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(_keys(keys, req_context), req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        use = req_context.get_state(Use)
        if use is None:
            return super().prepare_store(keys, req_context)
        self._adapters.settle(time.monotonic())
        if use.waiting:
            return None
        if use.doubtful:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        named = {_named(key, use, req_context): key for key in keys}
        out = super().prepare_store(list(named), req_context)
        if out is not None:
            out.keys_to_store = [named[key] for key in out.keys_to_store]
        return out

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(_keys(keys, req_context), req_context, success)

    def shutdown(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        super().shutdown()

    def _later(self, use: Use) -> LookupResult:
        # One RETRY defers the request; the MISS after it ends the scan of its keys.
        if self._single_group and use.request in self._asked_again:
            return LookupResult.MISS
        self._asked_again.add(use.request)
        return LookupResult.RETRY

    def _take(self, path: str, known: Fingerprint | None) -> Future[Fingerprint]:
        try:
            return self._reader.submit(lambda: fingerprint(adapter_files(path), known))
        except RuntimeError as error:
            # No thread can be started, or the server is going down.
            failed: Future[Fingerprint] = Future()
            failed.set_exception(error)
            return failed


def _keys(keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[OffloadKey]:
    use = req_context.get_state(Use)
    if use is None or not use.salt:
        return keys
    return [_named(key, use, req_context) for key in keys]


def _named(key: OffloadKey, use: Use, req_context: ReqContext) -> OffloadKey:
    """The key under which the adapter's chunk is kept, at the same place in the prompt."""
    named = OffloadKey(use.key(key))
    position = req_context.get_offload_key_position(key)
    if position is not None:
        req_context.set_offload_key_position(named, position)
    return named
