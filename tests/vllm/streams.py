"""Streams of requests for vLLM's own scheduler, with nothing behind it that computes."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from random import Random
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvstore.connector.mediums import ConnectorOutput
from tests.vllm.mirror import CrashedError, Mirror, Pair, WorkerMetadata
from tests.vllm.pretend import Device, WrongBytesError
from tests.vllm.scripted import Contents, Script
from tests.vllm.shapes import LONGEST, Shape, our_scheduler, vllm_scheduler


class Server:
    """vLLM's scheduler with both connectors, and workers that only count steps."""

    def __init__(self, shape: Shape, seed: int, folder: Path) -> None:
        self.shape = shape
        self.random = Random(f"{seed}")
        script = Script(seed, **shape.script)
        self.script = script
        self.contents = {side: Contents(script) for side in ("ours", "theirs")}
        layers = shape.layers
        self.devices = {side: Device(layers, shape.factor) for side in self.contents}
        self.tokens: dict[str, list[int]] = {}
        self._marks: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.happened: Counter[str] = Counter()
        self._submitted: list[Pair] = []
        self._held: list[Pair] = []
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._prompts = [[self.random.randrange(90) for _ in range(LONGEST)] for _ in range(3)]

        self.scheduler, hash_size = vllm_scheduler(shape, self.contents["theirs"], folder)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        connector = self.scheduler.connector
        assert isinstance(connector, Mirror)
        self.mirror = connector
        self.ours = our_scheduler(shape, self.contents["ours"], hash_size)
        connector.attach(self.ours, self.contents, list(shape.groups), self._delay, self._marks_of)

    def _delay(self) -> int:
        return self.random.choice((0, 1, 2, 3, 5, 8))

    def _marks_of(self, request: str) -> list[list[int]]:
        """What its tokens leave in their blocks, for each group."""
        marks = self._marks[request]
        tokens = self.tokens[request]
        for group, its in enumerate(marks):
            for place in range(len(its), len(tokens)):
                its.append(hash((its[-1] if its else group, tokens[place])))
        return marks

    # -- what clients do -------------------------------------------------------------------------

    def add(self) -> None:
        """A new request, whose prompt others may share."""
        random = self.random
        name = f"r{len(self.requests)}"
        known = list(self.tokens.values()) or self._prompts
        base = random.choice(known if random.random() < 0.4 else self._prompts)
        prompt = base[: random.randrange(1, 70)]
        if random.random() < 0.5:
            prompt = prompt + [random.randrange(90) for _ in range(random.randrange(12))]
        stop = [random.randrange(90)] if random.random() < 0.5 else None
        options: dict[str, Any] = {}
        if random.random() < 0.05:
            options["prompt_logprobs"] = 1
            self.happened["reads no cache"] += 1
        request = Request(
            name,
            prompt[: LONGEST - 4],
            SamplingParams(max_tokens=random.randrange(1, 30), stop_token_ids=stop, **options),
            None,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        self.tokens[name] = list(request.all_token_ids)
        self._marks[name] = [[] for _ in self.shape.groups]
        self.scheduler.add_request(request)
        self.happened["requests"] += 1

    def abort(self) -> None:
        """Somebody goes away."""
        alive = [name for name, request in self.requests.items() if not request.is_finished()]
        loading = [
            name
            for name in alive
            if self.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        names = loading if loading and self.random.random() < 0.7 else alive
        if names:
            name = self.random.choice(names)
            self.happened["aborted"] += 1
            self.happened["aborted while loading"] += name in loading
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self) -> None:
        if self.random.random() < 0.5:
            self.scheduler.reset_prefix_cache(reset_connector=True)
        else:
            self.scheduler.reset_connector_cache()

    # -- steps -----------------------------------------------------------------------------------

    def run(self, steps: int) -> Counter[str]:
        """So many steps with new requests, and as many as it takes until nothing is left."""
        try:
            self._run(steps)
        except CrashedError:
            self.happened["crashes of vLLM"] += 1
        else:
            self._check_end()
        return self.happened + self.mirror.happened

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.3 and len(self.scheduler.requests) < 9:
                self.add()
            if self.random.random() < 0.06:
                self.abort()
            if self.shape.resets and self.random.random() < 0.03:
                self.reset()
            self.take_step()
        for _ in range(600):
            if not (self.scheduler.has_requests() or self._submitted or self._held):
                break
            self.take_step()
        else:
            raise AssertionError("it does not come to an end")
        self.take_step()
        while self._queue:
            self.take_output()

    def _check_end(self) -> None:
        assert not self.scheduler.requests
        assert not self.ours.has_pending_work()
        assert not self.ours._requests
        assert not self.mirror.scheduler._req_status
        assert self.ours.stats.unknown_jobs == 0
        for name, count in self.contents["ours"].began.items():
            assert count == 1
            assert self.contents["ours"].ended[name] == 1

    def take_step(self) -> None:
        self.script.step += 1
        for contents in self.contents.values():
            contents.evict()
        output = self.scheduler.schedule()
        self._queue.append((output, self._execute(output)))
        if not self.shape.asynchronous or len(self._queue) > 1:
            self.take_output()

    def take_output(self) -> None:
        """The scheduler is told what the oldest step has given."""
        before = {name for name in self.requests if self.requests[name].is_finished()}
        self.scheduler.update_from_output(*self._queue.popleft())
        ended = {name for name in self.requests if self.requests[name].is_finished()}
        self.happened["finished"] += len(ended - before)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        plan = self.mirror.plan
        due = self._held
        self._held = []
        wanted = {pair for pairs in plan.flush.values() for pair in pairs}
        for pair in plan.stores:
            (due if pair in wanted else self._held).append(pair)
        for pair in due:
            self._begin(pair)
        # A side that has not asked for it gets it after the step has computed.
        ended: list[Pair] = []
        for pair in list(self._submitted):
            if pair in wanted:
                ended.append(pair)
                self._submitted.remove(pair)
                for side, pairs in plan.flush.items():
                    if pair in pairs:
                        self._end(pair, side)
        for pair in plan.loads:
            self._begin(pair)
        sampled = self._compute(output)
        for pair in ended:
            for side, pairs in plan.flush.items():
                if pair not in pairs:
                    self._end(pair, side)
        for pair in list(self._submitted):
            if pair.left <= 0 or pair.theirs is None or pair.ours is None:
                self._submitted.remove(pair)
                ended.append(pair)
                for side in self.devices:
                    self._end(pair, side)
            pair.left -= 1
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._report(ended),
        )

    def _begin(self, pair: Pair) -> None:
        self._submitted.append(pair)
        for side, transfer in pair.transfers.items():
            self._on(side, pair, self.devices[side].begin, id(pair), transfer)

    def _end(self, pair: Pair, side: str) -> None:
        if side in pair.transfers:
            self._on(side, pair, self.devices[side].end, id(pair), pair.transfers[side])

    def _on(self, side: str, pair: Pair | None, act: Any, *what: Any) -> None:
        try:
            act(*what)
        except WrongBytesError as error:
            if side == "theirs" and pair is not None and pair.wrong:
                self.happened["wrong bytes in vLLM"] += 1
                return
            raise WrongBytesError(f"{side}, step {self.script.step}: {error}") from error

    def _report(self, ended: list[Pair]) -> KVConnectorOutput:
        return KVConnectorOutput(
            finished_recving={pair.request for pair in ended if not pair.is_store},
            kv_connector_worker_meta=WorkerMetadata(
                completed_jobs={pair.theirs: 1 for pair in ended if pair.theirs is not None},
                ours=ConnectorOutput(
                    Counter({pair.ours: 1 for pair in ended if pair.ours is not None})
                ),
                pairs=ended,
            ),
        )

    def _compute(self, output: SchedulerOutput) -> list[list[int]]:
        cached = output.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.happened["resumed"] += len(cached.resumed_req_ids)
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            begin = begins[name]
            end = begin + count
            tokens = self.tokens[name]
            assert end <= len(tokens)
            marks = self._marks_of(name)
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
            for side, device in self.devices.items():
                self._on(side, None, device.compute, name, begin, end, marks, blocks)
            sampled.append([])
            if end == len(tokens):
                token = abs(marks[0][-1]) % 90
                tokens.append(token)
                sampled[-1].append(token)
        return sampled
