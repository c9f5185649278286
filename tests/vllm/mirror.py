"""vLLM's connector and ours side by side: each call goes to both, and the answers are compared.

vLLM's answer is what its scheduler gets, except where ours says "not in this step" and a wanted
difference explains it: to say so is always allowed.

Where the two may differ, and why, is said in `tests.vllm.wanted`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.connector.mediums import ConnectorMetadata, ConnectorOutput
from kvstore.connector.scheduler import ConnectorScheduler
from tests.vllm.pretend import Marks, Transfer, WrongBytesError, copies_of
from tests.vllm.scripted import Contents
from tests.vllm.wanted import (
    AFTER_RESET,
    AGAIN,
    FORGOTTEN,
    LEFT,
    PREEMPTED,
    SMALL,
    SPARSE,
    Raw,
    Tables,
    Wanted,
    raw_of,
)


class DifferentError(AssertionError):
    """The two have answered differently, and nothing explains it."""


class CrashedError(Exception):
    """vLLM's scheduler has crashed, by a fault of its own after a reset with windows."""


@dataclass(eq=False)
class Pair:
    """A transfer, as each side knows it.

    Attributes:
        theirs, ours: its numbers; None where that side has none.
        left: steps until it ends, unless somebody wants it before.
        stale: it was made before a reset.
        dropped: for each side the chunks that the other does not store.
        wrong: vLLM's transfer takes blocks for others than they are.
    """

    request: str
    is_store: bool
    step: int
    left: int
    theirs: int | None
    ours: int | None
    transfers: dict[str, Transfer]
    stale: bool = False
    wrong: bool = False
    dropped: dict[str, frozenset[bytes]] = field(
        default_factory=lambda: {"ours": frozenset(), "theirs": frozenset()}
    )


@dataclass
class Plan:
    """What both sides want of one step.

    Attributes:
        flush: for each side the pairs that have to end before the step computes.
    """

    loads: list[Pair]
    stores: list[Pair]
    flush: dict[str, list[Pair]]


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """What vLLM's worker tells, and with it what ours tells."""

    ours: ConnectorOutput = field(default_factory=ConnectorOutput)
    pairs: list[Pair] = field(default_factory=list)


