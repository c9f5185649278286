"""A host: a paged engine with host memory, a disk of its own and a store behind it.

It runs in the namespace that it was started in, and does what it reads from its standard input, a
JSON line each; what it says, it prints as one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from examples.paged_engine.engine import Engine, EngineConfig
from examples.paged_engine.model import ModelConfig

BLOCK_TOKENS = 16
NEW_TOKENS = 4
CHUNK_TOKENS = 64


class Host:
    """See the module's text.

    Args:
        tokens: of a prompt. disk: a directory, or None for no disk.
        store: the tier's configuration, or None.
        deadline_s: that of kvstore.
    """

    def __init__(
        self,
        tokens: int,
        disk: str | None,
        store: dict[str, Any] | None,
        deadline_s: float,
    ) -> None:
        self._tokens = tokens
        model = ModelConfig(
            layers=8, width=512, heads=8, kv_heads=2, head_size=64, max_tokens=tokens + NEW_TOKENS
        )
        blocks = 2 * -(-(tokens + NEW_TOKENS) // BLOCK_TOKENS) + 4
        tiers: list[dict[str, Any]] = []
        if disk is not None:
            tiers.append({"type": "disk", "path": disk, "capacity_bytes": "2GiB"})
        if store is not None:
            tiers.append(store)
        offload = {
            "cpu_bytes_to_use": "256MiB",
            "identity": {"model": "random", "layers": 8, "width": 512},
            "block_size": CHUNK_TOKENS,
            "deadline_s": deadline_s,
            "tiers": tiers,
        }
        offloading = offload if tiers else None
        self.engine = Engine(
            EngineConfig(model, BLOCK_TOKENS, blocks, max_tokens_per_step=512, offload=offloading)
        )

    def serve(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Serve a prompt of each seed, one by one.

        Returns:
            `seconds` until the first token and those of them that were `waited` for chunks, tokens
            `found`, and what was `said`.
        """
        seconds, waited, found, said = [], [], [], []
        for seed in seeds:
            dice = random.Random(seed)
            prompt = [dice.randrange(256) for _ in range(self._tokens)]
            began = time.perf_counter()
            request = self.engine.add(prompt, NEW_TOKENS)
            scheduled = began
            while not request.output:
                if not request.num_computed_tokens:
                    scheduled = time.perf_counter()
                if not self.engine.step():
                    # It waits: others may have the processor.
                    time.sleep(0.001)
            waited.append(scheduled - began)
            seconds.append(time.perf_counter() - began)
            self.engine.run()
            found.append(request.loaded_tokens)
            said.append(request.output)
        return {"seconds": seconds, "waited": waited, "found": found, "said": said}

    def settle(self, seconds: float) -> dict[str, Any]:
        """Wait until all is stored."""
        end = time.monotonic() + seconds
        connector = self.engine.connector
        while connector is not None and time.monotonic() < end:
            self.engine.step()
            if not connector.has_pending_work():
                break
            time.sleep(0.002)
        return {}

    def rate(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Serve all prompts at once: tokens of prompts per second."""
        dice = [random.Random(seed) for seed in seeds]
        prompts = [[one.randrange(256) for _ in range(self._tokens)] for one in dice]
        began = time.perf_counter()
        self.engine.generate(prompts, NEW_TOKENS)
        return {"rate": len(seeds) * self._tokens / (time.perf_counter() - began)}

    def idle(self, seconds: float) -> dict[str, Any]:
        """Take steps without requests."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.engine.step()
            time.sleep(0.01)
        return {}

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()


def obey(kind: Callable[..., Any]) -> None:
    """The first line says what the host is; those behind it what to do."""
    host = kind(**json.loads(sys.stdin.readline()))
    print(json.dumps({}), flush=True)
    try:
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(getattr(host, words.pop("do"))(**words)), flush=True)
    finally:
        host.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(2)
    obey(Host)
