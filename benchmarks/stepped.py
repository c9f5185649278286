"""A real vLLM engine in this process, driven step by step.

Its copies between device and host memory can be made to land as late as vLLM allows: while they
are waited for, or some steps after they were begun, as on a GPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from rounds import ENGINE, ENVIRONMENT, over_kvstore, work_around

Completed = list[tuple[Any, list[int]]]
"""Whose completions they are, and their tokens."""


class Server:
    """An engine with the model in `tiny-model`, which has vLLM's dummy weights if none are there.

    Attributes:
        cached: prompt tokens of completed requests that no step computed.
        preempted: how often requests were preempted.
        leads: for each case that was asked for with its leads, and each token of its completion,
            by how much its log probability was above that of the next best.
        logprobs: in the same way the log probabilities themselves.

    Args:
        folder: where the model is made; it becomes the working directory.
        config: of the model.
        offload: `kv_connector_extra_config` without the spec; None: an engine without offload.
        engine: arguments of the engine beside those of `examples/rounds.py`.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        offload: dict[str, Any] | None,
        **engine: Any,
    ) -> None:
        os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", **os.environ})
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.chdir(folder)
        from vllm import LLM, SamplingParams

        work_around(config)
        model = Path("tiny-model")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {**ENGINE, "dtype": config["torch_dtype"], **engine}
        if offload is not None:
            arguments["kv_transfer_config"] = over_kvstore(offload)
        self.engine: Any = LLM(str(model), **arguments).llm_engine
        self._sampling = SamplingParams
        self._asked: dict[str, Hashable] = {}
        self._names = 0
        self._preemptions: dict[str, int] = {}
        self.cached = 0
        self.leads: dict[Hashable, list[float]] = {}
        self.logprobs: dict[Hashable, list[float]] = {}

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        """kvstore's manager in it."""
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def preempted(self) -> int:
        return sum(self._preemptions.values())

    def ask(
        self, case: Hashable, prompt: Sequence[int], tokens: int, *, leads: bool = False
    ) -> None:
        """Ask for the completion of a prompt, under a name that need not be the only one."""
        self._names += 1
        name = f"r{self._names}"
        self._asked[name] = case
        sampling = self._sampling(
            temperature=0,
            max_tokens=tokens,
            detokenize=False,
            ignore_eos=True,
            logprobs=2 if leads else None,
        )
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def requests(self, status: str | None = None) -> list[str]:
        """vLLM's names of the requests that go on, or of those that are in this state."""
        found = self.scheduler.requests.items()
        return [name for name, request in found if status in (None, request.status.name)]

    def abort(self, name: str) -> None:
        """The client of this request, by vLLM's name of it, has gone away."""
        self.engine.abort_request([name], internal=True)

    def run(self, steps: int | None = None) -> Completed:
        """So many steps, or until nothing is left; what was completed."""
        done: Completed = []
        while self.engine.has_unfinished_requests() and steps != 0:
            for output in self.engine.step():
                if output.finished:
                    case, said = self._asked.pop(output.request_id), output.outputs[0]
                    done.append((case, list(said.token_ids)))
                    if said.logprobs is not None:
                        self.leads[case] = [_lead(each) for each in said.logprobs]
                        chosen = zip(said.logprobs, said.token_ids, strict=True)
                        self.logprobs[case] = [found[token].logprob for found, token in chosen]
                    self.cached += output.num_cached_tokens or 0
            for name, request in self.scheduler.requests.items():
                if request.num_preemptions:
                    self._preemptions[name] = request.num_preemptions
            steps = None if steps is None else steps - 1
        return done

    def reset(self, running: bool = False) -> None:
        """Forget what the device has and what is offloaded; requests that run may start over."""
        try:
            self.engine.reset_prefix_cache(running, reset_connector=True)
        except RuntimeError:
            # Requests that wait for a load cannot be put back; the connector's turn all the same.
            self.engine.reset_prefix_cache(False, reset_connector=True)

    def sleep(self, level: int) -> None:
        """Let it sleep and wake up with its weights. No request may be left."""
        self.engine.sleep(level)
        self.engine.wake_up()

    def drain(self) -> None:
        """Steps without requests, until everything is on disk, or a minute has passed.

        vLLM's workers yield the processor in a loop until they have had no work for a second.
        Linux 6.18 has been seen to keep the kernel's threads that complete writes waiting for
        seconds meanwhile, where the workers have every core: after a while steps are rare.
        """
        begin, pool = time.monotonic(), self.manager._core._pool
        # What a reset has overtaken holds rows until it has ended, too.
        while (self.manager.has_pending_work() or pool.held) and (
            passed := time.monotonic() - begin
        ) < 60:
            self.engine.step()
            time.sleep(0.002 if passed < 2 else 1.5)

    def end(self) -> None:
        """Let everything go while the interpreter still lives."""
        self.engine.engine_core.shutdown()


def _lead(found: Mapping[int, Any]) -> float:
    best, next_best, *_ = sorted((each.logprob for each in found.values()), reverse=True)
    return float(best - next_best)


def copy_late(rng: random.Random) -> None:
    """Let the workers' copies land when they are waited for, or looked after, now and then."""
    from kvstore.vllm.worker import HostCopyWorker

    copy, finished = HostCopyWorker._copy, HostCopyWorker.get_finished
    begun: dict[int, tuple[Any, Any, bool]] = {}

    def begin(self: Any, job: int, device: Any, host: Any, *, store: bool) -> bool:
        begun[job] = (device, host, store)
        return True

    def land(worker: Any, job: int) -> None:
        device, host, store = begun.pop(job)
        copy(worker, job, device, host, store=store)

    def get_finished(self: Any) -> Any:
        for job in list(begun):
            if rng.random() < 0.3:
                land(self, job)
        return finished(self)

    def wait(self: Any, jobs: set[int]) -> None:
        for job in jobs & begun.keys():
            land(self, job)

    patched: Any = HostCopyWorker
    patched._copy, patched.get_finished, patched.wait = begin, get_finished, wait