class Mirror(OffloadingConnector):  # type: ignore[misc]
    """See the module's text. `attach` comes before the first call.

    Attributes:
        plan: what is to be done in the present step.
        pairs: transfers under way.
        happened: how often what happened.
    """

    def attach(
        self,
        ours: ConnectorScheduler,
        contents: dict[str, Contents],
        windows: list[int | None],
        delay: Any,
        marks_of: Any,
    ) -> None:
        """
        Args:
            contents: what the managers know, of ``theirs`` and ``ours``.
            delay: how many steps the next transfer takes.
            marks_of: what a request's tokens leave in their blocks, for each group.
        """
        config = self.scheduler.config
        self.ours = ours
        self.contents = contents
        self.wanted = Wanted(config, windows)
        self.windows = windows
        self.delay = delay
        self.marks_of = marks_of
        self.factor = config.blocks_per_chunk
        self.pairs: list[Pair] = []
        self.plan = Plan([], [], {})
        self.happened: Counter[str] = Counter()
        self.step = 0
        self._given_out: set[int] = set()
        self._dropped_by_reset: set[str] = set()
        self._passed: dict[str, list[int]] = {}
        """For each request the chunks of its groups that vLLM will not offer again."""

    # -- calls ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self.wanted.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        their: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        our = self.ours.get_num_new_matched_tokens(request, num_computed_tokens)
        self.wanted.had.pop(request.request_id, None)
        self.happened["lookups"] += 1
        self.happened["deferred"] += their[0] is None
        self.happened["found"] += bool(their[0])
        if their == our:
            return their
        mine = [pair for pair in self.pairs if pair.request == request.request_id]
        if our[0] is None and any(pair.stale for pair in mine):
            self.happened[AFTER_RESET] += 1
            return our
        # A store is under way that only one side has made.
        if their[0] is None and mine and all(pair.ours is None for pair in mine):
            return their
        if our[0] is None and mine and all(pair.theirs is None for pair in mine):
            return our
        sizes = {group.tokens_per_chunk for group in self.ours._groups}
        if our == (0, False) and len(sizes) > 1 and (their[0] is None or their[0] < max(sizes)):
            self.happened[SMALL] += 1
            return our
        raise DifferentError(f"{request.request_id} at {num_computed_tokens}: {their}, ours {our}")

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.ours.update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._given_out.update(
                block.block_id
                for its in blocks.blocks
                for block in its
                if not block.is_null and block.block_hash is None
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        status = dict(self.scheduler._req_status)
        self._passed = {
            name: [state.next_stored_chunk_idx for state in known.group_states]
            for name, known in status.items()
        }
        their = super().build_connector_meta(scheduler_output)
        assert isinstance(their, OffloadingConnectorMetadata)
        our = self.ours.build_connector_meta(scheduler_output)
        tables = {name: self.wanted.table(name, known) for name, known in status.items()}
        loads = self._pair(their.load_jobs, our.load_jobs, tables, is_store=False)
        stores = self._pair(their.store_jobs, our.store_jobs, tables, is_store=True)
        flush = {
            "theirs": self._named("theirs", their.jobs_to_flush or (), stores),
            "ours": self._named("ours", our.jobs_to_flush, stores),
        }
        self._given_out.update(self._written(scheduler_output))
        self._check_flush(scheduler_output, stores, our)
        for side, pairs in flush.items():
            self.happened[f"flushed by {side}"] += len(pairs)
        self.pairs += loads + stores
        self.happened["loads"] += len(loads)
        self.happened["stores"] += len(stores)
        self.happened["preempted"] += len(scheduler_output.preempted_req_ids or ())
        self.plan = Plan(loads, stores, flush)
        self._given_out = set()
        self._dropped_by_reset = set()
        self.step += 1
        self.compare_contents()
        return their

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        assert isinstance(meta, WorkerMetadata)
        self.pairs = [pair for pair in self.pairs if pair not in meta.pairs]
        try:
            super().update_connector_output(connector_output)
        except KeyError as error:
            # A block of which it thinks twice that it is the request's.
            if not (self.happened["resets"] and any(self.windows)):
                raise
            raise CrashedError(f"vLLM: {error!r}") from error
        ended = self.ours.update_connector_output(meta.ours)
        assert not ended.failed
        if sorted(ended.loaded) != sorted(connector_output.finished_recving or ()):
            raise DifferentError(
                f"loads that have ended: {connector_output.finished_recving}, {ended}"
            )
        self.compare_contents()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        their: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(
            request, block_ids
        )
        our = self.ours.request_finished(request, block_ids)
        if their != our:
            raise DifferentError(f"{request.request_id} has finished: {their}, ours {our}")
        return their

    def has_pending_push_work(self) -> bool:
        their = super().has_pending_push_work()
        our = self.ours.has_pending_work()
        if their != our and not any(
            pair.stale or pair.ours is None or pair.theirs is None for pair in self.pairs
        ):
            raise DifferentError(f"work is pending: {their}, ours {our}")
        return their or our

    def reset_cache(self) -> bool | None:
        before = set(self.scheduler._req_status)
        their: bool | None = super().reset_cache()
        self.ours.reset()
        self._dropped_by_reset = before - set(self.scheduler._req_status)
        for name in before:
            self.wanted.had[name] = self.wanted.requests[name].num_computed_tokens
        for pair in self.pairs:
            pair.stale = True
        self.happened["resets"] += 1
        self.compare_contents()
        return their

    # -- comparisons -----------------------------------------------------------------------------

    def compare_contents(self) -> None:
        """The same is stored, and being stored."""
        their, our = self.contents["theirs"], self.contents["ours"]
        if their.stored != our.stored or their.storing != our.storing:
            raise DifferentError("the managers know different keys")
        if their.steps != our.steps:
            raise DifferentError("steps whose ends were told")

    def _pair(
        self,
        their: dict[int, Any],
        our: dict[int, Any],
        tables: Tables,
        *,
        is_store: bool,
    ) -> list[Pair]:
        """The transfers of both sides that belong together."""
        of_theirs = {job.req_id: number for number, job in their.items()}
        of_ours = {job.req_id: number for number, job in our.items()}
        assert len(of_theirs) == len(their)
        assert len(of_ours) == len(our)
        pairs = []
        differ = []
        for request in sorted(of_theirs.keys() | of_ours.keys()):
            numbers = of_theirs.get(request), of_ours.get(request)
            t = None if numbers[0] is None else raw_of(their[numbers[0]], is_store)
            o = None if numbers[1] is None else raw_of(our[numbers[1]], is_store)
            pair = Pair(request, is_store, self.step, self.delay(), *numbers, {})
            if t != o:
                if not is_store:
                    told = self.wanted.told(request, t), self.wanted.told(request, o)
                    raise DifferentError(f"{request} loads {told[0]}, ours {told[1]}")
                differ.append((pair, t, o))
            pairs.append(pair)
        self._explain_all(differ, tables)
        for pair in pairs:
            for side, number, jobs in (("ours", pair.ours, our), ("theirs", pair.theirs, their)):
                if number is not None:
                    raw = raw_of(jobs[number], is_store)
                    transfer = self._transfer(pair, side, raw, is_store)
                    if transfer is not None:
                        pair.transfers[side] = transfer
        return sorted(pairs, key=lambda pair: (pair.theirs is None, pair.theirs or pair.ours or 0))

    def _transfer(self, pair: Pair, side: str, raw: Raw, is_store: bool) -> Transfer | None:
        """A job as that side's workers read it; None if nobody could."""
        request = pair.request
        try:
            copies = copies_of(*raw, self.factor)
        except WrongBytesError:
            if side == "ours" or not pair.wrong:
                raise
            self.happened["wrong bytes in vLLM"] += 1
            return None
        expected: dict[bytes, Marks] = {}
        if is_store:
            marks = self.marks_of(request)
            for copy in copies:
                group, chunk = self.wanted.place(request, copy.key)
                size = self.factor * self.wanted.block_sizes[group]
                expected[copy.key] = list(marks[group][chunk * size : (chunk + 1) * size])
        return Transfer(request, is_store, copies, expected, pair.dropped[side])

    def _explain_all(
        self,
        differ: list[tuple[Pair, Raw | None, Raw | None]],
        tables: Tables,
    ) -> None:
        """Stores differ: some wanted difference must be the reason, for each key."""
        skipped: set[bytes] = set()
        """Keys that only vLLM stores, for one request."""
        again: set[bytes] = set()
        """Keys that only ours stores, for a request that has started over."""
        for pair, their, our in differ:
            again |= {
                key
                for key in set(our[0] if our else ()) - set(their[0] if their else ())
                if self.wanted.is_again(pair.request, key, self._passed[pair.request])
            }
        for pair, their, our in differ:
            skipped |= self._explain(pair, their, our, tables, again)
        for pair, their, our in differ:
            extra = set(our[0] if our else ()) - set(their[0] if their else ())
            self.happened[AGAIN] += len(extra & again)
            if pair.request in self._dropped_by_reset:
                self.happened[FORGOTTEN] += 1
            elif not all(
                key in skipped or key in again or self.wanted.is_sparse(key) for key in extra
            ):
                # What is skipped another request may have offered to vLLM before.
                raise self._different(pair.request, their, our, tables)
            self.happened[SPARSE] += sum(map(self.wanted.is_sparse, extra))
            # From here on both have to know the same.
            self.contents["ours"].forget(pair.request, extra)
            pair.dropped["ours"] = frozenset(extra)

    def _different(
        self,
        request: str,
        their: Raw | None,
        our: Raw | None,
        tables: Tables,
    ) -> DifferentError:
        of = self.wanted.requests[request]
        told = self.wanted.told(request, their), self.wanted.told(request, our)
        return DifferentError(
            f"{request} stores {told[0]}, ours {told[1]}; its blocks are {tables.get(request)}, "
            f"it is {of.status.name}, has computed "
            f"{of.num_computed_tokens} of {of.num_tokens}, {of.num_prompt_tokens} in the prompt"
        )

    def _explain(
        self, pair: Pair, their: Raw | None, our: Raw | None, tables: Tables, again: set[bytes]
    ) -> set[bytes]:
        """What only vLLM stores for a request, with good reason."""
        request, wanted = pair.request, self.wanted
        t, o = set(their[0] if their else ()), set(our[0] if our else ())
        for key in t - o:
            # In ours another request has just offered it again, and stores it.
            reason = AGAIN if key in again else wanted.reason(request, key, tables.get(request))
            if reason is None:
                raise self._different(request, their, our, tables)
            self.happened[reason] += 1
            pair.wrong |= reason in (LEFT, PREEMPTED)
            pair.wrong |= wanted.has_gap(request, key, t, tables[request])
        pair.wrong |= request in wanted.had
        # The same blocks for what both store.
        if our and their and not pair.wrong:
            blocks = {copy.key: copy for copy in copies_of(*their, self.factor)}
            if any(blocks.get(copy.key, copy) != copy for copy in copies_of(*our, self.factor)):
                raise self._different(request, their, our, tables)
        self.contents["theirs"].forget(request, t - o)
        pair.dropped["theirs"] = frozenset(t - o)
        return t - o

    def _named(self, side: str, numbers: Iterable[int], new: list[Pair]) -> list[Pair]:
        wanted = set(numbers)
        found = [pair for pair in self.pairs + new if getattr(pair, side) in wanted]
        if side == "ours" and len(found) < len(wanted):
            raise DifferentError(f"ours flushes {wanted}, of which some do not exist")
        return found

    def _check_flush(
        self, output: SchedulerOutput, stores: list[Pair], our: ConnectorMetadata
    ) -> None:
        """Ours must end transfers whose blocks are given out, and those of preempted requests."""
        preempted = output.preempted_req_ids or ()
        finished = [pair for pair in stores if pair.request in output.finished_req_ids]
        for pair in self.pairs + finished:
            if pair.ours is None:
                continue
            assert "ours" in pair.transfers
            reused = not self._given_out.isdisjoint(pair.transfers["ours"].blocks)
            must = reused or (pair.is_store and pair.request in preempted)
            self.happened["reused while under way"] += reused
            if must and pair.ours not in our.jobs_to_flush:
                raise DifferentError(f"ours has to flush {pair}")

    def _written(self, output: SchedulerOutput) -> set[int]:
        """Blocks that requests have got in this step, but for those that they only read."""
        given = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for name, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if ids is not None:
                given.append((ids, computed if name in cached.resumed_req_ids else 0))
        sizes = [group.tokens_per_block for group in self.ours._groups]
        return {
            block
            for ids, computed in given
            for its, size in zip(ids, sizes, strict=True)
            for block in its[computed // size :]
            if block
        }
