"""A host as `host.py` is one, but with a real vLLM engine."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.hosts.host import CHUNK_TOKENS, NEW_TOKENS, obey
from benchmarks.random_model import write_model
from examples.rounds import ENGINE, ENVIRONMENT, LLAMA, over_kvstore

BLOCK_TOKENS = 32

SHAPE = {"num_key_value_heads": 2, "vocab_size": 1000, "torch_dtype": "float32"}
"""Of the model: as many bytes of KV cache for a token as that of the paged engine."""


OWN_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Scheduler and worker in one process, which knows no network but the cable; its standard output is
for who commands it."""


class VLLMHost:
    """See the module's text; arguments as of `Host`."""

    def __init__(
        self,
        tokens: int,
        disk: str | None,
        store: dict[str, Any] | None,
        deadline_s: float,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ |= OWN_ENVIRONMENT
        from vllm import LLM, SamplingParams

        self._tokens = tokens
        self._numbers = iter(range(2**31))
        tiers: list[dict[str, Any]] = []
        if disk is not None:
            tiers.append({"type": "disk", "path": disk, "capacity_bytes": "2GiB"})
        if store is not None:
            tiers.append(store)
        offload = {
            "cpu_bytes_to_use": "256MiB",
            "blocks_per_chunk": CHUNK_TOKENS // BLOCK_TOKENS,
            "deadline_s": deadline_s,
            "tiers": tiers,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-model-")
        # Hosts that share call their model the same.
        os.chdir(self._folder.name)
        write_model(Path("tiny"), {**LLAMA, **SHAPE})
        arguments = {
            **ENGINE,
            "load_format": "auto",
            "block_size": BLOCK_TOKENS,
        }
        arguments["max_model_len"] = tokens + NEW_TOKENS
        arguments["num_gpu_blocks_override"] = 2 * -(-(tokens + NEW_TOKENS) // BLOCK_TOKENS) + 4
        if tiers:
            arguments["kv_transfer_config"] = over_kvstore(offload)
        self._llm = LLM(model="tiny", **arguments)
        self._engine = self._llm.llm_engine
        self._sampling = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True
        )

    def serve(self, seeds: Sequence[int]) -> dict[str, Any]:
        """As `Host.serve`."""
        seconds, waited, found, said = [], [], [], []
        for seed in seeds:
            began = time.perf_counter()
            first = 0.0
            self._begin([seed])
            while self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                if outputs:
                    (done,) = outputs
                    first = first or time.perf_counter() - began
                else:
                    # It may wait: others may have the processor.
                    time.sleep(0.0005)
            seconds.append(first)
            waited.append(done.metrics.scheduled_ts - done.metrics.queued_ts)
            found.append(done.num_cached_tokens)
            said.append(list(done.outputs[0].token_ids))
        return {"seconds": seconds, "waited": waited, "found": found, "said": said}

    def settle(self, seconds: float) -> dict[str, Any]:
        """As `Host.settle`."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        end = time.monotonic() + seconds
        quiet = 0
        while quiet < 3 and time.monotonic() < end:
            self._engine.step()
            quiet = 0 if scheduler.has_requests() else quiet + 1
            time.sleep(0.002)
        return {}

    def rate(self, seeds: Sequence[int]) -> dict[str, Any]:
        """As `Host.rate`."""
        began = time.perf_counter()
        self._begin(seeds)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"rate": len(seeds) * self._tokens / (time.perf_counter() - began)}

    def idle(self, seconds: float) -> dict[str, Any]:
        """As `Host.idle`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._engine.step()
            time.sleep(0.01)
        return {}

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _begin(self, seeds: Sequence[int]) -> None:
        for seed in seeds:
            dice = random.Random(seed)
            prompt = {"prompt_token_ids": [10 + dice.randrange(900) for _ in range(self._tokens)]}
            self._engine.add_request(str(next(self._numbers)), prompt, self._sampling)


if __name__ == "__main__":
    obey(VLLMHost)
