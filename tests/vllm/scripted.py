"""Managers that do what a script says: one for vLLM's scheduler, one for ours.

What they answer follows from the key, the step and the seed alone, not from who asked before. So
both sides get the same answers, even if they ask in another order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload import base as theirs

from kvstore.connector.contract import OffloadingManager, PrepareStoreOutput
from kvstore.connector.mediums import LoadStoreSpec


@dataclass
class Script:
    """What happens to keys. The numbers are per cent.

    Attributes:
        deferred: keys that are to be asked for again, some steps long.
        refused: stores that find no room.
        evicted: keys that leave before a step.
        unwanted: keys that are never stored.
        pending_deferred: what is being stored is to be asked for again; otherwise it is missing.
    """

    seed: int
    deferred: int = 0
    refused: int = 0
    evicted: int = 0
    unwanted: int = 0
    pending_deferred: bool = False
    step: int = 0

    def says(self, percent: int, *what: object) -> bool:
        """Whether `what` is among these per cent."""
        return zlib.crc32(repr((self.seed, *what)).encode()) % 100 < percent


@dataclass
class Contents:
    """What one side's manager knows.

    Attributes:
        stored: keys that can be loaded.
        storing: keys that are being stored.
        loading: (request, key) of what is being loaded.
        forgotten: (request, key) of stores that shall leave nothing, once they end.
        under_way: (request, key) of stores that have not ended.
        began, ended: how often the manager was told that of a request.
        steps: whose ends it was told.
    """

    script: Script
    stored: set[bytes] = field(default_factory=set)
    storing: set[bytes] = field(default_factory=set)
    loading: set[tuple[str, bytes]] = field(default_factory=set)
    forgotten: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    under_way: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    began: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def lookup(self, key: bytes) -> bool | None:
        script = self.script
        if script.says(script.deferred, "deferred", key, script.step // 3):
            return None
        if script.pending_deferred and key in self.storing:
            return None
        return key in self.stored

    def prepare_load(self, request: str, keys: Iterable[bytes]) -> list[bytes]:
        wanted = list(keys)
        for key in wanted:
            if self.lookup(key) is not True:
                raise KeyError(key)
            self.loading.add((request, key))
        return wanted

    def complete_load(self, request: str, keys: Iterable[bytes]) -> None:
        self.loading.difference_update((request, key) for key in keys)

    def prepare_store(self, request: str, keys: Iterable[bytes]) -> list[bytes] | None:
        script = self.script
        assert not self.ended[request], f"{request} stores after its end"
        if script.says(script.refused, "refused", request, script.step):
            return None
        chosen = [
            key
            for key in keys
            if key not in self.stored
            and key not in self.storing
            and not script.says(script.unwanted, "unwanted", key)
        ]
        self.storing.update(chosen)
        self.under_way.update((request, key) for key in chosen)
        return chosen

    def complete_store(self, request: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.under_way[request, key] -= 1
            if self.forgotten[request, key] > 0:
                self.forgotten[request, key] -= 1
            else:
                self.storing.remove(key)
                self.stored.add(key)

    def forget(self, request: str, keys: Iterable[bytes]) -> None:
        """These, which `request` stores, shall not be there when the store ends."""
        for key in keys:
            self.storing.remove(key)
            self.forgotten[request, key] += 1

    def evict(self) -> None:
        """Before a step some keys leave that nobody loads."""
        script = self.script
        held = {key for _, key in self.loading}
        for key in sorted(self.stored - held):
            if script.says(script.evicted, "evicted", key, script.step):
                self.stored.remove(key)

    def reset(self, *, late_completions: bool) -> None:
        self.stored.clear()
        self.storing.clear()
        self.loading.clear()
        if not late_completions:
            self.under_way.clear()
        self.forgotten = self.under_way.copy()


class TheirPlace(theirs.LoadStoreSpec):  # type: ignore[misc]
    """Keys, as vLLM's connector hands them on."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys


