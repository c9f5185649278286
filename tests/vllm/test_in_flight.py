"""Steps in flight, guessed tokens, preemptions, aborts, errors and resets: every token is right.

vLLM's scheduler plans a step before it knows what the last one has sampled, and takes back what was
guessed wrong. Nothing of either may be stored, nor a block that somebody else has by then.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.patience import PATIENCE
from tests.vllm.whole import Server, _marks

SEQUENCES, BATCH = 5, 37
"""Most requests and tokens of a step: prompts end amid blocks."""

WRONG = -1

SHAPES: list[dict[str, Any]] = [
    {"windows": (None,)},
    {"windows": (None, 10)},
    {"windows": (None, 10), "sizes": (16, 4), "interval": None},
]
"""The KV cache groups of models."""


class InFlight(Server):
    """A server of whose steps some are under way; what it guesses is wrong more often than not."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        random: Random,
        *,
        ahead: int,
        guesses: int,
        **shape: Any,
    ) -> None:
        self.random, self.ahead, self.guesses = random, ahead, guesses
        self.kind = Scheduler if ahead == 1 else AsyncScheduler
        self.under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        # What the workers know of each request: its tokens, and how many they have computed.
        self.ends = cycle((RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR))
        self.known: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.unanswered: list[list[int]] = []
        self.happened: Counter[str] = Counter()
        super().__init__(folder, options, blocks=56 * len(shape["windows"]), **shape)

    def _configure(self, folder: Path, options: dict[str, Any], blocks: int) -> Any:
        config, groups = super()._configure(folder, options, blocks)
        config.scheduler_config.async_scheduling = self.ahead > 1
        config.scheduler_config.max_num_seqs = SEQUENCES
        config.scheduler_config.max_num_batched_tokens = BATCH
        if self.guesses:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=self.guesses,
                prompt_lookup_max=3,
                prompt_lookup_min=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        return config, groups

    def step(self) -> bool:
        self.steps += 1
        computed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.under_way.append((output, self._execute(output)))
            computed = bool(output.num_scheduled_tokens)
        if self.under_way and (len(self.under_way) >= self.ahead or not computed):
            self._take()
        return computed

    def _take(self) -> None:
        output, told = self.under_way.popleft()
        self.scheduler.update_from_output(output, told)
        if self.guesses and self.ahead == 1:
            names = list(output.num_scheduled_tokens)
            most = self.random.randrange(self.guesses + 1)
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[5] * most for _ in names]))

    def _compute(self, output: Any) -> list[list[int]]:
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {name: computed[name] for name in cached.resumed_req_ids}
        self.happened["preempted"] += len(output.preempted_req_ids or ())
        for name, begin in begins.items():
            self.known[name] = list(self.requests[name].all_token_ids)
            self.computed[name] = begin
            self.happened["found"] += begin > 0
        return [
            self._sample(name, count, len(output.scheduled_spec_decode_tokens.get(name, ())))
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _sample(self, name: str, count: int, guessed: int) -> list[int]:
        """Compute so many tokens of the request, the last ones guessed; return what comes next."""
        known, begin = self.known[name], self.computed[name]
        end = begin + count - guessed
        chain = list(known)
        if end == len(known):
            for _ in range(guessed + 1):
                chain.append(_marks(chain)[-1] % 90)
        right = self.random.randrange(guessed + 1) if end == len(known) else 0
        marks = _marks(chain)
        # What was guessed may lie behind the last block.
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        room = min(size * len(its) for size, its in zip(self.sizes, tables, strict=True))
        new = [*marks[begin : end + right], *[WRONG] * (guessed - right)]
        self._attend(name, marks[:begin], new[: room - begin])
        self.computed[name] = end + right
        sampled = chain[len(known) :][: right + 1]
        known += sampled
        self.happened["guessed wrong"] += guessed - right if sampled else 0
        return sampled

    def act(self, bases: list[list[int]]) -> None:
        """Let something happen between two steps."""
        alive = [name for name, request in self.requests.items() if not request.is_finished()]
        dice = self.random.random()
        if self.unanswered and self.random.random() < 0.2:
            # Who had no answer asks again.
            self.add(self.unanswered.pop(), tokens=4)
        if dice < 0.3 and len(alive) < 10:
            prompt = self.random.choice(bases)[: self.random.randrange(1, 110)]
            self.add(prompt, tokens=self.random.randrange(1, 40))
        elif dice < 0.38 and alive:
            # Amid its prompt, if there is one.
            requests = ((name, self.requests[name]) for name in alive)
            amid = [n for n, r in requests if 0 < r.num_computed_tokens < r.num_prompt_tokens]
            name = self.random.choice(amid or alive)
            status = next(self.ends)
            self.happened[status.name] += 1
            self.scheduler.finish_requests(name, status)
            self.unanswered.append(list(self.requests[name].prompt_token_ids or ()))
        elif dice < 0.4:
            self.happened["forgotten"] += 1
            self.scheduler.reset_prefix_cache(reset_connector=self.random.random() < 0.3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("ahead", "guesses"), [(1, 2), (2, 0), (3, 2)])
def test_no_token_is_wrong_whatever_is_in_flight(
    tmp_path: Path, ahead: int, guesses: int, shape: dict[str, Any], seed: int
) -> None:
    random = Random(f"{seed} {ahead} {shape['windows']}")
    disk = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    options = {"host": random.choice(("64KiB", "512KiB")), "tiers": [disk], "recompute_s": 0}
    server = InFlight(tmp_path, options, random, ahead=ahead, guesses=guesses, **shape)
    bases = [[random.randrange(90) for _ in range(110)] for _ in range(3)]
    try:
        for _ in range(200):
            server.act(bases)
            if not server.step():
                time.sleep(0.0005)
        end = time.monotonic() + PATIENCE
        while server.scheduler.has_requests() or server.under_way:
            assert time.monotonic() < end, "it does not come to an end"
            if not server.step():
                time.sleep(0.0005)
        for name, request in server.requests.items():
            tokens, prompt = list(request.all_token_ids), request.num_prompt_tokens
            marks = _marks(tokens)
            assert tokens[prompt:] == [mark % 90 for mark in marks[prompt - 1 : -1]], name
        server.settle()
        server.check_rows()
        scheduler: Any = server.connector.connector_scheduler
        assert not scheduler._jobs
        assert not scheduler._req_status
    finally:
        server.close()
    happened = server.happened
    assert min(happened["found"], happened["FINISHED_ERROR"], happened["FINISHED_ABORTED"]) > 0
    assert not guesses or happened["guessed wrong"]
