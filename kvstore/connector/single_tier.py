"""Single-tier manager: one backend, one eviction policy."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvstore.connector.backend import Backend, BlockStatus
from kvstore.connector.contract import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
    by_lists,
)
from kvstore.connector.mediums import LoadStoreSpec
from kvstore.plugins import build_policy
from kvstore.policies import EvictionPolicy

__all__ = ["PolicyManager"]


class PolicyManager(OffloadingManager):
    """Manager of the blocks of one `backend`, which `policy` evicts.

    No lookup is deferred: blocks that are not stored yet are misses. Requests are not
    distinguished.

    Attributes:
        stray: number of keys that were completed but not prepared.
    """

    def __init__(
        self,
        backend: Backend,
        policy: str | EvictionPolicy = "lru",
        *,
        enable_events: bool = False,
    ) -> None:
        """
        Args:
            policy: an empty policy, or a name: see `kvstore.policies.policy_names`.
            enable_events: whether events are kept for `take_events`.

        Raises:
            ValueError: if no policy has that name; the message lists those that exist.
        """
        self._backend = backend
        if isinstance(policy, str):
            policy = build_policy(policy, max(1, backend.get_num_free_blocks()))
        self._policy = policy
        self._blocks: dict[bytes, BlockStatus] = {}
        self._late_loads: dict[bytes, list[BlockStatus]] = {}
        self._late_stores: dict[bytes, list[BlockStatus]] = {}
        """Blocks of loads and stores that were under way at a reset."""
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self.stray = 0

    # -- lookup ------------------------------------------------------------------------

    def lookup(
        self, keys: bytes | Iterable[bytes], req_context: RequestContext | None = None
    ) -> int:
        if isinstance(keys, bytes):
            return self._is_ready(keys)
        count = 0
        for key in keys:
            if not self._is_ready(key):
                break
            count += 1
        return count

    loads_are_uses = True

    def touch(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        # Tail first, so that a chain is evicted from its end.
        held = [key for key in keys if key in self._blocks]
        for key in reversed(_in_prompt_order(held, req_context)):
            self._policy.touch(key)

    # -- load and store ------------------------------------------------------------------

    def prepare_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> LoadStoreSpec:
        keys = list(keys)
        for key in keys:
            if not self._is_ready(key):
                raise KeyError(f"{key.hex()} cannot be loaded: it is not stored")
        blocks = [self._blocks[key] for key in keys]
        for block in blocks:
            block.ref_cnt += 1
        self.touch(keys, req_context)
        return self._backend.get_load_store_spec(keys, blocks)

    def complete_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        for key in keys:
            late = self._late_loads.get(key)
            block = late[0] if late else self._blocks.get(key)
            if block is None or block.ref_cnt < 1:
                self.stray += 1
                continue
            block.ref_cnt -= 1
            if late and not block.ref_cnt:
                self._free_late(self._late_loads, key)

    def prepare_store(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        storing = dict.fromkeys(keys)
        new = [key for key in storing if key not in self._blocks]
        room, evicted = self._make_room(new, storing.keys())
        if new and not room:
            return None
        # With several KV cache groups the keys are given group by group.
        ordered = _in_prompt_order(new, req_context)[:room]
        kept = set(ordered)
        new = [key for key in new if key in kept]
        blocks = self._backend.allocate_blocks(new)
        self._blocks.update(zip(new, blocks, strict=True))
        for key in reversed(ordered):
            self._policy.insert(key)
        return PrepareStoreOutput(new, self._backend.get_load_store_spec(new, blocks), evicted)

    def complete_store(
        self,
        keys: Iterable[bytes],
        req_context: RequestContext | bool | None = None,
        success: bool = True,
    ) -> None:
        _, success = by_lists(req_context, success)
        stored = []
        for key in keys:
            block = self._blocks.get(key)
            if key in self._late_stores:
                self._free_late(self._late_stores, key)
            elif block is None or block.is_ready:
                self.stray += 1
            elif success:
                block.ref_cnt = 0
                stored.append(key)
            else:
                del self._blocks[key]
                self._policy.remove(key)
                self._backend.free(block)
        self._tell(stored, removed=False)

    # -- the rest ------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        blocks, self._blocks = self._blocks, {}
        for key, block in blocks.items():
            self._policy.remove(key)
            if block.ref_cnt == 0:
                self._backend.free(block)
            else:
                late = self._late_loads if block.is_ready else self._late_stores
                late.setdefault(key, []).append(block)
        self._tell([key for key, block in blocks.items() if block.is_ready], removed=True)

    def shutdown(self) -> None:
        self._backend.close()

    # -- inside ----------------------------------------------------------------------------

    def _is_ready(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.is_ready

    def _make_room(self, new: list[bytes], storing: Set[bytes]) -> tuple[int, list[bytes]]:
        """Evict to make room; return how many of `new` fit, and what was evicted."""
        free = self._backend.get_num_free_blocks()
        if len(new) <= free:
            return len(new), []
        blocks = self._blocks

        def protected(key: bytes) -> int:
            return key in storing or blocks[key].ref_cnt != 0

        missing = len(new) - free
        left = self._policy.evict(missing, protected, new[::-1])
        if left is None:
            missing = min(missing, sum(not protected(key) for key in blocks))
            incoming = new[: free + missing][::-1]
            left = self._policy.evict(missing, protected, incoming) if missing else None
        evicted = left or []
        for key in evicted:
            self._backend.free(blocks.pop(key))
        self._tell(evicted, removed=True)
        return free + len(evicted), evicted

    def _free_late(self, late: dict[bytes, list[BlockStatus]], key: bytes) -> None:
        blocks = late[key]
        self._backend.free(blocks.pop(0))
        if not blocks:
            del late[key]

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._events is not None:
            backend = self._backend
            self._events.append(OffloadingEvent(keys, backend.block_size, backend.medium, removed))


def _in_prompt_order(keys: list[bytes], req_context: RequestContext | None) -> list[bytes]:
    """Order keys of a request by where they end, if it says that."""
    position = getattr(req_context, "position", None)
    return keys if position is None else sorted(keys, key=position)
