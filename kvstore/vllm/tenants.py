"""Tenant manager: keep each tenant's chunks under keys of its own.

A request names its tenant in its transfer parameters, ``{"kvstore": {"tenant": "alice"}}``. Without
a name its `cache_salt` is its tenant, and without that it belongs to the tenant "". It may say how
many of its first tokens are public: ``{"kvstore": {"public_tokens": 1024}}``. Those belong to the
tenant "public", and are found by all requests that say so, too. No request can name that tenant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)

from kvstore.connector.queued import GroupSizes, QueuedKeys
from kvstore.core.hints import PARAMS_KEY
from kvstore.policies.shares import TAG_BYTES, tag_of
from kvstore.vllm.layout import EngineShape
from kvstore.vllm.lora import LoRAOffloadingManager
from kvstore.vllm.manager import KVStoreOffloadingManager
from kvstore.vllm.version import GROUP_BYTES, keep_position

__all__ = ["LoRATenantOffloadingManager", "TenantOffloadingManager"]

PUBLIC = "public"
"""The tenant of what requests call public."""

TENANT, PUBLIC_TOKENS = "tenant", "public_tokens"
"""What a request may say below `PARAMS_KEY`."""


@dataclass(slots=True, eq=False)
class _Owner:
    """Whose the chunks of a request are.

    Attributes:
        tag: of its tenant. public: hashes of the chunks that belong to all.
    """

    tag: bytes
    public: frozenset[bytes] = frozenset()

    def key(self, key: bytes) -> OffloadKey:
        """Return the key under which the chunk that vLLM calls `key` is kept."""
        public = bool(self.public) and key[:-GROUP_BYTES] in self.public
        return OffloadKey((_PUBLIC_TAG if public else self.tag) + key)


_PUBLIC_TAG = tag_of(PUBLIC)

NOBODY = _Owner(tag_of(""))


class TenantOffloadingManager(KVStoreOffloadingManager):
    """Gives the requests of each tenant keys of their own."""

    def __init__(self, spec: EngineShape) -> None:
        super().__init__(spec)
        self._owners: dict[str, _Owner] = {}

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        name, engine = req_context.req_id, self._spec.engine
        request = None if engine is None else engine.opened(name)
        told = _told(req_context)
        tenant = told.get(TENANT)
        if tenant is None:
            tenant = getattr(request, "cache_salt", None) or ""
        owner = _Owner(_tag(str(tenant)), self._public(told.get(PUBLIC_TOKENS), request))
        self._owners[name] = owner
        req_context.set_state(owner)
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._owners.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def on_request_queued(self, name: str, groups: Sequence[QueuedKeys]) -> None:
        owner = self._owners.get(name, NOBODY)
        named = [replace(group, keys=[owner.key(key) for key in group.keys]) for group in groups]
        super().on_request_queued(name, named)

    def most_tokens(self, groups: GroupSizes, name: str = "") -> int:
        owner = self._owners.get(name, NOBODY)
        tags = [_PUBLIC_TAG, owner.tag] if owner.public else [owner.tag]
        return self._manager.most_tokens(groups, tags)

    def _params_of(self, req_context: ReqContext) -> Any:
        params = super()._params_of(req_context)
        told = _told(req_context)
        if not told:
            return params
        public = told.get(PUBLIC_TOKENS)
        # A malformed one counts as a hint that is not known.
        taken = (TENANT, PUBLIC_TOKENS) if public is None or _is_count(public) else (TENANT,)
        rest = {key: value for key, value in told.items() if key not in taken}
        return {**params, PARAMS_KEY: rest}

    def _public(self, tokens: Any, request: Any) -> frozenset[bytes]:
        """Return the hashes of the chunks that end within the first `tokens` of a prompt."""
        if request is None or not _is_count(tokens):
            return frozenset()
        size = int(self._spec.config.cache.tokens_per_hash)
        return frozenset(bytes(each) for each in request.block_hashes[: tokens // size])

    # -- chunks ------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return super().lookup(_named(key, req_context), req_context)

    def _own_keys(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        return [_named(key, req_context) for key in keys]

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        out = super().prepare_store([_named(key, req_context) for key in keys], req_context)
        if out is not None:
            out.keys_to_store = [_of_vllm(key) for key in out.keys_to_store]
            out.evicted_keys = [_of_vllm(key) for key in out.evicted_keys]
        return out

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in super().take_events():
            yield replace(event, keys=[_of_vllm(key) for key in event.keys])


class LoRATenantOffloadingManager(LoRAOffloadingManager, TenantOffloadingManager):
    """For an engine with adapters: their keys first, then those of tenants."""


def _tag(tenant: str) -> bytes:
    """Return the tag of what a request calls its tenant: never that of public tokens.

    What is called like them gets a zero in front, as does what begins with one: so it shares its
    tag with no other name.
    """
    return tag_of(f"\0{tenant}" if tenant == PUBLIC or tenant.startswith("\0") else tenant)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _told(req_context: ReqContext) -> Mapping[str, Any]:
    params = req_context.kv_transfer_params
    told = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    return told if isinstance(told, Mapping) else {}


def _named(key: OffloadKey, req_context: ReqContext) -> OffloadKey:
    owner: _Owner = req_context.get_state(_Owner) or NOBODY
    named: OffloadKey = keep_position(req_context, key, owner.key(key))
    return named


def _of_vllm(key: bytes) -> OffloadKey:
    return OffloadKey(key[TAG_BYTES:])
