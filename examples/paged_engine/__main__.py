"""Time to the first token with and without offload.

    python -m examples.paged_engine [--prompts 4] [--tokens 1024] [--window N] [--disk DIR]

Each prompt is served three times by engines whose device memory cannot keep it: computed, from host
memory, and from disk by an engine that has just started over the same directory.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.paged_engine.engine import Engine, EngineConfig
from examples.paged_engine.model import ModelConfig
from examples.paged_engine.request import Request

BLOCK_TOKENS = 16
NEW_TOKENS = 16


def engine_for(arguments: argparse.Namespace, offload: dict[str, Any] | None) -> Engine:
    """An engine with device memory for two prompts."""
    model = ModelConfig(
        layers=arguments.layers,
        width=arguments.width,
        heads=arguments.width // 64,
        kv_heads=max(1, arguments.width // 256),
        head_size=64,
        max_tokens=arguments.tokens + NEW_TOKENS,
        window=arguments.window,
        device=arguments.device,
    )
    groups = 2 if arguments.window else 1
    blocks = groups * 2 * -(-(arguments.tokens + NEW_TOKENS) // BLOCK_TOKENS) + 4
    return Engine(
        EngineConfig(model, BLOCK_TOKENS, blocks, max_tokens_per_step=512, offload=offload)
    )


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[Request], float]:
    """Serve prompts one by one; returns them, and the median time to the first token in ms."""
    requests, times = [], []
    for prompt in prompts:
        started = time.perf_counter()
        request = engine.add(prompt, NEW_TOKENS)
        while not request.output:
            engine.step()
        times.append(1000 * (time.perf_counter() - started))
        engine.run()
        requests.append(request)
    return requests, statistics.median(times)


def main() -> int:
    """Print the table; 1 if some output differs."""
    parser = argparse.ArgumentParser(prog="examples.paged_engine", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--window", type=int, help="of every second layer, in tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--disk", type=Path, help="by default a temporary directory")
    arguments = parser.parse_args()
    dice = random.Random(0)
    prompts = [
        [dice.randrange(256) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="paged-engine-") as scratch:
        offload = {
            "cpu_bytes_to_use": "1GiB",
            # All that decides the bytes of a chunk.
            "identity": {
                "model": "random, seed 0",
                "layers": arguments.layers,
                "width": arguments.width,
                "pages": "float32: block, K and V, token, head, number",
            },
            "block_size": 4 * BLOCK_TOKENS,
            "tiers": [
                {
                    "type": "disk",
                    "path": str(arguments.disk or scratch),
                    "capacity_bytes": "2GiB",
                }
            ],
        }
        reference = engine_for(arguments, None)
        serve(reference, prompts[:1])
        computed, computing = serve(reference, prompts)
        first = engine_for(arguments, offload)
        cold, _ = serve(first, prompts)
        host, from_host = serve(first, prompts)
        first.settle()
        first.shutdown()
        second = engine_for(arguments, offload)
        disk, from_disk = serve(second, prompts)
        second.shutdown()
    wanted = [request.output for request in computed]
    served = {
        "computed": computed,
        "stored": cold,
        "host memory": host,
        "disk, after a restart": disk,
    }
    times = {"computed": computing, "host memory": from_host, "disk, after a restart": from_disk}
    print(f"{arguments.prompts} prompts of {arguments.tokens} tokens, first token, median:\n")
    print("| from | ms | times sooner | tokens loaded | output |")
    print("|---|---|---|---|---|")
    same = True
    for name, milliseconds in times.items():
        requests = served[name]
        equal = [request.output for request in requests] == wanted
        same &= equal
        loaded = sum(request.loaded_tokens for request in requests)
        total = sum(request.num_prompt_tokens for request in requests)
        sooner, output = computing / milliseconds, "equal" if equal else "DIFFERENT"
        print(f"| {name} | {milliseconds:.0f} | {sooner:.1f} | {loaded} of {total} | {output} |")
    same &= [request.output for request in served["stored"]] == wanted
    return 0 if same else 1


if __name__ == "__main__":
    torch.set_num_threads(2)
    raise SystemExit(main())