class TheirManager(theirs.OffloadingManager):  # type: ignore[misc]
    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    def lookup(self, key: theirs.OffloadKey, req_context: theirs.ReqContext) -> theirs.LookupResult:
        found = self.contents.lookup(key)
        if found is None:
            return theirs.LookupResult.RETRY
        return theirs.LookupResult.HIT if found else theirs.LookupResult.MISS

    def prepare_load(
        self, keys: Collection[theirs.OffloadKey], req_context: theirs.ReqContext
    ) -> theirs.LoadStoreSpec:
        return TheirPlace(self.contents.prepare_load(req_context.req_id, keys))

    def complete_load(
        self, keys: Collection[theirs.OffloadKey], req_context: theirs.ReqContext
    ) -> None:
        self.contents.complete_load(req_context.req_id, keys)

    def prepare_store(
        self, keys: Collection[theirs.OffloadKey], req_context: theirs.ReqContext
    ) -> theirs.PrepareStoreOutput | None:
        chosen: Any = self.contents.prepare_store(req_context.req_id, keys)
        if chosen is None:
            return None
        return theirs.PrepareStoreOutput(chosen, TheirPlace(chosen), [])

    def complete_store(
        self,
        keys: Collection[theirs.OffloadKey],
        req_context: theirs.ReqContext,
        success: bool = True,
    ) -> None:
        self.contents.complete_store(req_context.req_id, keys)

    def on_new_request(self, req_context: theirs.ReqContext) -> theirs.RequestOffloadingContext:
        self.contents.began[req_context.req_id] += 1
        return theirs.RequestOffloadingContext()

    def on_request_finished(self, req_context: theirs.ReqContext) -> None:
        self.contents.ended[req_context.req_id] += 1

    def on_schedule_end(self, context: theirs.ScheduleEndContext) -> None:
        self.contents.steps += 1

    def reset_cache(self) -> None:
        # What is under way is never completed.
        self.contents.reset(late_completions=False)


class TheirSpec(theirs.OffloadingSpec):  # type: ignore[misc]
    """vLLM builds it by its name, and hands it what the operator has configured."""

    def get_manager(self) -> theirs.OffloadingManager:
        return TheirManager(self.extra_config["contents"])

    def get_worker(self, kv_caches: theirs.CanonicalKVCaches) -> theirs.OffloadingWorker:
        raise NotImplementedError


class OurPlace(LoadStoreSpec):
    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys

    @staticmethod
    def medium() -> str:
        return "script"


class OurManager(OffloadingManager):
    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    def lookup(self, keys: Any, req_context: Any = None) -> Any:
        return self.contents.lookup(keys)

    def prepare_load(self, keys: Iterable[bytes], req_context: Any = None) -> LoadStoreSpec:
        return OurPlace(self.contents.prepare_load(req_context.req_id, keys))

    def complete_load(self, keys: Iterable[bytes], req_context: Any = None) -> None:
        self.contents.complete_load(req_context.req_id, keys)

    def prepare_store(
        self, keys: Iterable[bytes], req_context: Any = None
    ) -> PrepareStoreOutput | None:
        chosen = self.contents.prepare_store(req_context.req_id, keys)
        return None if chosen is None else PrepareStoreOutput(chosen, OurPlace(chosen))

    def complete_store(
        self, keys: Iterable[bytes], req_context: Any = None, success: bool = True
    ) -> None:
        assert success
        self.contents.complete_store(req_context.req_id, keys)

    def on_new_request(self, req_context: Any) -> None:
        self.contents.began[req_context.req_id] += 1

    def on_request_finished(self, req_context: Any) -> None:
        self.contents.ended[req_context.req_id] += 1

    def on_schedule_end(self, context: object = None, *, computes: bool | None = None) -> None:
        self.contents.steps += 1

    def reset(self) -> None:
        # What is under way is completed all the same.
        self.contents.reset(late_completions=True)
