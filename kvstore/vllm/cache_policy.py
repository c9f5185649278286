"""Cache policy: a policy of ours behind vLLM's `CachePolicy`, for vLLM 0.32 and 0.33.

vLLM's manager owns the chunks and counts their references; what it tells a policy,
and when, differs from our contract in three ways:

* new keys are inserted head first, one by one: they are kept until the next call
  of another kind and then given on tail first;
* a use is told when its request ends, for the whole request at once;
* the order of a prompt is known in full only then: what is stored earlier is
  linked as far as that request has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvstore.plugins import build_policy
from kvstore.vllm.version import GROUP_BYTES, position_of

__all__ = ["KVStoreCachePolicy"]


class _LastStored(dict[bytes, OffloadKey]):
    """The last key that a request has stored, for each KV cache group."""


class KVStoreCachePolicy(CachePolicy):
    """A kvstore policy for vLLM: see the module's text. Subclasses name the policy."""

    policy_name = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._policy = build_policy(self.policy_name, cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._entering: list[OffloadKey] = []
        self._coming: list[OffloadKey] = []

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        self._chunks[key] = chunk
        self._entering.append(key)

    def remove(self, key: OffloadKey) -> None:
        self._let_in()
        del self._chunks[key]
        self._policy.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._let_in()
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._policy.touch(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._let_in()
        last = req_context.get_state(_LastStored)
        if last is None:
            last = _LastStored()
            req_context.set_state(last)
        self._coming = list(keys)
        groups: dict[bytes, list[OffloadKey]] = {}
        for key in self._coming:
            groups.setdefault(key[-GROUP_BYTES:], []).append(key)
        for group, some in groups.items():
            self._policy.link(some, last.get(group))
            last[group] = some[-1]
        self._coming.reverse()

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._let_in()
        for keys in key_groups:
            self._policy.link(keys)
        ordered = _in_prompt_order(key_groups, req_context)
        for key in reversed(ordered):
            if key in reused_keys and key in self._chunks:
                self._policy.touch(key)
        self._policy.settle(ordered, [keys[-1] for keys in key_groups if keys])

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._let_in()
        coming, self._coming = self._coming, []
        chunks = self._chunks

        def stays(key: bytes) -> bool:
            return chunks[OffloadKey(key)].ref_cnt != 0 or key in protected

        victims = self._policy.evict(n, stays, coming)
        if victims is None:
            return None
        return [(OffloadKey(key), chunks.pop(OffloadKey(key))) for key in victims]

    def clear(self) -> None:
        self._entering.clear()
        self._coming.clear()
        self._chunks.clear()
        self._policy.clear()

    def _let_in(self) -> None:
        """Tell the policy what was inserted since it was last called, tail first."""
        for key in reversed(self._entering):
            self._policy.insert(key)
        self._entering.clear()


def _in_prompt_order(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: ReqContext
) -> list[OffloadKey]:
    """The keys of all groups, head first: a prompt is of use as far as every group has it.

    Group by group where vLLM does not tell where a key ends.
    """
    keys = [key for group in key_groups for key in group]
    position = position_of(req_context)
    if position is not None and len(key_groups) > 1:
        # Within a group the order is given. A key without a place follows the one before it.
        places: dict[OffloadKey, int] = {}
        for group in key_groups:
            last = 0
            for key in group:
                last = places[key] = max(last, position(key) or 0)
        keys.sort(key=places.__getitem__)
    return keys
