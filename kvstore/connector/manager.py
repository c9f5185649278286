"""Tiered manager: host memory and slower tiers behind the contract of a manager.

This module is long because a manager has every call in two forms: with its request, and by lists.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstore.api.arguments import check_keys
from kvstore.assembly import assemble, rows_for
from kvstore.config import Config
from kvstore.connector.computing import Computing
from kvstore.connector.contract import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestContext,
    asking,
    by_lists,
)
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.connector.queued import GroupSizes, QueuedKeys, tokens_that_fit, usable_keys
from kvstore.core import CoreStats
from kvstore.core.transfers import Transfer
from kvstore.engine.scheduler_steps import Stepper, in_turns
from kvstore.engine.unnamed_requests import Prompt, Prompts, UnderWay
from kvstore.errors import KVStoreError
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import about

__all__ = ["KVStoreManager"]

logger = logging.getLogger("kvstore")

NOBODY = "\0"
"""Name of a request that has prepared nothing, for stray completions."""

PENDING_SECONDS = 0.25
"""Seconds after a store for which copies to tiers count as pending work.

A server with pending work neither sleeps nor ends. After that time, copies go on while it is idle,
and a tier that hangs or is slow no longer delays the server.
"""

STEP_SECONDS = 0.25
"""Longest step, for servers that do not call `on_schedule_end`."""


@in_turns(but=("has_pending_work",))
class KVStoreManager(OffloadingManager):
    """Manager of host memory and slower tiers; no call waits for I/O.

    Chunks on slower tiers are fetched as soon as they are looked up. The answer is None until they
    have arrived, or until ``deadline_s`` has passed without progress.

    Attributes:
        region: host memory; the specs of loads and stores name its rows.
        description: host memory and tiers in a few words.
        stepper: who drives the core.
        computing: how fast the server computes.
        commands: of the control server, if there is one.
    """

    loads_are_uses = True

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        region: PinnedRegion | None = None,
        *,
        block_size: int = 1,
        one_group: bool = True,
        steady: bool = False,
        late_completions: bool = True,
        label: str | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            config: see `kvstore.config`; must have ``chunk_bytes``, and ``identity`` if there is
                a tier.
            region: host memory shared with workers, with as many rows as
                `kvstore.assembly.rows_for` says; by default the manager allocates its own.
            block_size: tokens of a chunk, for events.
            one_group: whether all keys are of one KV cache group.
            steady: whether the server calls `on_schedule_end`, and takes steps while there is
                pending work.
            late_completions: whether transfers that were under way at a reset are completed like
                all others; if not, `transfers_ended` is called for them.
            label: name of caches on disk; by default the model's name in the identity.
            release: called once `region` is no longer used here; by default it is closed.

        Raises:
            KVStoreError: if the configuration or a path cannot be used. Nothing is kept then.
        """
        checked = config if isinstance(config, Config) else Config.from_mapping(config)
        chunk_bytes, identity = checked.given_chunk_bytes, checked.given_identity
        self._one_group = one_group
        self._late_completions = self._reports_late = late_completions
        self._fetches_queued = checked.fetch_queued
        self._block_size = block_size
        self._drain = checked.shutdown_timeout_s
        self.region = region or PinnedRegion.private(*rows_for(checked, chunk_bytes))
        self._release = release or self.region.close
        try:
            assembly = assemble(
                checked,
                self.region,
                chunk_bytes,
                label or str(identity.get("model", "kv")),
                identity,
                events=checked.keep_events,
            )
            self.stepper = Stepper(assembly, steady=steady)
            self._spans = assembly.spans
        except BaseException:
            self._release()
            raise
        self._turn = self.stepper.turn
        self._core = assembly.core
        self.description = assembly.description
        self.computing = Computing(self._core.computed)
        self.commands = assembly.commands
        if assembly.commands is not None:
            assembly.commands.attach(self.stepper.act, self._reset_in_use)
        self._prompts = Prompts(self._core, checked.lease_s)
        self.stepper.on_begin = self._expire
        self._asked: dict[str, bytes] = {}
        """Request -> the first key that it has looked up in this step."""
        self._found: set[str] = set()
        """Requests with hits in this step that they have not loaded yet."""
        self._loading = UnderWay()
        """Loads without a request."""
        self._storing = UnderWay()
        self._abandoned: list[Transfer] = []
        self._unreported = 0
        """The server reports no end of transfers that were prepared before this era."""
        self._store_refused = False
        """Whether a store was refused since the last step, and so waits for room."""
        self._stored = 0.0
        """When chunks were stored last."""
        self._closed = False
        logger.info(
            "kvstore: %s",
            self.description,
            extra=about("store.opened", description=self.description),
        )

    # -- lookup ------------------------------------------------------------------------

    def lookup(
        self, keys: bytes | Iterable[bytes], req_context: RequestContext | None = None
    ) -> int | None:
        if isinstance(keys, bytes):
            request = asking(req_context).req_id
            self._begin_for(request, keys)
            found = self._core.lookup(keys, request)
            if found is False:
                self.computing.missed(request, keys)
            elif found and not self.stepper.ends_told:
                self._found.add(request)
            return found
        if req_context is not None:
            raise KVStoreError(
                "lookup of several keys takes no req_context: look up one key at a time, or call "
                "lookup_prefix"
            )
        return self._lookup_all(keys if isinstance(keys, list) else list(keys))

    def lookup_prefix(self, keys: Iterable[bytes], req_context: RequestContext) -> int | None:
        keys = keys if isinstance(keys, list) else list(keys)
        if not keys:
            return 0
        request = req_context.req_id
        self._begin_for(request, keys[0])
        found = self._core.lookup_prefix(keys, request)
        if found is not None and found < len(keys):
            self.computing.missed(request, keys[found])
        if found and not self.stepper.ends_told:
            self._found.add(request)
        return found

    def is_deferred(self, req_context: RequestContext) -> bool:
        if not self.stepper.begun:
            self.stepper.begin()
        request = req_context.req_id
        deferred = self._core.is_waiting(request)
        if deferred:
            self._core.renew(request)
        return deferred

    def _lookup_all(self, keys: Sequence[bytes]) -> int | None:
        now = time.monotonic()
        prompt = self._prompts.waiting(keys, None, now)
        if prompt is None:
            keys = check_keys(keys)
            if not keys:
                return 0
            prompt = self._prompts.asking(keys, None, now)
        self._begin_for(prompt.id, keys[0])
        answer = self._core.lookup_prefix(keys, prompt.id)
        self._prompts.told(prompt, answer)
        if answer:
            self._found.add(prompt.id)
        elif answer is None:
            # Start the promotions now: the server may ask again long before it calls anything else.
            self.stepper.hand_over()
        return answer

    def _begin_for(self, request: str, key: bytes) -> None:
        """Begin a step unless one is under way.

        If the server does not call `on_schedule_end`, a request that looks up its first key again
        begins a new step, unless other requests have hits that they have not loaded yet.
        """
        if not self.stepper.begun:
            self.stepper.begin()
        elif self.stepper.ends_told:
            return
        elif self._asked.get(request) == key:
            self._found.discard(request)
            if self._found:
                self.stepper.absorb()
            else:
                self._renew()
        self._end_if_late()
        self._asked.setdefault(request, key)

    def _end_if_late(self) -> None:
        """End an overlong step of a server that does not call `on_schedule_end`."""
        stepper = self.stepper
        lasting = stepper.begun and not stepper.ends_told
        if lasting and time.monotonic() - stepper.began > STEP_SECONDS:
            self._renew()

    def _loads(self, request: str) -> None:
        """Note that `request` loads its hits; end the step if no other request has any."""
        self._found.discard(request)
        if not self._found and self.stepper.begun and not self.stepper.ends_told:
            self._renew()

    def _renew(self) -> None:
        self._asked.clear()
        self._found.clear()
        self.stepper.renew()

    def begin_step(self) -> None:
        """Begin a step, for callers that use the core directly."""
        self.stepper.begin()

    def touch(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        self._core.touch(list(keys))

    # -- load and store ------------------------------------------------------------------

    def prepare_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> HostLoadStoreSpec:
        keys = check_keys(keys if isinstance(keys, list) else list(keys))
        if req_context is not None:
            rows = self._core.prepare_load(keys, req_context.req_id)
            self._loads(req_context.req_id)
            return HostLoadStoreSpec(rows)
        if not keys:
            return HostLoadStoreSpec([])
        prompt = self._prompts.getting(keys, None, time.monotonic())
        try:
            rows = self._core.prepare_load(keys, prompt.id)
        except KeyError:
            self._prompts.end(prompt)
            self._loads(prompt.id)
            raise
        self._prompts.had(prompt, len(keys))
        self._loading.add(keys, prompt, self._core.era)
        self._loads(prompt.id)
        return HostLoadStoreSpec(rows)

    def complete_load(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> None:
        if self._closed:
            return
        if req_context is not None:
            request = req_context.req_id
            for era, its in self._eras(list(keys), request, stores=False):
                self._core.complete_load(its, request, era)
        else:
            shares, stray = self._loading.take(keys)
            for share in shares:
                self._core.complete_load(share.keys, share.prompt.id, share.era)
                self._end(share.prompt, len(share.keys))
            self._core.complete_load(stray, NOBODY)
        self.stepper.hand_over()

    def prepare_store(
        self, keys: Iterable[bytes], req_context: RequestContext | None = None
    ) -> PrepareStoreOutput | None:
        self._end_if_late()
        self.stepper.absorb()
        keys = check_keys(keys if isinstance(keys, list) else list(keys))
        if req_context is not None:
            self.computing.offered(req_context.req_id, keys)
            grant = self._core.prepare_store(keys, req_context.req_id)
        elif not keys:
            return PrepareStoreOutput([], HostLoadStoreSpec([]), [])
        else:
            prompt = self._prompts.storing(keys, None, time.monotonic())
            self._core.extend_prompt(prompt.id, keys)
            grant = self._core.prepare_store(keys, prompt.id)
            if grant is not None:
                self._storing.add(grant.keys, prompt, self._core.era)
        if grant is None:
            self._store_refused = True
            return None
        return PrepareStoreOutput(grant.keys, HostLoadStoreSpec(grant.rows), grant.evicted)

    def complete_store(
        self,
        keys: Iterable[bytes],
        req_context: RequestContext | bool | None = None,
        success: bool = True,
    ) -> None:
        req_context, success = by_lists(req_context, success)
        if self._closed:
            return
        self._stored = time.monotonic()
        if req_context is not None:
            request = req_context.req_id
            for era, its in self._eras(list(keys), request, stores=True):
                self._core.complete_store(its, request, success, era)
        else:
            shares, stray = self._storing.take(keys)
            for share in shares:
                self._core.complete_store(share.keys, share.prompt.id, success, share.era)
                self._end(share.prompt, len(share.keys))
            self._core.complete_store(stray, NOBODY)
        self.stepper.hand_over()

    # -- requests and steps ----------------------------------------------------------------

    def on_new_request(self, req_context: RequestContext) -> None:
        if self._spans is not None:
            headers = getattr(req_context, "trace_headers", None) or {}
            self._spans.belongs_to(req_context.req_id, headers.get("traceparent"))
        position = getattr(req_context, "position", None)
        self.computing.opened(req_context.req_id, position)
        self._core.on_new_request(
            req_context.req_id,
            position,
            one_group=self._one_group,
            params=getattr(req_context, "kv_transfer_params", None),
            envelope=getattr(req_context, "kv_hints", None),
        )

    def is_coming(self, key: bytes) -> bool:
        return key in self._core.chunks or self._core.contains_prefix((key,)) == 1

    def most_tokens(self, groups: GroupSizes, keys: Sequence[bytes] = ()) -> int:
        if len(groups) == 1 or not self._core.tiers:
            # Fetched as far as rows allow, from the beginning; or not fetched at all.
            return sys.maxsize
        return tokens_that_fit(groups, min(self._core.loadable_rows(), self._core.reach(keys)))

    def on_request_queued(self, req_context: RequestContext, groups: Sequence[QueuedKeys]) -> None:
        if not self._fetches_queued or not self._core.tiers:
            return
        stores = any(tier.store is not None for tier in self._core.tiers)
        # What a tier has that is not read for the moment may be fetched later.
        any_length = stores or len(groups) == 1
        known = len if any_length else self._core.contains_prefix
        sizes = tuple((group.tokens_per_chunk, group.window_chunks) for group in groups)
        its = [key for group in groups for key in (*group.keys[:1], *group.keys[-1:])]
        keys = usable_keys(groups, known, self.most_tokens(sizes, its))
        if keys and self._core.on_request_queued(req_context.req_id, keys):
            self.stepper.hand_over()

    def on_request_turn(self, req_context: RequestContext) -> None:
        self._core.on_request_turn(req_context.req_id)

    def on_request_decided(self, req_context: RequestContext, *, loads: bool, start: int) -> None:
        self.computing.decided(req_context.req_id, start)
        self._core.on_request_decided(req_context.req_id, loads=loads)

    def on_request_finished(self, req_context: RequestContext) -> None:
        request = req_context.req_id
        self.computing.finished(request)
        hinted = self._core.wants_all(request)
        self._core.on_request_finished(request, time.monotonic())
        if hinted and self.stepper.ends_told and not self.stepper.begun:
            # A server that has nothing else to do need not take a step for it.
            self.stepper.hand_over()

    def on_schedule_end(self, context: object = None, *, computes: bool | None = None) -> None:
        self._asked.clear()
        self._found.clear()
        self.computing.step_ended(time.monotonic(), computes)
        self.stepper.end(self.computing.under_way)

    def on_step_reported(self) -> None:
        self.computing.step_reported(time.monotonic())

    def has_pending_work(self) -> bool:
        # Queued copies are handed out as earlier ones end.
        return self._core.unsaved > 0 and time.monotonic() - self._stored < PENDING_SECONDS

    def take_events(self) -> list[OffloadingEvent]:
        return [
            OffloadingEvent(event.keys, self._block_size, event.medium, event.removed, event.tier)
            for event in self._core.take_events()
        ]

    def stats(self) -> CoreStats:
        """Counters and gauges."""
        return self._core.stats()

    def abandon_transfers(self) -> None:
        """Abandon the loads and stores under way: the server will not report their ends.

        Their chunks stay protected until `transfers_ended`. Then unfinished stores are dropped,
        because it is not known what the device has written. All other chunks are kept.
        """
        # Includes those that were abandoned before, and what an operator's reset has overtaken.
        self._unreported = self._core.era
        self._abandoned = [transfer for transfer, _ in self._core.device_transfers()]

    def reset(self, *, close_tiers: bool = False) -> None:
        """Forget everything, on every tier. For `close_tiers` see `kvstore.core.Core.reset`.

        Loads and stores under way keep their rows until they are completed, or until
        `transfers_ended`. If a key is prepared again meanwhile, its older transfer must be
        completed first.
        """
        self._reports_late = self._late_completions
        self._abandoned.clear()
        self._core.reset(close_tiers=close_tiers)
        self._unreported = self._core.era
        self.stepper.hand_over()

    def _reset_in_use(self) -> None:
        """Forget everything, unknown to the server: it completes its transfers like all others."""
        self._core.reset()
        self._reports_late = True
        self.stepper.hand_over()

    def transfers_ended(self) -> None:
        """Release the transfers that were under way at the server's last reset, or abandoned."""
        self._core.transfers_ended(self._unreported)
        abandoned, self._abandoned = self._abandoned, []
        for transfer in abandoned:
            if transfer.stores:
                self._core.complete_store((transfer.key,), transfer.request, False, transfer.era)
            else:
                self._core.complete_load((transfer.key,), transfer.request, transfer.era)
        self.stepper.hand_over()

    def shutdown(self) -> None:
        """Finish copies to the tiers, within ``shutdown_timeout_s``, and close them.

        Completions that come later are ignored.
        """
        if self._closed:
            return
        self._closed = True
        if self.stepper.close(self._drain):
            self._release()

    # -- inside ----------------------------------------------------------------------------

    def _eras(
        self, keys: list[bytes], request: str, *, stores: bool
    ) -> Iterable[tuple[int | None, list[bytes]]]:
        """When the transfers of `keys` were prepared that end now; None for the present era."""
        if not self._reports_late or not self._core.late_transfers:
            return [(None, keys)]
        late = self._core.late_eras(request, stores=stores)
        found: dict[int | None, list[bytes]] = {}
        for key in keys:
            found.setdefault(late.get(key), []).append(key)
        return found.items()

    def _end(self, prompt: Prompt, calls: int) -> None:
        for _ in range(calls):
            self._prompts.returned(prompt)

    def _expire(self, now: float) -> None:
        self.computing.step_began()
        self._prompts.expire(now, crowded=self._core.waiting > 0 or self._store_refused)
        self._store_refused = False
