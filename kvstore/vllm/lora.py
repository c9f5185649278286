"""LoRA manager: keep each adapter's chunks under keys of its own weights."""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.vllm.adapters import AdapterKeys, Use
from kvstore.vllm.layout import EngineShape
from kvstore.vllm.manager import KVStoreOffloadingManager
from kvstore.vllm.version import position_of

__all__ = ["LoRAOffloadingManager"]


class LoRAOffloadingManager(KVStoreOffloadingManager):
    """Gives the requests of an adapter keys of their own; all others pass unchanged."""

    def __init__(self, spec: EngineShape, settings: str) -> None:
        super().__init__(spec)
        self._adapters = AdapterKeys(settings, spec.store_config.deadline_s)
        self._storing: dict[str, ReqContext] = {}
        """Requests that have stored something, until they end."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._adapters.arrived(req_context, self._spec.engine)
        return super().on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        use = self._adapters.use(req_context)
        if use is None:
            return super().lookup(key, req_context)
        if use.waiting:
            return self._scans.answer(key, use.request, position_of(req_context))
        if use.doubtful:
            return LookupResult.MISS
        (named,) = self._adapters.named([key], req_context)
        return super().lookup(named, req_context)

    def _own_keys(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        return super()._own_keys(self._adapters.named(keys, req_context), req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        use = req_context.get_state(Use)
        if use is None:
            return super().prepare_store(keys, req_context)
        self._adapters.settle()
        if use.waiting:
            return None
        if use.doubtful:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        ours = self._adapters.named(keys, req_context)
        theirs = dict(zip(ours, keys, strict=True))
        out = super().prepare_store(ours, req_context)
        if out is not None:
            out.keys_to_store = [theirs[key] for key in out.keys_to_store]
            use.stored += out.keys_to_store
            self._storing[use.request] = req_context
        return out

    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        self._ended(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._adapters.settle()
        super().on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return not self._adapters.settled or super().has_pending_work()

    def shutdown(self) -> None:
        for req_context in [*self._storing.values()]:
            self._ended(req_context)
        self._adapters.close()
        super().shutdown()

    def _ended(self, req_context: ReqContext) -> None:
        """What a request has stored stays, or does not: see `Adapters.leave`."""

        def forget(keys: list[OffloadKey]) -> None:
            self._begin_step()
            self._core.remove(self._own_keys(keys, req_context))

        if self._storing.pop(req_context.req_id, None) is not None:
            self._adapters.ended(req_context, forget)
